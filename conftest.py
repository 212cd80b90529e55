"""For notebooks and tests alike: the environment that the stored outputs were made in, and a closing count of what was compared."""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent / "tools"))

import run
import series

os.environ.update(run.ENVIRONMENT)
os.environ.setdefault(
    "HELPERS_GPUS", "virtual"
)  # also where there are real GPUs: stored outputs are those of virtual ones


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


def pytest_ignore_collect(collection_path, config):
    """tests/browser takes minutes and needs chromium: only when it is asked for by name."""
    asked = any("browser" in str(argument) for argument in config.invocation_params.args)
    return True if collection_path == series.ROOT / "tests" / "browser" and not asked else None
