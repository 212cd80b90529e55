"""Programs of every kind on one card, as we timed them on an H100 (80 GB, SXM; PyTorch 2.11, CUDA 13, cuDNN 9.19; November 2026).

That card's kernels and its host's operations were measured one by one in the same hours, and are what the clock has of them; no program was
an input.

Settings: a row of published.csv each, random data. Pictures by torchvision's models and SGD with momentum; GPT-2 124M as nanoGPT has it (no
dropout, tied words); an optimizer alone over 100 M parameters in 208 tensors; a U-Net, an LSTM, a DCGAN, perceptrons, a recommender
(DLRM), a graph network, `nn.Transformer`. The time is that of steps one after the other, without a wait between them; the memory is the
most allocated. What convolutions and LSTMs borrow was looked at in these very programs: their memory is not judged here. Those of
transformers (BERT, T5, Llama) were timed as well, and are left out: that package is no part of this project's set-up.

    python -m tests.accuracy.one_card      on a machine with a GPU: the same there, a line each, beside the H100's
"""

import contextlib
import itertools
import os
import statistics
import time
from collections.abc import Callable
from unittest import mock

import torch
import torchvision
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import virtualgpu
from tests.accuracy import vision
from tests.accuracy.published import Published, published
from tests.accuracy.row import Row

URL = "measured here"
# cuBLAS's workspaces are kept, as PyTorch had it before 2.15
KEPT = mock.patch.dict(os.environ, TORCH_CUBLAS_WORKSPACE_CACHE="1")
WARM, STEPS = 3, 3  # of the simulation, where one step is as long as the next
Step = Callable[[], object]


def training(parameters, loss: Callable, row: Published, kind=torch.optim.Adam, **options) -> Step:
    """A step: gradients away, loss, backward, optimizer; autocast where the row says so."""
    optimizer = kind(parameters, **options)

    def step():
        optimizer.zero_grad()
        with vision.autocast(row):
            value = loss()
        value.backward()
        optimizer.step()

    return step


class Block(nn.Module):
    """Of GPT-2."""

    def __init__(self, hidden: int, fused: bool):
        super().__init__()
        self.heads, self.fused = hidden // 64, fused
        self.n1, self.n2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden, bias=False), nn.Linear(hidden, hidden, bias=False)
        self.up, self.down = nn.Linear(hidden, 4 * hidden, bias=False), nn.Linear(4 * hidden, hidden, bias=False)

    def attend(self, x):
        batch, length, hidden = x.shape
        q, k, v = (
            part.view(batch, length, self.heads, 64).transpose(1, 2) for part in self.qkv(x).split(hidden, dim=2)
        )
        if self.fused:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            seen = torch.ones(length, length, dtype=torch.bool, device=x.device).tril()
            scores = (q @ k.transpose(-2, -1)) * 0.125
            y = F.softmax(scores.masked_fill(~seen, float("-inf")), dim=-1) @ v
        return self.out(y.transpose(1, 2).contiguous().view(batch, length, hidden))

    def forward(self, x):
        x = x + self.attend(self.n1(x))
        return x + self.down(F.gelu(self.up(self.n2(x)), approximate="tanh"))


class GPT2(nn.Module):
    def __init__(self, vocabulary: int, length: int, fused: bool, recompute: bool, hidden: int = 768, layers: int = 12):
        super().__init__()
        self.vocabulary, self.recompute = vocabulary, recompute
        self.words, self.places = nn.Embedding(vocabulary, hidden), nn.Embedding(length, hidden)
        self.blocks, self.norm = nn.ModuleList(Block(hidden, fused) for _ in range(layers)), nn.LayerNorm(hidden)

    def forward(self, tokens):
        x = self.words(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        logits = F.linear(self.norm(x), self.words.weight)
        return F.cross_entropy(logits.view(-1, self.vocabulary), tokens.view(-1))


def gpt2(row: Published) -> Step:
    options = row.options
    plain, vocabulary = options.get("attention") == "plain", int(options.get("vocabulary", 50304))
    model = GPT2(vocabulary, row.size, not plain, "recompute" in options).cuda()
    tokens = torch.randint(0, 50000, (row.batch, row.size), device="cuda")
    fused = {"foreach" if options["optimizer"].endswith("foreach") else "fused": True}
    return training(model.parameters(), lambda: model(tokens), row, torch.optim.AdamW, **fused)


def optimizer(row: Published) -> Step:
    """The step alone, or clipping alone."""
    shapes = [(768, 768)] * 104 + [(512, 768)] * 94 + [(768,)] * 10
    parameters = [torch.randn(shape, device="cuda").requires_grad_() for shape in shapes]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    kind = row.options["kind"]
    if kind == "clip":
        return lambda: nn.utils.clip_grad_norm_(parameters, 1.0)
    if kind == "SGD":
        return torch.optim.SGD(parameters, momentum=0.9, weight_decay=1e-4).step
    options = {"foreach": {"foreach": True}, "fused": {"fused": True}, "loop": {"foreach": False}}[kind]
    return torch.optim.AdamW(parameters, **options).step


def double(before: int, after: int) -> nn.Sequential:
    """Two convolutions of a U-Net."""
    layers = []
    for width in (before, after):
        layers += [nn.Conv2d(width, after, 3, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU(True)]
    return nn.Sequential(*layers)


class UNet(nn.Module):
    def __init__(self, sizes=(64, 128, 256, 512, 1024)):
        super().__init__()
        self.down = nn.ModuleList(itertools.starmap(double, itertools.pairwise((3, *sizes))))
        steps = list(itertools.pairwise(reversed(sizes)))
        self.grow = nn.ModuleList(nn.ConvTranspose2d(wide, thin, 2, stride=2) for wide, thin in steps)
        self.up = nn.ModuleList(double(2 * thin, thin) for _, thin in steps)
        self.last = nn.Conv2d(64, 2, 1)

    def forward(self, x):
        kept = []
        for i, layer in enumerate(self.down):
            x = layer(F.max_pool2d(x, 2) if i else x)
            kept.append(x)
        for grow, layer, old in zip(self.grow, self.up, kept[-2::-1], strict=True):
            x = layer(torch.cat([old, grow(x)], dim=1))
        return self.last(x)


def unet(row: Published) -> Step:
    model, x = UNet().cuda(), torch.randn(row.batch, 3, row.size, row.size, device="cuda")
    y = torch.zeros(row.batch, row.size, row.size, dtype=torch.int64, device="cuda")
    return training(model.parameters(), lambda: F.cross_entropy(model(x), y), row)


def lstm(row: Published) -> Step:
    with torch.device("cuda"):
        words, head = nn.Embedding(10000, 640), nn.Linear(640, 10000)
        layers = nn.LSTM(640, 640, 2, dropout=0.3, batch_first=True)
        tokens = torch.randint(0, 10000, (row.batch, row.size))

    def loss():
        return F.cross_entropy(head(layers(words(tokens))[0]).flatten(0, 1), tokens.flatten())

    parameters = [*words.parameters(), *layers.parameters(), *head.parameters()]
    return training(parameters, loss, row, torch.optim.SGD, lr=0.1)


def perceptron(row: Published) -> Step:
    """Two wide layers, or twenty-one narrow ones, whose steps are the host's."""
    widths = [row.size, 4 * row.size, 1000] if row.size > 256 else [row.size] * 21 + [10]
    layers = itertools.chain(*((nn.Linear(*sizes), nn.ReLU()) for sizes in itertools.pairwise(widths)))
    model = nn.Sequential(*list(layers)[:-1]).cuda()
    x, y = torch.randn(row.batch, row.size, device="cuda"), torch.randint(0, widths[-1], (row.batch,), device="cuda")
    return training(model.parameters(), lambda: F.cross_entropy(model(x), y), row)


def dlrm(row: Published) -> Step:
    """26 tables of 100,000 rows, four of them looked up in each for a sample."""
    with torch.device("cuda"):
        tables = nn.ModuleList(nn.EmbeddingBag(100_000, 64, mode="sum") for _ in range(row.size))
        bottom = nn.Sequential(nn.Linear(13, 512), nn.ReLU(), nn.Linear(512, 64), nn.ReLU())
        top = nn.Sequential(nn.Linear(27 * 27 + 64, 512), nn.ReLU(), nn.Linear(512, 1))
        dense, y = torch.randn(row.batch, 13), torch.rand(row.batch, 1).round()
        bags = [torch.randint(0, 100_000, (row.batch * 4,)) for _ in tables]
        offsets = torch.arange(0, row.batch * 4, 4)

    def loss():
        x = bottom(dense)
        z = torch.stack([x, *(table(bag, offsets) for table, bag in zip(tables, bags, strict=True))], dim=1)
        out = top(torch.cat([x, (z @ z.transpose(1, 2)).flatten(1)], dim=1))
        return F.binary_cross_entropy_with_logits(out, y)

    parameters = [*tables.parameters(), *bottom.parameters(), *top.parameters()]
    return training(parameters, loss, row, torch.optim.SGD, lr=0.01)


def dcgan(row: Published) -> Step:
    def up(before, after, stride, padding):
        grow = nn.ConvTranspose2d(before, after, 4, stride, padding, bias=False)
        return nn.Sequential(grow, nn.BatchNorm2d(after), nn.ReLU(True))

    def down(before, after):
        return nn.Sequential(
            nn.Conv2d(before, after, 4, 2, 1, bias=False), nn.BatchNorm2d(after), nn.LeakyReLU(0.2, True)
        )

    with torch.device("cuda"):
        ups = [up(100, 512, 1, 0), up(512, 256, 2, 1), up(256, 128, 2, 1), up(128, 64, 2, 1)]
        make = nn.Sequential(*ups, nn.ConvTranspose2d(64, 3, 4, 2, 1), nn.Tanh())
        downs = [nn.Conv2d(3, 64, 4, 2, 1), nn.LeakyReLU(0.2), down(64, 128), down(128, 256), down(256, 512)]
        judge = nn.Sequential(*downs, nn.Conv2d(512, 1, 4), nn.Flatten())
        real, one, zero = torch.randn(row.batch, 3, 64, 64), torch.ones(row.batch, 1), torch.zeros(row.batch, 1)
    ours, theirs = (torch.optim.Adam(net.parameters(), lr=2e-4, betas=(0.5, 0.999)) for net in (make, judge))
    loss = nn.BCEWithLogitsLoss()

    def step():
        theirs.zero_grad()
        fake = make(torch.randn(row.batch, 100, 1, 1, device="cuda"))
        (loss(judge(real), one) + loss(judge(fake.detach()), zero)).backward()
        theirs.step()
        ours.zero_grad()
        loss(judge(fake), one).backward()
        ours.step()

    return step


def gnn(row: Published) -> Step:
    """Means over neighbours: batch nodes, size edges."""
    nodes, edges = row.batch, row.size
    with torch.device("cuda"):
        layers = nn.ModuleList(nn.Linear(128, 128) for _ in range(3))
        x, y = torch.randn(nodes, 128), torch.randint(0, 128, (nodes,))
        source, target = (torch.randint(0, nodes, (edges,)) for _ in range(2))

    def loss():
        degree = torch.zeros(nodes, device="cuda").scatter_add_(0, target, torch.ones(edges, device="cuda"))
        h = x
        for layer in layers:
            mean = torch.zeros_like(h).index_add(0, target, layer(h)[source]) / degree.clamp(min=1)[:, None]
            h = torch.relu(mean)
        return F.cross_entropy(h, y)

    return training(layers.parameters(), loss, row)


def transformer(row: Published) -> Step:
    model = nn.Transformer(d_model=1024, nhead=16, batch_first=True).cuda()
    x = torch.randn(row.batch, row.size, 1024, device="cuda")
    optimizer = torch.optim.AdamW(model.parameters())

    def step():
        with vision.autocast(row):
            loss = model(x, x).square().mean()
        optimizer.zero_grad()  # so the last gradients are there in the forward pass
        loss.backward()
        optimizer.step()

    return step


def loaded(row: Published) -> Step:
    """Pictures that come from the host: pinned, on a stream of their own, the next ones during a step; or from ordinary memory."""
    model = getattr(torchvision.models, row.model)().cuda()
    pinned = row.options["loader"] == "pinned prefetch"
    batches = [torch.randn(row.batch, 3, row.size, row.size) for _ in range(2)]
    batches = itertools.cycle([batch.pin_memory() for batch in batches] if pinned else batches)
    y = torch.zeros(row.batch, dtype=torch.int64, device="cuda")
    side = torch.cuda.Stream()

    def copied():
        with torch.cuda.stream(side):
            return next(batches).to("cuda", non_blocking=True)

    ready = [copied()] if pinned else []

    def loss():
        if not pinned:
            return F.cross_entropy(model(next(batches).cuda()), y)
        torch.cuda.current_stream().wait_stream(side)
        x = ready.pop()
        x.record_stream(torch.cuda.current_stream())
        ready.append(copied())
        return F.cross_entropy(model(x), y)

    return training(model.parameters(), loss, row, torch.optim.SGD, momentum=0.9)


PROGRAMS = {
    "gpt2": gpt2,
    "optimizer": optimizer,
    "unet": unet,
    "lstm": lstm,
    "perceptron": perceptron,
    "dlrm": dlrm,
    "dcgan": dcgan,
    "gnn": gnn,
    "nn.Transformer": transformer,
}


@contextlib.contextmanager
def precision(row: Published):
    """TF32 as the row says: "ieee" has none, "float32" that of convolutions, "tf32" both; and cuDNN's search where it asks for it."""
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    before = cudnn.allow_tf32, matmul.allow_tf32, cudnn.benchmark
    cudnn.allow_tf32, matmul.allow_tf32 = row.precision != "ieee", row.precision == "tf32"
    cudnn.benchmark = "search" in row.options
    try:
        yield
    finally:
        cudnn.allow_tf32, matmul.allow_tf32, cudnn.benchmark = before


def prepare(row: Published) -> Step:
    """A step of the program. Call it in `precision(row)`."""
    if "loader" in row.options:
        return loaded(row)
    return PROGRAMS[row.model](row) if row.model in PROGRAMS else vision.prepare(row)[1]


def measure(row: Published) -> tuple[float, int]:
    """Simulated seconds of a step, and most bytes allocated."""
    with KEPT, virtualgpu.dry_run(1, like=row.card, host=row.host), precision(row):
        step, clock = prepare(row), virtualgpu.machine().clock
        for _ in range(WARM):
            step()
        torch.cuda.synchronize()
        start = clock.host
        for _ in range(STEPS):
            step()
        torch.cuda.synchronize()
        return (clock.host - start) / STEPS, torch.cuda.max_memory_allocated()


def name(row: Published) -> str:
    settings = f", {row.settings}" if row.settings else ""
    return f"{row.model}, {row.mode}, {row.precision}{' channels last' * (row.layout == 'last')}, batch {row.batch}{settings}, {row.card}"


def rows() -> list[Row]:
    results, taken = [], {}
    for row in published("one_card"):
        if row.run not in taken:
            taken[row.run] = measure(row)
        seconds, most = taken[row.run]
        memory = row.kind == "memory"
        results.append(
            row.beside(f"{name(row)}{': most allocated' * memory}", most / 2**20 if memory else 1000 * seconds)
        )
    return results


def on_this_gpu(row: Published, seconds: float = 0.5) -> tuple[float, int]:
    """Measured seconds of a step on cuda:0, at the median of five stretches, and most bytes allocated."""
    with precision(row):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        step = prepare(row)
        stretches, steps = [], 10
        for _ in range(6):
            start = time.perf_counter()
            for _ in range(steps):
                step()
            torch.cuda.synchronize()
            stretches.append((time.perf_counter() - start) / steps)
            steps = max(3, round(seconds / stretches[-1] / 5))
        return statistics.median(stretches[1:]), torch.cuda.max_memory_allocated()


def main() -> None:
    if not torch.cuda.is_available():
        raise SystemExit("no GPU here: `python -m tests.accuracy one_card` simulates these programs")
    print(f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}; beside it the H100 of the table")
    for row in published("one_card"):
        taken, most = on_this_gpu(row)
        here = f"{most / 2**20:.1f} MiB" if row.kind == "memory" else f"{1000 * taken:.3f} ms"
        print(f"{name(row):<100} {here:>14} {row.figure:>12} {row.unit}", flush=True)


if __name__ == "__main__":
    main()
