"""virtualgpu/timing/data/memory_bound.csv: how often each operation that is bound by memory moves its tensors, by what single kernels took.

    python -m tests.gpu.memory_table     writes it anew

Over the kernels of h100_profiled.csv and h100_kernels.csv that are one operation and last longer than their launches: the time beyond the
launches over that of the operation's bytes is its traffic; of those where that is more than SLOW, if they are many, the multiprocessors' cycles for
each number of the largest tensor. Each is the lower quartile by bytes, of kernels that fill the card: small ones wait for other things. What nobody
timed, or not with its tensors alike, has what its code says. A step is what a thread took for one of many images where it is all that is waited for.
"""

import csv
from collections import defaultdict
from pathlib import Path
from unittest import mock

import virtualgpu
from tests.gpu import kernels_of_a_card
from virtualgpu.timing import kernels, memory_bound

TABLE = Path(memory_bound.__file__).parent / "data" / "memory_bound.csv"
COLUMNS = ("operation", "traffic", "wide_traffic", "cycles", "step", "limit", "launches", "training", "copied")
COLUMNS += ("elementwise", "model", "source")
SLOW = 1.15
NUMBERS = {"traffic": float, "wide_traffic": float, "cycles": float, "step": int, "launches": int, "training": int}


def given() -> dict[str, dict]:
    """memory_bound_given.csv: what the code of each operation says (aten/src/ATen/native and native/cuda): kernels and the like; and where it was
    not timed, its traffic."""
    with open(Path(__file__).with_name("memory_bound_given.csv"), encoding="utf-8", newline="") as file:
        rows = [{key: NUMBERS.get(key, str)(text) for key, text in row.items() if text} for row in csv.DictReader(file)]
    return {row.pop("operation"): row for row in rows}


GIVEN = given()


def measured():
    """(what runs it, seconds) of each row of both tables that is made of operations bound by memory."""
    for row in kernels_of_a_card.rows():
        if row.family not in ("attention", "masked_attention", "product", "convolution", "sum", "batch_norm"):
            yield lambda row=row: kernels_of_a_card.call(row.family, row.settings).run, 1e-6 * row.fresh
    for family in kernels_of_a_card.IN_A_GRAPH:
        for make, us in kernels_of_a_card.calls_in_a_graph(family, "H100"):
            yield make, 1e-6 * us


def samples() -> dict[str, list[tuple[float, float, float]]]:
    """By operation, of single kernels: (traffic, cycles for each number, bytes)."""
    found = defaultdict(list)
    with virtualgpu.dry_run(1, like="H100"):
        card = virtualgpu.machine().gpus[0].kernels
        names = {id(kind): name for name, kind in memory_bound.KINDS.items()}
        for make, seconds in measured():
            run, asked = make(), []

            def note(card, kind, args, tensors, nbytes, asked=asked):
                numbers = max(tensor.numel() for tensor in tensors)
                asked.append((kind, nbytes, numbers, kind.elementwise and memory_bound.one_by_one(tensors) > 0))
                return 0.0

            with mock.patch.object(memory_bound, "seconds", note):
                run()
            if len(asked) != 1 or id(asked[0][0]) not in names or asked[0][3]:
                continue
            kind, nbytes, numbers, _ = asked[0]
            launches = GIVEN.get(names[id(kind)], {}).get("launches", 1) * card.spec.kernel
            busy = seconds - launches * (1 - kernels.STARTING * kind.elementwise)
            if busy > launches:
                bytes_alone = card.moving(nbytes, kernels.Kind(limit=kind.limit, launches=0))
                found[names[id(kind)]].append((busy / bytes_alone, busy * card.cycles / numbers, nbytes))
    return found


def lower_quartile(samples: list[tuple[float, float]]) -> float:
    """Of (value, weight)."""
    left = sum(weight for _, weight in samples) / 4
    for value, weight in sorted(samples):
        left -= weight
        if left <= 0:
            return value
    raise ValueError("no samples")


def rows() -> list[dict]:
    """Of the table, as text."""
    found, made = samples(), []
    for name, given in GIVEN.items():
        timed = found.get(given.get("like", name), [])
        row = dict.fromkeys(COLUMNS, "") | {"operation": name, "traffic": 1.0, "limit": "memory", "launches": 1} | given
        if timed and not given.get("model") and not given.keys() & {"traffic", "cycles"}:
            slow = [(cycles, nbytes) for traffic, cycles, nbytes in timed if traffic > SLOW]
            row["traffic"] = lower_quartile([(traffic, nbytes) for traffic, _, nbytes in timed])
            if 4 * len(slow) > len(timed):
                row["traffic"], row["cycles"] = min(1.0, row["traffic"]), lower_quartile(slow)
            row["source"] += f"; {len(timed)} kernels timed"
        made.append({key: f"{row[key]:.3g}" if isinstance(row[key], float) else str(row[key]) for key in COLUMNS})
    return made


def main() -> None:
    written = rows()
    with open(TABLE, "w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(written)


if __name__ == "__main__":
    main()
