"""What real GPUs did, from a trace that torch.profiler wrote; reading it takes no PyTorch."""

from collections.abc import Iterable

from virtualgpu.timing.queues import Span


def gpu_spans(events: Iterable[dict]) -> list[Span]:
    """What GPUs did, of a Chrome trace by torch.profiler ("traceEvents"), in seconds: kernels, those of NCCL (communication) and copies.
    They were issued at the end of the driver's call with the same correlation."""
    events = [event for event in events if event.get("ph") == "X" and "ts" in event]
    issued = {
        event.get("args", {}).get("correlation", -1): (event["ts"] + event.get("dur", 0)) * 1e-6
        for event in events
        if event.get("cat") in ("cuda_runtime", "cuda_driver")
    }
    spans = []
    for event in events:
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
            args, name, start = event.get("args", {}), event["name"], event["ts"] * 1e-6
            kind = "copy" if event["cat"] == "gpu_memcpy" else "communication" if "nccl" in name.lower() else "kernel"
            call = min(issued.get(args.get("correlation", -1), start), start)
            end, gpu, stream = (event["ts"] + event.get("dur", 0)) * 1e-6, args.get("device", 0), args.get("stream", 0)
            spans.append(Span(int(gpu), start, end, kind, name, int(stream), "", call))
    return spans
