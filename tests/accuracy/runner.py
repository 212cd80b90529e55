"""How a published row is run: a step of its program in a dry run, and what of that stands beside the published figure."""

import contextlib
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist

import virtualgpu
from tests.accuracy.published import Published, Row, published

Step = Callable[[], object]
NARROW = {"half": torch.float16, "bfloat16": torch.bfloat16}
BYTES = {"MB": 2**20, "MiB": 2**20, "GB": 1e9, "GiB": 2**30}  # MB: of nvidia-smi, as transformers' page has it
KEPT = {"most allocated": "allocated", "nvidia-smi": "reserved"}  # words of the settings


class Measured(NamedTuple):
    """A step: its seconds, those of its kernels, and the most bytes that there were until it ended."""

    seconds: float
    kernels: float
    allocated: int
    reserved: int
    active: int


def measured(step: Step, steps: int = 2, mean: int = 1) -> Measured:
    """The last of so many steps, each waited for (the first has the allocator's and the optimizer's beginnings). mean: of so many one
    after the other, which nothing waits between."""
    clock = virtualgpu.machine().clock
    for last in range(steps):
        torch.cuda.synchronize()
        start, before = clock.host, clock.computing[torch.cuda.current_device()]
        for _ in range(mean if last == steps - 1 else 1):
            step()
        torch.cuda.synchronize()
    stats = torch.cuda.memory_stats()
    return Measured(
        (clock.host - start) / mean,
        (clock.computing[torch.cuda.current_device()] - before) / mean,
        *(stats[f"{kind}_bytes.all.peak"] for kind in ("allocated", "reserved", "active")),
    )


@contextlib.contextmanager
def precision(row: Published) -> Iterator[None]:
    """TF32 as the row says: "ieee" has none, "float32" that of convolutions, "tf32" both; and cuDNN's search where it asks for it."""
    matmul = torch.backends.cuda.matmul
    before, matmul.allow_tf32 = matmul.allow_tf32, row.precision == "tf32"
    search, tf32 = "search" in row.options, row.precision != "ieee"
    try:
        # PyTorch's own test utilities, once imported, allow no other way to set cuDNN's
        with torch.backends.cudnn.flags(enabled=True, benchmark=search, deterministic=False, allow_tf32=tf32):
            yield
    finally:
        matmul.allow_tf32 = before


@contextlib.contextmanager
def dry_run(row: Published, n: int | None = 1, **options) -> Iterator[None]:
    """On so many GPUs of the row's card, with its host and precision. With a world_size, one rank of so many in its process group."""
    n = None if "world_size" in options else n
    with virtualgpu.dry_run(n, **{"like": row.card, "host": row.host} | options), precision(row):
        if "world_size" in options:
            dist.init_process_group("nccl")
        yield
        if dist.is_initialized():
            dist.destroy_process_group()


def in_unit(row: Published, took: Measured) -> float:
    """What stands beside the row's figure. Of memory, unless the settings say otherwise, what was reserved; of our own programs allocated."""
    if row.kind == "memory":
        figure = row.options.get("figure", "most allocated" if row.source == "measured here" else "reserved")
        return getattr(took, KEPT.get(figure, figure)) / BYTES[row.unit]
    if row.kind == "speed":
        return row.batch * (row.size if row.unit == "tokens/s" else 1) / took.seconds
    return 1000 * (took.kernels if row.kind == "kernels" else took.seconds)


def beside(
    program: str, run: Callable[[Published], Measured], what: Callable[[Published], str], tolerance=None
) -> list[Row]:
    """Every row of the program; those that differ in their figure alone are of one run. tolerance: of the memory's."""
    found, taken = [], {}
    for row in published(program):
        if row.run not in taken:
            taken[row.run] = run(row)
        of_memory = tolerance if row.kind == "memory" else None
        found.append(row.beside(what(row), in_unit(row, taken[row.run]), of_memory))
    return found


def name(row: Published) -> str:
    """For the tables: the program with what matters of its settings, who published it, and when."""
    layout = " channels last" * (row.layout == "last")
    return f"{row.model}, {row.mode}, {row.precision}{layout}, batch {row.batch}, {row.card} ({row.what} {row.date})"


def autocast(row: Published) -> torch.autocast:
    """To the 16 bits that the row's precision names; off where it is not AMP."""
    narrow = torch.bfloat16 if row.precision == "AMP bfloat16" else torch.float16
    return torch.autocast("cuda", narrow, enabled=row.precision.startswith("AMP"))


def training(parameters, loss: Callable, row: Published, kind=torch.optim.Adam, **options) -> Step:
    """A step: gradients away, loss, backward, optimizer; autocast where the row says so."""
    optimizer = kind(parameters, **options)

    def step():
        optimizer.zero_grad()
        with autocast(row):
            value = loss()
        value.backward()
        optimizer.step()

    return step
