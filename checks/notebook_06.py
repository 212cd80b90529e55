"""The graders of notebook 06: out of memory. Both run the reader's code in a process of its own: an endless loop ends with it, and what
the notebook's GPU holds does not matter."""

import gc
import itertools
import math
from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.nn import functional as F

import virtualgpu
from checks.grader import alone_on_t4, grader, plain

MIB = 1 << 20
ENDS = "is there a loop without an end?"

# -- An estimate from shapes

WITHIN = 0.10
NETWORKS: list[tuple[list[int], int]] = [  # widths and batch: parameters weigh most, activations, and both
    ([1024, 8192, 8192, 1024, 10], 64),
    ([784, 8192, 2048, 8192, 8192, 4096, 10], 128),
    ([3072, 2048, 512, 4096, 8192, 2048, 512, 10], 128),
    ([1024, 1024, 1024, 10], 65_536),
    ([784, 256, 1024, 10], 16_384),
    ([784, 512, 256, 256, 256, 1024, 10], 16_384),
    ([1024, 512, 1024, 10], 65_536),
    ([3072, 1024, 512, 1024, 512, 512, 1024, 10], 16_384),
    ([256, 1024, 2048, 1024, 4096, 10], 4096),
    ([1024, 2048, 4096, 512, 8192, 512, 512, 10], 4096),
    ([784, 512, 8192, 2048, 8192, 10], 4096),
    ([784, 8192, 8192, 4096, 1024, 10], 8192),
]


def measured(widths: Sequence[int], batch_size: int) -> float:
    """MiB at the peak of two training steps of a network of linear layers and ReLU; shapes alone are run, on the GPU that is there."""
    with virtualgpu.dry_run():
        torch.cuda.reset_peak_memory_stats()
        layers = [layer for a, b in itertools.pairwise(widths) for layer in (nn.Linear(a, b), nn.ReLU())]
        net = nn.Sequential(*layers[:-1]).cuda()
        optimizer = torch.optim.Adam(net.parameters(), fused=True)
        x = torch.zeros(batch_size, widths[0], device="cuda")
        y = torch.zeros(batch_size, dtype=torch.long, device="cuda")
        for _ in range(2):
            F.cross_entropy(net(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        return torch.cuda.max_memory_allocated() / MIB


@grader
def estimates(peak_mib: Callable, timeout: float = 60) -> str | None:
    """peak_mib(widths, batch_size) comes within 10 % of what two steps take, for twelve networks."""
    return alone_on_t4(_estimated, peak_mib, ask=ENDS, timeout=timeout)


def _estimated(peak_mib: Callable) -> str | None:
    """The complaint about the network that is farthest off, by a factor."""
    wrong = []
    for widths, batch_size in NETWORKS:
        said = plain(peak_mib(list(widths), batch_size))
        if isinstance(said, bool) or not isinstance(said, int | float) or not math.isfinite(said) or said < 0:
            return (
                f"for widths {widths} and a batch of {batch_size:,} it returns {said!r}: a number of MiB is asked for"
            )
        right = measured(widths, batch_size)
        if abs(said / right - 1) > WITHIN:
            wrong.append((abs(math.log(max(said, 1e-9) / right)), said, right, widths, batch_size))
    if not wrong:
        return None
    if all(abs(said / MIB / right - 1) <= WITHIN for _, said, right, *_ in wrong):
        return "it returns bytes, it seems: divide by 2**20, for MiB are asked for"
    _, said, right, widths, batch_size = max(wrong)
    return (
        f"{len(NETWORKS) - len(wrong)} of {len(NETWORKS)} are right within {WITHIN:.0%}. Farthest off, widths {widths} and a batch of {batch_size:,}: you say "
        f"{said:,.0f} MiB, and it takes {right:,.0f}"
    )


# -- A leak in a stranger's program

EPOCHS, ALLOWED = 4, 512  # bytes that an epoch may leave behind: the allocator's smallest block


class Expected:
    """What the stranger's program reports, without its leaks."""

    def __init__(self, net, batches, device):
        self.net, self.batches, self.device = net.to(device), batches, device
        self.optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
        self.hardest, self.report = [], []

    def epoch(self):
        for x, y in self.batches:
            losses = F.cross_entropy(self.net(x.to(self.device)), y.to(self.device), reduction="none")
            self.optimizer.zero_grad()
            losses.mean().backward()
            self.optimizer.step()
            worst = losses.argmax().item()
            self.hardest.append((x[worst].clone(), losses[worst].item()))
        self.net.eval()
        margins, right = [], 0
        with torch.no_grad():
            for x, y in self.batches:
                scores = self.net(x.to(self.device)).cpu()
                first, second = scores.topk(2, dim=1).values.unbind(dim=1)
                margins.append((first - second).mean().item())
                right += (scores.argmax(dim=1) == y).sum().item()
        self.net.train()
        self.report.append({"right": right, "margin": sum(margins) / len(margins)})


@grader
def leaks_nothing(run: Callable, timeout: float = 60) -> str | None:
    """run(net, batches, device) makes a training run whose epoch() leaves nothing on the GPU from the second one on, and whose report,
    hardest and network are those of the stranger's."""
    return alone_on_t4(_watched, run, ask=ENDS, timeout=timeout)


def _material() -> tuple[nn.Module, list[tuple[torch.Tensor, torch.Tensor]]]:
    """A network and batches for it, the same each time."""
    draw = torch.Generator().manual_seed(6)
    batches = [(torch.randn(24, 1, 16, 16, generator=draw), torch.randint(10, (24,), generator=draw)) for _ in range(5)]
    torch.manual_seed(6)
    layers = [nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 14 * 14, 10)]
    return nn.Sequential(*layers), batches


def _watched(run: Callable) -> str | None:
    device = torch.device("cuda", 0)
    net, batches = _material()
    expected = Expected(net, batches, device)
    for _ in range(EPOCHS):
        expected.epoch()
    wanted = {name: value.cpu() for name, value in net.state_dict().items()}
    del net, expected.net, expected.optimizer
    net, batches = _material()
    running, held = run(net, batches, device), []
    for _ in range(EPOCHS):
        running.epoch()
        gc.collect()
        held.append(torch.cuda.memory_allocated())
    left = (held[-1] - held[1]) // (EPOCHS - 2)
    return _differs(running, net, wanted, expected) or (
        None
        if left <= ALLOWED
        else f"an epoch of {len(batches)} batches still leaves {left / 1024:,.0f} KiB on the GPU"
    )


def _differs(running, net: nn.Module, wanted: dict[str, torch.Tensor], expected: Expected) -> str | None:
    """What is not as the stranger's program has it."""
    missing = [name for name in ("report", "hardest") if not hasattr(running, name)]
    if missing:
        return f"the run has no `{missing[0]}` any more: what it reports has to stay"
    for name, value in net.state_dict().items():
        if not torch.allclose(value.cpu().float(), wanted[name].float(), rtol=1e-3, atol=1e-4):
            return f"it trains another network: after {EPOCHS} epochs `{name}` differs"
    if len(running.report) != len(expected.report):
        return f"`report` has {len(running.report)} rows after {EPOCHS} epochs"
    for epoch, (row, right) in enumerate(zip(running.report, expected.report, strict=True)):
        for key, value in right.items():
            if key not in row:
                return f"`report` says nothing of {key!r} any more"
            if abs(_number(row[key]) - value) > 1e-3 * max(1, abs(value)):
                return f"`report` has {key!r} {_number(row[key]):.4f} in epoch {epoch}, and the program as it was {value:.4f}"
    if len(running.hardest) != len(expected.hardest):
        return f"`hardest` has {len(running.hardest)} images, and the program as it was {len(expected.hardest)}"
    for (image, loss), (right_image, right_loss) in zip(running.hardest, expected.hardest, strict=True):
        if not torch.equal(torch.as_tensor(image).cpu(), right_image) or abs(_number(loss) - right_loss) > 1e-3:
            return "`hardest` has another image or another loss than the program as it was"
    return None


def _number(value) -> float:
    return float(value.detach() if isinstance(value, torch.Tensor) else value)
