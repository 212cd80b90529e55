"""Programs with streams, a line each, and how they are run: with the steps that wait as they should, or without.

Steps are Python's, with a semicolon between them, on the default stream d, or, with `s:` before it, on s; r is another one, o one of the other
GPU. `s<d` lets s wait for d. A step with ? before it is left out where the program forgets to wait, and one with ! is there only then.
"""

import re
import threading  # noqa: F401  # for a program

import torch
import torch.distributed as dist

import virtualgpu  # noqa: F401
from virtualgpu.sanitizer import UnsynchronizedAccessError

N = 1 << 18
STEP = re.compile(r"(?P<mark>[?!]?)(?:(?P<stream>[sro]):)?(?:(?P<waits>\w+)<(?P<other>\w+)|(?P<code>.+))")


def ones(*shape):
    return torch.ones(*shape or (N,), device="cuda")


def zeros(*shape):
    return torch.zeros(*shape or (N,), device="cuda")


def empty(*shape):
    return torch.empty(*shape or (N,), device="cuda")


def on_its_way():
    """Ones that are copied to the host, which does not wait."""
    return ones(8).to("cpu", non_blocking=True)


def copied(host):
    return host.to("cuda", non_blocking=True)


def message(x):
    """From rank 0 to 1."""
    return dist.isend(x, 1) if dist.get_rank() == 0 else dist.irecv(x, 0)


def exchanged(sent, received):
    other = 1 - dist.get_rank()
    return dist.batch_isend_irecv([dist.P2POp(dist.isend, sent, other), dist.P2POp(dist.irecv, received, other)])


def reduced(x):
    return torch.ops._c10d_functional.all_reduce(x, "sum", dist.group.WORLD.group_name)


def waited(x):
    return torch.ops._c10d_functional.wait_tensor(x)


def run(program: str, waits: bool = True) -> None:
    """Raises what its race raises."""
    names = {"d": torch.cuda.current_stream(), "s": torch.cuda.Stream(), "r": torch.cuda.Stream()}
    if torch.cuda.device_count() > 1 and not dist.is_initialized():
        names |= {"d1": torch.cuda.current_stream(1), "o": torch.cuda.Stream("cuda:1")}
    names |= {"e": torch.cuda.Event(), "pinned": torch.ones(N).pin_memory(), "host": torch.ones(8)}
    names |= globals()
    for step in program.split("; "):
        match = STEP.fullmatch(step.strip())
        assert match, step
        mark, stream, one, other, code = match.groups()
        if mark == ("!" if waits else "?"):
            continue
        with torch.cuda.stream(names[stream or "d"]):
            exec(f"{one}.wait_stream({other})" if one else code, names)
    torch.cuda.synchronize()


def raised(program: str, waits: bool = False) -> str:
    """What the program's race is called, or ""."""
    try:
        run(program, waits)
    except UnsynchronizedAccessError as error:
        return str(error)
    return ""


def rows(text: str) -> dict[str, tuple[str, ...]]:
    """name: program | what is said, by name."""
    lines = [line for line in text.strip().splitlines() if line and not line.startswith("#")]
    return {
        name: tuple(part.strip() for part in rest.split("|")) for name, rest in (line.split(": ", 1) for line in lines)
    }


WRITING, FREED = "may still be writing", "may still be reading, of a tensor that was freed"
RACES = rows(f"""
read after write: x=zeros(); s<d; s:x.add_(1); ?d<s; x*2 | default stream of cuda:0 reads what aten::add_.Tensor on stream 3 of cuda:0 {WRITING}
write after read: x=zeros(); s<d; s:y=x*2; s:e.record(); ?e.wait(); x.fill_(3) | may still be reading
write after write: x=empty(); x.fill_(1); ?s<d; s:x.fill_(2) | {WRITING}
event recorded too early: x=zeros(); s<d; !s:e.record(); s:x.add_(1); ?s:e.record(); e.wait(); x.sum() | {WRITING}
copied in on a stream: s:x=copied(pinned); ?d<s; x+1 | {WRITING}
by way of a third stream: r:x=ones(); ?s<r; d<s; x.sum() | {WRITING}
lists: x=[ones(), ones(), ones()]; ?s<d; s:torch._foreach_add_(x, 1) | {WRITING}
freed while in use: x=ones(); s<d; s:y=x*2; ?x.record_stream(s); del x; z=zeros() | {FREED}
freed after waiting: x=ones(); s<d; s:y=x*2; ?d<s; del x; z=zeros() | {FREED}
freed in parts: x=ones(8 << 20); s<d; s:y=x[4 << 20:]*2; ?d<s; del x; a=zeros(4 << 20); b=zeros(4 << 20) | {FREED}
made here and filled there: x=ones(); z=x*2; del x; y=empty(); ?s<d; s:y.fill_(5) | of a tensor that was freed
gradient made on another stream: w=ones().requires_grad_(); y=w*3; s:g=ones(); ?d<s; y.backward(g) | {WRITING}
gradient read on another stream: w=ones().requires_grad_(); (w*3).sum().backward(); ?s<d; s:w.grad.sum() | {WRITING}
copied to the other GPU: x=ones(); y=x.to('cuda:1'); ?o<d1; o:y+1 | {WRITING}
halves of one tensor: x=zeros(64, 64); s<d; s:x[:, :32].add_(1); ?x[:, 32:].add_(2); !x[:, 31:].add_(2) | {WRITING}
one of two waited for: s:x=ones(8); r:y=ones(8); s.synchronize(); ?r.synchronize(); x+1; y+1 | {WRITING}
number read early: x=on_its_way(); ?ones(1).item(); x[3].item() | the host (aten::_local_scalar_dense) reads what
""")
ON_THE_HOST = rows("""
source overwritten: x=copied(pinned); ?d.synchronize(); pinned.zero_() | the host (aten::zero_) overwrites what
read early: x=on_its_way(); ?torch.cuda.synchronize(); x.sum() | the host (aten::sum) reads what
from a buffer: pinned.copy_(ones(), non_blocking=True); e.record(); ?e.synchronize(); pinned.numpy() | the host (Tensor.numpy) reads what
as a list: x=on_its_way(); ?d.synchronize(); x.tolist() | the host (Tensor.tolist) reads what
though time has passed: x=on_its_way(); virtualgpu.machine().clock.wait_until(1.0); ?d.synchronize(); x.sum() | the host (aten::sum) reads what
waited for another stream: x=on_its_way(); ?d.synchronize(); !s.synchronize(); x.sum() | the host (aten::sum) reads what
""")
SILENT = rows("""
pageable memory, for which the host waits: host.copy_(ones(8), non_blocking=True); host.sum(); x=copied(host); host.zero_()
a stream's own blocks: x=ones(4 << 20); s<d; s:y=x*2; del x; s:y+ones(4 << 20)
memory given back, for which cudaFree waits: x=ones(3 << 20); s<d; s:y=x*2; del x; torch.cuda.empty_cache(); z=zeros(3 << 20)
another thread's waiting: s:x=ones(8); t=threading.Thread(target=s.synchronize); t.start(); t.join(); x.sum()
""")
# every way to wait
WAITS = (
    "torch.cuda.synchronize()",
    "torch.accelerator.synchronize()",
    "s.synchronize()",
    "e.synchronize()",
    "e.wait()",
    "d.wait_event(e)",
    "d<s",
)
SILENT |= {wait: (f"s:x=ones(8); s:e.record(); {wait}; x+1",) for wait in WAITS}
