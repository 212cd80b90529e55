"""In each process of `--explain`: what its GPUs did in each step, left for the runner; with a change (`explain_changes`) where it asks for one."""

import functools
import itertools
import json
import os
from typing import NamedTuple

import torch
from torch.nn.modules.module import register_module_forward_pre_hook

from virtualgpu import environment
from virtualgpu.run import explain_changes, steps
from virtualgpu.run.explain_loader import Loader
from virtualgpu.run.explain_parts import Parts, parts
from virtualgpu.timing.trace import Recording

SUFFIX = ".explained"
HALF = (torch.float16, torch.bfloat16)


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


class Watch(steps.Watch):
    """As the one of steps, which ends the program; and with it all that is left here."""

    def __init__(self, machine, most: int, change: dict, folder: str):
        super().__init__(machine, most)
        batches = change.get("batches", {})
        self.rank = environment.rank()
        self.loader = Loader(
            machine, folder, lambda: 0.0 if "loader" in change else explain_changes.of_rank(batches, rank())
        )
        self.half, self.bucket_cap, self.collectives = False, None, {}
        self.wrapped: list[torch.nn.Module] = []  # in DistributedDataParallel, without a hook for its communication
        self.marks: list[tuple[int, dict]] = []  # batches and collectives until the end of each step
        self._note_collectives()
        explain_changes.bucketed(self._note_bucket)
        self._note_hooks()
        register_module_forward_pre_hook(self._note_half)
        self.before_step = explain_changes.apply(change, machine, rank)
        machine.clock.record(Recording())
        self.before_step(0)

    def _stepped(self, optimizer, *rest) -> None:
        made = len(self.ends)
        try:
            super()._stepped(optimizer, *rest)
        finally:  # also where that was the last one, and ends the program
            if len(self.ends) > made:
                self._note_step()

    def _note_step(self) -> None:
        """What the first step did is nobody's to tell: it makes the optimizer's state."""
        self.rank = rank()
        if len(self.ends) == 1:
            self.machine.clock.record(Recording())
        self.marks.append((len(self.loader.seconds), dict(self.collectives)))
        self.before_step(len(self.ends))

    def _begin_anew(self) -> None:
        super()._begin_anew()
        self.marks = []

    def leave(self, folder: str) -> None:
        """For `collect`; and what `steps` leaves."""
        super().leave(folder)
        if self.machine.communicators is not None:
            self.machine.clock.collectives.settle()
        spans = self.machine.clock.spans or []
        first = 1 if len(self.ends) > 2 else 0  # in the second step DDP makes its buckets anew
        windows = list(itertools.pairwise(self.ends[first:]))
        found = {}
        for gpu in self.machine.gpus:
            own = [span for span in spans if span.gpu == gpu.index]
            steps_of_gpu = [parts(own, self.loader.loading, *window) for window in windows]
            if any(step.computing for step in steps_of_gpu):  # a context alone is no work
                found[str(gpu.index)] = steps_of_gpu
        told = Explained(
            self.rank,
            found,
            self._together(first, len(windows)),
            self.bucket_cap,
            self._compressible(),
            self.half,
            _tf32(),
            self._batch(first),
        )
        with open(os.path.join(folder, f"{os.getpid()}{SUFFIX}"), "w", encoding="utf-8") as file:
            json.dump(told, file)

    def _note_half(self, module: torch.nn.Module, _) -> None:
        if not self.half:
            self.half = torch.is_autocast_enabled("cuda") or any(
                tensor is not None and tensor.dtype in HALF for tensor in module._parameters.values()
            )

    def _note_collectives(self) -> None:
        from virtualgpu.distributed.nodes import Layout

        real = Layout.seconds

        def seconds(layout, kind, nbytes):
            lasts = real(layout, kind, nbytes)
            if layout.size > 1 and kind != "barrier":
                count, size, whole, _ = self.collectives.get(kind, (0, 0, 0.0, None))
                self.collectives[kind] = count + 1, size + nbytes, whole + lasts, lambda n: real(layout, kind, n)
            return lasts

        Layout.seconds = seconds

    def _note_hooks(self) -> None:
        from torch.nn.parallel import DistributedDataParallel

        explain_changes.made(lambda ddp: self.wrapped.append(ddp))
        real = DistributedDataParallel.register_comm_hook

        @functools.wraps(real)
        def register_comm_hook(ddp, *args, **kwargs):
            self.wrapped = [other for other in self.wrapped if other is not ddp]
            return real(ddp, *args, **kwargs)

        DistributedDataParallel.register_comm_hook = register_comm_hook

    def _compressible(self) -> bool:
        parameters = itertools.chain.from_iterable(ddp.parameters() for ddp in self.wrapped)
        return any(parameter.dtype == torch.float32 for parameter in parameters if parameter.requires_grad)

    def _together(self, first: int, windows: int) -> dict[str, list[float]]:
        told = {}
        if not windows:
            return told
        before, until = self.marks[first][1], self.marks[-1][1]
        for kind, (*totals, lasts) in until.items():
            count, size, seconds = (
                (total - earlier) / windows
                for total, earlier in zip(totals, before.get(kind, (0, 0, 0.0)), strict=False)
            )
            told[kind] = [count, size, seconds, lasts(max(1, int(size)))]
        return told

    def _batch(self, first: int) -> float | None:
        """Seconds, on average; None where the program has no loader."""
        taken = self.loader.seconds[self.marks[first][0] : self.marks[-1][0]] if len(self.marks) > first else []
        return sum(taken) / len(taken) if taken else None

    def _note_bucket(self, megabytes: float | None) -> float | None:
        self.bucket_cap = min(megabytes or explain_changes.DEFAULT_BUCKET, self.bucket_cap or float("inf"))
        return megabytes


def rank() -> int:
    """Of this process, as far as it knows by now: of its process group, or its launcher's word; -1 where there is none."""
    from torch import distributed as dist

    return dist.get_rank() if dist.is_available() and dist.is_initialized() else environment.rank()


def _tf32() -> bool:
    return torch.get_float32_matmul_precision() != "highest" or torch.backends.cuda.matmul.allow_tf32


def collect(folder: str) -> list[Explained]:
    """What the processes left that stepped, by rank."""
    found = []
    for name in sorted(os.listdir(folder)):
        if name.endswith(SUFFIX):
            with open(os.path.join(folder, name), encoding="utf-8") as file:
                one = Explained(*json.load(file))
            if one.gpus:
                gpus = {gpu: [Parts(*step) for step in own] for gpu, own in one.gpus.items()}
                found.append(one._replace(gpus=gpus))
    return sorted(found, key=lambda one: one.rank)
