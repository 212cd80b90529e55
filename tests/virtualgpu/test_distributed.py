"""Process groups on virtual GPUs: gloo works, nccl is refused in a sentence where it used to end the process."""

import pytest
import torch
import torch.distributed as dist

import virtualgpu


@pytest.fixture
def store():
    with virtualgpu.gpus(2):
        yield dist.HashStore()
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.parametrize("backend", ["nccl", "cpu:gloo,cuda:nccl", None])
def test_nccl_is_refused(store, backend):
    with pytest.raises(NotImplementedError, match=r"nccl are not modelled.*gloo"):
        dist.init_process_group(backend, store=store, rank=0, world_size=1)
    assert not dist.is_initialized()


def test_gloo_adds_up_on_the_cpu(store):
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    x = torch.ones(3)
    dist.all_reduce(x)
    assert x.tolist() == [1, 1, 1] and dist.get_backend() == "gloo"
    with pytest.raises(NotImplementedError, match="nccl"):
        dist.new_group([0], backend="nccl")
