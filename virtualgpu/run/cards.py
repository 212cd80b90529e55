"""The cards of `virtualgpu.hardware`, as the runner asks for them."""

import os
from collections.abc import Sequence

from virtualgpu.environment import Card
from virtualgpu.hardware import bridges, networks, settings, specs
from virtualgpu.run.smi.topology import Links

DEFAULT = 2  # GPUs, as virtualgpu.gpus()


def find(gpus: int | None, like: str, memory: str | None) -> tuple[Card, ...]:
    """`gpus` cards like `like`: a name, a file, or several with commas. Raises ValueError, in a sentence."""
    if gpus is None and ("," not in like or os.path.exists(like)):
        gpus = DEFAULT
    names = [like] if os.path.exists(like) else [name.strip() for name in like.split(",")]
    cards = specs.find_all(gpus, like, memory)
    names = [
        os.path.abspath(name) if os.path.isfile(name) else name for name in names
    ]  # the program may change the folder
    names = names * len(cards) if len(names) == 1 else names
    return tuple(Card(name, spec.name, spec.memory, spec.capability) for name, spec in zip(names, cards, strict=True))


def network(name: str) -> str:
    """That network's name, where there is one of it, or its rate. Raises ValueError, in a sentence."""
    return networks.find(name).name


def clock(rates: str | None, host: str | None) -> tuple[str, str]:
    """How time is taken. Raises ValueError, in a sentence."""
    known = settings.find(clock=rates, host=host)
    return known.clock, known.host


def bridge(card: Card, gpus_per_node: int) -> None:
    """Raises ValueError where so many of these cards are to be joined by a bridge for two."""
    bridges.check([specs.find(card.like)] * gpus_per_node)


def links(cards: Sequence[Card]) -> list[Links]:
    """How each of them reaches the others."""
    result = []
    for card in cards:
        spec = specs.find(card.like)
        many, rate = (spec.nvlink.links, spec.nvlink.bandwidth) if spec.nvlink else (0, 0.0)
        together = round(spec.peer.bandwidth / rate) if many else 0
        result.append(Links(many, together, rate / 1e9, spec.peer_access))
    return result


def table() -> str:
    """What there is."""
    return specs.table()
