"""torchtitan's Llama 3, unmodified, on 4 virtual GPUs: two steps of its debug model, in each kind of parallelism.

    python -m tests.judges torchtitan CHECKOUT [name ...]      CHECKOUT: a copy of github.com/pytorch/torchtitan

A program has done its work when it ends well and every rank has said a loss of both steps (a pipeline's first stages say a negative
one: they have none), the second smaller than the first. Small batches, and products in float32: a CPU without instructions for
bfloat16 takes fifty times as long. Without CUDA graphs, which are not modelled.
"""

import argparse
import json
import re
from pathlib import Path

from tests.judges import examples
from tests.judges.examples import Case
from tests.judges.report import BUILD, table

LIMIT = 600  # seconds: five processes import torchtitan
SMALL = [
    *("--training.steps", "2", "--training.max-context-length", "128", "--debug.seed", "1", "--debug.deterministic"),
    *("--training.num-tokens-per-microbatch-per-dp-rank", "512", "--training.mixed-precision-param", "float32"),
    "--training.disable-cuda-graphs",
]
TITAN = ["-m", "torchtitan.train", "--module", "llama3", "--config", "llama3_debugmodel", *SMALL]
TP, PP = "--parallelism.tensor-parallel-degree", "--parallelism.pipeline-parallel-degree"
REPLICAS, SHARDS = "--parallelism.data-parallel-replicate-degree", "--parallelism.data-parallel-shard-degree"


def _ranks(*arguments: str, n: int = 4) -> Case:
    """`n` processes by torchrun."""
    return Case(".", ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(n), *TITAN, *arguments], n)


CASES = {
    "fsdp": _ranks(),
    "hsdp_compile": _ranks(REPLICAS, "2", SHARDS, "2", "--compile.enable"),
    "tp_fsdp_checkpoint": _ranks(TP, "2", "--checkpoint.enable", "--checkpoint.interval", "1"),
    "tp_fsdp_full_ac": _ranks(TP, "2", "activation-checkpoint:full"),
    "pp_fsdp_interleaved": _ranks(PP, "2"),
}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.judges torchtitan")
    parser.add_argument("checkout", type=Path)
    parser.add_argument("names", nargs="*", choices=[*CASES, []], default=[], metavar="name", help=", ".join(CASES))
    options = parser.parse_args(arguments)
    BUILD.mkdir(parents=True, exist_ok=True)
    results = {}
    for name in options.names or CASES:
        results[name] = result = run(name, options.checkout.resolve())
        good = "ends well" if result["good"] else "fails"
        print(f"{name:24} {good:10} {result['seconds']:6.1f} s  {result['why'] or result['losses']}", flush=True)
    (BUILD / "torchtitan.json").write_text(json.dumps(results, indent=1))
    ends = sum(result["good"] for result in results.values())
    print()
    table([("torchtitan", f"{ends} of {len(results)}")])
    return int(ends < len(results))


def run(name: str, checkout: Path) -> dict:
    """How one program ends, and its losses: those of each step that ranks with a loss have said."""
    case = CASES[name]
    result = examples.run(name, checkout, case, LIMIT)
    losses = losses_of((BUILD / f"{name}.log").read_text(errors="replace"))
    result["losses"] = {step: sorted({loss for loss in said if loss > 0}) for step, said in losses.items()}
    first, second = (result["losses"].get(step) for step in (1, 2))
    everybody = all(len(losses.get(step, [])) == case.gpus for step in (1, 2))
    if result["good"] and not (everybody and first and second and max(second) < min(first)):
        result |= {"good": False, "why": f"losses of both steps from {case.gpus} ranks, falling, not {losses}"}
    return result


def losses_of(log: str) -> dict[int, list[float]]:
    """{step: what each rank says}, from torchtitan's log, which has colours."""
    found: dict[int, list[float]] = {}
    for step, loss in re.findall(r"step: +(\d+) +loss: +(-?[\d.]+)", re.sub(r"\x1b\[[\d;]*m", "", log)):
        found.setdefault(int(step), []).append(float(loss))
    return found
