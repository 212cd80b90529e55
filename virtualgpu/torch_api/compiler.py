"""torch.compile on virtual GPUs: it gives what it gives elsewhere (an OptimizedModule, a function), which then runs eagerly. And flex_attention,
which is made to be compiled: what PyTorch's Python code does before its kernels run.
"""

import functools
import warnings
from types import FunctionType, MethodType

import torch

from virtualgpu import _compat
from virtualgpu.engine.allocation import gpu_of
from virtualgpu.engine.machine import Machine
from virtualgpu.torch_api.registry import Patches

MODES = (None, "default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
AUTOCAST = _compat.DispatchKey.AutocastPrivateUse1  # autocast("cuda") here: see autocast.py


def install(machine: Machine, patches: Patches) -> None:
    """Leave the compiler until it is needed; replace torch.compile, whose first call warns, what would import it to tell it of a setting, and the
    tracing of score_mod; flex_attention's operators get a kernel for autocast."""
    patches.undo(_compat.import_when_needed())
    patches.stand_in(torch, "compile", _compile, patches, [])
    patches.stand_in(torch, "use_deterministic_algorithms", _be_deterministic, patches, [])
    patches.stand_in(_compat.flex, "create_fw_bw_graph", _trace, machine)
    for operator in (_compat.flex.flex_attention, _compat.flex.flex_attention_backward):
        if AUTOCAST not in operator.py_kernels:  # stays for the life of the process
            operator.py_impl(AUTOCAST)(functools.partial(_autocast, operator))


def _compile(patches: Patches, said: list, original, model=None, **options):
    if not said:
        said.append("warning")
        warnings.warn("torch.compile: on virtual GPUs it runs eagerly, with eager's memory and time", stacklevel=3)
    if _is_ordinary(**options):
        if model is None:
            return functools.partial(torch.compile, **options)
        if isinstance(model, (FunctionType, MethodType)):
            return _compat.compiled_later(
                model, lambda: original(model, **options), lambda: torch.compile is not original
            )
        if options.get("mode") is None:
            options["backend"] = _compat.inductor
    if "stance" not in said:
        said.append("stance")
        before = torch.compiler.set_stance("force_eager")  # imports torch._dynamo, which takes a second or two
        patches.undo(lambda: before.__exit__(None, None, None))
        before.__enter__()
    return original(model, **options)


def _is_ordinary(backend=None, mode=None, fullgraph=False, dynamic=None, **others) -> bool:
    """Is there nothing in these options that PyTorch might refuse?"""
    return not others and backend in (None, "inductor") and mode in MODES


def _be_deterministic(patches: Patches, later: list, original, mode, *, warn_only=False):
    """torch.use_deterministic_algorithms. later: what PyTorch's compiler is told where virtual GPUs go off and it may be used."""
    if _compat.compiler_has_settings() or not (isinstance(mode, bool) and isinstance(warn_only, bool)):
        return original(mode, warn_only=warn_only)
    torch.set_deterministic_debug_mode("default" if not mode else "warn" if warn_only else "error")
    if not later:
        patches.undo(
            lambda: (
                later[-1]
                and original(
                    torch.are_deterministic_algorithms_enabled(),
                    warn_only=torch.is_deterministic_algorithms_warn_only_enabled(),
                )
            )
        )
    later.append(mode)


def _trace(machine: Machine, original, *args, **kwargs):
    """What the reader does to a score is traced, with fake tensors, to differentiate it.

    It is traced where the tensors really are: autograd's C++ would ask the driver about a fake tensor of a GPU.
    """
    with machine.untracked():
        forward, backward = original(*args, **kwargs)
    for node in backward.graph.nodes:
        if node.op == "get_attr" and getattr(getattr(backward, node.target), "requires_grad", False):
            raise NotImplementedError(
                "flex_attention on virtual GPUs has no gradient for a tensor that score_mod takes from around it: "
                "detach it before, or add it to the scores of F.scaled_dot_product_attention(attn_mask=...)"
            )
    return forward, backward


def _autocast(operator, *args):
    """The forward pass in autocast's type, as PyTorch's own kernel for CUDA has it."""
    with _compat.without_keys(_compat.KeySet(AUTOCAST)):
        if operator is _compat.flex.flex_attention:
            args = [*map(_cast, args[:3]), *args[3:]]
        return operator(*args)


def _cast(tensor: torch.Tensor) -> torch.Tensor:
    wide = tensor.dtype is torch.float64
    return tensor if wide or gpu_of(tensor) is None else tensor.to(torch.get_autocast_dtype("cuda"))
