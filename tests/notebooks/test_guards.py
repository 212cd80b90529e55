"""Guards on the notebooks as they are stored: what nbval would let pass in silence."""

import itertools
import re
import subprocess
import sys

import lesson_text
import pytest
import series
import stamp
from nbval.plugin import get_sanitize_patterns
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

NOTEBOOKS = series.notebooks()
PRIVATE = re.compile(r"/(?:home|root|Users|tmp|work|var/folders|content)/[\w.-]+|[A-Z]:\\Users|site-packages/")


@pytest.fixture(params=NOTEBOOKS, ids=lambda path: path.stem, scope="module")
def notebook(request):
    return series.read(request.param)


def texts(output):
    """Every text of one output, the alternative text of a picture too."""
    if output.output_type == "stream":
        return [output.text]
    if output.output_type == "error":
        return [output.evalue, *output.traceback]
    return [value for kind, value in output.data.items() if kind.startswith("text/")] + [str(output.metadata)]


def test_each_cell_was_run_in_order_and_from_the_top(notebook):
    counts = [cell.execution_count for cell in series.code_cells(notebook)]
    assert counts == list(range(1, len(counts) + 1)), "run `make store`"


def test_each_cell_is_compared(notebook):
    """nbval passes a cell whose output was stripped, and an error that nobody stored."""
    for cell in series.code_cells(notebook):
        tags, kinds = series.tags(cell), {output.output_type for output in cell.outputs}
        assert tags <= series.TAGS, f"unknown tag in {tags}; known: {sorted(series.TAGS)}"
        assert "NBVAL_" not in cell.source, "use a tag, not a comment in the reader's code"
        if cell.source.rstrip().splitlines()[-1].startswith(("print(", "plots.", "checks.")):
            assert cell.outputs, cell.source
        assert ("raises-exception" in tags) == ("error" in kinds), cell.source
        assert not {"raises-exception", "nbval-ignore-output"} <= tags, cell.source


def test_no_line_runs_out_of_the_cell(notebook):
    """JupyterLab and the pages show about 105 characters; a longer line hides its end."""
    for cell in series.code_cells(notebook):
        if not cell.metadata.get("jupyter", {}).get("source_hidden"):
            assert max(map(len, cell.source.splitlines())) <= 105, cell.source


def test_an_output_is_a_readers(notebook):
    """No warning, no private path; a picture has its title and origin as alternative text, which helpers.plots writes."""
    for cell in series.code_cells(notebook):
        for output in cell.outputs:
            assert output.get("name") != "stderr", f"{output.text}\nfrom\n{cell.source}"
            for text in texts(output):
                assert not PRIVATE.search(text), f"{PRIVATE.search(text)[0]} in the output of\n{cell.source}"
            if "image/png" in output.get("data", {}):
                alt = output.metadata.get("image/png", {}).get("alt", "")
                assert re.match(r"Figure \((measured|simulated|data)\): \S", alt), cell.source
                assert output.data["text/plain"] == alt


def test_each_exercise_has_a_folded_solution_and_both_are_graded(notebook):
    graded = {"exercise": [], "solution": []}
    for cell in series.code_cells(notebook):
        for kind in series.tags(cell) & graded.keys():
            graded[kind].append("".join(text for output in cell.outputs for text in texts(output)))
        if "solution" in series.tags(cell):
            assert cell.metadata.get("jupyter", {}).get("source_hidden"), "a solution is folded in JupyterLab"
            assert cell.source.startswith("# @title Solution"), "and in Colab"
            assert cell.metadata.jupyter.outputs_hidden and cell.metadata["_kg_hide-output"], "what it prints, too"
    assert len(graded["exercise"]) == len(graded["solution"]) >= 2
    assert all("[not yet]" in said for said in graded["exercise"]), "the stub is graded as open"
    assert all(said == "[passed] well done\n" for said in graded["solution"])


def test_the_opening_is_complete(notebook):
    found = series.summary(notebook)
    assert re.match(r"\d\d · \w", found.title)
    assert 3 <= len(found.teaches) <= 5
    assert found.picture and found.picture_says
    assert found.runs and found.level in ("beginner", "intermediate", "advanced") and found.needs
    prose = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    for heading in ("**Time:**", "## What to remember", "## You will read elsewhere / today"):
        assert heading in prose


def test_what_the_front_page_shows_was_printed():
    """By notebook 04, or by an example of the engine's docs, which virtualgpu's own tests run."""
    notebook = series.read(series.NOTEBOOKS / "04_dataparallel_vs_ddp.ipynb")
    printed = [series.said(cell) for cell in series.code_cells(notebook)]
    printed += [page.read_text("utf-8") for page in (series.ROOT / "virtualgpu/docs").glob("*.md")]
    front = (series.ROOT / "README.md").read_text("utf-8")
    blocks = re.findall(r"```console\n\$ .*\n((?:.+\n)*)```", front)
    assert blocks and all(any(block in text for text in printed) for block in blocks)


def test_badge_and_set_up_cell_are_as_generated(capsys):
    assert stamp.main(["--check"]) == 0, capsys.readouterr().out


def test_what_a_lesson_reads_is_fetched_in_colab():
    """The set-up cell fetches some folders of the repository alone: a table of another one would be there in every run but Colab's."""
    paths = [*(series.ROOT / "lessons").glob("*.md")]
    for folder in ("notebooks/figures", "notebooks/scripts", "helpers", "checks"):
        paths += (series.ROOT / folder).glob("*.py")
    joined = r"""(?:\bhome|\bROOT|parents\[\d\]|\.parent)((?: / ["'][\w./-]+["'])+)"""
    read = {
        "/" + "/".join(re.findall(r"[\w./-]{2,}", names.replace(" / ", " ")))
        for path in paths
        for names in re.findall(joined, path.read_text("utf-8"))
    }
    assert read, "none found: the pattern is out of date"
    assert [path for path in sorted(read) if not f"{path}/".startswith(tuple(stamp.FETCHED))] == []


def test_cleared_outputs_cost_the_readme_no_picture(monkeypatch):
    """A notebook that has not run again yet has no picture to give: the last one stays, and is not emptied."""
    read = series.read

    def cleared(path):
        notebook = read(path)
        for cell in series.code_cells(notebook):
            cell.outputs = []
        return notebook

    monkeypatch.setattr(series, "read", cleared)
    assert stamp.stamp_pictures(fix=False) == []


def test_a_lesson_is_one_sitting(notebook):
    assert len(notebook.cells) <= 105  # of one idea each: a cell cut into two makes no lesson longer


def test_a_prediction_is_written_before_it_is_answered(notebook):
    """Each prompt has a place, which holds None; all that the answer's cell shows, one of the next three, is folded."""
    cells = series.code_cells(notebook)
    for at, cell in enumerate(cells):
        if "prediction" in series.tags(cell):
            assert re.match(r"guess = None( {2}# .+)?$", cell.source) and not cell.outputs
            (answer,) = [after for after in cells[at + 1 : at + 4] if "helpers.reveal(guess, " in after.source][:1]
            assert [output.data["text/html"].startswith("<details><summary>") for output in answer.outputs] == [True]
    told = lesson_text.count(notebook)
    assert told.prompts == told.guesses


def test_each_lesson_leads_to_the_next():
    """At the end of the main path: what goes further is optional."""
    for path, after in itertools.pairwise(NOTEBOOKS):
        prose = "\n".join(cell.source for cell in series.read(path).cells if cell.cell_type == "markdown")
        assert f"]({after.name})" in prose.split("\n## Going further")[0][-800:], f"the end of {path.name}"


def test_each_sanitizer_pair_is_parsed_and_still_needed():
    """A pattern that matches no stored output is dead, and a wider one than needed would hide a change."""
    found = {}
    for name in ("sanitize.cfg", "sanitize_versions.cfg"):
        text = (series.ROOT / "tests" / name).read_text("utf-8")
        found[name] = get_sanitize_patterns(text)
        assert {len(found[name])} == {
            len(re.findall(start, text, re.M)) for start in (r"^\s*\[", "^regex:", "^replace:")
        }
    stored = "\n".join(
        text
        for path in NOTEBOOKS
        for cell in series.code_cells(series.read(path))
        if "nbval-ignore-output" not in series.tags(cell)
        for output in cell.outputs
        for text in texts(output)
    )
    ours, others = found.values()
    assert all(re.search(pattern, stored) for pattern, _ in others)
    assert {*ours} <= {*others} and len(others) == len(ours) + 5, "what another version's kernels change"


def test_the_exact_versions_satisfy_the_ranges_which_keep_what_colab_has():
    """constraints.txt pins what requirements.txt asks for and names no registry. Colab in 2026-08: torch 2.11.0 and its torchvision."""

    def requirements(name):
        lines = (series.ROOT / name).read_text("utf-8").splitlines()
        found = [Requirement(line) for line in lines if line and not line.startswith("#")]
        assert not any(one.url for one in found)
        return {canonicalize_name(one.name): one.specifier for one in found}

    pins, ranges = requirements("constraints.txt"), requirements("requirements.txt")
    assert all(re.fullmatch(r"==[^,]+", str(pin)) for pin in pins.values())
    assert [name for name, wanted in ranges.items() if not wanted.contains(str(pins[name])[2:])] == []
    assert ranges["torch"].contains("2.11.0+cpu") and ranges["torch"].contains("2.11.0+cu128")
    assert ranges["torchvision"].contains("0.26.0+cpu")


def test_the_workflow_runs_each_session_of_the_matrix():
    workflow = (series.ROOT / ".github" / "workflows" / "weekly.yml").read_text("utf-8")
    sessions = re.search(r"sessions = \[(.*?)\]", (series.ROOT / "noxfile.py").read_text("utf-8"), re.S)[1]
    assert re.findall(r'"(.+?)"', re.search(r"session: \[(.*)\]", workflow)[1]) == re.findall(r'"(.+?)"', sessions)


def test_what_opens_the_notebooks_as_colab_imports_what_colab_has():
    lacking = [
        "jupytext", "babel", "sphinx", "bs4", "myst_nb", "pytest", "nbval", "ray", "accelerate", "safetensors", "GPUtil", "pynvml",
    ]  # fmt: skip
    code = f"import sys, runpy; sys.modules |= dict.fromkeys({lacking}); runpy.run_path('tests/colab/run.py')"
    subprocess.run([sys.executable, "-c", code], cwd=series.ROOT, check=True)
