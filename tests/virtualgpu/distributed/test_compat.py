"""PyTorch's private names for process groups behave as the engine expects of them, in whichever version is installed."""

import gc
import importlib
import inspect
import weakref
from datetime import timedelta

import pytest
import torch
from torch import distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed import _functional_collectives as functional_collectives

import virtualgpu
from virtualgpu._compat import distributed as _compat
from virtualgpu.distributed import process_group
from virtualgpu.distributed.collectives import FUNCTIONS, OPERATIONS, TABLE


@pytest.fixture
def on_cpu():
    """A group of gloo with this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


# -- groups


def test_backends_of_pytorch_say_so(on_cpu):
    backend, out = on_cpu._get_backend(torch.device("cpu")), torch.zeros(3)
    assert isinstance(backend, _compat.Gloo) and type(backend).__module__ in _compat.OF_PYTORCH
    with pytest.raises(RuntimeError):
        on_cpu._get_backend(torch.device("xpu"))
    options = _compat.AllgatherOptions()  # gloo gathers into one tensor, and takes a timeout
    options.timeout = timedelta(seconds=10)
    backend._allgather_base(out, torch.arange(3.0), options).wait()
    assert out.tolist() == [0, 1, 2]


def test_the_backend_that_stands_in_for_nccl(alone):
    backend = alone._get_backend(torch.device("cuda"))
    assert isinstance(backend, process_group.ProcessGroupNCCL) and isinstance(backend, dist.ProcessGroupNCCL)
    assert dist.get_backend() == "nccl" and _compat.device_types(alone) == {"cuda"}
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    assert options.is_high_priority_stream and options._timeout == timedelta(minutes=10)
    before = backend.limit
    backend = dist.new_group([0], timeout=timedelta(seconds=7), pg_options=options)._get_backend(torch.device("cuda"))
    assert backend.limit == timedelta(seconds=7) != before
    assert backend.options is options


def test_nccl_is_gone_afterwards():
    before = hasattr(dist, "ProcessGroupNCCL"), dist.is_nccl_available(), dict(dist.Backend._plugins)
    assert before[0] is (_compat.RealNCCL is not None)
    virtualgpu.gpus(1)
    assert dist.is_nccl_available() and issubclass(dist.ProcessGroupNCCL, process_group.ProcessGroupNCCL)
    virtualgpu.reset()
    assert before == (hasattr(dist, "ProcessGroupNCCL"), dist.is_nccl_available(), dist.Backend._plugins)


# -- reductions


def test_the_factors_of_a_premul_sum(alone, monkeypatch):
    """Versions whose operations do not say the factor again know it while there is one; they say so, and never guess."""
    x = torch.full((2,), 8.0, device="cuda")
    for factor in (0.5, torch.tensor(0.25)):
        monkeypatch.setattr(_compat, "_premul", [])
        op = dist._make_nccl_premul_sum(factor)
        dist.all_reduce(x.fill_(8), op)
        assert x.tolist() == [8 * float(factor)] * 2
    monkeypatch.setattr(_compat, "_premul", [])
    half, quarter = (dist._make_nccl_premul_sum(factor) for factor in (0.5, 0.25))
    if not hasattr(_compat.ReduceOp, "unbox"):
        with pytest.raises(NotImplementedError, match="which of several factors"):
            dist.all_reduce(x, half)
        return
    x.fill_(8)
    dist.all_reduce(x, half)
    dist.all_reduce(x, quarter)
    assert x.tolist() == [1, 1]


def test_a_reduction_of_functional_collectives(alone):
    x = torch.full((2,), 8.0, device="cuda")
    for name in ("sum", "avg", "max"):
        assert functional_collectives.all_reduce(x, name, alone).tolist() == [8, 8]
    if "Any reduce_op" not in str(torch.ops._c10d_functional.all_reduce.default._schema):
        return  # before 2.15 there are names alone
    for op in (dist.ReduceOp.SUM, dist.ReduceOp(dist.ReduceOp.MAX)):
        assert functional_collectives.all_reduce(x, op, alone).tolist() == [8, 8]
    assert functional_collectives.all_reduce(x, dist._make_nccl_premul_sum(0.5), alone).tolist() == [4, 4]


# -- works, and the end of a backward pass


def test_a_future_that_is_complete_holds_nothing(alone):
    """Not until Python looks for cycles: a bucket of DDP would lie on the GPU until then."""
    x = torch.ones(1 << 20, device="cuda", requires_grad=True)
    seen = []

    def begin(grad):
        future = dist.all_reduce(grad.clone(), async_op=True).get_future().then(lambda done: done.value()[0].sum())
        seen.append(weakref.ref(future))
        return grad

    before = torch.cuda.memory_allocated()
    gc.collect()
    gc.disable()
    try:
        x.register_hook(begin)
        x.sum().backward()
        x.grad = None
        assert seen[0]() is None and torch.cuda.memory_allocated() == before
    finally:
        gc.enable()


def test_uniform_numbers_of_a_fake_tensor(alone):
    """DTensor asks for them; C++ of a wheel without CUDA has no guard for their device."""
    with FakeTensorMode():
        x = torch.empty(4, 3, device="cuda")
        assert x.uniform_(-1, 1) is x and x.device.type == "cuda"


# -- which operations there are

READ_BEFORE = {"send", "recv_", "recv_any_source_", "wait_tensor", "wait_tensors", "_wrap_tensor_autograd"}
BESIDE = {"monitored_barrier_", "check_for_nan"}  # gloo's alone, and no collective
OF_COMPILED_PROGRAMS = {"isend", "irecv", "batch_p2p_ops"}  # what torch.compile puts in place of messages


def test_every_operation_of_this_version_is_known():
    """A name that a new version brings fails here, not in somebody's training."""
    known = {
        "c10d": {*OPERATIONS, *READ_BEFORE, *BESIDE},
        "_c10d_functional": {*FUNCTIONS, *READ_BEFORE, *OF_COMPILED_PROGRAMS},
        "_c10d_functional_autograd": set(FUNCTIONS),
    }
    found = set()
    for full in torch._C._dispatch_get_all_op_names():
        namespace, _, name = full.split(".")[0].partition("::")
        if namespace in known:
            assert name in known[namespace], full
            found.add(name)
    assert {*OPERATIONS, *FUNCTIONS} - found <= {"gather_into_tensor_"}  # new in 2.15
    assert [row.number for row in TABLE] == list(range(len(TABLE)))  # by which ranks tell each other of them


def test_the_methods_of_a_pipeline_stage_and_what_moves_the_states_of_fsdp1():
    """The same names and arguments in all versions; a stage by hand or traced has no others of its own."""
    module = importlib.import_module(_compat.PIPELINE_SCHEDULES)
    base = _compat.pipeline_stage(module)
    for name, first in [
        ("forward_one_chunk", ["fwd_chunk_id"]),
        ("backward_one_chunk", ["bwd_chunk_id", "loss", "full_backward"]),
        ("backward_weight_one_chunk", ["bwd_chunk_id"]),
        ("scale_grads", ["grad_scale_factor"]),
    ]:
        method = inspect.unwrap(getattr(base, name))
        assert list(inspect.signature(method).parameters)[1 : 1 + len(first)] == first
        assert all(name not in vars(kind) for kind in base.__subclasses__())
    assert len(base.__subclasses__()) == 2
    if torch.__version__ >= "2.12":
        kind, name = _compat.pipeline_votes(module)
        assert callable(getattr(kind, name))
    move = getattr(importlib.import_module(_compat.FSDP1), _compat.MOVES_STATES)
    assert list(inspect.signature(inspect.unwrap(move)).parameters) == ["params", "buffers", "device_from_device_id"]
