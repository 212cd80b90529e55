"""torch.profiler on virtual GPUs: the CPU's side is PyTorch's; the GPUs' side is their simulated kernels, in the Chrome trace.

CUPTI, by which PyTorch watches real kernels, knows nothing of virtual ones. A profile that asks for CUDA records the CPU, says so
once, and adds the kernels to what export_chrome_trace writes.
"""

import functools
import gzip
import json
import warnings

import torch
from torch.autograd import profiler as autograd_profiler
from torch.profiler import ProfilerActivity
from torch.profiler import profiler as kineto

from virtualgpu.engine import overrides
from virtualgpu.engine.machine import Machine
from virtualgpu.timing.trace import chrome_events
from virtualgpu.torch_api.registry import Patches

TOLD = (
    "torch.profiler cannot see virtual GPUs: its tables have the CPU's side. The simulated kernels are in the Chrome trace "
    "(export_chrome_trace), and in virtualgpu.recording()"
)


def install(machine: Machine, patches: Patches) -> None:
    """Replace methods of torch.profiler's profile, of the older one in torch.autograd, and of emit_nvtx."""
    told = []

    def cpu_only() -> None:
        if not told:
            told.append(True)
            warnings.warn(TOLD, stacklevel=4)

    begin, start, stop, export = (
        kineto._KinetoProfile.__init__,
        kineto._KinetoProfile.start_trace,
        kineto._KinetoProfile.stop_trace,
        kineto._KinetoProfile.export_chrome_trace,
    )

    @functools.wraps(begin)
    def __init__(self, *args, activities=None, **kwargs):
        asked = set(activities) if activities is not None else {ProfilerActivity.CPU}
        if ProfilerActivity.CUDA in asked:
            cpu_only()
            asked = (asked - {ProfilerActivity.CUDA}) | {ProfilerActivity.CPU}
        self._virtual_spans = None
        begin(self, *args, activities=asked, **kwargs)

    @functools.wraps(start)
    def start_trace(self):
        clock = machine.clock
        self._virtual_spans = []
        self._virtual_before = clock.record(self._virtual_spans)
        self._virtual_start = clock.host
        return start(self)

    @functools.wraps(stop)
    def stop_trace(self):
        if self._virtual_spans is not None:
            before = self._virtual_before
            machine.clock.record(before)
            if before is not None:
                before.extend(self._virtual_spans)
        return stop(self)

    @functools.wraps(export)
    def export_chrome_trace(self, path: str):
        out = export(self, path)
        if self._virtual_spans:
            _add(path, chrome_events(self._virtual_spans, origin=self._virtual_start))
        return out

    for name, ours in {
        "__init__": __init__,
        "start_trace": start_trace,
        "stop_trace": stop_trace,
        "export_chrome_trace": export_chrome_trace,
    }.items():
        patches.replace(kineto._KinetoProfile, name, ours)

    plain = autograd_profiler.profile.__init__

    @functools.wraps(plain)
    def profile_init(self, enabled=True, *, use_cuda=False, use_device=None, **kwargs):
        if use_cuda or use_device == "cuda":
            cpu_only()
            use_device = None
        plain(self, enabled, use_device=use_device, **kwargs)

    patches.replace(autograd_profiler.profile, "__init__", profile_init)
    emit = autograd_profiler.emit_nvtx
    patches.replace(emit, "__enter__", lambda self: self)
    patches.replace(emit, "__exit__", lambda self, *error: False)
    overrides.NAMESPACES["profiler"] = _annotate
    known = torch.profiler.supported_activities
    patches.replace(torch.profiler, "supported_activities", lambda: known() | {ProfilerActivity.CUDA})


def _annotate(dispatch, func, args, kwargs):
    """record_function begins or ends: what is launched in between has its name."""
    annotations = dispatch.clock.local.annotations
    if func._overloadpacket.__name__.startswith("_record_function_enter"):
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
