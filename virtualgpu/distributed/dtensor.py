"""DTensor and DeviceMesh on virtual GPUs: what they ask the device for, what they compute on the side, and their random numbers."""

import contextlib
import threading

import torch
from torch.distributed import device_mesh

from virtualgpu import _compat
from virtualgpu._compat.distributed import dtensor_random
from virtualgpu.distributed.process_group import with_numbers
from virtualgpu.engine.machine import Machine
from virtualgpu.engine.rng import Plain
from virtualgpu.engine.storage import Allocation, label
from virtualgpu.engine.values import values_of
from virtualgpu.torch_api.patches import Patches, standing_in

AS_IT_IS = ("__hash__", "__eq__", "__repr__", "__enter__", "__exit__")  # of a mesh: no tensors in these


def install(machine: Machine, patches: Patches) -> None:
    """Replace DeviceMesh's methods, and how tensors are wrapped and faked; random numbers when somebody makes a mesh."""
    mesh, tensor, fake = device_mesh.DeviceMesh, torch.Tensor, _compat.fake_tensor.FakeTensorMode
    for name, value in list(vars(mesh).items()):  # it computes with small CPU tensors: in a dry run with numbers, too
        if name in AS_IT_IS or isinstance(value, (type, classmethod)):
            continue
        if isinstance(value, property) and value.fget is not None:
            patches.replace(mesh, name, property(standing_in(value.fget, _with_numbers, machine), value.fset))
        elif isinstance(value, staticmethod):
            patches.replace(mesh, name, staticmethod(standing_in(value.__func__, _with_numbers, machine)))
        elif callable(value):
            patches.stand_in(mesh, name, _with_numbers, machine)
    patches.stand_in(mesh, "__init__", _with_random, patches)
    patches.stand_in_everywhere(device_mesh, "init_device_mesh", _with_numbers, machine)
    wrap = standing_in(tensor._make_wrapper_subclass, _make_wrapper_subclass, machine)
    patches.replace(tensor, "_make_wrapper_subclass", staticmethod(wrap))
    entered = _Entered()
    patches.stand_in(fake, "__enter__", _enter_fakes, machine, entered)
    patches.stand_in(fake, "__exit__", _exit_fakes, machine, entered)
    # The tracer works out a number that is made on a GPU, unless it knows that there is no driver to ask for one
    patches.replace(fake, "avoid_device_init", property(lambda self: True))
    if not _compat.built_with_cuda:
        # There C++ has no guard for its devices, which PyTorch's way to draw a fake tensor's numbers asks for
        table, operator = _compat.decompositions(), torch.ops.aten.uniform_.default
        original = table[operator]
        table[operator] = standing_in(original, _uniform)
        patches.undo(lambda: table.update({operator: original}))


def _with_numbers(machine: Machine, original, *args, **kwargs):
    """Also those of a tensor of ranks that was made in a dry run: the program's, or that of an init_device_mesh imported earlier."""
    if machine.some_dry:
        args = tuple(_known(machine, arg) for arg in args)
        kwargs = {name: _known(machine, arg) for name, arg in kwargs.items()}
    return with_numbers(machine, original, *args, **kwargs)


def _known(machine: Machine, ranks):
    if not isinstance(ranks, torch.Tensor) or not _compat.is_really_meta(ranks):
        return ranks
    there = ranks.cpu()
    with machine.untracked():
        values = values_of(there)
    return ranks if values is None else values


def _with_random(patches: Patches, original, *args, **kwargs):
    """Not before somebody makes a mesh: importing DTensor takes a second."""
    install_random(patches)
    return original(*args, **kwargs)


def _make_wrapper_subclass(machine: Machine, original, cls, *args, device=None, **kwargs):
    """A wrapper of tensors says where it is by what it wraps, or was told; for C++ it is on the CPU, as what it wraps really is."""
    is_named = len(args) <= DEVICE
    device = device if is_named else args[DEVICE]
    if device is None:
        return original(cls, *args, **kwargs)
    is_virtual = torch.device(device).type == "cuda"
    real = torch.device(machine.base) if is_virtual else device
    if is_named:
        wrapper = original(cls, *args, device=real, **kwargs)
    else:  # a nested tensor of the jagged layout says it so
        wrapper = original(cls, *args[:DEVICE], real, *args[DEVICE + 1 :], **kwargs)
    if is_virtual and not hasattr(cls, "__tensor_flatten__"):
        label(wrapper, Allocation(machine.gpu(device), 0))
    return wrapper


DEVICE = 6  # its place among the arguments after the class


class _Entered(threading.local):
    """What each mode of fake tensors in this thread entered with it, the innermost last."""

    def __init__(self):
        self.contexts: list[contextlib.AbstractContextManager] = []


def _enter_fakes(machine: Machine, entered: _Entered, original, mode):
    """DTensor works out shardings with fake tensors, whose own bookkeeping takes a tensor of a dry run for what it really is."""
    context = machine.untracked() if machine.dry else contextlib.nullcontext()
    context.__enter__()
    entered.contexts.append(context)
    return original(mode)


def _exit_fakes(machine: Machine, entered: _Entered, original, mode, *error):
    entered.contexts.pop().__exit__(None, None, None)
    return original(mode, *error)


def _uniform(original, tensor, low=0.0, high=1.0, generator=None):
    if tensor.device.type != "cuda":
        return original(tensor, low, high, generator)
    return tensor.copy_(torch.rand_like(tensor) * (high - low) + low)


# -- Random numbers: shards draw different ones, replicas the same, and all ranks' generators stay together.
#
# PyTorch moves the offset of CUDA's counter-based generators by the size of each shard. The generators here are the CPU's, which have
# none: for each operation all ranks draw one seed from their generators, which one torch.manual_seed made alike, and each shard
# draws its numbers from that seed and its place.


TRACKER = "TrackerOfVirtualGPUs"
SPREAD = 0x9E3779B97F4A7C15  # 2**64 over the golden ratio, as splitmix64 spreads seeds


def install_random(patches: Patches) -> None:
    """Replace OffsetBasedRNGTracker and, in versions that have it, run_dtensor_rng_op. Called again, there is nothing to do."""
    dispatch, random, tracker = dtensor_random()
    if random.OffsetBasedRNGTracker.__name__ == TRACKER:
        return

    def init(self, device_mesh, run_state_sync: bool = True) -> None:
        tracker.__init__(self, torch.device(device_mesh.device_type, torch.cuda.current_device()))

    methods = {
        "__init__": init,
        "_distribute_region": lambda self, spec, generator=None: drawn_by(shard_of(spec), generator),
        "_compute_rng_offsets": lambda self, spec: (shard_of(spec), 0),  # for run_op below
    }
    patches.replace(random, "OffsetBasedRNGTracker", type(TRACKER, (tracker,), methods))
    patches.set(random, "_rng_tracker", None)
    if hasattr(dispatch, "run_dtensor_rng_op"):
        patches.replace(dispatch, "run_dtensor_rng_op", run_op)


def run_op(shard: int, _end: int, op, *args, **kwargs):
    """One operation draws for a shard."""
    with drawn_by(shard):
        return op(*args, **kwargs)


def shard_of(spec) -> int:
    """Which shard of the tensor this rank has, counted over the mesh's dimensions; the same for replicas."""
    shard = 0
    for dim, (placement, coordinate) in enumerate(zip(spec.placements, spec.mesh.get_coordinate(), strict=True)):
        if placement.is_shard():
            shard = shard * spec.mesh.size(dim) + coordinate
    return shard


@contextlib.contextmanager
def drawn_by(shard: int, generator: torch.Generator | None = None):
    """In this block the generator, the current GPU's unless given, draws for one shard; afterwards it is one draw further, on every rank."""
    generator = generator or torch.cuda.default_generators[torch.cuda.current_device()]
    draws = torch.Generator("cpu")
    draws.set_state(Plain.get_state(generator))
    seed = int(torch.randint(1 << 62, (), generator=draws, device="cpu"))
    after = draws.get_state()
    generator.manual_seed((seed + shard * SPREAD) % (1 << 63))
    try:
        yield
    finally:
        Plain.set_state(generator, after)
