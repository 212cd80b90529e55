"""make run: one notebook that fails does not hide the others, and the pages show what was learned."""

import base64
import contextlib
import io
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from urllib.parse import unquote

import nbformat
import pages
import psutil
import pytest
import run
import series
from bs4 import BeautifulSoup
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

GOOD = new_notebook(
    cells=[
        new_markdown_cell(
            "# 01 · Add *numbers*\n\n[![Open in Colab](https://badge.svg)](https://colab/01)\n\n**You will**\n\n- add with `+`\n- see <b> escaped\n"
        ),
        new_code_cell("1 + 1"),
        new_code_cell("from helpers import plots\nplots.curves({'a': [1, 2]}, 'It \"rises\"', 'x', 'y')"),
    ]
)
BAD = new_notebook(
    cells=[
        new_markdown_cell("# 02 · Fail"),
        new_code_cell("x = 1"),
        new_code_cell("raise ValueError('the cure is tea\\nwith milk')"),
    ]
)
DEAD = new_notebook(
    cells=[new_markdown_cell("# 03 · Die"), new_code_cell("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)")]
)
WHERE = new_notebook(
    cells=[
        new_markdown_cell("# 04 · Where"),
        new_code_cell(f"import os\n[os.environ.get(name) for name in {[*run.ENVIRONMENT, 'OMP_NUM_THREADS']}]"),
        new_code_cell(
            "import pathlib, sys\nprint(pathlib.Path.home() / 'x', file=sys.stderr)",
            metadata={"tags": ["nbval-ignore-output"]},
        ),
    ]
)


def series_in(root, monkeypatch):
    """A series of its own: notebooks/ and build/ in this folder. What it gives writes notebooks there."""
    monkeypatch.setattr(series, "ROOT", root)
    monkeypatch.setattr(series, "NOTEBOOKS", root / "notebooks")
    monkeypatch.setattr(series, "BUILD", root / "build")
    (root / "notebooks").mkdir()

    def write(**notebooks):
        for name, notebook in notebooks.items():
            nbformat.write(notebook, root / "notebooks" / f"{name.removeprefix('nb_')}.ipynb")
        return root

    return write


@pytest.fixture
def folder(tmp_path, monkeypatch):
    return series_in(tmp_path, monkeypatch)


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """build/ after a run of four notebooks, of which two fail; and what was printed."""
    with pytest.MonkeyPatch.context() as monkeypatch, contextlib.redirect_stdout(io.StringIO()) as printed:
        for name in [*run.ENVIRONMENT, "OMP_NUM_THREADS"]:
            monkeypatch.delenv(name, raising=False)
        write = series_in(tmp_path_factory.mktemp("series"), monkeypatch)
        root = write(nb_01_good=GOOD, nb_02_bad=BAD, nb_03_dead=DEAD, nb_04_where=WHERE)
        assert run.main(["--jobs", "2"]) == 1
        return root / "build", printed.getvalue()


def test_a_failing_notebook_does_not_hide_the_others(ran):
    build, printed = ran
    told = {"[ OK ] 01_good", "[FAIL] 02_bad", "[FAIL] 03_dead", "[ OK ] 04_where"}
    assert set(re.findall(r"^\[.{4}\] \w+", printed, re.M)) == told, "each as soon as it ends"
    assert "  02_bad: cell 2 of 2: ValueError: the cure is tea\n  with milk\n" in printed, (
        "whole: the cause stands last"
    )
    assert "03_dead: cell 1 of 1: the kernel died" in printed
    assert "2 of 4 notebooks ran" in printed
    assert {path.name for path in build.glob("0*")} == {
        f"{n}.{e}" for n in ("01_good", "02_bad", "03_dead", "04_where") for e in ("html", "ipynb")
    }
    assert list(json.loads((build / "times.json").read_text("utf-8"))) == ["01_good", "04_where"]
    assert nbformat.read(build / "02_bad.ipynb", 4).cells[2].outputs[0].ename == "ValueError", "the copy shows it"


def test_a_kernel_that_does_not_start_is_a_failure_like_others(folder, capsys, monkeypatch):
    folder(nb_01_good=GOOD)

    async def broken(self, **options):
        raise RuntimeError("Kernel died before replying to kernel_info")

    monkeypatch.setattr(run.NotebookClient, "async_start_new_kernel", broken)
    assert run.main([]) == 1
    assert "01_good: the kernel did not start: Kernel died" in capsys.readouterr().out


def test_the_pages(ran):
    build, _ = ran
    index = (build / "index.html").read_text("utf-8")
    assert '<a href="01_good.html">01 · Add <em>numbers</em></a> <small>' in index
    assert "<li>add with <code>+</code></li><li>see &lt;b&gt; escaped</li>" in index
    assert 'alt="Figure (measured): It &quot;rises&quot;"' in index
    assert "cell 2 of 2: ValueError: the cure is tea" in index
    page = BeautifulSoup((build / "01_good.html").read_text("utf-8"), "html.parser")
    assert page.title.text == "01 · Add numbers"
    assert [image["alt"] for image in page.find_all("img")] == ['Figure (measured): It "rises"']
    assert page.find("a", string="Open in Colab")["href"] == "https://colab/01", "the badge became a link"


def test_the_pages_are_a_small_site(folder):
    """Previous and next, an anchor for each section, and a link to another notebook leads to its page."""
    first = new_notebook(
        cells=[*GOOD.cells, new_markdown_cell("## What? · *Now*, and `then`\n\nSee [02](02_bad.ipynb#x).")]
    )
    root = folder(nb_01_good=first, nb_02_bad=BAD)
    run.main(["--stored"])
    one, two = (
        BeautifulSoup((root / "build" / f"{name}.html").read_text("utf-8"), "html.parser")
        for name in ("01_good", "02_bad")
    )
    around = [
        [(link["href"], link.text) for link in page.select_one("nav.series").find_all("a")] for page in (one, two)
    ]
    everything = ("index.html", "All notebooks")
    assert around == [
        [everything, ("02_bad.html", "02 · Fail →")],
        [("01_good.html", "← 01 · Add numbers"), everything],
    ]
    link = one.select_one("nav.toc li a")
    assert link.text == "What? · Now, and then"
    assert unquote(link["href"][1:]) == one.find("h2")["id"], "as a browser reads it"
    assert one.find("a", string="02")["href"] == "02_bad.html#x"


def test_a_link_to_a_file_leads_where_a_browser_can_read_it():
    """A browser shows Markdown as it stands, without sections; and a page is read away from the repository, too."""

    def led(target: str) -> str:
        return re.sub(r'href="([^"]+)"', pages.onward, f'href="{target}"').removeprefix('href="').removesuffix('"')

    assert led("../virtualgpu/README.md#how-near-it-comes") == "virtualgpu.html#How-near-it-comes"
    assert led("../virtualgpu/README.md") == "virtualgpu.html"
    assert led("scripts/llama.py").endswith("/blob/main/notebooks/scripts/llama.py")
    assert led("../tests/accuracy/published.csv").endswith("/blob/main/tests/accuracy/published.csv")


def test_a_page_asks_nothing_of_the_outside(folder):
    root = folder(nb_01_good=GOOD)
    run.main(["--stored"])
    for path in (root / "build").glob("*.html"):
        page = BeautifulSoup(path.read_text("utf-8"), "html.parser")
        assert not page.find_all(["script", "link", "iframe"])
        assert all(image["src"].startswith("data:") for image in page.find_all("img"))
        assert not re.search(r"url\((?!['\"]?data:)|@import", "".join(style.text for style in page.find_all("style")))


def test_the_virtual_gpus_have_a_page(folder):
    """Their README: its picture within, links to files leading to the repository, the table of contents of a notebook's page."""
    root = folder(nb_01_good=GOOD)
    (root / "virtualgpu").mkdir()
    (root / "drawn.png").write_bytes(b"picture")
    text = "# virtualgpu\n\n## Run\n\n![Bars](../drawn.png) [judges](../tests/README.md) [outside](https://a.b/c) [here](#Run)\n"
    (root / "virtualgpu" / "README.md").write_text(text, "utf-8")
    (root / "pyproject.toml").write_text('[tool.series]\nrepository = "me/series"\nbranch = "main"\n')
    run.main(["--stored"])
    page = BeautifulSoup((root / "build" / "virtualgpu.html").read_text("utf-8"), "html.parser")
    assert page.title.text == "virtualgpu"
    assert base64.b64decode(page.img["src"].removeprefix("data:image/png;base64,")) == b"picture"
    links = {link.text: link["href"] for link in page.main.find_all("a", class_=None)}
    assert links["judges"] == "https://github.com/me/series/blob/main/tests/README.md"
    assert (links["outside"], links["here"]) == ("https://a.b/c", "#Run")
    assert [link.text for link in page.select("nav.toc li a")] == ["Run"]
    index = BeautifulSoup((root / "build" / "index.html").read_text("utf-8"), "html.parser")
    assert index.find("a", string="virtual GPUs")["href"] == "virtualgpu.html"


def test_store_keeps_the_outputs_of_what_ran_only(folder):
    root = folder(nb_01_good=new_notebook(cells=GOOD.cells[:2]), nb_02_bad=BAD)
    before = (root / "notebooks" / "02_bad.ipynb").read_bytes()
    run.main(["--store"])
    stored = nbformat.read(root / "notebooks" / "01_good.ipynb", 4)
    assert stored.cells[1].outputs[0].data["text/plain"] == "2" and stored.cells[1].execution_count == 1
    assert (root / "notebooks" / "02_bad.ipynb").read_bytes() == before


def test_stored_executes_nothing(folder):
    root = folder(nb_03_dead=DEAD)
    assert run.main(["--stored"]) == 0
    assert "03 · Die" in (root / "build" / "index.html").read_text("utf-8")


def test_a_kernel_has_the_environment_that_outputs_are_compared_in(ran):
    (output,) = nbformat.read(ran[0] / "04_where.ipynb", 4).cells[1].outputs
    half = str(max(1, os.cpu_count() // 2))  # of the cores: another notebook runs beside it
    assert output.data["text/plain"] == str([*run.ENVIRONMENT.values(), half])


def test_no_private_path_is_stored_from_a_cell_that_is_not_compared(ran):
    assert nbformat.read(ran[0] / "04_where.ipynb", 4).cells[2].outputs[0].text == "~/x\n"


def test_only_some(folder, capsys):
    root = folder(nb_01_good=GOOD, nb_02_bad=BAD)
    assert run.main(["01", "--stored"]) == 0
    assert [path.name for path in (root / "build").glob("0*")] == ["01_good.html"]
    assert run.main(["07"]) == 2
    assert "There are: 01_good, 02_bad" in capsys.readouterr().out


def test_ctrl_c_leaves_no_process(folder):
    """An interrupted `make run` ends its kernels too: two run at a time, the shortest waits."""

    def slow(number):
        waits = f"import time\nopen('started{number}', 'w').close()\ntime.sleep(600)"
        return new_notebook(cells=[new_markdown_cell(f"# {number} · Wait"), new_code_cell(waits)])

    root = folder(nb_01_slow=slow(1), nb_02_slow=slow(2), nb_05_slow=slow(5))
    tools = Path(run.__file__).parent
    code = (
        f"import sys; sys.path.insert(0, {str(tools)!r}); import pathlib, series, run; series.ROOT = root = pathlib.Path({str(root)!r}); "
        "series.NOTEBOOKS, series.BUILD = root / 'notebooks', root / 'build'; sys.exit(run.main(['--jobs', '2']))"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not all((root / "notebooks" / f"started{number}").exists() for number in (1, 5)):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.05)
    family = psutil.Process(process.pid).children(recursive=True)
    assert len(family) >= 2, "the kernels"
    assert not (root / "notebooks" / "started2").exists(), "the longest are begun first"
    process.send_signal(2)
    printed, _ = process.communicate(timeout=30)
    assert process.returncode == 130 and "Interrupted" in printed
    assert not psutil.wait_procs(family, timeout=10)[1]
