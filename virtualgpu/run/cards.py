"""The cards of `virtualgpu.hardware`, looked up without PyTorch: its import takes seconds, and the runner starts at each run.

The table of cards needs PyTorch for one thing only, the names of data types. While it is imported here, a module that knows
nothing but names stands in, where PyTorch is not imported already; afterwards both are forgotten.
"""

import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from types import ModuleType

from virtualgpu.environment import Card
from virtualgpu.run.smi.topology import Links

HARDWARE = "virtualgpu.hardware"
DEFAULT = 2  # GPUs, as virtualgpu.gpus()


def find(gpus: int | None, like: str, memory: str | None) -> tuple[Card, ...]:
    """`gpus` cards like `like`: a name, a file, or several with commas. Raises ValueError, in a sentence."""
    with _specs() as specs:
        if gpus is None and ("," not in like or os.path.exists(like)):
            gpus = DEFAULT
        names = [like] if os.path.exists(like) else [name.strip() for name in like.split(",")]
        chosen = specs.find_all(gpus, like, memory)
        names = [
            os.path.abspath(name) if os.path.isfile(name) else name for name in names
        ]  # the program may change the folder
        names = names * len(chosen) if len(names) == 1 else names
        return tuple(
            Card(name, spec.name, spec.memory, tuple(spec.capability)) for name, spec in zip(names, chosen, strict=True)
        )


def network(name: str) -> str:
    """That network's name, where there is one of it, or its rate. Raises ValueError, in a sentence."""
    with _specs():
        from virtualgpu.hardware import networks

        return networks.find(name).name


def clock(rates: str | None, host: str | None) -> tuple[str, str]:
    """How time is taken. Raises ValueError, in a sentence."""
    with _specs():
        from virtualgpu.hardware import hosts

        return tuple(hosts.settings(rates, host))


def bridge(card: Card, gpus_per_node: int) -> None:
    """Raises ValueError where so many of these cards are to be joined by a bridge for two."""
    with _specs() as specs:
        specs.bridges.check([specs.find(card.like)] * gpus_per_node)


def links(cards: Sequence[Card]) -> list[Links]:
    """How each of them reaches the others."""
    ways = []
    with _specs() as specs:
        for card in cards:
            spec = specs.find(card.like)
            links, rate = (spec.nvlink.links, spec.nvlink.bandwidth) if spec.nvlink else (0, 0.0)
            together = round(spec.peer.bandwidth / rate) if links else 0
            ways.append(Links(links, together, rate / 1e9, spec.peer_access))
    return ways


def table() -> str:
    """What there is."""
    with _specs() as specs:
        return specs.table()


class _Names(ModuleType):
    """In PyTorch's place: torch.float32 is "float32"."""

    def __getattr__(self, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return name


@contextlib.contextmanager
def _specs() -> Iterator[ModuleType]:
    stand_in = "torch" not in sys.modules and not any(name.startswith(HARDWARE) for name in sys.modules)
    if stand_in:
        sys.modules["torch"] = _Names("torch")
    try:
        from virtualgpu.hardware import specs

        yield specs
    finally:
        if stand_in:
            for name in [name for name in sys.modules if name == "torch" or name.startswith(HARDWARE)]:
                del sys.modules[name]
            vars(sys.modules["virtualgpu"]).pop("hardware", None)
