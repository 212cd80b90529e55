"""PyTorch's own multi-GPU examples, unmodified, on virtual GPUs.

    python -m tests.judges examples CHECKOUT [name ...]      CHECKOUT: a copy of github.com/pytorch/examples, of PiPPy, of
                                                             tutorials; tests/judges for programs by other libraries

Each program runs under `python -m virtualgpu` (RUNNER names another) in a copy of its folder; its output goes to build/judges/<name>.log and the
results to build/judges/examples.json. --dry: all of them in a dry run, on shapes alone. A program that trains for hours is stopped once it has printed what shows that it does.
Exit status 0: all end well but those that need_not_pass.toml lists. One whose package is not installed is skipped, and named.
"""

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
import textwrap
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.judges.report import BUILD, ROOT, excused, runner, table

ALWAYS = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
CROSSCHECK = {
    "VIRTUALGPU_CROSSCHECK": "1"
}  # in a dry run: what it remembers of one operation is compared with the next
LIMIT = 240  # seconds a program may take


@dataclass(frozen=True)
class Case:
    """A program of the checkout. until: a pattern of its output after which it is stopped and has ended well."""

    folder: str
    arguments: list[str]
    gpus: int
    until: str = ""


def _ranks(n: int, folder: str, *program: str, under: str = "distributed/", dry: bool = False) -> Case:
    """`n` processes by torchrun."""
    torchrun = [*(["--dry"] if dry else []), "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(n)]
    return Case(f"{under}{folder}", [*torchrun, *program], n)


TINY_GPT = [
    *("gpt_config.n_layer=2", "gpt_config.n_head=2", "gpt_config.n_embd=32", "data_config.path=data/input.txt"),
    *("data_config.truncate=0.002", "data_config.block_size=32", "trainer_config.max_epochs=2"),
    *("trainer_config.save_every=1", "trainer_config.data_loader_workers=1"),
]
IMAGENET = ["main.py", "--dummy", "-a", "resnet18", "-b", "8", "-j", "0", "-p", "1"]
SPAWNED = ["--multiprocessing-distributed", "--world-size", "1", "--rank", "0", "--dist-url", "tcp://127.0.0.1:29517"]
DCGAN = ["main.py", "--dataset", "fake", "--accel", "--dry-run", "--workers", "0", "--batchSize", "8", "--niter", "1"]
THREE_STEPS = r"Epoch: \[0\]\[ *3/"
ACCELERATE = "accelerate.test_utils.scripts"  # programs that it brings for GPUs and tests itself by, of those that need no network
OWN_TESTS = ("test_ops", "test_sync", "test_distributed_data_loop", "test_ddp_comm_hook")
CASES = {
    # one process
    "imagenet_data_parallel": Case("imagenet", IMAGENET, 2, THREE_STEPS),
    "dcgan": Case("dcgan", DCGAN, 1),
    "dcgan_data_parallel": Case("dcgan", [*DCGAN, "--ngpu", "2"], 2),
    "ddp_series_single_gpu": Case("distributed/ddp-tutorial-series", ["single_gpu.py", "3", "1"], 1),
    # several processes
    "imagenet_ddp": Case("imagenet", [*IMAGENET, *SPAWNED], 2, THREE_STEPS),
    "ddp_series_multigpu": Case("distributed/ddp-tutorial-series", ["multigpu.py", "3", "1"], 2),
    "ddp_series_torchrun": _ranks(2, "ddp-tutorial-series", "multigpu_torchrun.py", "3", "1"),
    "ddp": _ranks(2, "ddp", "example.py"),
    "fsdp2": _ranks(2, "FSDP2", "example.py"),
    "fsdp2_prefetch": _ranks(2, "FSDP2", "example.py", "--explicit-prefetching"),
    "fsdp2_mixed": _ranks(2, "FSDP2", "example.py", "--mixed-precision"),
    "fsdp2_dcp": _ranks(2, "FSDP2", "example.py", "--dcp-api"),
    "tensor_parallel_2": _ranks(2, "tensor_parallelism", "tensor_parallel_example.py"),
    "tensor_parallel_4": _ranks(4, "tensor_parallelism", "tensor_parallel_example.py"),
    "sequence_parallel": _ranks(4, "tensor_parallelism", "sequence_parallel_example.py"),
    "fsdp_tp": _ranks(4, "tensor_parallelism", "fsdp_tp_example.py"),
    "minGPT": _ranks(2, "minGPT-ddp/mingpt", "main.py", *TINY_GPT),  # needs hydra-core, fsspec, boto3
    # PiPPy: a pipeline of four stages that the tracer cuts; needs transformers
    "pippy_bert": _ranks(4, "examples/huggingface", "pippy_bert.py", under=""),
    # tutorials: a pipeline of two stages that are cut by hand
    "pipelining_tutorial": _ranks(2, "intermediate_source", "pipelining_tutorial.rst", under=""),
    # libraries: beside this file; small programs of ours by transformers, peft, TRL, accelerate, Lightning, DeepSpeed, Megatron
    "trainer_data_parallel": Case("libraries", ["transformers_trainer.py"], 2),
    "trainer_data_parallel_dry": Case("libraries", ["--dry", "transformers_trainer.py"], 2),
    "trainer_ddp": _ranks(2, "libraries", "transformers_trainer.py", under=""),
    "device_map": Case("libraries", ["transformers_device_map.py"], 2),
    "qlora": Case("libraries", ["bitsandbytes_qlora.py"], 2),
    "trl_sft": _ranks(2, "libraries", "trl_trainers.py", "sft", under=""),
    "trl_dpo": _ranks(2, "libraries", "trl_trainers.py", "dpo", under=""),
    "trl_grpo": _ranks(2, "libraries", "trl_trainers.py", "grpo", under=""),
    "padded": Case("libraries", ["transformers_padded.py"], 1),
    "padded_dry": Case("libraries", ["--dry", "transformers_padded.py", "dry"], 1),
    "accelerate_ddp": _ranks(2, "libraries", "accelerate_loop.py", under=""),
    "accelerate_fsdp2": _ranks(2, "libraries", "accelerate_loop.py", "fsdp2", under=""),
    "accelerate_fsdp2_dry": _ranks(2, "libraries", "accelerate_loop.py", "fsdp2", "dry", under="", dry=True),
    **{f"accelerate_own_{name}": _ranks(2, "libraries", "-m", f"{ACCELERATE}.{name}", under="") for name in OWN_TESTS},
    "lightning_ddp": Case("libraries", ["lightning_trainer.py", "ddp", "16-mixed"], 2),
    "lightning_ddp_dry": Case("libraries", ["--dry", "lightning_trainer.py", "ddp", "16-mixed", "dry"], 2),
    "lightning_spawn": Case("libraries", ["lightning_trainer.py", "ddp_spawn", "bf16-mixed"], 2),
    "lightning_fork": Case("libraries", ["lightning_trainer.py", "ddp_fork", "32"], 2),
    "lightning_fsdp": Case("libraries", ["lightning_trainer.py", "fsdp", "bf16-mixed"], 2),
    "lightning_fsdp_dry": Case("libraries", ["--dry", "lightning_trainer.py", "fsdp", "bf16-mixed", "dry"], 2),
    "deepspeed_zero2": _ranks(2, "libraries", "deepspeed_engine.py", "2", under=""),
    "deepspeed_zero3": _ranks(2, "libraries", "deepspeed_engine.py", "3", under=""),
    "deepspeed_zero3_dry": _ranks(2, "libraries", "deepspeed_engine.py", "3", "dry", under="", dry=True),
    "deepspeed_pipeline": _ranks(2, "libraries", "deepspeed_engine.py", "pipeline", under=""),
    "deepspeed_pipeline_dry": _ranks(2, "libraries", "deepspeed_engine.py", "pipeline", "dry", under="", dry=True),
    "megatron_tp_pp": _ranks(4, "libraries", "megatron_gpt.py", "2", "2", under=""),
    "megatron_zero": _ranks(2, "libraries", "megatron_gpt.py", "1", "1", "zero", under=""),
    "megatron_tp_pp_dry": _ranks(4, "libraries", "megatron_gpt.py", "2", "2", "dry", under="", dry=True),
}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.judges examples")
    parser.add_argument("checkout", type=Path)
    parser.add_argument("names", nargs="*", choices=[*CASES, []], default=[], metavar="name", help=", ".join(CASES))
    parser.add_argument("--dry", action="store_true", help="each of them in a dry run")
    options = parser.parse_args(arguments)
    BUILD.mkdir(parents=True, exist_ok=True)
    results = {}
    there = [name for name, case in CASES.items() if (options.checkout / case.folder).is_dir()]
    for name in options.names or there:
        results[name] = result = run(name, options.checkout.resolve(), dry=options.dry)
        good = "ends well" if result["good"] else "skipped" if result["lacks"] else "fails"
        print(f"{name:24} {good:10} {result['seconds']:6.1f} s  {result['why']}", flush=True)
    (BUILD / f"examples{'_dry' * options.dry}.json").write_text(json.dumps(results, indent=1))
    ran = {name: result for name, result in results.items() if not result["lacks"]}
    excuses = {name: excused("examples", name) for name, result in ran.items() if not result["good"]}
    ends, excusable = sum(result["good"] for result in ran.values()), sum(map(bool, excuses.values()))
    rows = [("examples, dry" if options.dry else "examples", f"{ends} of {len(ran) - excusable}")]
    if excusable:
        rows.append(("need not pass", ", ".join(sorted(set(filter(None, excuses.values()))))))
    if len(ran) < len(results):
        lacks = {name: result["lacks"] for name, result in results.items() if result["lacks"]}
        rows.append(("skipped", ", ".join(f"{name} needs {module}" for name, module in lacks.items())))
    print()
    table(rows)
    return int(not all(excuses.values()))


def run(name: str, checkout: Path, case: Case | None = None, limit: float = LIMIT, dry: bool = False) -> dict:
    """How one program ends: `case`, or that of this name; dry: on shapes alone."""
    case, log = case or CASES[name], BUILD / f"{name}.log"
    command = runner()
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    with tempfile.TemporaryDirectory() as scratch:
        work = shutil.copytree(checkout / case.folder, Path(scratch, "work"), ignore=shutil.ignore_patterns(".git"))
        arguments = [_program(work / a) if a.endswith(".rst") else a for a in case.arguments]
        start = time.monotonic()
        with open(log, "w") as out:
            program = subprocess.Popen(
                [*command, "--gpus", str(case.gpus), *(["--dry"] if dry else []), *arguments],
                **dict(cwd=work, stdout=out, stderr=subprocess.STDOUT, start_new_session=True),
                env={**os.environ, **ALWAYS, **(CROSSCHECK if dry else {}), "PYTHONPATH": path},
            )
        ended = wait_for(program, case.until, log, limit)
    text = log.read_text(errors="replace")
    refused = (
        "Unable to locate sufficient" in text or "using CPU, this will be slow" in text or "Using device: cpu" in text
    )
    good = ended in (0, "shown") and not refused
    errors = re.findall(r"^(?:\[rank\d+\]: ?|\s*)?([\w.]*(?:Error|Exception)\b: .*)$", text, re.M)
    missing = re.findall(r"^(?:\[rank\d+\]: ?)?ModuleNotFoundError: No module named '(\w+)'", text, re.M)
    lacks = missing[0] if missing and not good else ""
    why = (
        ""
        if good
        else f"it needs {lacks}"
        if lacks
        else "it sees no GPUs"
        if refused
        else errors[-1][:160]
        if errors
        else f"ended with {ended}"
    )
    seconds = round(time.monotonic() - start, 1)
    return {**asdict(case), "good": good, "ended": ended, "seconds": seconds, "why": why, "lacks": lacks}


def _program(page: Path) -> str:
    """The program that a tutorial's page is made of: its blocks of Python, one after the other, as a file beside it."""
    blocks, inside = [], False
    for line in page.read_text().splitlines():
        if line.startswith(".. code"):
            inside = "python" in line
            blocks += [""] if inside else []
        elif line.strip() and not line.startswith(" "):
            inside = False
        elif inside:
            blocks[-1] += line + "\n"
    page.with_suffix(".py").write_text("\n".join(map(textwrap.dedent, blocks)))
    return page.with_suffix(".py").name


def wait_for(program: subprocess.Popen, until: str, log: Path, limit: float) -> int | str:
    """Its exit status; "shown" if it printed what it was to print, "late" over the limit. It and what it started are ended."""
    deadline = time.monotonic() + limit
    ended: int | str | None = None
    while ended is None:
        try:
            ended = program.wait(0.5)
        except subprocess.TimeoutExpired:
            if until and re.search(until, log.read_text(errors="replace")):
                ended = "shown"
            elif time.monotonic() > deadline:
                ended = "late"
    for ring in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
            os.killpg(program.pid, ring)
            program.wait(5)
    return ended
