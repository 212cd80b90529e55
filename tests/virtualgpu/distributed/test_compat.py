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
from torch.utils._python_dispatch import TorchDispatchMode

import virtualgpu
from virtualgpu._compat import distributed as _compat
from virtualgpu.distributed import process_group
from virtualgpu.distributed.collectives import FUNCTIONS, OPERATIONS, TABLE

REDUCTIONS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")


class Mine(_compat.Work):
    def __init__(self):
        super().__init__()
        self.waits = 0

    def wait(self, timeout=None) -> bool:
        self.waits += 1
        return True


class Listener(TorchDispatchMode):
    """Notes what every collective is given, and answers with `work` where there is one."""

    def __init__(self, work=None):
        super().__init__()
        self.given, self.work = [], work

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        values = {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)}
        self.given.append(values | (kwargs or {}))
        if self.work is None or func.namespace != "c10d":
            return func(*args, **(kwargs or {}))
        return args[0], self.work.boxed()

    def the(self, name: str):
        return next(values[name] for values in self.given if name in values)


@pytest.fixture
def on_cpu():
    """A group of gloo with this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


# -- groups


def test_the_group_that_an_operation_is_given(on_cpu):
    with Listener() as listener:
        dist.all_reduce(torch.ones(1))
    group = _compat.group_of(listener.the("process_group"))
    assert type(group) is _compat.ProcessGroup and (group.rank(), group.size()) == (0, 1)
    assert group.group_name == on_cpu.group_name and _compat.named(on_cpu.group_name) is on_cpu
    assert _compat.group_of(group) is group is _compat.unboxed(listener.the("process_group"))
    assert _compat.device_types(group) >= {"cpu"} and weakref.WeakKeyDictionary({group: 1})[on_cpu] == 1
    for given in (on_cpu, on_cpu.group_name):
        with Listener() as listener:
            functional_collectives.all_reduce(torch.ones(1), "sum", given).sum()
        name = listener.the("group_name")
        found = _compat.named(name) if isinstance(name, str) else _compat.group_of(name)
        assert found.group_name == on_cpu.group_name
    other = dist.new_group([0])  # each has its own part of the store
    _compat.store_of(other).set("key", "value")
    assert _compat.store_of(other).get("key") == b"value" and not _compat.store_of(on_cpu).check(["key"])


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


def test_a_reduction_as_python_and_the_dispatcher_have_it(on_cpu):
    for name in REDUCTIONS:
        op = getattr(_compat.ReduceOp, name)
        assert _compat.reduction(op) == _compat.reduction(_compat.ReduceOp(op)) == (name, None)
        with Listener(Mine()) as listener:
            dist.all_reduce(torch.ones(1, dtype=torch.int32), op)
        given = listener.the("reduce_op")
        assert _compat.reduction(given) == _compat.REDUCTIONS[_compat.reduction_number(given)] == (name, None)


def test_the_factors_of_a_premul_sum(alone, monkeypatch):
    """Versions whose operations do not say the factor again know it while there is one; they say so, and never guess."""
    x = torch.full((2,), 8.0, device="cuda")
    for factor in (0.5, torch.tensor(0.25)):
        monkeypatch.setattr(_compat, "_premul", [])
        op = dist._make_nccl_premul_sum(factor)
        with Listener() as listener:
            dist.all_reduce(x.fill_(8), op)
        assert x.tolist() == [8 * float(factor)] * 2
        assert _compat.reduction(listener.the("reduce_op")) == ("PREMUL_SUM", float(factor))
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


def test_cpp_calls_a_work_of_python_while_it_lives(on_cpu):
    mine = Mine()
    with Listener(mine):
        work = dist.all_reduce(torch.ones(1), async_op=True)
    work.wait()
    assert mine.waits == 1
    with Listener(mine):
        dist.all_reduce(torch.ones(1))
    assert mine.waits >= 1  # some versions wait for it themselves
    seen = weakref.ref(mine)
    del mine, work
    gc.collect()
    assert seen() is None


def test_a_callback_at_the_end_of_a_backward_pass():
    called = []

    class Calls(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            _compat.queue_callback(lambda: called.append("end"))
            called.append("node")
            return grad

    x = torch.ones(1, requires_grad=True)
    Calls.apply(Calls.apply(x)).backward()
    assert called == ["node", "node", "end", "end"]


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
