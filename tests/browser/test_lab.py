"""JupyterLab in a real browser: a lesson as it is opened, trusted or not; each by the menu's *Run All Cells*, what a reader would see; the
stop button; and a lesson that is edited and saved."""

import json
import os
import re
import shutil
import subprocess
import sys
import time
import urllib.request
from types import SimpleNamespace

import nbformat
import psutil
import pytest
import series

from tests.browser.conftest import SLIDERS
from tests.browser.test_pages import DIM
from tests.processes import free_port, ranks

SHOTS = series.BUILD / "browser"
LIMIT = 400  # seconds for one notebook
SETTINGS_OF_MAKE = series.ROOT / "tools" / "lab.py"
SETTINGS = {
    "apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False},
    "notebook-extension/tracker": {"windowingMode": "none"},  # every cell is drawn, so that every cell can be looked at
}


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    """A JupyterLab on a copy of the notebooks, as a reader would run it, progress bars on: its address, folder and process."""
    folder = tmp_path_factory.mktemp("lab")
    for name in ("lessons", "notebooks"):
        shutil.copytree(series.ROOT / name, folder / name)
    shutil.copy(series.ROOT / "pyproject.toml", folder)
    for name, values in SETTINGS.items():
        file = folder / "settings" / "@jupyterlab" / f"{name}.jupyterlab-settings"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(values))
    port = free_port()
    environment = {k: v for k, v in os.environ.items() if k != "TQDM_DISABLE"}
    environment |= {"JUPYTERLAB_SETTINGS_DIR": str(folder / "settings"), "JUPYTER_PREFER_ENV_PATH": "1"}
    environment["JUPYTER_DATA_DIR"] = str(folder / "data")  # whom this user trusts does not count here
    options = ["--no-browser", "--allow-root", "--expose-app-in-browser", f"--port={port}", "--IdentityProvider.token="]
    server = subprocess.Popen(
        [sys.executable, "-m", "jupyter", "lab", *options, f"--config={SETTINGS_OF_MAKE}", f"--notebook-dir={folder}"],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    address = f"http://127.0.0.1:{port}/lab"
    try:
        wait_for(lambda: answers(address), 60, "JupyterLab does not answer")
        here = SimpleNamespace(address=address, folder=folder / "notebooks", environment=environment)
        here.server = psutil.Process(server.pid)
        yield here
    finally:
        server.terminate()
        server.wait(120)  # a busy machine: it ends the kernels first


def answers(address: str) -> bool:
    try:
        return urllib.request.urlopen(address, timeout=5).status == 200
    except OSError:
        return False


def wait_for(condition, seconds: float, otherwise: str) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, otherwise
        time.sleep(0.5)


def opened(browser, lab, name: str):
    """A notebook's page, its kernel ready."""
    page = browser.new_page(viewport={"width": 1300, "height": 1000})
    page.goto(f"{lab.address}/tree/notebooks/{name}?reset")
    page.wait_for_selector(".jp-Notebook .jp-Cell", timeout=60_000)
    page.wait_for_function(
        "jupyterapp.shell.currentWidget?.sessionContext?.session?.kernel?.status === 'idle'", timeout=60_000
    )
    return page


def close(page) -> None:
    """And end its kernel."""
    page.evaluate("jupyterapp.shell.currentWidget.sessionContext.shutdown()")
    page.close()


def run_all(page) -> None:
    page.locator(".jp-Notebook .jp-Cell").first.click()
    page.locator(".lm-MenuBar-itemLabel", has_text="Run").first.click()
    page.locator(".lm-Menu-itemLabel", has_text="Run All Cells").first.click()


# Of the pictures, those that a reader sees; of the texts within, those that are hard to read
SEEN = "figure => [...figure.querySelectorAll('img')].filter(image => image.checkVisibility()).map(image => image.alt)"
LESSON = "02_model_parallel"


def pages_of(cell) -> list[str]:
    """What a cell shows as HTML."""
    return [output.get("data", {}).get("text/html", "") for output in cell.get("outputs", [])]


@pytest.mark.parametrize("trusted", [False, True])
def test_as_it_is_opened_before_anything_runs(browser, lab, trusted):
    """An answer is closed, a click opens it; a slider shows one picture, with scripts or without; of a solution nothing is seen."""
    path = lab.folder / f"opened_{trusted}.ipynb"
    shutil.copy(series.NOTEBOOKS / f"{SLIDERS}.ipynb", path)
    if trusted:  # by its content: the untrusted one comes first
        subprocess.run([sys.executable, "-m", "jupyter", "trust", path], env=lab.environment, check=True)
    page = opened(browser, lab, path.name)
    page.wait_for_timeout(1000)
    cells = series.read(path).cells
    answers = page.locator(".jp-OutputArea details", has_text="The answer")
    assert answers.count() == sum("<summary>The answer" in str(cell.get("outputs")) for cell in cells) > 2
    assert not page.locator(".jp-OutputArea details[open] > summary", has_text="The answer").count()
    answer = answers.filter(has=page.locator("figure.frames")).first
    assert answer.locator("pre").first.is_hidden()
    answer.locator("summary", has_text="The answer").click()
    assert answer.locator("pre").first.is_visible()

    figure = answer.locator("figure.frames")
    stored = next(page for cell in cells for page in pages_of(cell) if "The answer" in page and "figure" in page)
    values = re.findall(r'<details data-value="([^"]*)"', stored)
    begins = next(at for at, tag in enumerate(re.findall(r"<details data-value=[^>]*>", stored)) if " open" in tag)
    (first,) = figure.evaluate(SEEN)
    if trusted:
        assert not figure.locator("summary").filter(visible=True).count()
        slider, value = figure.locator("input"), figure.locator("output")
        said = [value.inner_text()]
        for move in (
            lambda: figure.get_by_label("next").click(),
            lambda: slider.press("End"),
            lambda: figure.get_by_label("next").click(),  # nothing lies beyond
            lambda: figure.get_by_label("previous").click(),
            lambda: slider.fill(str(begins)),
        ):
            move()
            said.append(value.inner_text())
            (seen,) = figure.evaluate(SEEN)
            assert seen.replace(",", "").startswith(f"Figure (simulated): {said[-1]} ")
        at = [begins, min(begins + 1, len(values) - 1), -1, -1, -2, begins]
        assert said == [values[place] for place in at] and seen == first
    else:
        assert not figure.locator("input, button").count()
        figure.locator("summary").last.click()
        assert len(seen := figure.evaluate(SEEN)) == 2 and seen[0] == first
    for which, hidden in (("Input", "source_hidden"), ("Output", "outputs_hidden")):
        closed = sum(bool(cell.metadata.get("jupyter", {}).get(hidden)) for cell in cells)
        assert page.locator(f".jp-Notebook .jp-{which}Placeholder").count() == closed > 0
    for theme in ("Dark", "Light"):
        page.evaluate(f"jupyterapp.commands.execute('apputils:change-theme', {{theme: 'JupyterLab {theme}'}})")
        page.wait_for_timeout(2000)
        for place in (answer, figure):
            assert place.evaluate(DIM) == [], theme
            place.scroll_into_view_if_needed()
            SHOTS.mkdir(parents=True, exist_ok=True)
            page.screenshot(path=SHOTS / f"opened-{trusted}-{theme}-{place is figure}.png")
    close(page)


def test_an_edited_lesson_is_saved_as_text_too(browser, lab):
    """In both files one line is another, although a solution was opened and the kernel has told its version."""
    page = opened(browser, lab, f"{LESSON}.ipynb")
    files = lab.folder / f"{LESSON}.ipynb", lab.folder.parent / "lessons" / f"{LESSON}.md"
    before = [file.read_text("utf-8") for file in files]
    page.evaluate(
        "(() => { const cells = jupyterapp.shell.currentWidget.content.widgets, text = cells[2].model.sharedModel;"
        "cells.forEach(cell => { cell.inputHidden = false; if (cell.outputHidden) cell.outputHidden = false; });"
        "text.setSource(text.getSource().replace('is on one GPU, the other', 'is on a GPU, the other')); })()"
    )
    page.evaluate("jupyterapp.commands.execute('docmanager:save')")
    wait_for(lambda: "is on a GPU, the other" in files[1].read_text("utf-8"), 20, "the text was not saved")
    close(page)
    assert [file.read_text("utf-8") for file in files] == [
        text.replace("is on one GPU, the other", "is on a GPU, the other", 1) for text in before
    ]


@pytest.mark.parametrize("path", series.notebooks(), ids=lambda path: path.stem)
def test_run_all_cells(browser, lab, path):
    page = opened(browser, lab, path.name)
    run_all(page)
    start = time.monotonic()
    ran = "jupyterapp.shell.currentWidget.content.widgets.filter(c => c.model.type === 'code' && c.model.sharedModel.source.trim())"
    wait_for(
        lambda: (
            page.evaluate(f"{ran}.every(c => c.model.executionCount && c.model.executionState !== 'running')")
            and page.evaluate("jupyterapp.shell.currentWidget.sessionContext.session.kernel.status === 'idle'")
        ),
        LIMIT,
        f"{path.stem} still runs",
    )
    seconds = time.monotonic() - start
    page.wait_for_timeout(1500)
    notebook = page.evaluate("jupyterapp.shell.currentWidget.content.model.toJSON()")
    SHOTS.mkdir(parents=True, exist_ok=True)
    photograph(page, path.stem)
    page.evaluate("jupyterapp.commands.execute('apputils:change-theme', {theme: 'JupyterLab Dark'})")
    page.wait_for_timeout(2000)
    photograph(page, f"{path.stem}-dark")
    found = faults(page, notebook)
    print(
        f"{path.stem}: {seconds:.0f} s, {page.locator('.widget-hprogress, .jupyter-widgets progress').count()} progress bars"
    )
    page.evaluate("jupyterapp.commands.execute('apputils:change-theme', {theme: 'JupyterLab Light'})")
    close(page)
    assert not found, "\n".join(found)


LAUNCH = """
import time
import virtualgpu

def slow():
    time.sleep(600)

virtualgpu.launch(slow, timeout=900)
"""


def test_the_stop_button_leaves_no_rank(browser, lab):
    """A cell that launches is interrupted from the toolbar and run again; then its kernel is shut down."""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(LAUNCH.strip())])
    notebook.metadata.kernelspec = {"name": "python3", "display_name": "Python 3"}  # or JupyterLab asks for one
    nbformat.write(notebook, lab.folder / "stop.ipynb")
    page = opened(browser, lab, "stop.ipynb")
    run_all(page)
    wait_for(lambda: len(ranks(lab.server)) == 2, 60, "no ranks")
    page.locator('[data-command="notebook:interrupt-kernel"]').click()
    wait_for(lambda: not ranks(lab.server), 20, "ranks outlive the stop button")
    outputs = "jupyterapp.shell.currentWidget.content.model.toJSON().cells[0].outputs"
    wait_for(lambda: page.evaluate(f"{outputs}.some(o => o.ename === 'KeyboardInterrupt')"), 20, "not interrupted")
    run_all(page)
    wait_for(lambda: len(ranks(lab.server)) == 2, 60, "no ranks the second time")
    page.evaluate("jupyterapp.shell.currentWidget.sessionContext.shutdown()")
    wait_for(lambda: not lab.server.children(recursive=True), 30, "processes outlive the kernel")
    page.close()


def photograph(page, name: str) -> None:
    """The whole notebook, screen after screen, into one folder a notebook."""
    folder = SHOTS / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    outer = "document.querySelector('.jp-WindowedPanel-outer')"
    page.evaluate(f"{outer}.scrollTop = 0")
    for number in range(100):
        page.wait_for_timeout(150)
        page.locator(".jp-NotebookPanel:not(.lm-mod-hidden)").screenshot(path=folder / f"{number:02}.png")
        before = page.evaluate(f"{outer}.scrollTop")
        page.evaluate(f"{outer}.scrollTop += {outer}.clientHeight - 40")
        if page.evaluate(f"{outer}.scrollTop") == before:
            return


def faults(page, notebook: dict) -> list[str]:
    """What a reader would take for broken."""
    found = []
    for cell in notebook["cells"]:
        for output in cell.get("outputs", []):
            staged = "raises-exception" in cell["metadata"].get("tags", [])
            if output["output_type"] == "error" and not staged:
                found.append(f"{output['ename']}: {output['evalue']} from\n{cell['source']}")
            if output.get("name") == "stderr":
                found.append(f"on stderr: {output['text']} from\n{cell['source']}")
    widgets = sum(
        "application/vnd.jupyter.widget-view+json" in output.get("data", {})
        for cell in notebook["cells"]
        for output in cell.get("outputs", [])
    )
    if (
        page.locator(".jp-Notebook .widget-hprogress progress, .jp-Notebook .widget-hprogress .progress").count()
        < widgets
    ):
        found.append(f"not each of {widgets} progress bars is drawn")
    for words in ("Loading widget", "Error displaying widget", "Click to show javascript error"):
        if page.get_by_text(words).count():
            found.append(words)
    hidden = sum(bool(cell["metadata"].get("jupyter", {}).get("source_hidden")) for cell in notebook["cells"])
    if page.locator(".jp-Notebook .jp-InputPlaceholder").count() != hidden:
        found.append(f"not each of {hidden} folded cells is closed")
    found += page.evaluate(WIDE_OR_LONG)
    return found


# an output wider than its place (its end is hidden), or much longer than a screen
WIDE_OR_LONG = """() => [...document.querySelectorAll('.jp-Notebook .jp-OutputArea-output')].flatMap(e => {
    const says = (e.innerText || e.querySelector('img')?.alt || '').slice(0, 200);
    const wide = [e, ...e.querySelectorAll('pre, table, img')].some(x => x.scrollWidth > x.clientWidth + 2 && x.clientWidth > 0
        || x.getBoundingClientRect().right > e.closest('.jp-OutputArea').getBoundingClientRect().right + 2);
    const staged = e.dataset.mimeType === 'application/vnd.jupyter.error';
    return [wide && !staged ? ['wider than its place: ' + says] : [], e.clientHeight > 1000 ? ['longer than a screen: ' + says] : []].flat();
})"""
