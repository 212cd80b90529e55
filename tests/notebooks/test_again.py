"""A reader goes back: each cell of a lesson runs a second time at once, and once more from the end of the notebook, last cell first."""

import pytest
import series
from nbclient import NotebookClient


@pytest.mark.judge
@pytest.mark.parametrize("path", series.notebooks(), ids=lambda path: path.name[:2])
def test_cells_run_again(path):
    notebook = series.read(path)
    cells = [(index, cell) for index, cell in enumerate(notebook.cells) if cell.cell_type == "code"]
    client = NotebookClient(
        notebook, timeout=600, allow_errors=True, resources={"metadata": {"path": str(path.parent)}}
    )
    failed = []

    def run(index, cell, when):
        client.execute_cell(cell, index)
        errors = [f"{out.ename}: {out.evalue}"[:200] for out in cell.outputs if out.output_type == "error"]
        if errors and "raises-exception" not in series.tags(cell):
            failed.append((when, index, *errors))

    with client.setup_kernel():
        for index, cell in cells:
            run(index, cell, "first")
            run(index, cell, "again at once")
        for index, cell in reversed(cells):
            run(index, cell, "again from the end")
    assert not failed
