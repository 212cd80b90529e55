"""PyTorch's private names for process groups behave as the engine expects of them, in whichever version is installed."""

import gc
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
from virtualgpu.distributed.collectives import FUNCTIONS, OPERATIONS

REDUCTIONS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")
SEVERAL = hasattr(_compat.ReduceOp, "unbox")  # factors of PREMUL_SUM that can be told from each other


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


@pytest.fixture
def alone():
    """A group of gloo with this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.fixture
def on_gpu():
    """A group of nccl with this process alone, on a virtual GPU."""
    virtualgpu.gpus(1)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


# -- groups


def test_the_group_that_an_operation_is_given(alone):
    x = torch.ones(1)
    with Listener() as listener:
        dist.all_reduce(x)
    (given,) = listener.given
    group = _compat.group_of(given["process_group"])
    assert type(group) is _compat.ProcessGroup and (group.rank(), group.size()) == (0, 1)
    assert group.group_name == alone.group_name and _compat.named(alone.group_name) is alone
    assert _compat.group_of(group) is group
    assert {device.type for device in group._device_types} >= {"cpu"}


def test_a_group_of_functional_collectives(alone):
    for group in (alone, alone.group_name):
        with Listener() as listener:
            functional_collectives.all_reduce(torch.ones(1), "sum", group).sum()
        given = next(values["group_name"] for values in listener.given if "group_name" in values)
        found = _compat.named(given) if isinstance(given, str) else _compat.group_of(given)
        assert found.group_name == alone.group_name


def test_each_group_has_its_own_part_of_the_store(alone):
    other = dist.new_group([0])
    _compat.store_of(other).set("key", "value")
    assert _compat.store_of(other).get("key") == b"value" and not _compat.store_of(alone).check(["key"])


def test_backends_of_pytorch_say_so(alone):
    backend = alone._get_backend(torch.device("cpu"))
    assert isinstance(backend, _compat.Gloo) and type(backend).__module__ in _compat.OF_PYTORCH
    with pytest.raises(RuntimeError):
        alone._get_backend(torch.device("xpu"))


def test_the_backend_that_stands_in_for_nccl(on_gpu):
    backend = on_gpu._get_backend(torch.device("cuda"))
    assert isinstance(backend, process_group.ProcessGroupNCCL) and isinstance(backend, dist.ProcessGroupNCCL)
    assert dist.get_backend() == "nccl" and {device.type for device in on_gpu._device_types} == {"cuda"}
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


@pytest.mark.parametrize("name", REDUCTIONS)
def test_a_reduction_as_python_and_the_dispatcher_have_it(name, alone):
    op = getattr(_compat.ReduceOp, name)
    assert _compat.reduction(op) == _compat.reduction(_compat.ReduceOp(op)) == (name, None)
    x = torch.ones(1, dtype=torch.int32)
    with Listener(Mine()) as listener:
        dist.all_reduce(x, op)
    (given,) = listener.given
    assert _compat.reduction(given["reduce_op"]) == (name, None)


@pytest.mark.parametrize("factor", [0.5, torch.tensor(0.25)], ids=["number", "tensor"])
def test_the_factor_of_a_premul_sum(factor, on_gpu, monkeypatch):
    monkeypatch.setattr(_compat, "_premul", [])
    op = dist._make_nccl_premul_sum(factor)
    with Listener() as listener:
        x = torch.full((2,), 8.0, device="cuda")
        dist.all_reduce(x, op)
    assert x.tolist() == [8 * float(factor)] * 2
    given = next(values["reduce_op"] for values in listener.given if "reduce_op" in values)
    assert _compat.reduction(given) == ("PREMUL_SUM", float(factor))


def test_several_factors_of_a_premul_sum(on_gpu, monkeypatch):
    """Versions whose operations do not say the factor again know it while there is one; they say so, and never guess."""
    monkeypatch.setattr(_compat, "_premul", [])
    x = torch.full((2,), 8.0, device="cuda")
    half, quarter = (dist._make_nccl_premul_sum(factor) for factor in (0.5, 0.25))
    if not SEVERAL:
        with pytest.raises(NotImplementedError, match="which of several factors"):
            dist.all_reduce(x, half)
        return
    dist.all_reduce(x, half)
    dist.all_reduce(x, quarter)
    assert x.tolist() == [1, 1]


def test_a_reduction_of_functional_collectives(on_gpu):
    x = torch.full((2,), 8.0, device="cuda")
    for name in ("sum", "avg", "max"):
        assert functional_collectives.all_reduce(x, name, on_gpu).tolist() == [8, 8]
    if "Any reduce_op" not in str(torch.ops._c10d_functional.all_reduce.default._schema):
        return  # before 2.15 there are names alone
    for op in (dist.ReduceOp.SUM, dist.ReduceOp(dist.ReduceOp.MAX)):
        assert functional_collectives.all_reduce(x, op, on_gpu).tolist() == [8, 8]
    assert functional_collectives.all_reduce(x, dist._make_nccl_premul_sum(0.5), on_gpu).tolist() == [4, 4]


# -- works, and the end of a backward pass


def test_cpp_calls_a_work_of_python_while_it_lives(alone):
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
    said = []

    class Says(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            _compat.queue_callback(lambda: said.append("end"))
            said.append("node")
            return grad

    x = torch.ones(1, requires_grad=True)
    Says.apply(Says.apply(x)).backward()
    assert said == ["node", "node", "end", "end"]


def test_gloo_gathers_into_one_tensor_and_takes_a_timeout(alone):
    backend, out = alone._get_backend(torch.device("cpu")), torch.zeros(3)
    options = _compat.AllgatherOptions()
    options.timeout = timedelta(seconds=10)
    backend._allgather_base(out, torch.arange(3.0), options).wait()
    assert out.tolist() == [0, 1, 2]


def test_a_future_that_is_complete_holds_nothing(on_gpu):
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


def test_uniform_numbers_of_a_fake_tensor(on_gpu):
    """DTensor asks for them; C++ of a wheel without CUDA has no guard for their device."""
    with FakeTensorMode():
        x = torch.empty(4, 3, device="cuda")
        assert x.uniform_(-1, 1) is x and x.device.type == "cuda"


# -- which operations there are

READ_BEFORE = {"send", "recv_", "recv_any_source_", "wait_tensor", "wait_tensors", "_wrap_tensor_autograd"}
OF_THE_CPU = {"monitored_barrier_"}  # gloo's alone
NOT_COLLECTIVES = {"check_for_nan"}
OF_COMPILED_PROGRAMS = {"isend", "irecv", "batch_p2p_ops"}  # what torch.compile puts in place of messages


def test_every_operation_of_this_version_is_known():
    """A name that a new version brings fails here, not in somebody's training."""
    known = {
        "c10d": {*OPERATIONS, *READ_BEFORE, *OF_THE_CPU, *NOT_COLLECTIVES},
        "_c10d_functional": {*FUNCTIONS, *READ_BEFORE, *OF_COMPILED_PROGRAMS},
        "_c10d_functional_autograd": set(FUNCTIONS),
    }
    found = set()
    for full in torch._C._dispatch_get_all_op_names():
        namespace, _, name = full.split(".")[0].partition("::")
        if namespace in known:
            assert name in known[namespace], full
            found.add(name)
    missing = {*OPERATIONS, *FUNCTIONS} - found
    assert missing <= {"gather_into_tensor_"}  # new in 2.15


def test_the_methods_of_a_pipeline_stage():
    """The same names and arguments in all versions; a stage by hand or traced has no others of its own."""
    import importlib
    import inspect

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


def test_what_moves_the_states_of_fsdp1():
    import importlib
    import inspect

    move = getattr(importlib.import_module(_compat.FSDP1), _compat.MOVES_STATES)
    assert list(inspect.signature(inspect.unwrap(move)).parameters) == ["params", "buffers", "device_from_device_id"]
