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
from pathlib import Path

from tests.accuracy.published import published
from tests.judges.programs import ALWAYS, TABLE, words_of
from tests.judges.report import BUILD, ROOT, python_path, table


def main(arguments: list[str], judge: str = "fit") -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.judges fit")
    parser.add_argument("checkout", type=Path)
    parser.add_argument("names", nargs="*", metavar="name")
    options = parser.parse_args(arguments)
    BUILD.mkdir(parents=True, exist_ok=True)
    if str(options.checkout) == "published":
        return _published(options.names)
    checkout, cases = options.checkout.resolve(), TABLE[judge]
    names = options.names or [name for name, case in cases.items() if (checkout / case["file"]).is_file()]
    bad = 0
    for name in names:
        wrong = _judge(name, cases[name], checkout)
        bad += bool(wrong)
        print(f"{name:24} {wrong or 'good'}", flush=True)
    print()
    table([(judge, f"{len(names) - bad} of {len(names)}")])
    return int(bad > 0)


def _judge(name: str, case: dict, checkout: Path) -> str:
    """What is wrong with it, if anything."""
    with tempfile.TemporaryDirectory() as scratch:
        source = (checkout / case["file"]).parent
        folder = Path(shutil.copytree(source, Path(scratch, "work"), ignore=shutil.ignore_patterns(".git", "out")))
        if "data" in case:
            _words(folder / case["data"])
        trials, said = search([*words_of(case["options"]), *words_of(case["command"])], folder)
    (BUILD / f"fit_{name}.json").write_text(json.dumps(trials, indent=1))
    failed = [trial for trial in trials if trial["status"] == "failed"]
    fits = [trial for trial in trials if trial["status"] == "fits"]
    if failed or not fits:
        return failed[0]["words"] if failed else said or "nothing fits"
    for trial in fits if "samples" in case else ():
        batches = case["samples"] * (trial["gpus"] if case.get("each_gpu") else 1)
        expected = batches * int(next(iter(trial["values"].values())))
        if trial["samples"] != expected:
            return f"{trial['samples']} samples, not {expected}: {trial['gpus']} x {trial['card']} {trial['values']}"
    return ""


def _words(folder: Path) -> None:
    """A data set of nanoGPT: words at random, two bytes each."""
    import numpy

    folder.mkdir(parents=True, exist_ok=True)
    for name in ("train", "val"):
        words = numpy.random.default_rng(0).integers(0, 50257, 100_000).astype(numpy.uint16)
        words.tofile(folder / f"{name}.bin")


def search(arguments: list[str], folder: Path = ROOT) -> tuple[list[dict], str]:
    """The trials of `fit` with these arguments, and what it said besides."""
    command = [sys.executable, "-m", "virtualgpu", "fit", "--json", *arguments]
    environ = {**os.environ, **ALWAYS, "PYTHONPATH": python_path()}
    done = subprocess.run(command, cwd=folder, env=environ, text=True, capture_output=True)
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
