"""Guards on the notebooks as they are stored: what nbval would let pass in silence."""

import itertools
import re

import lesson_text
import nbformat
import pytest
import series
import stamp
from nbval.plugin import get_sanitize_patterns

NOTEBOOKS = series.notebooks()
PRIVATE = re.compile(r"/(?:home|root|Users|tmp|work|var/folders|content)/[\w.-]+|[A-Z]:\\Users|site-packages/")


@pytest.fixture(params=NOTEBOOKS, ids=lambda path: path.stem)
def notebook(request):
    return series.read(request.param)


def texts(output):
    """Every text of one output, the alternative text of a picture too."""
    if output.output_type == "stream":
        return [output.text]
    if output.output_type == "error":
        return [output.evalue, *output.traceback]
    return [value for kind, value in output.data.items() if kind.startswith("text/")] + [str(output.metadata)]


def test_there_are_notebooks():
    assert NOTEBOOKS


def test_each_cell_was_run_in_order_and_from_the_top(notebook):
    counts = [cell.execution_count for cell in series.code_cells(notebook)]
    assert counts == list(range(1, len(counts) + 1)), "run `make store`"


def test_a_cell_that_prints_has_its_output(notebook):
    """nbval passes a cell whose output was stripped: so a cell that ends in print(...) or plots must have one."""
    for cell in series.code_cells(notebook):
        last = cell.source.rstrip().splitlines()[-1]
        if last.startswith(("print(", "plots.", "checks.")):
            assert cell.outputs, cell.source


def test_no_line_runs_out_of_the_cell(notebook):
    """JupyterLab and the pages show about 105 characters; a longer line hides its end."""
    for cell in series.code_cells(notebook):
        if not cell.metadata.get("jupyter", {}).get("source_hidden"):
            assert max(map(len, cell.source.splitlines())) <= 105, cell.source


def test_tags_are_spelled_right(notebook):
    for cell in notebook.cells:
        assert series.tags(cell) <= series.TAGS, f"unknown tag in {series.tags(cell)}; known: {sorted(series.TAGS)}"
        assert "NBVAL_" not in cell.source, "use a tag, not a comment in the reader's code"


def test_a_cell_that_may_raise_has_its_error_compared(notebook):
    for cell in notebook.cells:
        if "raises-exception" in series.tags(cell):
            assert any(output.output_type == "error" for output in cell.outputs), cell.source
            assert "nbval-ignore-output" not in series.tags(cell), cell.source


def test_restored_trials_are_listed_in_an_order_of_ours(notebook):
    """Tune lists them by their last result: which of two that ran at a time is first, the machine decides."""
    source = "\n".join(cell.source for cell in series.code_cells(notebook))
    for name in re.findall(r"(\w+) = tune\.Tuner\.restore\(", source):
        assert not re.search(rf"\bin {name}\b(?!\.)", source), f"sort {name}, by the trials' paths for example"


def test_no_error_and_no_warning_is_stored(notebook):
    for cell in series.code_cells(notebook):
        for output in cell.outputs:
            assert "raises-exception" in series.tags(cell) or output.output_type != "error", cell.source
            assert output.get("name") != "stderr", f"{output.text}\nfrom\n{cell.source}"


def test_no_private_path_in_an_output(notebook):
    for cell in series.code_cells(notebook):
        for output in cell.outputs:
            for text in texts(output):
                assert not PRIVATE.search(text), f"{PRIVATE.search(text)[0]} in the output of\n{cell.source}"


def test_each_picture_says_what_it_shows(notebook):
    """helpers.plots writes title and origin as alternative text; a picture without it did not go through plots."""
    for cell in series.code_cells(notebook):
        for output in cell.outputs:
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
    named = r"""(?:\bhome|\bROOT|parents\[\d\]) / ["']([\w./-]+)["'](?: / ["']([\w./-]+)["'])?"""
    read = {
        "/" + "/".join(filter(None, found)) for path in paths for found in re.findall(named, path.read_text("utf-8"))
    }
    assert read, "none found: the pattern is out of date"
    assert [path for path in sorted(read) if not f"{path}/".startswith(tuple(stamp.FETCHED))] == []


def test_cleared_outputs_cost_the_readme_no_picture(tmp_path, monkeypatch):
    """A notebook that has not run again yet has no picture to give: the last one stays, and is not emptied."""
    name, picture = next(iter(stamp.PICTURES.items()))
    for folder in ("docs", "notebooks"):
        (tmp_path / folder).mkdir()
    for file in ("README.md", f"docs/{picture}"):
        (tmp_path / file).write_bytes((series.ROOT / file).read_bytes())
    notebook = series.read(series.NOTEBOOKS / name)
    for cell in series.code_cells(notebook):
        cell.outputs = []
    nbformat.write(notebook, tmp_path / "notebooks" / name)
    kept = (tmp_path / "docs" / picture).read_bytes()
    monkeypatch.setattr(series, "NOTEBOOKS", tmp_path / "notebooks")
    monkeypatch.setattr(stamp, "settings", lambda found=stamp.settings(): found)  # noqa: B008 - read before ROOT moves
    monkeypatch.setattr(series, "ROOT", tmp_path)
    assert stamp.stamp_pictures(fix=True) == []
    assert kept and (tmp_path / "docs" / picture).read_bytes() == kept


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


def test_links_between_notebooks_lead_somewhere(notebook):
    names = {path.name for path in NOTEBOOKS}
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            for name in re.findall(r"\]\((\d\d_\w+\.ipynb)", cell.source):
                assert name in names, cell.source


def test_each_lesson_leads_to_the_next():
    """At the end of the main path: what goes further is optional."""
    for path, after in itertools.pairwise(NOTEBOOKS):
        prose = "\n".join(cell.source for cell in series.read(path).cells if cell.cell_type == "markdown")
        assert f"]({after.name})" in prose.split("\n## Going further")[0][-800:], f"the end of {path.name}"


@pytest.mark.parametrize("name", ["sanitize.cfg", "sanitize_versions.cfg"])
def test_each_sanitizer_pair_that_was_written_is_parsed(name):
    text = (series.ROOT / "tests" / name).read_text("utf-8")
    written = len(re.findall(r"^\s*\[", text, re.M))
    assert (
        written
        == len(get_sanitize_patterns(text))
        == len(re.findall(r"^regex:", text, re.M))
        == len(re.findall(r"^replace:", text, re.M))
    )


def test_other_versions_differ_in_simulated_figures_memory_and_tpe_alone():
    ours, others = (
        get_sanitize_patterns((series.ROOT / "tests" / name).read_text("utf-8"))
        for name in ("sanitize.cfg", "sanitize_versions.cfg")
    )
    simulated = (r".*\bsimulated\b.*", "A LINE OF SIMULATED FIGURES")
    memory = (r".*(\b[MG]iB\b|\bx the time\b).*", "A LINE OF MEMORY FIGURES")
    assert [pair for pair in others if pair not in ours] == [simulated, memory, (r"TPE\s+[\d.]+ %", "TPE SHARE")]
    assert [pair for pair in ours if pair not in others] == []


def test_each_sanitizer_pair_is_still_needed():
    """A pattern that matches no stored output is dead, and a wider one than needed would hide a change."""
    stored = "\n".join(
        text
        for path in NOTEBOOKS
        for cell in series.code_cells(series.read(path))
        if "nbval-ignore-output" not in series.tags(cell)
        for output in cell.outputs
        for text in texts(output)
    )
    for pattern, _ in get_sanitize_patterns((series.ROOT / "tests" / "sanitize.cfg").read_text("utf-8")):
        assert re.search(pattern, stored), pattern


def test_the_exact_versions_satisfy_the_ranges():
    """constraints.txt pins what requirements.txt asks for, within its ranges, and names no registry."""
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    lines = (series.ROOT / "constraints.txt").read_text("utf-8").splitlines()
    found = [Requirement(line) for line in lines if not line.startswith("#")]
    assert all(not pin.url and [one.operator for one in pin.specifier] == ["=="] for pin in found)
    pins = {canonicalize_name(pin.name): next(iter(pin.specifier)).version for pin in found}
    for line in (series.ROOT / "requirements.txt").read_text("utf-8").splitlines():
        if line and not line.startswith("#"):
            wanted = Requirement(line)
            assert wanted.specifier.contains(pins[canonicalize_name(wanted.name)]), line


def test_the_ranges_keep_what_colab_has():
    """Colab in 2026-08: torch 2.11.0 (+cpu or +cu128) and the torchvision of that release."""
    from packaging.requirements import Requirement

    lines = [
        line
        for line in (series.ROOT / "requirements.txt").read_text("utf-8").splitlines()
        if line and not line.startswith("#")
    ]
    ranges = {Requirement(line).name: Requirement(line).specifier for line in lines}
    assert ranges["torch"].contains("2.11.0+cpu") and ranges["torch"].contains("2.11.0+cu128")
    assert ranges["torchvision"].contains("0.26.0+cpu")


def test_the_workflow_runs_each_session_of_the_matrix():
    workflow = (series.ROOT / ".github" / "workflows" / "weekly.yml").read_text("utf-8")
    sessions = re.search(r"sessions = \[(.*?)\]", (series.ROOT / "noxfile.py").read_text("utf-8"), re.S)[1]
    assert re.findall(r'"(.+?)"', re.search(r"session: \[(.*)\]", workflow)[1]) == re.findall(r'"(.+?)"', sessions)
