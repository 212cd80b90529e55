"""What `gpus` returns and says: virtual GPUs, or the machine's own."""

import functools
from collections.abc import Callable, Sequence

import torch

from virtualgpu.hardware.settings import DATASHEET
from virtualgpu.hardware.specs import Spec
from virtualgpu.session.installed import Session


class Devices(list):
    """The devices, as a list; used in a with statement, virtual GPUs that this call made, or its limit on real ones, go when it ends (`undo`)."""

    def __init__(self, gpus, undo: Callable[[], None] = lambda: None):
        super().__init__(gpus)
        self.undo = undo

    def __enter__(self) -> "Devices":
        return self

    def __exit__(self, *error) -> None:
        self.undo()


def virtual_ones(session: Session, undo: Callable[[], None] = lambda: None) -> Devices:
    """Those of the session, announced in a line."""
    cards, n = session.cards, len(session.cards)
    what = f"{'s, each' if n > 1 else ','} like a {cards[0].name} with {_size(cards[0])}"
    if any(card != cards[0] for card in cards):
        what = "s: " + ", ".join(f"a {card.name} with {_size(card)}" for card in cards)
    worth = "a lower bound" if session.settings.clock == DATASHEET else "most steps within 30 %"
    print(f"{n} virtual GPU{what}: numbers and memory are real, time is simulated ({worth}).")
    return Devices((gpu.device for gpu in session.machine.gpus), undo)


def _size(card: Spec) -> str:
    return f"{card.memory / 2**30:.4g} GiB" if card.memory >= 2**30 else f"{card.memory / 2**20:.4g} MiB"


def real_ones(n: int, limits: Sequence[int] | None) -> Devices:
    """The first `n` of the machine, announced in a line. limits: bytes that this process may take of each, until `undo`; all of it unless given."""
    before = [torch.cuda.get_per_process_memory_fraction(i) for i in range(n)]
    _limit([min(1.0, limits[i] / torch.cuda.mem_get_info(i)[1]) if limits else 1.0 for i in range(n)])
    print(f"{n} real GPU{'s' * (n > 1)}: {', '.join(torch.cuda.get_device_name(i) for i in range(n))}.")
    return Devices((torch.device("cuda", i) for i in range(n)), functools.partial(_limit, before))


def _limit(shares: Sequence[float]) -> None:
    for index, share in enumerate(shares):
        torch.cuda.set_per_process_memory_fraction(share, index)
