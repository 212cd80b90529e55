"""What a recorded step held of which kind, told from its trace and phases."""

import pytest
import torch

from virtualgpu.memory.snapshot import kinds

MIB = 1 << 20


class Trace:
    """A snapshot's trace, written by hand: sizes in MiB."""

    def __init__(self):
        self.events = []

    def alloc(self, address, size):
        self.events.append({"action": "alloc", "addr": address, "size": size * MIB})

    def free(self, address):
        self.events += [{"action": f"free_{when}", "addr": address, "size": 0} for when in ("requested", "completed")]


def test_what_a_step_held_is_told_by_phase_and_by_what_outlives_it():
    trace, phases = Trace(), []
    phases.append((0, "model"))
    trace.alloc(1, 8)
    phases.append((1, "forward"))
    trace.alloc(2, 4)  # goes within forward
    trace.alloc(3, 2)
    trace.free(2)
    phases.append((len(trace.events), "backward"))
    trace.alloc(2, 8)  # the same place again
    trace.free(3)
    phases.append((len(trace.events), "optimizer"))
    trace.alloc(4, 16)
    trace.free(2)
    trace.free(99)  # made before it was recorded
    found = kinds(trace.events, phases)
    assert found == {
        "parameters": [8.0] * 13,
        "activations": [0, 0, 2, 2, 2, 2, 2, 0, 0, 0, 0, 0, 0],
        "gradients": [0, 0, 0, 0, 0, 8, 8, 8, 8, 8, 0, 0, 0],
        "optimizer state": [0, 0, 0, 0, 0, 0, 0, 0, 16, 16, 16, 16, 16],
        "temporary": [0, 4, 4, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0],
    }


def test_what_was_held_sums_up_to_what_the_allocator_says(gpu):
    torch.cuda.memory._record_memory_history(max_entries=10_000, stacks="python")
    layer = torch.nn.Linear(512, 512, device=gpu)
    phases = [(0, "model"), (len(torch.cuda.memory._snapshot()["device_traces"][0]), "forward")]
    loss = layer(torch.ones(256, 512, device=gpu)).square().sum()
    trace = torch.cuda.memory._snapshot()["device_traces"][0]
    torch.cuda.memory._record_memory_history(None)
    last = sum(row[-1] for row in kinds(trace, phases).values())
    assert last == pytest.approx(torch.cuda.memory_allocated() / MIB, abs=0.01) and loss.item() > 0
