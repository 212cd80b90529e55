"""Whose steps are counted: a process that was forked does not tell its parent's again."""

import multiprocessing
import types

import pytest
import torch

from virtualgpu.run.trials import steps


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="needs fork")
def test_a_loaders_worker_is_no_rank(tmp_path):
    clock = types.SimpleNamespace(latest=lambda: 1.0, busy=[0.5])
    watch = steps.Watch(types.SimpleNamespace(gpus=[], clock=clock), 0)
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    for _ in range(2):
        optimizer.step()
    worker = multiprocessing.get_context("fork").Process(target=watch.leave, args=(str(tmp_path),))
    worker.start()
    worker.join()
    watch.leave(str(tmp_path))
    assert sorted(len(left.ends) for left in steps.collect(str(tmp_path))) == [0, 2]
