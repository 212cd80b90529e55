"""torch.compile, optimizers' steps, torch.profiler, modules that move and Triton's kernels, while virtual GPUs are on."""

import functools
import gzip
import json
import warnings
from types import FunctionType, MethodType

import torch
from torch import Tensor, nn
from torch.autograd import profiler as autograd_profiler
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.profiler import ProfilerActivity

from virtualgpu import _compat
from virtualgpu.engine import overrides, values
from virtualgpu.engine.machine import GPU, Machine
from virtualgpu.engine.storage import gpu_of
from virtualgpu.timing.flops import moved
from virtualgpu.timing.memory_bound import ORDINARY
from virtualgpu.timing.trace import chrome_events
from virtualgpu.torch_api.patches import Patches, when_imported

# -- torch.compile on virtual GPUs: it gives what it gives elsewhere (an OptimizedModule, a function), which then runs eagerly. And flex_attention,
# which is made to be compiled: what PyTorch's Python code does before its kernels run.

MODES = (None, "default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
AUTOCAST = _compat.DispatchKey.AutocastPrivateUse1  # autocast("cuda") here: see autocast.py


def _install_compiler(machine: Machine, patches: Patches) -> None:
    patches.undo(_compat.import_when_needed())
    patches.stand_in(torch, "compile", _compile, patches, [])
    patches.stand_in(torch, "use_deterministic_algorithms", _be_deterministic, patches, [])
    patches.stand_in(_compat.flex, "create_fw_bw_graph", _trace_score_mod, machine)
    for operator in (_compat.flex.flex_attention, _compat.flex.flex_attention_backward):
        if AUTOCAST not in operator.py_kernels:  # stays for the life of the process
            operator.py_impl(AUTOCAST)(functools.partial(_autocast_flex_attention, operator))


def _compile(patches: Patches, done: list, original, model=None, **options):
    if not done:
        done.append("warned")
        warnings.warn("torch.compile: on virtual GPUs it runs eagerly, with eager's memory and time", stacklevel=3)
    if _is_sure_to_be_taken(**options):
        if model is None:
            return functools.partial(torch.compile, **options)
        if isinstance(model, (FunctionType, MethodType)):
            return _compat.compiled_later(
                model, lambda: original(model, **options), lambda: torch.compile is not original
            )
        if options.get("mode") is None:
            options["backend"] = _compat.inductor
    if "stance" not in done:
        done.append("stance")
        before = torch.compiler.set_stance("force_eager")  # imports torch._dynamo, which takes a second or two
        patches.undo(lambda: before.__exit__(None, None, None))
        before.__enter__()
    return original(model, **options)


def _is_sure_to_be_taken(backend=None, mode=None, fullgraph=False, dynamic=None, **others) -> bool:
    """Is there nothing in these options that PyTorch might refuse?"""
    return not others and backend in (None, "inductor") and mode in MODES


def _be_deterministic(patches: Patches, later: list, original, mode, *, warn_only=False):
    """torch.use_deterministic_algorithms. later: what PyTorch's compiler is told where virtual GPUs go off and it may be used."""
    if _compat.compiler_has_settings() or not (isinstance(mode, bool) and isinstance(warn_only, bool)):
        return original(mode, warn_only=warn_only)
    torch.set_deterministic_debug_mode("default" if not mode else "warn" if warn_only else "error")

    def tell_compiler() -> None:
        if later[-1]:
            warns = torch.is_deterministic_algorithms_warn_only_enabled()
            original(torch.are_deterministic_algorithms_enabled(), warn_only=warns)

    if not later:
        patches.undo(tell_compiler)
    later.append(mode)


def _trace_score_mod(machine: Machine, original, *args, **kwargs):
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


def _autocast_flex_attention(operator, *args):
    """The forward pass in autocast's type, as PyTorch's own kernel for CUDA has it."""
    with _compat.without_keys(_compat.KeySet(AUTOCAST)):
        if operator is _compat.flex.flex_attention:
            args = [*map(_autocast, args[:3]), *args[3:]]
        return operator(*args)


def _autocast(tensor: torch.Tensor) -> torch.Tensor:
    is_double = tensor.dtype is torch.float64
    return tensor if is_double or gpu_of(tensor) is None else tensor.to(torch.get_autocast_dtype("cuda"))


# -- An optimizer's step: its operations are an optimizer's, and what it does in Python costs the host.


def _install_optimizers(machine: Machine, patches: Patches) -> None:
    def before(optimizer: Optimizer, args, kwargs) -> None:
        machine.clock.set_kind("optimizer")
        with machine.clock.ours():
            parameters, counts = _in_lists(optimizer)
            if parameters:
                machine.clock.pass_step(parameters, counts)

    def after(optimizer: Optimizer, args, kwargs) -> None:
        with machine.clock.ours():
            machine.clock.set_kind("forward")

    for register, hook in ((register_optimizer_step_pre_hook, before), (register_optimizer_step_post_hook, after)):
        patches.undo(register(hook).remove)


def _in_lists(optimizer: Optimizer) -> tuple[int, int]:
    """Parameters on a GPU that have a gradient and that the step takes in lists, by foreach or fused, and how many of them have a count of
    steps on the CPU. Those it takes one by one cost what their operations do."""
    parameters = counts = 0
    for group in optimizer.param_groups:
        fused = group.get("fused")
        if not fused and ("foreach" not in group or group["foreach"] is False or group.get("differentiable")):
            continue
        for parameter in group["params"]:
            if parameter.grad is not None and gpu_of(parameter) is not None:
                parameters += 1
                count = None if fused else optimizer.state.get(parameter, {}).get("step")
                counts += isinstance(count, Tensor) and gpu_of(count) is None
    return parameters, counts


# -- torch.profiler on virtual GPUs: the CPU's side is PyTorch's; the GPUs' side is their simulated kernels, in the Chrome trace.
#
# CUPTI, by which PyTorch watches real kernels, knows nothing of virtual ones. A profile that asks for CUDA records the CPU, says so
# once, and adds the kernels to what export_chrome_trace writes.


PROFILER_WARNING = (
    "torch.profiler cannot see virtual GPUs: its tables have the CPU's side. The simulated kernels are in the Chrome trace "
    "(export_chrome_trace), and in virtualgpu.recording()"
)


def _install_profiler(machine: Machine, patches: Patches) -> None:
    profiles, profile = _Profiles(machine), _compat.KinetoProfile
    patches.stand_in(profile, "__init__", profiles.begin)
    patches.stand_in(profile, "start_trace", profiles.start)
    patches.stand_in(profile, "stop_trace", profiles.stop)
    patches.stand_in(profile, "export_chrome_trace", _export_chrome_trace)
    patches.stand_in(autograd_profiler.profile, "__init__", profiles.begin_older)
    patches.replace(autograd_profiler.emit_nvtx, "__enter__", lambda self: self)
    patches.replace(autograd_profiler.emit_nvtx, "__exit__", lambda self, *error: False)
    overrides.register_namespace("profiler", _annotate_spans)
    patches.stand_in(torch.profiler, "supported_activities", lambda known: known() | {ProfilerActivity.CUDA})


class _Profiles:
    """What the profiles of one session share: the clock whose kernels they record, and that they have warned."""

    def __init__(self, machine: Machine):
        self.clock, self.warned = machine.clock, False

    def _warn(self) -> None:
        if not self.warned:
            self.warned = True
            warnings.warn(PROFILER_WARNING, stacklevel=5)

    def begin(self, original, profile, *args, activities=None, **kwargs):
        """Of CPU and CUDA, the CPU alone is asked of PyTorch."""
        wanted = set(activities) if activities is not None else {ProfilerActivity.CPU}
        if ProfilerActivity.CUDA in wanted:
            self._warn()
            wanted = (wanted - {ProfilerActivity.CUDA}) | {ProfilerActivity.CPU}
        profile._virtual_spans = None
        original(profile, *args, activities=wanted, **kwargs)

    def start(self, original, profile):
        profile._virtual_spans = []
        profile._virtual_before = self.clock.record(profile._virtual_spans)
        profile._virtual_start = self.clock.host
        return original(profile)

    def stop(self, original, profile):
        """The spans belong to who recorded before, too."""
        if profile._virtual_spans is not None:
            before = profile._virtual_before
            self.clock.record(before)
            if before is not None:
                before.extend(profile._virtual_spans)
        return original(profile)

    def begin_older(self, original, profile, enabled=True, *, use_cuda=False, use_device=None, **kwargs):
        """As `begin`, of torch.autograd.profiler.profile(use_device="cuda")."""
        if use_cuda or use_device == "cuda":
            self._warn()
            use_device = None
        original(profile, enabled, use_device=use_device, **kwargs)


def _export_chrome_trace(original, profile, path: str, *args, **kwargs):
    out = original(profile, path, *args, **kwargs)
    if profile._virtual_spans:
        _add_kernels(path, chrome_events(profile._virtual_spans, origin=profile._virtual_start))
    return out


def _annotate_spans(dispatch, func, args, kwargs):
    """record_function begins or ends: what is launched in between has its name."""
    annotations = dispatch.clock.local.annotations
    if _compat.packet(func).__name__.startswith("_record_function_enter"):
        annotations.append(args[0])
    elif annotations:
        annotations.pop()
    return func(*args, **kwargs)


def _add_kernels(path: str, events: list[dict]) -> None:
    opened = gzip.open if str(path).endswith(".gz") else open
    with opened(path, "rt") as file:
        trace = json.load(file)
    starts = [event["ts"] for event in trace["traceEvents"] if event.get("ph") == "X" and "ts" in event]
    origin = min(starts, default=0.0)
    for event in events:
        if "ts" in event:
            event["ts"] += origin
        if event["ph"] == "X":  # as Kineto writes them
            event["args"] = {"device": event["pid"], "stream": event["tid"]}
            if event["cat"] != "gpu_user_annotation":
                event["cat"] = "gpu_memcpy" if event["cat"] == "copy" else "kernel"
    trace["traceEvents"].extend(events)
    with opened(path, "wt") as file:
        json.dump(trace, file)


# -- Modules that move or are loaded: in a dry run, too, a parameter stays itself, and has a shape alone.


def _install_modules(machine: Machine, patches: Patches) -> None:
    patches.stand_in(nn.Module, "_apply", _apply, machine)  # behind Module.to, cuda, half and their kind
    patches.stand_in(nn.Module, "load_state_dict", _load_state_dict, machine)


def _apply(machine: Machine, original, module: nn.Module, *args, **kwargs):
    """A parameter that came with its numbers (from a file) cannot take a shape for its data, so PyTorch puts another in its place: it
    would no longer be tied to those that it was tied to, whose memory would then count twice, and an optimizer would keep the old one.
    """
    if not machine.dry or machine.local.bypass:
        return original(module, *args, **kwargs)
    before = _parameters(module)
    out = original(module, *args, **kwargs)
    for name, after in _parameters(module).items():
        parameter = before[name]
        if after is not parameter and _compat.is_really_meta(after) and not _compat.is_really_meta(parameter):
            torch.utils.swap_tensors(parameter, after)
            setattr(module, name, parameter)
    return out


def _load_state_dict(machine: Machine, original, module: nn.Module, state_dict, strict=True, assign=False):
    """With `assign`, the parameters are a file's tensors, with their numbers. A dry run has no use for those, and autograd takes no shape for
    the gradient of such a leaf: a model that is cut or cast before it moves to its GPU would fail."""
    result = original(module, state_dict, strict=strict, assign=assign)
    if assign and machine.dry and not machine.local.bypass:
        for parameter in module.parameters():
            if type(parameter) is nn.Parameter and not _compat.is_really_meta(parameter):
                shape = torch.empty_strided(parameter.shape, parameter.stride(), dtype=parameter.dtype)
                torch.utils.swap_tensors(parameter, nn.Parameter(shape, parameter.requires_grad))
    return result


def _parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    return dict(module.named_parameters(recurse=False, remove_duplicate=False))


# -- Triton's kernels: interpreted, where TRITON_INTERPRET=1 is set before triton is imported (the runner sets it), and refused in a
# sentence where they were to be compiled, which needs a driver.
#
# Triton's interpreter copies a GPU's tensors to the host and back. Here the numbers are on the host already: it works on them as they are,
# so no copy is counted, and no memory. A kernel takes the time of moving its tensors once; its FLOPs are not known. In a dry run it does
# not run, and what is written to its tensors is not known.

TRITON_REFUSED = (
    "Triton compiles a kernel for a GPU's driver, and virtual GPUs have none: set TRITON_INTERPRET=1 before triton is imported, and its "
    "kernels are interpreted (python -m virtualgpu sets it, where NumPy is installed)"
)
TRITON_WARNING = (
    "Triton's kernels are interpreted on virtual GPUs (TRITON_INTERPRET=1): their numbers are right, and come slowly; "
    "their simulated time is that of moving their tensors"
)


def _install_triton(machine: Machine, patches: Patches) -> None:
    """Whenever triton comes, if it does."""

    def interpreter_came(interpreter) -> None:
        executor = interpreter.GridExecutor
        patches.stand_in(executor, "__call__", _run_kernel, machine, [])
        patches.stand_in(executor, "_init_args_hst", _arguments_in_place, machine)
        patches.stand_in(executor, "_restore_args_dev", _no_copies_back, machine)

    for name, then in {
        "interpreter": interpreter_came,
        "jit": lambda module: patches.stand_in(module.JITFunction, "run", _refuse_to_compile),
        "autotuner": lambda module: patches.stand_in(module.Autotuner, "_bench", _first_configuration),
    }.items():
        when_imported(f"triton.runtime.{name}", then, patches)


def _run_kernel(machine: Machine, warned: list, original, executor, *args, **kwargs):
    tensors = _kernel_tensors((*args, *kwargs.values()))
    gpu = None if machine.local.bypass else _kernel_gpu(machine, args, tensors)
    if gpu is None:
        return original(executor, *args, **kwargs)
    if not warned:
        warned.append(True)
        warnings.warn(TRITON_WARNING, stacklevel=3)
    if machine.dry:
        values.invalidate(tensors, "a Triton kernel")
    else:
        with machine.untracked():
            original(executor, *args, **kwargs)
    seconds = gpu.kernels.moving(moved(tensors), ORDINARY)
    machine.clock.launch(gpu.index, seconds, getattr(executor.fn, "__name__", "triton"))


def _arguments_in_place(machine: Machine, original, executor, args, kwargs):
    return (list(args), dict(kwargs)) if machine.local.bypass else original(executor, args, kwargs)


def _no_copies_back(machine: Machine, original, executor, *args):
    return None if machine.local.bypass else original(executor, *args)


def _refuse_to_compile(original, function, *args, **kwargs):
    if _on_gpu((*args, *kwargs.values())):
        raise NotImplementedError(TRITON_REFUSED)
    return original(function, *args, **kwargs)


def _first_configuration(original, tuner, *args, config, **meta):
    """Of a kernel's configurations the first: they give the same numbers, and to measure them takes a driver."""
    if _on_gpu((*args, *meta.values())):
        return [0.0, 0.0, 0.0]
    return original(tuner, *args, config=config, **meta)


def _on_gpu(arguments) -> bool:
    return any(gpu_of(tensor) is not None for tensor in _kernel_tensors(arguments))


def _kernel_tensors(arguments) -> list[torch.Tensor]:
    """Those among a kernel's arguments, also where Triton has wrapped them (a descriptor, another type)."""
    tensors = []
    for value in arguments:
        if isinstance(value, torch.Tensor):
            tensors.append(value)
        elif isinstance(value, tuple):
            tensors += _kernel_tensors(value)
        elif isinstance(base := getattr(value, "base", None), torch.Tensor):
            tensors.append(base)
    return tensors


def _kernel_gpu(machine: Machine, args, tensors) -> GPU | None:
    """The GPU of a kernel's tensors; None where all are the CPU's. Raises Triton's ValueError for one that the GPU cannot reach."""
    gpu = next((gpu for tensor in tensors if (gpu := gpu_of(tensor)) is not None), None)
    if gpu is None:
        return None
    for index, value in enumerate(args):
        if isinstance(value, torch.Tensor) and gpu_of(value) is None and not value.is_pinned():
            raise ValueError(f"Pointer argument (at {index}) cannot be accessed from Triton (cpu tensor?)")
    return machine.own(gpu)


def install(machine: Machine, patches: Patches) -> None:
    """All of this file's stand-ins."""
    _install_compiler(machine, patches)
    _install_optimizers(machine, patches)
    _install_profiler(machine, patches)
    _install_modules(machine, patches)
    _install_triton(machine, patches)
