"""JupyterLab in a real browser: each notebook by the menu's *Run All Cells*, what a reader would see; and the stop button."""

import json
import os
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

from tests.processes import free_port, ranks

SHOTS = series.BUILD / "browser"
LIMIT = 400  # seconds for one notebook
SETTINGS = {
    "apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False},
    "notebook-extension/tracker": {"windowingMode": "none"},  # every cell is drawn, so that every cell can be looked at
}


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    """A JupyterLab on a copy of the notebooks, as a reader would run it, progress bars on: its address, folder and process."""
    folder = tmp_path_factory.mktemp("lab")
    shutil.copytree(series.NOTEBOOKS, folder / "notebooks")
    for name, values in SETTINGS.items():
        file = folder / "settings" / "@jupyterlab" / f"{name}.jupyterlab-settings"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(values))
    port = free_port()
    environment = {k: v for k, v in os.environ.items() if k != "TQDM_DISABLE"}
    environment |= {"JUPYTERLAB_SETTINGS_DIR": str(folder / "settings"), "JUPYTER_PREFER_ENV_PATH": "1"}
    options = ["--no-browser", "--allow-root", "--expose-app-in-browser", f"--port={port}", "--IdentityProvider.token="]
    server = subprocess.Popen(
        [sys.executable, "-m", "jupyter", "lab", *options, f"--notebook-dir={folder / 'notebooks'}"],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    address = f"http://127.0.0.1:{port}/lab"
    try:
        wait_for(lambda: answers(address), 60, "JupyterLab does not answer")
        yield SimpleNamespace(address=address, folder=folder / "notebooks", server=psutil.Process(server.pid))
    finally:
        server.terminate()
        server.wait(30)


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
    page.goto(f"{lab.address}/tree/{name}?reset")
    page.wait_for_selector(".jp-Notebook .jp-Cell", timeout=60_000)
    page.wait_for_function(
        "jupyterapp.shell.currentWidget?.sessionContext?.session?.kernel?.status === 'idle'", timeout=60_000
    )
    return page


def run_all(page) -> None:
    page.locator(".jp-Notebook .jp-Cell").first.click()
    page.locator(".lm-MenuBar-itemLabel", has_text="Run").first.click()
    page.locator(".lm-Menu-itemLabel", has_text="Run All Cells").first.click()


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
    page.evaluate("jupyterapp.shell.currentWidget.sessionContext.shutdown()")
    page.close()
    assert not found, "\n".join(found)


LAUNCH = """
import time
import helpers

def slow():
    time.sleep(600)

helpers.launch(slow, timeout=900)
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
