"""Programs on several GPUs, but for Llama's: DDP, DataParallel, ZeRO, tensor parallel, pipelines. The settings are the functions' docstrings."""

import os
from dataclasses import replace

import torch
import torch.distributed as dist
import torch.nn.functional as F
import torchvision
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import virtualgpu
from tests import tutorial as experiment
from tests.accuracy import gpt
from tests.accuracy.published import Published, Row, published, ratio
from tests.accuracy.runner import Measured, autocast, beside, dry_run, measured
from virtualgpu.hardware.specs import find_spec
from virtualgpu.run.ranks import launch


def train_ddp(row: Published) -> Measured:
    """The third step: DDP orders its buckets anew after the first."""
    options = row.options
    with dry_run(row, world_size=row.gpus, gpus_per_node=4, network=options.get("network")):
        model = DistributedDataParallel(getattr(torchvision.models, row.model)().cuda())
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=float(options.get("momentum", 0)))

        def step():
            if options.get("gradients") == "dropped":
                optimizer.zero_grad()
            if options.get("data") == "device":
                pictures = torch.empty(row.batch, 3, row.size, row.size, device="cuda")
            else:
                pictures = torch.empty(row.batch, 3, row.size, row.size, pin_memory=True).cuda(non_blocking=True)
            labels = torch.zeros(row.batch, dtype=torch.int64).cuda()
            with autocast(row):
                loss = F.cross_entropy(model(pictures), labels)
            loss.backward()
            optimizer.step()

        took = measured(step, 3)
        return took._replace(seconds=took.seconds / row.gpus)


def ddp() -> list[Row]:
    def what(row: Published) -> str:
        return f"{row.model}, DDP, {row.precision}, batch {row.batch}, {row.gpus} {row.card}"

    found, firsts = [], {}
    for row, result in zip(published("ddp"), beside("ddp", train_ddp, what), strict=True):
        found.append(result)
        one = firsts.setdefault(row._replace(gpus=1, settings="", figure=0, missed=""), result)
        if one is not result:
            found.append(ratio(f"{result.what} against one", result, one))
    return found


def train_data_parallel(row: Published) -> Measured:
    with dry_run(row, row.gpus):
        model = getattr(torchvision.models, row.model)()
        model = (nn.DataParallel(model) if row.gpus > 1 else model).cuda()
        images = torch.randn(row.batch, 3, row.size, row.size)
        labels = torch.zeros(row.batch, dtype=torch.int64, device="cuda")

        def step():
            model.zero_grad()
            F.cross_entropy(model(images.cuda()), labels).backward()

        return measured(step, 3)


def data_parallel() -> list[Row]:
    def what(row: Published) -> str:
        return f"{row.model}, DataParallel on {row.gpus}, {row.card}"

    rows, told = published("data_parallel"), beside("data_parallel", train_data_parallel, what)
    found = {(row.card, row.model, row.gpus): result for row, result in zip(rows, told, strict=True)}
    return [
        ratio(f"time on {gpus} against 1: {row.what}", row, found[card, model, 1])
        for (card, model, gpus), row in found.items()
        if gpus > 1
    ]


def zero_peaks(sharded: bool) -> dict[str, float]:
    """Peaks of one rank, in millions of bytes."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    rank = int(os.environ["LOCAL_RANK"])
    told = {}

    def note(when: str) -> None:
        told[when] = torch.cuda.max_memory_allocated(rank) / 1e6

    torch.cuda.set_device(rank)
    model = nn.Sequential(*[nn.Linear(2000, 2000).to(rank) for _ in range(20)])
    note("model")
    model = DistributedDataParallel(model, device_ids=[rank])
    note("after DDP")
    adam, options = torch.optim.Adam, {"lr": 0.01, "foreach": False}
    if sharded:
        optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=adam, **options)
    else:
        optimizer = adam(model.parameters(), **options)
    outputs = model(torch.randn(20, 2000).to(rank))
    F.mse_loss(outputs, torch.randn(20, 2000).to(rank)).backward()
    note("before the step")
    optimizer.step()
    note("after the step, ZeRO" if sharded else "after the step")
    return told


def zero_recipe() -> list[Row]:
    with virtualgpu.gpus(2, like="V100"):
        told = launch(zero_peaks, True, nprocs=2, dry=True)[0] | launch(zero_peaks, False, nprocs=2, dry=True)[0]
    found = [(row, row.options["when"]) for row in published("zero_recipe")]
    return [row.beside(f"DDP and Adam: {when}", told[when], 3) for row, when in found]


def tutorial() -> list[Row]:
    slower, faster = experiment.simulated()
    told = {
        f"split={size}": (f"pipeline, split size {size}: speed against one GPU", 1 + faster[size], 10)
        for size in faster
    }
    told["halves=time"] = "ResNet-50 in halves: time against one GPU", 1 + slower, 10
    told["split=best"] = "best of nine split sizes", max(faster, key=faster.get), 0
    return [row.beside(*told[row.settings]) for row in published("tutorial")]


class WithLoss(nn.Module):
    """GPT-2 124M that gives its loss, as transformers' does."""

    def __init__(self, length: int = 1024, hidden: int = 768):
        super().__init__()
        blocks = [gpt.OldBlock(hidden, 12, length) for _ in range(12)]
        self.model = gpt.GPT(50257, length, hidden, blocks, dropout=gpt.DROPOUT)

    def forward(self, tokens):
        return F.cross_entropy(self.model(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def train_gpt2(parallel: nn.Module, row: Published, batch: int) -> float:
    """Seconds of the third step."""
    optimizer = torch.optim.AdamW(parallel.parameters(), foreach=False)

    def step():
        parallel(torch.zeros(batch, row.size, dtype=torch.int64).cuda()).mean().backward()
        nn.utils.clip_grad_norm_(parallel.parameters(), 1.0, foreach=False)
        optimizer.step()
        parallel.zero_grad(set_to_none=False)  # as PyTorch did then

    return measured(step, 3).seconds


def rank_of_gpt2(row: Published) -> float:
    os.environ["NCCL_P2P_DISABLE"] = str(int("no NVLink" in row.options["parallel"]))
    device = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(device)
    return train_gpt2(DistributedDataParallel(WithLoss().cuda(), device_ids=[device]), row, row.batch)


def gpt2() -> list[Row]:
    found = {}
    for row in published("gpt2"):
        steps, parallel = int(row.options["steps"]), row.options["parallel"]
        with virtualgpu.gpus(2, like=f"{row.card} NVLink", host=row.host):
            if parallel.startswith("DDP"):
                seconds = launch(rank_of_gpt2, row, nprocs=2, dry=True, timeout=300)[0]
            else:
                with virtualgpu.dry_run():
                    seconds = train_gpt2(nn.DataParallel(WithLoss().cuda()), row, 2 * row.batch)
        found[parallel] = row.beside(f"GPT-2, 2 TITAN RTX, {steps} steps: {parallel}", steps * seconds)
    pairs = ("DDP, NVLink", "DP, NVLink"), ("DDP, no NVLink", "DDP, NVLink")
    ratios = [ratio(f"GPT-2, time: {one} against {other}", found[one], found[other], 10) for one, other in pairs]
    return [*found.values(), *ratios]


class Copy(torch.autograd.Function):
    """Every rank has the input; its gradients are summed."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, dx):
        dist.all_reduce(dx)
        return dx


class Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, dx):
        return dx


class CrossEntropy(torch.autograd.Function):
    """Of logits that ranks have columns of; in place, as Megatron-LM's."""

    @staticmethod
    def forward(ctx, logits, labels, parts):
        highest, wanted = logits.max(dim=-1)[0], labels % logits.shape[1]
        if parts > 1:
            dist.all_reduce(highest, dist.ReduceOp.MAX)
        logits -= highest[:, None]
        chosen = logits.gather(1, wanted[:, None])[:, 0]
        total = logits.exp_().sum(dim=-1)
        if parts > 1:
            dist.all_reduce(chosen)
            dist.all_reduce(total)
        ctx.save_for_backward(logits.div_(total[:, None]), wanted)
        return (total.log() - chosen).mean()

    @staticmethod
    def backward(ctx, dloss):
        probabilities, wanted = ctx.saved_tensors
        rows = torch.arange(len(wanted), device=wanted.device)
        probabilities[rows, wanted] -= 1
        return probabilities.mul_(dloss / len(wanted)), None, None


class MegatronBlock(gpt.Block):
    """Of so many parts, one: its columns of the first layer, its rows of the second. One softmax for scale, mask and softmax."""

    gelu = staticmethod(gpt.tanh)

    def __init__(self, hidden: int, heads: int, parts: int):
        super().__init__(hidden, heads // parts, dropout=gpt.DROPOUT)
        self.parts = parts
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden // parts), nn.Linear(hidden // parts, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden // parts), nn.Linear(4 * hidden // parts, hidden)

    def mix(self, q, k, v):
        return self.drop(F.softmax(q @ k.transpose(-1, -2), dim=-1)) @ v

    def split(self, x):
        return self.qkv(x).view(*x.shape[:2], self.heads, 3, -1).permute(3, 0, 2, 1, 4)

    def forward(self, x):
        into, whole = (Copy.apply, Sum.apply) if self.parts > 1 else (lambda x: x, lambda x: x)
        x = x + self.drop(whole(self.attend(into(self.norms[0](x)))))
        return x + self.drop(whole(self.down(self.gelu(self.up(into(self.norms[1](x)))))))


class Megatron(gpt.GPT):
    """forward gives the loss."""

    def __init__(self, parts: int, length: int, hidden: int = 1024, vocabulary: int = 50304):
        blocks = [MegatronBlock(hidden, 16, parts) for _ in range(24)]
        super().__init__(vocabulary // parts, length, hidden, blocks, dropout=gpt.DROPOUT)
        self.parts = parts

    def forward(self, tokens):
        x = self.words(tokens % self.words.num_embeddings)
        x = Sum.apply(x) if self.parts > 1 else x
        x = self.drop(x + self.places(torch.arange(tokens.shape[1], device=tokens.device)))
        x = self.norm(self.blocks(x))
        logits = F.linear(Copy.apply(x) if self.parts > 1 else x, self.words.weight)
        return CrossEntropy.apply(logits.flatten(0, 1).float(), tokens.flatten(), self.parts)


def train_megatron(row: Published) -> Measured:
    parallel = row.options["parallel"]
    card = find_spec(f"{row.card} NVLink")
    faster = 40.0 / 35.6  # a 3090 Ti against a 3090, by the data sheets
    rates = {dtype: faster * rate for dtype, rate in card.rates.items()}
    card = replace(card, rates=rates, processors=84, bandwidth=1008e9)
    os.environ["NCCL_P2P_DISABLE"] = str(int("no NVLink" in parallel))
    with dry_run(row, like=card, world_size=row.gpus):
        model = Megatron(2 if parallel == "tensor" else 1, row.size).cuda().bfloat16()
        parameters = list(model.parameters())
        copies = [parameter.detach().float() for parameter in parameters]
        sizes = [parameter.numel() for parameter in parameters]
        gradients = torch.zeros(sum(sizes), device="cuda")
        for parameter, copy, part in zip(parameters, copies, gradients.split(sizes), strict=True):
            copy.grad = part.view_as(copy)

            def add(parameter, total=copy.grad):
                total += parameter.grad
                parameter.grad = None

            parameter.register_post_accumulate_grad_hook(add)
        optimizer = torch.optim.AdamW(copies, fused=True)

        def step():
            gradients.zero_()
            model(torch.zeros(row.batch, row.size, dtype=torch.int64).cuda()).backward()
            if parallel.startswith("DDP"):
                dist.all_reduce(gradients.div_(row.gpus))
            nn.utils.clip_grad_norm_(copies, 1.0)
            optimizer.step()
            with torch.no_grad():
                torch._foreach_copy_(parameters, copies)

        took = measured(step)
    del os.environ["NCCL_P2P_DISABLE"]
    return took._replace(seconds=took.seconds / (row.gpus if parallel.startswith("DDP") else 1))


def megatron() -> list[Row]:
    what = "GPT-2 medium, Megatron-LM, RTX 3090 Ti: {}".format
    found = beside("megatron", train_megatron, lambda row: what(row.options["parallel"]))
    one, *others = found
    ratios = [ratio(f"GPT-2 medium, speed: {row.what.rpartition(': ')[2]} against one GPU", row, one) for row in others]
    return [*found, *ratios]


STAGES, HIDDEN = 8, 4096


def stage_of(index: int) -> nn.Module:
    edges = index in (0, STAGES - 1)
    blocks = [gpt.Block(HIDDEN, 32) for _ in range(3 if edges else 4)]
    if index == 0:
        return nn.Sequential(nn.Embedding(50304, HIDDEN), *blocks)
    return nn.Sequential(*blocks, *([nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, 50304)] if edges else []))


def of_words(logits, labels):
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def run_stage(rows: list[Published]) -> list[tuple[float, float]]:
    """Of each row: seconds of a step here, and those in which this stage worked."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    index = int(os.environ["RANK"])
    torch.cuda.set_device(index)
    device = torch.device("cuda", index)
    module, told = stage_of(index).to(device, torch.bfloat16), []
    for row in rows:
        count = int(row.options["micro_batches"])
        schedule = Schedule1F1B(PipelineStage(module, index, STAGES, device), count, loss_fn=of_words)

        def step(schedule=schedule, samples=count * row.batch, length=row.size):
            tokens = torch.zeros(samples, length, dtype=torch.int64, device=device)
            if index == 0:
                schedule.step(tokens)
            else:
                schedule.step(target=tokens) if index == STAGES - 1 else schedule.step()

        dist.barrier()  # all begin together, whenever their parameters had come
        measured(step, 1)
        dist.barrier()
        took = measured(step, 1)
        told.append((took.seconds, took.kernels))
        module.zero_grad()
    return told


def zero_bubble() -> list[Row]:
    rows = published("zero_bubble")
    with virtualgpu.gpus(STAGES, like="A100-80GB"):
        ranks = launch(run_stage, rows, nprocs=STAGES, dry=True, timeout=600)
    found = []
    for row, of_ranks in zip(rows, zip(*ranks, strict=True), strict=True):
        cost, busy = map(max, zip(*of_ranks, strict=True))
        what = f"1F1B, 8 stages, {row.options['micro_batches']} micro-batches: bubble"
        found.append(row.beside(what, 1 - busy / cost, 10))
    return found
