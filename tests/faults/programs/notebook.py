"""tools/run.py over a series of one short notebook, in the folder notebooks/ here; its outputs are kept. The site is left out."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "tools"))

import run  # noqa: E402
import series  # noqa: E402
import website  # noqa: E402

CELLS = [
    "import torch, virtualgpu\ngpus = virtualgpu.gpus(2)",
    "import torch.distributed as dist\n\ndef work():\n    x = torch.ones(4, device='cuda')\n    dist.all_reduce(x)\n    return float(x.sum())",
    "virtualgpu.launch(work, nprocs=2, timeout=25)",
    "import time\nfor _ in range(20):\n    time.sleep(0.1)\ntorch.ones(3, device=gpus[1]).sum().item()",
]


def write(folder: Path) -> None:
    """notebooks/01_short.ipynb, not executed."""
    from nbformat import v4, write

    (folder / "notebooks").mkdir()
    cells = [v4.new_markdown_cell("# 01 · Short"), *map(v4.new_code_cell, CELLS)]
    write(v4.new_notebook(cells=cells), folder / "notebooks" / "01_short.ipynb")


if __name__ == "__main__":
    series.ROOT = Path.cwd()
    series.NOTEBOOKS, series.BUILD = series.ROOT / "notebooks", series.ROOT / "build"
    website.build = lambda paths, seconds: series.BUILD / "site" / "index.html"
    run.stamp.stamp_lesson = lambda path, fix: []  # it has neither an opening nor a set-up cell
    sys.exit(run.main(["--store", *sys.argv[1:]]))
