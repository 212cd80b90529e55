"""Checkpoints of FSDP2 that another thread or process writes: what is loaded is what was saved, whatever was learned meanwhile."""

import pytest
import torch
import torch.distributed as dist
from torch import nn


def model_and_optimizer():
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)).to(f"cuda:{dist.get_rank()}")
    for layer in (model[0], model[2], model):
        fully_shard(layer)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def learn(model, optimizer) -> None:
    model(torch.ones(2, 8, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def values(states) -> list:
    """Whole tensors of a model's and an optimizer's state, as lists."""
    model, optimizer = states
    moments = [value for of in optimizer["state"].values() for value in of.values()]
    return [(v.full_tensor() if hasattr(v, "full_tensor") else v).tolist() for v in (*model.values(), *moments)]


def saved_and_loaded(folder, kind):
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

    torch.cuda.set_device(dist.get_rank())
    model, optimizer = model_and_optimizer()
    learn(model, optimizer)
    states = get_state_dict(model, optimizer)
    before = values(states)
    future = checkpoint.async_save(
        dict(zip(("model", "optimizer"), states, strict=True)),
        checkpoint_id=folder,
        async_checkpointer_type=AsyncCheckpointerType(kind),
    )
    future.result()
    learn(model, optimizer)
    changed = values(get_state_dict(model, optimizer)) != before
    other, its_optimizer = model_and_optimizer()
    states = dict(zip(("model", "optimizer"), get_state_dict(other, its_optimizer), strict=True))
    checkpoint.load(states, checkpoint_id=folder)
    set_state_dict(other, its_optimizer, model_state_dict=states["model"], optim_state_dict=states["optimizer"])
    loaded = get_state_dict(other, its_optimizer)
    where = {parameter.to_local().device.index for parameter in loaded[0].values()}
    return changed, values(loaded) == before, where, next(iter(loaded[0].values())).data_ptr()


@pytest.mark.parametrize("kind", ["thread", "process"])
def test_a_checkpoint_is_written_in_the_background_and_loads_back(on_gpus, tmp_path, kind):
    assert on_gpus(saved_and_loaded, str(tmp_path), kind) == [(True, True, {rank}, 0) for rank in (0, 1)]
