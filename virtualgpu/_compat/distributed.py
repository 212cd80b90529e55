"""PyTorch's private names for process groups, each in one place. `tests/virtualgpu/distributed/test_compat.py` walks through them.

Versions 2.11 to 2.15, wheels with and without NCCL.
"""

import importlib
import sys
from datetime import timedelta
from operator import methodcaller

import torch
from torch import distributed as dist
from torch._C import _distributed_c10d as cpp
from torch._C._distributed_c10d import AllgatherOptions, ProcessGroup, ReduceOp, Work  # noqa: F401
from torch._C._distributed_c10d import ProcessGroupGloo as Gloo
from torch.distributed import distributed_c10d as c10d

# A Python subclass of Work is called by C++ for as long as its Python object lives
RealNCCL = getattr(cpp, "ProcessGroupNCCL", None)
OF_PYTORCH = (cpp.__name__, Gloo.__module__)  # where its own backends say that they are from

queue_callback = torch.autograd.Variable._execution_engine.queue_callback  # (f): at the end of this backward pass
make_premul_sum = getattr(dist, "_make_nccl_premul_sum", None)
default_group = c10d._get_default_group
Plugin = c10d.Backend._BackendPlugin

_premul: list[float] = []  # factors that were asked for; versions without ReduceOp.unbox do not say them again


def backends() -> dict:
    """{name in capitals: Plugin} of the backends that Python registered; others may register theirs meanwhile."""
    return c10d.Backend._plugins


def backend_of(group: ProcessGroup, device: str):
    """A group's backend for "cuda" or "cpu". Raises RuntimeError where it has none."""
    return group._get_backend(torch.device(device))


def device_types(group: ProcessGroup) -> frozenset[str]:
    """The types of device for which it has a backend."""
    return frozenset({device.type for device in group._device_types})


def async_tensor() -> type:
    """What a functional collective gives: AsyncCollectiveTensor(tensor)."""
    return importlib.import_module("torch.distributed._functional_collectives").AsyncCollectiveTensor


def know_fake_backend() -> None:
    """Older versions know it from this module."""
    importlib.import_module("torch.testing._internal.distributed.fake_pg")


def dtensor_random() -> tuple:
    """Two modules of torch.distributed.tensor, that of its operations and that of its random numbers; and the base of trackers there."""
    tensor = importlib.import_module("torch.distributed.tensor")
    return tensor._dispatch, tensor._random, tensor._random._RNGStateTracker


def forget_meshes() -> None:
    """What DTensor remembers of meshes: they are equal where their ranks are, and name process groups that may be gone."""
    if "torch.distributed.tensor" in sys.modules:
        importlib.import_module("torch.distributed.tensor.debug")._clear_sharding_prop_cache()
        getattr(
            torch._C, "_clear_DTensor_sharding_propagator_cache", lambda: None
        )()  # older versions have the two apart


def group_of(boxed) -> ProcessGroup:
    """The process group that a functional collective was given."""
    return boxed if isinstance(boxed, ProcessGroup) else unboxed(boxed)


unboxed = ProcessGroup.unbox  # (what an operation of the dispatcher was given for a process group)
reduction_number = methodcaller("op")  # (what it was given for a reduction)
REDUCTIONS = {kind.value: (name, None) for name, kind in ReduceOp.RedOpType.__members__.items() if name != "PREMUL_SUM"}


def reduction(op) -> tuple[str, float | None]:
    """The name of a reduction ("SUM"), and the factor of a PREMUL_SUM. `op`: a ReduceOp, as Python or the dispatcher has it."""
    if isinstance(op, torch.ScriptObject):
        if not hasattr(ReduceOp, "unbox"):
            name = ReduceOp.RedOpType(op.op()).name
            return name, _factor() if name == "PREMUL_SUM" else None
        op = ReduceOp.unbox(op)
    if isinstance(op, ReduceOp.RedOpType):
        return op.name, None
    kind, factor = op.__getstate__()
    return kind.name, factor


def premul_sum(original, factor):
    """Stands in for torch.distributed._make_nccl_premul_sum: remembers the factors."""
    if isinstance(factor, torch.Tensor):
        factor = factor.item()
    _premul[:] = [*(known for known in _premul if known != factor), factor][-100:]
    return original(factor)


def _factor() -> float:
    if len(_premul) != 1:
        raise NotImplementedError(
            f"this version of PyTorch ({torch.__version__}) does not tell which of several factors a PREMUL_SUM has: "
            "use one factor, or PyTorch 2.15"
        )
    return _premul[0]


def store_of(group: ProcessGroup):
    """The group's own part of the store that ranks meet in."""
    return c10d._world.pg_map[group][1]


def timeout_of(backend) -> timedelta | None:
    """What gloo was made with; None for a backend that has no options."""
    return getattr(getattr(backend, "options", None), "_timeout", None)


def named(name: str) -> ProcessGroup:
    """The group of that name, as functional collectives have it."""
    return c10d._resolve_process_group(name)


def is_fake(group: ProcessGroup) -> bool:
    """Is it of PyTorch's backend that carries nothing?"""
    return c10d._world.pg_map[group][0] == "fake"


PIPELINE_SCHEDULES = "torch.distributed.pipelining.schedules"  # importing it takes a second


def pipeline_stage(module) -> type:
    """The class of every pipeline stage, by hand or traced, from the module of that name."""
    return module._PipelineStageBase


def pipeline_votes(module) -> tuple[type, str] | None:
    """The class and the method by which stages agree, before the first step, whether all know their shapes; None in older versions."""
    for name in ("_initialize_pipeline_distributed_state", PASSED_ALONG):
        if hasattr(module._PipelineSchedule, name):
            return module._PipelineSchedule, name
    return None


# 2.12 to 2.14: each stage multiplies what the one before sends; later versions sum over all ranks
PASSED_ALONG = "_warmup_p2p"


def vote_for_all(module, stages, has_backward: bool) -> bool:
    """Settle the vote that is passed along as if the other ranks' stages voted like these. False: these stages take no vote."""
    if not all(isinstance(stage, module.PipelineStage) for stage in stages):
        return False
    modes = module.InferenceMode
    for stage in stages:
        stage._inference_mode = modes.DYNAMIC if modes.needs_dynamic(stage._user_meta, has_backward) else modes.STATIC
    return True


FSDP1 = "torch.distributed.fsdp._init_utils"
MOVES_STATES = "_move_states_to_device"  # in that module: of (parameters, buffers, device or None)


def comm_hooks(ddp) -> list:
    """The communication hooks that a DistributedDataParallel has."""
    return ddp._comm_hooks
