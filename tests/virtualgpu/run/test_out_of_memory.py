"""An uncaught OutOfMemoryError under the runner: what lay on the GPU by kind, and what would have had to go."""

PROGRAM = """
import sys, torch
from torch import nn
try:
    torch.empty(2**30, device="cuda")
except torch.OutOfMemoryError:
    pass
try:
    1 / 0
except ZeroDivisionError:
    sys.excepthook(*sys.exc_info())  # as if nobody had caught it
model = nn.Sequential(nn.Linear(4096, 4096), nn.Linear(4096, 4096)).cuda()
optimizer = torch.optim.Adam(model.parameters())
model(torch.randn(8, 4096, device="cuda")).sum().backward()
optimizer.step()
kept = torch.empty(2**26, device="cuda")
torch.empty(2**27, device="cuda")
"""


def test_what_lay_there_by_kind(run):
    """Not of an error that was caught, nor of another one."""
    ended = run("--gpus", "1", "--memory", "1GB", "--dry", "-c", PROGRAM)
    assert ended.returncode == 1
    first, _, last = ended.stderr.partition("ZeroDivisionError: division by zero\n")
    assert "when it ran out of memory" not in first and last.count("when it ran out of memory") == 1
    told = last[last.index("GPU 0 (Tesla T4, 1.00 GiB) when it ran out of memory") :].splitlines()
    kinds = {line.split()[0]: line.split()[1] for line in told[1:5]}
    assert kinds.keys() == {"parameters", "gradients", "optimizer", "activations"}
    assert kinds["parameters"] == "128.03" and kinds["optimizer"] == "256.06" and float(kinds["activations"]) >= 256
    assert told[5].startswith("  It does not fit: 512.00 MiB more were asked for") and "would have to go" in told[5]
    assert "--report" in told[6]
