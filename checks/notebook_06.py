"""The graders of notebook 06: out of memory. Both run the reader's code in processes of its own: an endless loop ends with them."""

import gc
import itertools
import random
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import nn

from checks.grader import NoRoom, alone, grader

ITERATIONS = 12
Runs = list[tuple[str, list[float], float]]  # the cause, MiB in tensors after each iteration, MiB of one output


def riddle(device: torch.device) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Four short runs on the GPU: {name: MiB in tensors at the end of each iteration}, and {name: MiB of the network's output of
    one iteration}."""
    runs = _runs(device, random.Random(3), 1)
    names = "ABCD"[: len(runs)]
    return (
        {name: curve for name, (_, curve, _) in zip(names, runs, strict=True)},
        {name: output for name, (_, _, output) in zip(names, runs, strict=True)},
    )


def _runs(device: torch.device, draw: random.Random, each: int) -> Runs:
    """So many runs of each cause, shuffled, their sizes drawn: no cause has a size of its own."""
    causes = [cause for cause in SITUATIONS for _ in range(each)]
    draw.shuffle(causes)
    gc.collect()  # what a cell above left would go in the middle of a curve
    try:
        return [(cause, *_watched(SITUATIONS[cause](device, draw), device)) for cause in causes]
    except torch.OutOfMemoryError:
        pass  # outside: the error has let go of what it kept
    raise NoRoom(no_room(device))


def _watched(run: Iterator[float], device: torch.device) -> tuple[list[float], float]:
    before = torch.cuda.memory_allocated(device)
    curve, output = [], 0.0
    for output in run:  # noqa: B007 - the last one is as large as the others, or larger
        curve.append((torch.cuda.memory_allocated(device) - before) / 2**20)
    return curve, output


def no_room(device: torch.device) -> str:
    """Who holds the GPU, before the reader's code has begun."""
    gc.collect()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return (
        f"{(total - free) / 2**20:,.0f} of the GPU's {total / 2**20:,.0f} MiB are taken before your code begins, and the grader "
        "finds no room. Did a cell end in an error? It keeps what it held: run the cell of section 11 that forgets it "
        "(helpers.forget_error() does the same), `del` what you have named, then run this cell again"
    )


def _keep_graphs(device, draw) -> Iterator[float]:
    rows, width = draw.choice([512, 1024, 2048]), draw.choice([128, 256])
    net, total = nn.Linear(256, width, device=device), 0
    for _ in range(ITERATIONS):
        output = net(torch.ones(rows, 256, device=device))
        total = total + output.square().sum()
        yield _mib(output)


def _step_every_few(device, draw) -> Iterator[float]:
    width, every = draw.choice([768, 1024, 1280, 1536]), draw.choice([2, 3, 4, 5])
    net = nn.Linear(width, width, device=device)
    optimizer = torch.optim.Adam(net.parameters())
    for iteration in range(1, ITERATIONS + 1):
        output = net(torch.ones(1, width, device=device))
        output.sum().backward()
        if iteration % every == 0:
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
        yield _mib(output)


def _longer_inputs(device, draw) -> Iterator[float]:
    rows, period = draw.choice([1024, 2048]), draw.choice([3, 4, 6])
    net = nn.Linear(256, 256, device=device)
    for iteration in range(ITERATIONS):
        output = net(torch.ones(rows * (1 + iteration % period), 256, device=device))
        output.sum().backward()
        yield _mib(output)


def _keep_outputs(device, draw) -> Iterator[float]:
    rows, width = draw.choice([1024, 2048, 4096]), draw.choice([64, 128, 256])
    net, kept = nn.Linear(64, width, device=device), []
    for _ in range(ITERATIONS):
        kept.append(net(torch.ones(rows, 64, device=device)).detach())
        yield _mib(kept[-1])


SITUATIONS: dict[str, Callable[..., Iterator[float]]] = {
    "graph kept": _keep_graphs,
    "optimizer state": _step_every_few,
    "longer inputs": _longer_inputs,
    "outputs kept": _keep_outputs,
}


def _mib(tensor: torch.Tensor) -> float:
    return tensor.nbytes / 2**20


@grader
def causes(cause: Callable, device: torch.device, timeout: float = 20) -> str | None:
    """cause(curve, output) names what each of 16 runs has, of all four causes and of sizes that are drawn; says how many are
    right, and describes one that is not."""
    runs = _runs(device, random.Random(60), 4)
    said = alone(_named, cause, [(curve, output) for _, curve, output in runs], timeout=timeout)
    if isinstance(said, str):
        return said
    wrong = [(name, *run) for name, run in zip(said, runs, strict=True) if name != run[0]]
    if not wrong:
        return None
    if unknown := [name for name, *_ in wrong if name not in SITUATIONS]:
        return f"it returns {unknown[0]!r}; the names are {sorted(SITUATIONS)}"
    name, _, curve, output = wrong[0]
    return f"it is right about {len(runs) - len(wrong)} of {len(runs)} runs. One that it wrongly calls {name!r}: {_described(curve, output)}"


def _described(curve: Sequence[float], output: float) -> str:
    steps = [after - before for before, after in itertools.pairwise(curve)]
    grown = sum(step > 0.01 for step in steps)
    return (
        f"it starts at {curve[0]:.1f} MiB, grows in {grown} of {len(steps)} iterations, by {max(steps):.2f} MiB at most, and "
        f"{'falls' if min(steps) < -0.01 else 'never falls'}; one output has {output:.2f} MiB"
    )


def _named(cause: Callable, runs: Sequence[tuple[list[float], float]]) -> list[str] | str:
    try:
        return [cause(list(curve), output) for curve, output in runs]
    except Exception as error:
        return f"your code raised {type(error).__name__}: {error}"


# -- A stranger's snapshot

PROGRAM = "train.py"
LIBRARY = "/opt/lib/python3/site-packages/toolbox/layers.py"


def stranger() -> dict:
    """A snapshot as torch.cuda.memory._dump_snapshot writes it, of somebody's program that ran out of memory."""
    return _snapshot(random.Random(7))[0]


def _snapshot(draw: random.Random) -> tuple[dict, tuple[str, int]]:
    """A snapshot, and the line of train.py that holds most.

    What misleads: it holds many small blocks, and another line the largest one; free blocks are larger still; some frames begin in a
    library; some blocks have no frame at all."""
    lines = draw.sample(range(8, 90), 5)
    culprit, single, *others = lines
    size = draw.choice([4, 6, 8]) * 2**20
    library = draw.random() < 0.5
    blocks = [_block(size, culprit, library) for _ in range(draw.randint(10, 14))]
    blocks.append(_block(6 * size, single))
    blocks += [_block(draw.randint(1, 3) * size // 2, line) for line in others for _ in range(3)]
    blocks.append(_block(3 * size, None))
    blocks += [_block(9 * size, single, state=state) for state in ("inactive", "active_awaiting_free")]
    draw.shuffle(blocks)
    cut = len(blocks) // 2
    segments = [{"total_size": sum(b["size"] for b in part), "blocks": part} for part in (blocks[:cut], blocks[cut:])]
    return {"segments": segments, "device_traces": [[]]}, (PROGRAM, culprit)


def _block(size: int, line: int | None, library: bool = False, state: str = "active_allocated") -> dict:
    own = [{"filename": PROGRAM, "line": line, "name": "train"}, {"filename": PROGRAM, "line": 99, "name": "<module>"}]
    inside = [{"filename": LIBRARY, "line": 40, "name": "forward"}]
    frames = [] if line is None or state == "inactive" else inside * library + own
    return {"state": state, "size": size, "requested_size": size, "frames": frames}


@grader
def culprits(culprit: Callable, timeout: float = 20) -> str | None:
    """culprit(snapshot) returns (file, line) of the stranger's own line that holds most, in each of ten snapshots."""
    draw = random.Random(11)
    cases = [_snapshot(draw) for _ in range(10)]
    said = alone(_asked, culprit, [snapshot for snapshot, _ in cases], timeout=timeout)
    if isinstance(said, str):
        return said
    for got, (_, wanted) in zip(said, cases, strict=True):
        if got != wanted:
            right = sum(a == b for a, (_, b) in zip(said, cases, strict=True))
            return f"it is right about {right} of {len(cases)} snapshots. In one of the others {_mistaken(got)}"
    return None


def _asked(culprit: Callable, snapshots: Sequence[dict]) -> list | str:
    try:
        return [
            tuple(place) if isinstance(place := culprit(snapshot), list | tuple) else place for snapshot in snapshots
        ]
    except Exception as error:
        return f"your code raised {type(error).__name__}: {error}"


def _mistaken(got: object) -> str:
    """Which of the known wrong ideas it is; never the answer."""
    if not (isinstance(got, tuple) and len(got) == 2):
        return f"it returns {got!r}; a pair of file name and line number is asked for"
    if got[0] == LIBRARY:
        return "it names a line of an installed library. Go on to the first frame that is the stranger's own"
    if got == (PROGRAM, 99):
        return "it names the outermost frame, which is there in every block"
    return f"it names line {got[1]}, which does not hold most. Sum up by line, and only what is `active_allocated`"
