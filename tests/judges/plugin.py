"""pytest plugin of the judge `pytorch`: two virtual GPUs before a test module is imported, one JSON line a test.

JUDGE_LIMIT is the seconds that a test may take (60), JUDGE_OUT names the file of lines. Tests that are in it already do not run again, so that a run goes on after a test that killed it.
"""

import faulthandler
import gc
import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest

import virtualgpu
from tests.judges.report import ANEW

OUT = Path(os.environ["JUDGE_OUT"])
LIMIT = int(os.environ.get("JUDGE_LIMIT", "60"))  # seconds

if virtualgpu.machine() is None:  # not under the runner
    os.environ["HELPERS_GPUS"] = "virtual"
    virtualgpu.gpus(2, like="T4")


class Late(BaseException):
    """The test took too long."""


def _ring(*_):
    raise Late(f"over {LIMIT} s")


def pytest_collection_modifyitems(items):
    done = {json.loads(line)["id"] for line in OUT.read_text().splitlines()} if OUT.exists() else set()
    items[:] = [item for item in items if item.nodeid not in done]


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item):
    OUT.with_suffix(".now").write_text(item.nodeid)
    faulthandler.dump_traceback_later(3 * LIMIT, exit=True)  # for what hangs in C++
    signal.signal(signal.SIGALRM, _ring)
    signal.alarm(LIMIT)
    item.start = time.monotonic()
    yield
    signal.alarm(0)
    faulthandler.cancel_dump_traceback_later()
    for name in (
        "last_type",
        "last_value",
        "last_traceback",
        "last_exc",
    ):  # a failed test's tensors, in the way of the next
        vars(sys).pop(name, None)
    gc.collect()


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    if call.when == "call":
        signal.alarm(0)
    report = (yield).get_result()
    if report.when == "call" or (report.when == "setup" and report.outcome != "passed"):
        seconds = round(time.monotonic() - item.start, 2)
        row = {"id": item.nodeid, "outcome": report.outcome, "why": _why(report, call), "seconds": seconds}
        with open(OUT, "a") as lines:
            lines.write(json.dumps(row) + "\n")
        if report.outcome == "failed" and getattr(item.cls, "poison_pill", False):
            _end_workers(item.cls)
            pytest.exit("the class would skip its other tests", ANEW)


def _end_workers(cls) -> None:
    """Processes that stay from test to test may wait for each other now."""
    for process in cls.processes:
        process.kill()
    for process in cls.processes:
        process.join()


def _why(report, call) -> str:
    if report.outcome == "passed":
        return ""
    if isinstance(report.longrepr, tuple):  # of a skip: file, line, reason
        return str(report.longrepr[2])
    return f"{type(call.excinfo.value).__name__}: {call.excinfo.value}"[:6000] if call.excinfo else ""
