"""torch.profiler on virtual GPUs: the CPU's side is PyTorch's; the GPUs' side is their simulated kernels, in the Chrome trace.

CUPTI, by which PyTorch watches real kernels, knows nothing of virtual ones. A profile that asks for CUDA records the CPU, says so
once, and adds the kernels to what export_chrome_trace writes.
"""

import gzip
import json
import warnings

import torch
from torch.autograd import profiler as autograd_profiler
from torch.profiler import ProfilerActivity

from virtualgpu import _compat
from virtualgpu.engine import overrides
from virtualgpu.engine.machine import Machine
from virtualgpu.timing.trace import chrome_events
from virtualgpu.torch_api.registry import Patches

WARNING = (
    "torch.profiler cannot see virtual GPUs: its tables have the CPU's side. The simulated kernels are in the Chrome trace "
    "(export_chrome_trace), and in virtualgpu.recording()"
)


def install(machine: Machine, patches: Patches) -> None:
    """Replace methods of torch.profiler's profile, of the older one in torch.autograd, and of emit_nvtx."""
    profiles = Profiles(machine)
    for name, function in {
        "__init__": profiles.begin,
        "start_trace": profiles.start,
        "stop_trace": profiles.stop,
        "export_chrome_trace": export,
    }.items():
        patches.stand_in(_compat.KinetoProfile, name, function)
    patches.stand_in(autograd_profiler.profile, "__init__", profiles.begin_older)
    patches.replace(autograd_profiler.emit_nvtx, "__enter__", lambda self: self)
    patches.replace(autograd_profiler.emit_nvtx, "__exit__", lambda self, *error: False)
    overrides.register_namespace("profiler", _annotate)
    patches.stand_in(torch.profiler, "supported_activities", lambda known: known() | {ProfilerActivity.CUDA})


class Profiles:
    """What the profiles of one session share: the clock whose kernels they record, and that they have warned."""

    def __init__(self, machine: Machine):
        self.clock, self.warned = machine.clock, False

    def _warn(self) -> None:
        if not self.warned:
            self.warned = True
            warnings.warn(WARNING, stacklevel=5)

    def begin(self, original, profile, *args, activities=None, **kwargs):
        """Of CPU and CUDA, the CPU alone is asked of PyTorch."""
        wanted = set(activities) if activities is not None else {ProfilerActivity.CPU}
        if ProfilerActivity.CUDA in wanted:
            self._warn()
            wanted = (wanted - {ProfilerActivity.CUDA}) | {ProfilerActivity.CPU}
        profile._virtual_spans = None
        original(profile, *args, activities=wanted, **kwargs)

    def start(self, original, profile):
        """From now on the clock's spans are this profile's."""
        profile._virtual_spans = []
        profile._virtual_before = self.clock.record(profile._virtual_spans)
        profile._virtual_start = self.clock.host
        return original(profile)

    def stop(self, original, profile):
        """They belong to who recorded before, too."""
        if profile._virtual_spans is not None:
            before = profile._virtual_before
            self.clock.record(before)
            if before is not None:
                before.extend(profile._virtual_spans)
        return original(profile)

    def begin_older(self, original, profile, enabled=True, *, use_cuda=False, use_device=None, **kwargs):
        """torch.autograd.profiler.profile(use_device="cuda")."""
        if use_cuda or use_device == "cuda":
            self._warn()
            use_device = None
        original(profile, enabled, use_device=use_device, **kwargs)


def export(original, profile, path: str, *args, **kwargs):
    """PyTorch's file, and the simulated kernels."""
    out = original(profile, path, *args, **kwargs)
    if profile._virtual_spans:
        _add(path, chrome_events(profile._virtual_spans, origin=profile._virtual_start))
    return out


def _annotate(dispatch, func, args, kwargs):
    """record_function begins or ends: what is launched in between has its name."""
    annotations = dispatch.clock.local.annotations
    if _compat.packet(func).__name__.startswith("_record_function_enter"):
        annotations.append(args[0])
    elif annotations:
        annotations.pop()
    return func(*args, **kwargs)


def _add(path: str, events: list[dict]) -> None:
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
