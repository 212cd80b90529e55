"""What `fit` makes of a command: values that reach the program, the batch that it asks for, samples of a step; what a program printed."""

import pytest

from virtualgpu.run.fit import search as fit_command
from virtualgpu.run.trials import forked, steps


@pytest.mark.parametrize(
    "command, values, filled",
    [
        (["a.py"], {"batch-size": "8"}, ["a.py", "--batch-size=8"]),
        (["a.py", "--batch_size", "4", "x"], {"batch-size": "8"}, ["a.py", "--batch_size", "8", "x"]),
        (["a.py", "--lr=1"], {"lr": "2"}, ["a.py", "--lr=2"]),
        (["a.py", "train.lr=1"], {"train.lr": "2"}, ["a.py", "train.lr=2"]),
        (["a.py", "train.batch={b}"], {"b": "8"}, ["a.py", "train.batch=8"]),
        (["torchrun", "--nproc-per-node={gpus}"], {"gpus": "2"}, ["torchrun", "--nproc-per-node=2"]),
    ],
)
def test_values_reach_the_program(command, values, filled):
    assert fit_command.filled(command, values) == filled


@pytest.mark.parametrize(
    "command, values, batch",
    [
        (["a.py", "--batch-size", "8"], {}, 8),
        (["a.py", "--per_device_train_batch_size=8", "--per_device_eval_batch_size=64"], {}, 8),
        (["a.py", "data.batch=8"], {}, 8),
        (["a.py", "--micro-batch-size", "2", "--global-batch-size", "8"], {}, None),
        (["a.py", "--micro-batch-size", "2", "--global-batch-size", "8"], {"micro-batch-size": "2"}, 2),
        (["a.py", "8"], {"batch": "8"}, 8),
        (["a.py", "--batch-first", "--lr", "8"], {"lr": "8"}, None),
    ],
)
def test_the_batch_that_a_command_asks_for(command, values, batch):
    assert fit_command.batch(command, values) == batch


@pytest.mark.parametrize(
    "shapes, passes, ranks, gpus, rows",
    [
        ([([8, 512], 1)], 1, 1, 1, 8),
        ([([8, 512], 40)], 40, 2, 2, 320),  # micro-batches
        ([([8, 512], 2)], 1, 1, 1, 8),  # two views of a batch
        ([([512, 8], 1)], 1, 1, 1, 8),  # the sequence first
        ([([4, 3], 1)], 1, 2, 2, 4),  # the batch is of all ranks
        ([([16, 3], 1)], 1, 1, 2, 16),  # DataParallel, and the batch is of each GPU
        ([([8, 3], 1), ([5, 3], 1)], 2, 1, 1, None),
        ([([8, 3], 1)], 0, 1, 1, 8),
        ([], 0, 1, 1, None),
    ],
)
def test_rows_of_a_step(shapes, passes, ranks, gpus, rows):
    assert fit_command.rows(shapes, passes, 8, ranks, gpus) == rows


def test_a_product():
    assert fit_command.product("8*4 * 2") == 64 and fit_command.product("64/8*0.5") == 4
    for wrong in ("8x2", "{batch}*2", "8**2", "8/0", ""):
        with pytest.raises(ValueError, match="--samples: "):
            fit_command.product(wrong)


TORCHRUN = """\
[rank1]: Traceback (most recent call last):
[rank0]: Traceback (most recent call last):
[rank1]:   File "/home/me/train.py", line 8, in <module>
[rank0]:   File "/home/me/train.py", line 7, in <module>
[rank1]: KeyError: 'missing'
[rank0]: torch.distributed.DistBackendError: rank 1 will not come
Traceback (most recent call last):
  File "/usr/bin/torchrun", line 8, in <module>
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
"""


@pytest.mark.parametrize(
    "said, words",
    [
        (TORCHRUN, "KeyError: 'missing' (train.py:8)"),
        (
            "usage: a.py\na.py: error: unrecognized arguments: --n=4\n" + TORCHRUN[-160:],
            "unrecognized arguments: --n=4",
        ),
        ("all is well\nSegmentation fault\n", "Segmentation fault"),
        ("", ""),
    ],
)
def test_the_error_that_ended_a_program(said, words):
    found = steps.error(said)
    assert found.endswith(words) and bool(found) == bool(words)


@pytest.mark.parametrize(
    "command, gpus, several",
    [
        ("train.py", [1], True),
        ("train.py", [1, 2], False),  # it may start ranks, at the port that it names
        ("torchrun --nproc-per-node=1 train.py", [1], False),  # at 29500
        ("-m torch.distributed.run train.py", [1], False),
        ("accelerate launch train.py", [1], False),
        ("torchrun --standalone --nproc-per-node={gpus} train.py", [1, 2], True),
    ],
)
def test_programs_that_might_meet_at_a_port_run_one_after_the_other(monkeypatch, command, gpus, several):
    monkeypatch.setattr(forked.os, "sched_getaffinity", lambda pid: range(4), raising=False)
    monkeypatch.setattr(forked, "ROOM", 1)
    assert forked.side_by_side(command.split(), gpus) == (4 if several else 1)
