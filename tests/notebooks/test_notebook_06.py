"""What nbval cannot see of notebook 06: the memory that it takes of the reader's machine, its links, and names of its sections."""

import re
import sys
import threading
import urllib.parse
from pathlib import Path

import psutil
import pytest
import series
from nbclient import NotebookClient

PATH = series.NOTEBOOKS / "06_oom_troubleshooting.ipynb"
GIB = 1 << 30


def own_memory(kernel: psutil.Process) -> int:
    """Bytes of the kernel and all that it started; a page that several share counts once (PSS)."""
    total = 0
    for process in [kernel, *kernel.children(recursive=True)]:
        try:
            total += process.memory_full_info().pss
        except psutil.Error:  # it has just ended
            continue
    return total


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_lesson_runs_in_4_gib_of_the_machines_memory():
    """All processes together, looked at five times a second; and the kernel's own peak, which no look can miss. (A limit,
    RLIMIT_AS, would count what PyTorch's libraries only map.)"""
    notebook, done, seen = series.read(PATH), threading.Event(), [0]
    client = NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(PATH.parent)}})
    with client.setup_kernel():
        kernel = psutil.Process(client.km.provisioner.pid)

        def look():
            while not done.wait(0.2):
                seen.append(own_memory(kernel))

        watcher = threading.Thread(target=look, daemon=True)
        watcher.start()
        try:
            for index, cell in enumerate(notebook.cells):
                client.execute_cell(cell, index)
            status = Path(f"/proc/{kernel.pid}/status").read_text()
        finally:
            done.set()
            watcher.join()
    alone = int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) * 1024
    assert len(seen) > 10
    assert alone < 4 * GIB and max(seen) < 4 * GIB, (alone / GIB, max(seen) / GIB)
    print(f"the kernel alone {alone / GIB:.2f} GiB, all processes {max(seen) / GIB:.2f}")


def test_each_link_of_the_map_leads_to_a_section():
    prose = "\n".join(cell.source for cell in series.read(PATH).cells if cell.cell_type == "markdown")
    headings = {heading.replace(" ", "-") for heading in re.findall(r"^#+ (.+)$", prose, re.M)}
    links = re.findall(r"\]\(#(\S+?)\)", prose)
    assert len(links) > 10 and {urllib.parse.unquote(link) for link in links} <= headings


def test_a_section_that_a_sentence_names_is_there():
    prose = "\n".join(cell.source for cell in series.read(PATH).cells if cell.cell_type == "markdown")
    sections = {int(number) for number in re.findall(r"^## (\d+) · ", prose, re.M)}
    assert sections == set(range(1, 15))
    assert {int(number) for number in re.findall(r"section (\d+)", prose)} <= sections
