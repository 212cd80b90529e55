"""What each process of `--explain` leaves for the runner, which reads it without PyTorch (watch.py makes it)."""

from typing import NamedTuple

from virtualgpu.run import left
from virtualgpu.run.explain.parts import Parts

LEFT = "explained"


class Explained(NamedTuple):
    """One process's. gpus: {index: its steps}. together: what its collectives of each kind come to in a step: how many, bytes, seconds, and
    seconds as one. bucket_cap: DDP's smallest, in MB; None without DDP. compressible: DDP sends gradients of float32, without a hook of the
    program's. half: it has parameters in half precision, or autocasts. tf32: products of float32 are in TF32. batch: seconds of the loader."""

    rank: int
    gpus: dict[str, list[Parts]]
    together: dict[str, list[float]]
    bucket_cap: float | None
    compressible: bool
    half: bool
    tf32: bool
    batch: float | None


def collect(folder: str) -> list[Explained]:
    """What the processes left that stepped, by rank."""
    processes = [Explained(*record) for _, record in left.collect(folder, LEFT) if record is not None]
    read = [
        one._replace(gpus={gpu: [Parts(*step) for step in own] for gpu, own in one.gpus.items()}) for one in processes
    ]
    return sorted((one for one in read if one.gpus), key=lambda one: one.rank)
