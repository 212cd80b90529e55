"""RPC and distributed autograd on virtual GPUs: numbers equal those of CPUs in every bit, device maps are followed or asked for."""

import pytest
import torch
import torch.distributed.autograd as dist_autograd
from torch import nn
from torch.distributed import rpc
from torch.distributed.optim import DistributedOptimizer

import virtualgpu


class Half(nn.Module):
    """A layer on one device, of any worker. home: where it gives its result."""

    def __init__(self, device, home):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.home = nn.Linear(8, 8).to(device), home

    def forward(self, x):
        y = self.layer(x.to(self.layer.weight.device)).relu()
        return y if self.home is None else y.to(self.home)

    def parameters_here(self):
        return [rpc.RRef(parameter) for parameter in self.parameters()]


def begin(folder: str, device_map=None) -> int:
    rank = torch.distributed.get_rank()
    options = rpc.TensorPipeRpcBackendOptions(num_worker_threads=4, init_method=f"file://{folder}/rpc")
    if device_map and rank == 0:
        options.set_device_map("worker1", device_map)
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2, rpc_backend_options=options)
    return rank


def steps(here, there, x):
    """Losses of three steps of a pipeline of two workers, backward and optimizer on both."""
    parameters = [*here.parameters_here(), *there.rpc_sync().parameters_here()]
    optimizer = DistributedOptimizer(torch.optim.SGD, parameters, lr=0.1)
    losses = []
    for _ in range(3):
        with dist_autograd.context() as context:
            loss = (there.rpc_sync().forward(here(x)) - x).pow(2).sum()
            dist_autograd.backward(context, [loss])
            optimizer.step(context)
        losses.append(loss.item())
    return losses


def by_way_of_the_cpu(folder):
    """The tutorial's way: each worker's result goes to its CPU before it is sent."""
    devices = ["cuda:0", "cuda:1"] if torch.cuda.is_available() else ["cpu", "cpu"]
    losses = None
    if begin(folder) == 0:
        there = rpc.remote("worker1", Half, args=(devices[1], "cpu"))
        losses = steps(Half(devices[0], "cpu"), there, torch.linspace(-1, 1, 32).view(4, 8))
    rpc.shutdown()
    return losses


def by_device_maps(folder):
    """A tensor goes from cuda:0 to the other's cuda:1, its result and its gradient come back."""
    seen = None
    if begin(folder, {0: 1}) == 0:
        x = torch.linspace(-1, 1, 32, device="cuda:0").view(4, 8)
        there = rpc.remote("worker1", Half, args=("cuda:1", None))
        losses = steps(Half("cuda:0", None), there, x)
        y = rpc.rpc_sync("worker1", torch.add, args=(x, x))
        parameter = there.rpc_sync().parameters_here()[0].to_here()
        seen = losses, str(y.device), torch.equal(y, x + x), str(parameter.device)
    rpc.shutdown()
    return seen


def without_device_maps(folder):
    words = []
    if begin(folder) == 0:
        for call in (
            lambda: rpc.rpc_sync("worker1", torch.add, args=(torch.ones(2, device="cuda:0"), 1)),
            lambda: rpc.rpc_sync("worker1", torch.ones, args=(2,), kwargs={"device": "cuda:1"}),
            lambda: rpc.rpc_sync("worker1", torch.jit.script(doubled), args=(torch.ones(2, device="cuda:0"),)),
        ):
            with pytest.raises((RuntimeError, NotImplementedError)) as found:
                call()
            words.append(str(found.value))
        words.append(rpc.rpc_sync("worker1", torch.add, args=(torch.ones(2), 1)).tolist())
    rpc.shutdown()
    return words


def doubled(x):
    return x * 2


def test_layers_of_two_workers_learn_as_on_cpus(on_gpus, on_cpus, tmp_path):
    (tmp_path / "cpus").mkdir()
    found = on_gpus(by_way_of_the_cpu, str(tmp_path))[0]
    assert found == on_cpus(by_way_of_the_cpu, str(tmp_path / "cpus"))[0] and found[2] < found[0]


def test_device_maps_are_followed_and_gradients_come_back(on_gpus, on_cpus, tmp_path):
    (tmp_path / "cpus").mkdir()
    losses, *places = on_gpus(by_device_maps, str(tmp_path))[0]
    assert losses == on_cpus(by_way_of_the_cpu, str(tmp_path / "cpus"))[0]
    assert places == ["cuda:0", True, "cuda:0"]


def test_a_gpus_tensor_without_a_device_map_is_refused_in_pytorchs_words(on_gpus, tmp_path):
    asked, answered, scripted, sent = on_gpus(without_device_maps, str(tmp_path))[0]
    assert "Request device mapping is not available for destination worker1" in asked and "set_device_map" in asked
    assert "Response device mapping is not available" in answered and "cuda:1" in answered
    assert "send the function of Python" in scripted and sent == [2.0, 2.0]


def test_no_channel_asks_the_driver(gpus, monkeypatch):
    """CUDA's runtime found no GPU where the real one was hidden, the driver found it, and TensorPipe took that for an error."""
    told, base = [], rpc.TensorPipeRpcBackendOptions.__base__
    make = base.__init__  # of (options, threads, transports, channels, ...)
    monkeypatch.setattr(base, "__init__", lambda *args: told.append(args[3]) or make(*args))
    for own in ({}, {"_channels": ["basic"]}):
        rpc.TensorPipeRpcBackendOptions(**own)
    virtualgpu.reset()
    rpc.TensorPipeRpcBackendOptions()
    assert told == [["mpt_uv", "basic"], ["basic"], None]
