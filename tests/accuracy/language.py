"""Transformers on one GPU, each from the settings of its rows in published.csv: what its docstring says, and nothing of the figures."""

import contextlib
import dataclasses
import itertools
from unittest import mock

import torch
import torch.nn.functional as F
from torch import nn

from tests.accuracy import gpt
from tests.accuracy.before import flash_attention
from tests.accuracy.llama import LLAMA3_1B, LLAMA3_8B, Llama
from tests.accuracy.published import Published, Row, published, ratio
from tests.accuracy.runner import NARROW, Measured, Step, autocast, beside, dry_run, measured, name
from tests.accuracy.vision import prepare

FROM_SCRATCH = ("gpt2", "gpt2 mask on the fly", "gpt2 fused AdamW", "gpt2 native classes", "gpt2 flash attention")
EVERY, EVALUATED = 15, 2  # steps, and batches evaluated after so many
FLASH_2 = "2024-01"  # PyTorch 2.2


def empty(row: Published) -> torch.Tensor:
    return torch.zeros(row.batch, row.size, dtype=torch.int64).cuda()


def words(row: Published) -> tuple[Step, Step | None]:
    """A step of a language model, and a batch evaluated."""
    level = FROM_SCRATCH.index(row.model) if row.model in FROM_SCRATCH else None
    large, optimizer = row.model == "bert_large", None
    if level is not None:
        model: nn.Module = gpt.from_scratch(row.size, level)
    else:
        model = gpt.Bert(1024, 16, 24, gpt.plain) if large else gpt.Bert(768, 12, 12, gpt.fused)
    model = model.cuda().to(NARROW.get(row.precision, torch.float32))
    if level is not None:
        optimizer = torch.optim.AdamW(model.parameters(), fused=level >= gpt.FUSED_ADAMW or None)
    elif not large:
        optimizer = torch.optim.Adam(model.parameters())
    scaler = torch.amp.GradScaler("cuda", enabled="scaler" in row.options)

    def forward():
        tokens, labels = empty(row), empty(row)
        with autocast(row):
            logits = model(tokens)
            loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return loss, logits if row.model == "bert_base" else None  # transformers returns both

    def step():
        if "gradients" not in row.options:
            model.zero_grad()
        output = forward()  # logits and all live in the backward pass as well
        scaler.scale(output[0]).backward()
        if optimizer:
            scaler.step(optimizer)
            scaler.update()

    def evaluate():
        model.eval()
        with torch.no_grad():
            forward()[0].item()
        model.train()

    return step, evaluate if level is not None else None


def pictures(row: Published) -> tuple[Step, None]:
    """The same of ViT-L/16 with 10 classes and Adam."""
    model, _ = prepare(row, num_classes=10)
    kind = torch.optim.SGD if row.options.get("optimizer") == "SGD" else torch.optim.Adam
    optimizer = kind(model.parameters(), lr=5e-5)
    batch = torch.randn(row.batch, 3, row.size, row.size, device="cuda", dtype=NARROW.get(row.precision, torch.float32))
    labels = torch.zeros(row.batch, dtype=torch.int64, device="cuda")
    older = row.precision != "float32" and row.date < FLASH_2

    def step():
        attention = mock.patch.object(F, "scaled_dot_product_attention", flash_attention)
        with attention if older else contextlib.nullcontext(), autocast(row):
            loss = F.cross_entropy(model(batch), labels)
        if "accumulated" not in row.options:
            optimizer.zero_grad()  # as the script has it: the last gradients are there in the forward pass
        loss.backward()
        optimizer.step()

    return step, None


def with_evaluation(row: Published) -> Measured:
    """A step, and its share of what is evaluated."""
    with dry_run(row):
        step, evaluate = (pictures if row.model.startswith("vit") else words)(row)
        took = measured(step)
        if evaluate:
            share = EVALUATED / EVERY * measured(evaluate, steps=1).seconds
            took = took._replace(seconds=took.seconds + share, reserved=torch.cuda.max_memory_reserved())
        return took


def between(before: Row, after: Row) -> Row:
    """What the larger batch takes more: nvidia-smi's figures have the context with them."""
    more = after.published - before.published, after.simulated - before.simulated
    what = f"{after.what}, more than the batch before"
    return dataclasses.replace(after, what=what, published=more[0], simulated=more[1])


def transformer() -> list[Row]:
    rows = published("transformer")
    told = beside("transformer", with_evaluation, lambda row: name(row) + ": reserved" * (row.kind == "memory"))
    found, occupied = [], {}
    for row, result in zip(rows, told, strict=True):
        if row.options.get("figure") == "nvidia-smi":
            occupied.setdefault((row.card, row.model, row.precision), []).append(result)
        else:
            found.append(result)
    speeds = [row for row in found if row.kind == "speed" and row.group == "LLMs-from-scratch"]
    for before, after in itertools.pairwise(speeds):
        found.append(ratio(f"speed against the row before: {after.what}", after, before))
    return [*found, *(between(*pair) for batches in occupied.values() for pair in itertools.pairwise(batches))]


KERNELS = 1343 - 2


def train_bert(row: Published) -> Measured:
    accumulated = int(row.options["accumulated"])
    with dry_run(row):
        model = gpt.Classifier(1024, 16, 24, gpt.masked).cuda()
        model.recompute = row.options["checkpointing"] == "yes"
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
        scaler = torch.amp.GradScaler("cuda", enabled=row.precision == "AMP")

        tokens = labels = loss = None

        def step():
            nonlocal tokens, labels, loss  # as in a loop, they are there until the next ones take their place
            for _ in range(accumulated):
                tokens, labels = empty(row), torch.zeros(row.batch, dtype=torch.int64).cuda()
                with autocast(row):
                    loss = F.cross_entropy(model(tokens), labels)
                scaler.scale(loss / accumulated).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=False)
            scaler.step(optimizer)
            scaler.update()
            model.zero_grad(set_to_none=False)  # as PyTorch did then

        took = measured(step)
        return took._replace(seconds=took.seconds / accumulated)


def bert_large() -> list[Row]:
    def what(row: Published) -> str:
        checkpointed = "checkpointing" if row.options["checkpointing"] == "yes" else ""
        parts = (f"batch {row.batch} x {row.options['accumulated']}", checkpointed, "fp16" * (row.precision == "AMP"))
        return "BERT-large, V100, " + ", ".join(filter(None, parts)) + ": reserved" * (row.kind == "memory")

    found = beside("bert_large", train_bert, what, 10)
    for row in found:
        if row.kind == "memory":
            row.published -= KERNELS
    first, *others = (row for row in found if row.kind == "speed")
    for row in others:
        ways = row.what.removeprefix("BERT-large, V100, ")
        found.append(ratio(f"BERT-large, speed: {ways} against batch 4", row, first, 10))
    return found


def train_llama(row: Published) -> Measured:
    work, sizes = row.options["work"], {"llama3_1b": LLAMA3_1B, "llama3_8b": LLAMA3_8B}[row.model]
    with dry_run(row):
        with torch.device("meta"):
            model = Llama(sizes, tied=sizes is LLAMA3_1B).bfloat16()
        model = model.to_empty(device="cuda").train(work != "forward")
        model.recompute = work != "forward"
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4) if "AdamW" in work else None
        tokens = torch.zeros(row.batch, row.size, dtype=torch.int64, device="cuda")

        def step():
            if work == "forward":
                with torch.no_grad():
                    model(tokens)
                return
            model.zero_grad()
            labels = F.pad(tokens, (0, 1), value=-100)[:, 1:]
            F.cross_entropy(model(tokens).float().flatten(0, 1), labels.flatten()).backward()
            if optimizer:
                optimizer.step()

        return measured(step)


def llama_eager() -> list[Row]:
    return beside(
        "llama_eager", train_llama, lambda row: f"{row.model}, {row.size} tokens, {row.card}: {row.options['work']}"
    )
