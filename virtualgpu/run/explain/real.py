"""`--explain` on real GPUs: torch.profiler in each process of the program for a few steps of its optimizer, and their traces read.

What a change would gain is not told of them: that takes the same program on virtual GPUs.
"""

import itertools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

from virtualgpu import environment
from virtualgpu.run import left, program
from virtualgpu.run.explain import real_trace
from virtualgpu.run.explain.parts import mean, parts
from virtualgpu.run.explain.runs import NOT_ENDED, STEPS, Explanation, Row
from virtualgpu.run.trials import messages
from virtualgpu.run.trials.programs import Programs
from virtualgpu.run.trials.steps import Counter

LEFT = "profile"
SKIPPED = 2  # steps before the profiler begins
ASK = "import torch; print('GPUs:', torch.cuda.device_count() if torch.cuda.is_available() else 0)"


def gpus() -> int:
    """How many real ones PyTorch sees here. Asked of a process of its own, and only where a driver can be."""
    if not os.path.exists("/dev/nvidiactl") and shutil.which("nvidia-smi") is None:
        return 0
    asked = subprocess.run([sys.executable, "-c", ASK], capture_output=True, text=True)
    return int(asked.stdout.split("GPUs:")[-1]) if asked.returncode == 0 and "GPUs:" in asked.stdout else 0


def run(
    command: Sequence[str],
    most: int = STEPS,
    limit: float | None = None,
    show: Callable[[str], None] = lambda words: None,
) -> Explanation:
    """Where a step of this program goes on this machine's GPUs: the mean of the steps after the first two.

    most: how many it makes. limit: seconds after which it has failed. An interrupt ends it.
    """
    show("the program, profiled")
    with Programs() as programs, program.folder() as path:
        environ = {
            **os.environ,
            environment.PROFILED: json.dumps({"folder": path, "steps": max(most or STEPS, SKIPPED + 1)}),
        }
        environ["PYTHONPATH"] = program.first(program.SITE, environ.get("PYTHONPATH"))
        environ.pop(environment.VARIABLE, None)
        status, output = programs.output_of(command, environ, path, limit)
        ranks = dict(left.collect(path, "rank"))
        traces = [(ranks.get(pid) or 0, trace["traceEvents"]) for pid, trace in left.collect(path, LEFT) if trace]
    if status is None:
        return Explanation(failed=NOT_ENDED)
    if status:
        return Explanation(failed=messages.end(status, output))
    return explained(sorted(traces, key=lambda trace: trace[0]))


def explained(traces: Sequence[tuple[int, list[dict]]]) -> Explanation:
    """From (rank, the events of its trace): a row for each GPU of each rank."""
    read = [(rank, real_trace.read(events)) for rank, events in traces]
    ended = [(rank, trace) for rank, trace in read if len(trace.ends) >= 2]
    if not ended:
        return Explanation(
            failed="the program ended before the profiler had seen a step of an optimizer of torch.optim"
        )
    rows, taken = [], []
    met = real_trace.meet([trace for _, trace in ended])
    for (rank, _), trace in zip(ended, met, strict=True):
        for gpu in sorted({span.gpu for span in trace.spans}):
            own = [span for span in trace.spans if span.gpu == gpu]
            steps = [parts(own, trace.loading, begin, end) for begin, end in itertools.pairwise(trace.ends)]
            rows.append(Row(rank, gpu, mean(steps)))
            taken.append([step.step for step in steps])
    if not rows:
        return Explanation(failed="the program used no GPU")
    slowest = [max(step) for step in zip(*taken, strict=False)]
    return Explanation(sum(slowest) / len(slowest), tuple(rows), has_loader=any(trace.loading for trace in met))


class Profile(Counter):
    """In a process of the program: profiles its steps after the first two, leaves the trace, and ends it as if it had come to its end."""

    def __init__(self, folder: str, most: int):
        super().__init__(most)
        self.folder = folder
        self.profiler: Any = None

    def made(self) -> None:
        """A step was made."""
        import torch

        wait = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
        if self.count == min(SKIPPED, self.most - 1):
            wait()
            self.profiler = torch.profiler.profile()
            self.profiler.start()
        if self.profiler is not None:
            with torch.profiler.record_function(real_trace.MARK):
                pass
        if self.count == self.most:
            wait()
            self.profiler.stop()
            left.leave(self.folder, "rank", environment.rank())
            self.profiler.export_chrome_trace(left.path(self.folder, LEFT))


_profile: Profile | None = None


def start() -> None:
    """In each process of the program, after `import torch`."""
    global _profile
    if _profile is None:
        settings = json.loads(os.environ[environment.PROFILED])
        _profile = Profile(settings["folder"], settings["steps"])
