"""The cards of `virtualgpu.hardware`, as the runner asks for them."""

import os

from virtualgpu.environment import Card
from virtualgpu.hardware import specs

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
