"""Kernels as programs call them, beside what an H100 and an H200 took (tests/gpu/*_profiled.csv: torch.profiler, 2026-11-27).

What goes in was written just before. A part of the rows, one of STRIDE; all of them, or those of an H200: `python -m tests.virtualgpu.timing.test_profiled_kernels [H200]`.
Those of other families in a replayed CUDA graph (*_kernels.csv).
"""

import math
import sys
from collections import defaultdict
from statistics import median

import pytest

import virtualgpu
from tests.accuracy.kernels import within
from tests.gpu import kernels_of_a_card
from tests.virtualgpu.timing.test_kernels import seconds

STRIDE = 5
# by family: how far the median may be off (a factor), and which share of the kernels is within 30 %
REACHED: dict[str, tuple[float, float]] = {
    "batch_norm": (1.1, 0.8),
    "interpolate": (1.15, 0.45),
    "elementwise": (1.1, 0.85),
    "sum": (1.15, 0.65),
    "copy": (1.06, 0.95),
    "cat": (1.1, 0.55),
    "pool": (1.3, 0.5),
    "group_norm": (1.1, 0.9),
    "row_norm": (1.1, 0.85),
    "attention": (1.06, 0.85),
    "masked_attention": (1.06, 0.75),
    "product": (1.08, 0.78),
    "convolution": (1.08, 0.58),
}


def simulated(family: str, settings: dict) -> float:
    """Microseconds of its kernels, in a dry run."""
    clock = virtualgpu.machine().clock
    with kernels_of_a_card.precision(settings):
        one = kernels_of_a_card.call(family, settings)
        one.run()
        before = clock.computing[0]
        one.run()
    return 1e6 * (clock.computing[0] - before)


def logs(family: str, card: str, stride: int = 1) -> dict[str, list[float]]:
    """Of measured over simulated, by what the rows have in common."""
    groups = defaultdict(list)
    with virtualgpu.dry_run(1, like=card):
        for row in kernels_of_a_card.rows(family, card)[::stride]:
            alike = [str(row.settings[name]) for name in ("dtype", "pas", "op", "way", "mode") if name in row.settings]
            groups[" ".join(alike)].append(math.log(row.fresh / simulated(family, row.settings)))
    return groups


MEASURED = [(family, card) for card in ("H100", "H200") for family in REACHED if kernels_of_a_card.rows(family, card)]


@pytest.mark.parametrize(("family", "card"), MEASURED)
def test_a_kernel_takes_what_it_took_in_a_program(family, card):
    """An H100's times are what the rules are from; nothing of the H200 was an input."""
    off, share = REACHED[family]
    every = [log for group in logs(family, card, STRIDE).values() for log in group]
    assert abs(median(every)) < math.log(off) and within(every, 30) >= share, sorted(map(math.exp, every))


@pytest.mark.parametrize(
    ("family", "card"),
    [*((family, "H100") for family in kernels_of_a_card.IN_A_GRAPH), ("unary", "H200"), ("binary", "H200")],
)
def test_a_kernel_takes_what_it_took_in_a_graph(family, card):
    """Scans, and narrow rows that are sorted, are those that are off."""
    found = kernels_of_a_card.calls_in_a_graph(family, card)
    logs = [math.log(us / 1e6 / seconds(make, card)) for make, us in found]
    off = 1.15 if family == "indexing" else 1.12
    assert len(logs) >= 8 and abs(median(logs)) < math.log(off) and within(logs, 30) > 0.7, sorted(map(math.exp, logs))


def main() -> None:
    card = sys.argv[1] if len(sys.argv) > 1 else "H100"
    for family in kernels_of_a_card.MAKERS:
        for alike, group in logs(family, card).items():
            print(
                f"{family:<12} {alike:<36} {len(group):4} rows: measured over simulated {math.exp(median(group)):5.2f} at the median, "
                f"{within(group, 30):4.0%} within 30 %"
            )


if __name__ == "__main__":
    main()
