"""`python -m virtualgpu fit` on programs that are not ours, as they stand, and on batch sizes that others published.

    python -m tests.judges fit CHECKOUT [name ...]     CHECKOUT: a copy of github.com/pytorch/examples, of github.com/karpathy/nanoGPT, or
                                                       tests/judges for programs by transformers and peft
    python -m tests.judges fit published [model ...]   the largest batch on an RTX 3090: timm's table of training

A program is good where each trial fits or is out of memory, at least one fits, and samples of a step are as many as the program takes in
(read from its source). Results go to build/judges/. Of the published batches, timm says one that fits and the next that it tried, which did
not: good is a largest batch from the one up to the other.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.accuracy.published import published
from tests.judges.examples import ALWAYS
from tests.judges.report import BUILD, ROOT, table


@dataclass(frozen=True)
class Case:
    """file: of the checkout, in whose folder the command runs. samples: of a step, on so many GPUs with that value; None: not known."""

    file: str
    options: list[str]
    command: list[str]
    samples: Callable[[int, int], int] | None = None
    before: Callable[[Path], None] = lambda folder: None


def _words(folder: Path) -> None:
    """A data set of nanoGPT: words at random, two bytes each."""
    import numpy

    (folder / "data/random").mkdir(parents=True, exist_ok=True)
    for name in ("train", "val"):
        numpy.random.default_rng(0).integers(0, 50257, 100_000).astype(numpy.uint16).tofile(
            folder / f"data/random/{name}.bin"
        )


CARDS = ["--like", "T4,L4,A100"]
RANKS = ["torchrun", "--standalone", "--nproc-per-node={gpus}"]
IMAGENET = ["main.py", "--dummy", "-a", "resnet50", "-j", "0"]
SPAWNED = ["--multiprocessing-distributed", "--world-size", "1", "--rank", "0", "--dist-url", "tcp://127.0.0.1:29519"]
NANOGPT = ["train.py", "--dataset=random", "--compile=False", "--eval_iters=1", "--gradient_accumulation_steps=4"]
GPT2 = [
    "transformers_causal.py",
    "gpt2",
    "--output_dir",
    "out",
    "--report_to",
    "none",
    "--save_strategy",
    "no",
    "--bf16",
]
CASES = {
    "imagenet_data_parallel": Case(
        "imagenet/main.py",
        [*CARDS, "--gpus", "1,2", "--vary", "batch-size=64,256"],
        IMAGENET,
        lambda gpus, batch: batch,  # DataParallel divides it
    ),
    "imagenet_ddp": Case(
        "imagenet/main.py",
        [*CARDS, "--gpus", "1,2", "--vary", "batch-size=64,256"],
        [*IMAGENET, *SPAWNED],
        lambda gpus, batch: batch,  # "the total batch size of all GPUs on the current node"
    ),
    "fsdp2": Case("distributed/FSDP2/example.py", [*CARDS, "--gpus", "2,4"], [*RANKS, "example.py"]),
    "nanoGPT": Case(
        "train.py",
        [*CARDS, "--vary", "batch_size=4,12"],
        NANOGPT,
        lambda gpus, batch: 4 * batch,
        _words,
    ),
    "nanoGPT_ddp": Case(
        "train.py",
        ["--like", "L4,A100", "--gpus", "1,2", "--vary", "batch_size=4,12"],
        [*RANKS, *NANOGPT],
        lambda gpus, batch: 4 * batch,  # accumulation is divided among the ranks
        _words,
    ),
    "trainer": Case(
        "libraries/transformers_causal.py",
        [*CARDS, "--gpus", "1,2", "--vary", "per_device_train_batch_size=4,16"],
        GPT2,
        lambda gpus, batch: gpus * batch,  # DataParallel: a batch for each GPU
    ),
    "trainer_ddp": Case(
        "libraries/transformers_causal.py",
        ["--like", "T4,A100", "--gpus", "1,2", "--vary", "per_device_train_batch_size=4,16"],
        [*RANKS, *GPT2, "--gradient_accumulation_steps", "2"],
        lambda gpus, batch: 2 * gpus * batch,
    ),
    "lora": Case(
        "libraries/peft_lora.py",
        [*CARDS, "--vary", "batch-size=1,4"],
        ["peft_lora.py"],
        lambda gpus, batch: batch,
    ),
}  # fmt: skip


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.judges fit")
    parser.add_argument("checkout", type=Path)
    parser.add_argument("names", nargs="*", metavar="name")
    options = parser.parse_args(arguments)
    BUILD.mkdir(parents=True, exist_ok=True)
    if str(options.checkout) == "published":
        return _published(options.names)
    checkout = options.checkout.resolve()
    names = options.names or [name for name, case in CASES.items() if (checkout / case.file).is_file()]
    bad = 0
    for name in names:
        wrong = _judge(name, CASES[name], checkout)
        bad += bool(wrong)
        print(f"{name:24} {wrong or 'good'}", flush=True)
    print()
    table([("fit", f"{len(names) - bad} of {len(names)}")])
    return int(bad > 0)


def _judge(name: str, case: Case, checkout: Path) -> str:
    """What is wrong with it, if anything."""
    with tempfile.TemporaryDirectory() as scratch:
        source = (checkout / case.file).parent
        folder = Path(shutil.copytree(source, Path(scratch, "work"), ignore=shutil.ignore_patterns(".git", "out")))
        case.before(folder)
        trials, said = search([*case.options, *case.command], folder)
    (BUILD / f"fit_{name}.json").write_text(json.dumps(trials, indent=1))
    failed = [trial for trial in trials if trial["status"] == "failed"]
    fits = [trial for trial in trials if trial["status"] == "fits"]
    if failed or not fits:
        return failed[0]["words"] if failed else said or "nothing fits"
    for trial in fits if case.samples is not None else ():
        expected = case.samples(trial["gpus"], int(next(iter(trial["values"].values()))))
        if trial["samples"] != expected:
            return f"{trial['samples']} samples, not {expected}: {trial['gpus']} x {trial['card']} {trial['values']}"
    return ""


def search(arguments: list[str], folder: Path = ROOT) -> tuple[list[dict], str]:
    """The trials of `fit` with these arguments, and what it said besides."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, "-m", "virtualgpu", "fit", "--json", *arguments],
        cwd=folder,
        env={**os.environ, **ALWAYS, "PYTHONPATH": path},
        text=True,
        capture_output=True,
    )
    return json.loads(done.stdout or "[]"), done.stderr


def _published(models: list[str]) -> int:
    """A row a model whose batches timm published (channels first): the largest batch that the command's own search finds."""
    rows = [row for row in published("fits") if row.layout == "first"]
    found = [("model", "trained", "out of memory", "largest that fits", "that leaves a tenth", "")]
    for model in models or dict.fromkeys(row.model for row in rows):
        low, high = sorted(row.batch for row in rows if row.model == model)
        trials, said = search(
            ["--like", "RTX 3090", "--vary", "batch-size=16..1024", "-m", "tests.accuracy.vision", model, "first"]
        )
        fits = {int(trial["values"]["batch-size"]): trial for trial in trials if trial["status"] == "fits"}
        if not fits:
            found.append((model, low, high, "", "", said or "nothing fits"))
            continue
        best = max(fits)
        inside = "within" if low <= best < high else "above" if best >= high else "below"
        roomy = max((batch for batch, trial in fits.items() if not trial["tight"]), default="")
        found.append((model, low, high, best, roomy, inside))
        (BUILD / f"fit_published_{model}.json").write_text(json.dumps(trials, indent=1))
    table(found)
    return int(any(row[-1] != "within" for row in found[1:]))
