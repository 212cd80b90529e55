"""What all tests share: the environment that the stored outputs were made in, a fake nvidia-smi, and a closing count."""

import os
import stat
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tools"))

import run  # noqa: E402
import series  # noqa: E402

os.environ.update(run.ENVIRONMENT)

GOOD_LINES = "\n".join(
    f"{i}, GPU-{i}{i}, {10 * (i + 1)}, 15360, {1000 * (i + 1)}, {15360 - 1000 * (i + 1)}, 550.54, Tesla T4, 0, Disabled, Disabled, 40"
    for i in range(3)
)


@pytest.fixture
def nvidia_smi(tmp_path, monkeypatch):
    """Put a fake nvidia-smi first on the PATH: nvidia_smi("shell commands"), or nothing for three healthy GPUs."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def install(commands: str = f"cat <<'END'\n{GOOD_LINES}\nEND"):
        folder = tmp_path / "bin"
        folder.mkdir(exist_ok=True)
        script = folder / "nvidia-smi"
        script.write_text(f"#!/bin/sh\n{commands}\n")
        script.chmod(script.stat().st_mode | stat.S_IEXEC)
        monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")

    return install


def pytest_terminal_summary(terminalreporter, config):
    """Say what strict nbval compared, so that a green line cannot hide that nothing was."""
    passed = {report.nodeid for report in terminalreporter.stats.get("passed", [])}
    items = [item for item in getattr(config, "_nbval_items", []) if item.nodeid in passed]
    if not items:
        return
    notebooks = {item.nodeid.split("::")[0] for item in items}
    silent = [item for item in items if not item.cell.outputs]
    ignored = [item for item in items if item.cell.outputs and "nbval-ignore-output" in series.tags(item.cell)]
    pictures = [item for item in items for output in item.cell.outputs if "image/png" in output.get("data", {})]
    terminalreporter.write_line(
        f"nbval: {len(notebooks)} notebook(s), {len(items)} cells ran as stored: {len(items) - len(silent) - len(ignored)} outputs "
        f"compared, {len(ignored)} ignored by tag, {len(silent)} without output; {len(pictures)} pictures compared by their words"
    )


def pytest_collection_modifyitems(config, items):
    config._nbval_items = [item for item in items if hasattr(item, "cell")]
