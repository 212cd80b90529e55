"""Programs that others wrote, unmodified, on virtual GPUs: those of programs.toml, which says what is run and what shows that it did its work.

    python -m tests.judges examples CHECKOUT [name ...]      CHECKOUT: a copy of github.com/pytorch/examples or of PiPPy; tests/judges for programs
                                                             by other libraries
    python -m tests.judges torchtitan CHECKOUT [name ...]    of github.com/pytorch/torchtitan: two steps of its debug Llama 3 on 4 GPUs
    python -m tests.judges tutorials CHECKOUT [name ...]     of github.com/PyTorchKorea/tutorials-kr, whose code is that of pytorch/tutorials

Each runs under `python -m virtualgpu` (RUNNER names another) in a copy of its folder; its output goes to build/judges/<name>.log and the results
to build/judges/<judge>.json. --dry: all of them on shapes alone. Exit status 0: all end well but those that need_not_pass.toml lists. One whose package is
not installed is skipped, and named. A tutorial's page is made a program: shorter where it trains for long, corrected where it has a mistake.
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
import tomllib
from pathlib import Path

from tests.judges.report import BUILD, excused, python_path, runner, table

TABLE = tomllib.loads(Path(__file__).with_name("programs.toml").read_text("utf-8"))
ALWAYS = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
CROSSCHECK = {"VIRTUALGPU_CROSSCHECK": "1"}  # dry: what is remembered of one operation is compared with the next
# Seconds a program may take: some start eight processes
LIMITS = {"examples": 240, "torchtitan": 600, "tutorials": 600}
NO_GPU = re.compile("Unable to locate sufficient|using CPU, this will be slow|Using device: cpu")


def main(arguments: list[str], judge: str) -> int:
    parser = argparse.ArgumentParser(prog=f"python -m tests.judges {judge}")
    parser.add_argument("checkout", type=Path)
    cases = TABLE[judge]
    parser.add_argument("names", nargs="*", choices=[*cases, []], default=[], metavar="name", help=", ".join(cases))
    parser.add_argument("--dry", action="store_true", help="each of them in a dry run")
    options = parser.parse_args(arguments)
    BUILD.mkdir(parents=True, exist_ok=True)
    checkout, results = options.checkout.resolve(), {}
    how = tutorial if judge == "tutorials" else run
    for name in options.names or [name for name in cases if (checkout / cases[name].get("folder", "")).is_dir()]:
        results[name] = result = how(name, cases[name], checkout, judge, options.dry)
        good = "ends well" if result["good"] else "skipped" if result["lacks"] else "fails"
        print(f"{name:24} {good:10} {result['seconds']:6.1f} s  {result['why']}", flush=True)
    (BUILD / f"{judge}{'_dry' * options.dry}.json").write_text(json.dumps(results, indent=1))
    return report(results, judge, options.dry)


def report(results: dict[str, dict], judge: str, dry: bool) -> int:
    """The table, and the exit status."""
    ran = {name: result for name, result in results.items() if not result["lacks"]}
    excuses = {name: excused(judge, name) for name, result in ran.items() if not result["good"]}
    ends, excusable = sum(result["good"] for result in ran.values()), sum(map(bool, excuses.values()))
    rows = [(judge + ", dry" * dry, f"{ends} of {len(ran) - excusable}")]
    if excusable:
        rows.append(("need not pass", ", ".join(sorted(set(filter(None, excuses.values()))))))
    if len(ran) < len(results):
        rows.append(("skipped", ", ".join(f"{name}: {r['why']}" for name, r in results.items() if r["lacks"])))
    print()
    table(rows)
    return int(not all(excuses.values()))


def words_of(text: str) -> list[str]:
    """With what some of them stand for."""
    return [more for word in text.split() for more in TABLE["words"].get(word, word).split()]


def command(case: dict) -> list[str]:
    """Its words, under the runner."""
    words = words_of(case["command"])
    ranks = str(case.get("ranks", 0))
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks] if "ranks" in case else []
    like = ["--like", case["like"]] if "like" in case else []
    return ["--gpus", str(case.get("gpus", ranks)), *like, *(["--dry"] if case.get("dry") else []), *torchrun, *words]


def run(name: str, case: dict, checkout: Path, judge: str, dry: bool = False) -> dict:
    """How one program ends."""
    log, start = BUILD / f"{name}.log", time.monotonic()
    case = case | {"dry": dry or case.get("dry", False)}
    environ = {**os.environ, **ALWAYS, **(CROSSCHECK if dry else {}), "PYTHONPATH": python_path()}
    with tempfile.TemporaryDirectory() as scratch:
        source = checkout / case["folder"]
        work = shutil.copytree(source, Path(scratch, "work"), ignore=shutil.ignore_patterns(".git"))
        with open(log, "w") as out:
            streams = {"stdout": out, "stderr": subprocess.STDOUT}
            program = subprocess.Popen(
                [*runner(), *command(case)], cwd=work, env=environ, start_new_session=True, **streams
            )
        ended = wait_for(program, case.get("until", ""), log, LIMITS[judge])
    text = log.read_text(errors="replace")
    why, lacks = reason(text, ended), ""
    if why and (missing := re.search(r"^(?:\[rank\d+\]: ?)?ModuleNotFoundError: No module named '(\w+)'", text, re.M)):
        lacks, why = missing[1], f"it needs {missing[1]}"
    if not why and not re.search(case.get("shows", ""), text, re.S):
        why = f"its output has no {case['shows']!r}"
    if not why and judge == "torchtitan":
        why = losses_fall(text, case["ranks"])
    return {"good": not why, "why": why, "lacks": lacks, "seconds": round(time.monotonic() - start, 1), "ended": ended}


def reason(text: str, ended: int | str) -> str:
    """Why a program did not end well; empty where it did."""
    if NO_GPU.search(text):
        return "it sees no GPUs"
    if ended in (0, "shown"):
        return ""
    errors = re.findall(r"^(?:\[rank\d+\]: ?|\s*)?([\w.]*(?:Error|Exception)\b: .*)$", text, re.M)
    return errors[-1][:160] if errors else f"ended with {ended}"


def losses_fall(log: str, ranks: int) -> str:
    """What is wrong where not every rank has said a loss of both steps, the second smaller (a pipeline's first stages say a negative one:
    they have none)."""
    found: dict[str, list[float]] = {"1": [], "2": []}
    for step, loss in re.findall(
        r"step: +(\d+) +loss: +(-?[\d.]+)", re.sub(r"\x1b\[[\d;]*m", "", log)
    ):  # it has colours
        found.setdefault(step, []).append(float(loss))
    first, second = ({loss for loss in found[step] if loss > 0} for step in "12")
    if first and second and max(second) < min(first) and len(found["1"]) == len(found["2"]) == ranks:
        return ""
    return f"losses of both steps from {ranks} ranks, falling, not {found}"


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


def tutorial(name: str, case: dict, checkout: Path, judge: str, dry: bool = False) -> dict:
    """How one page ends, made a program in a folder of its own."""
    text = page(case, checkout)
    if text is None:
        return {"good": False, "lacks": case["page"], "why": f"the checkout has no {case['page']}", "seconds": 0.0}
    with tempfile.TemporaryDirectory() as folder:
        for module, lines in TABLE["modules"].items():
            Path(folder, f"{module}.py").write_text(lines)
        Path(folder, "tutorial.py").write_text(program(case, text))
        words = f"tutorial.py {case.get('arguments', '')}"
        made = {"folder": ".", "command": words, "like": "T4"} | case
        return run(f"tutorial_{name}", made, Path(folder), judge, dry)


def page(case: dict, checkout: Path) -> str | None:
    """The page's text, from the checkout or, of which it is too new, its history; None where neither has it."""
    if "commit" not in case:
        path = checkout / case["page"]
        return path.read_text() if path.is_file() else None
    shown = subprocess.run(["git", "-C", checkout, "show", f"{case['commit']}:{case['page']}"], capture_output=True)
    return shown.stdout.decode() if shown.returncode == 0 else None


def program(case: dict, text: str) -> str:
    """The chosen blocks in the given order, between what the page leaves to the reader; what starts them last. Raises LookupError where the page changed."""
    parts = [text] if case["page"].endswith(".py") else blocks(text)
    parts = [parts[at] for at in case["blocks"]] if "blocks" in case else parts
    for old, new in case.get("changes", ()):
        if not any(old in part for part in parts):
            raise LookupError(f"{case['page']} has no {old!r}")
        parts = [part.replace(old, new) for part in parts]
    before, after = ("".join(TABLE["snippets"].get(one, one) for one in case.get(at, ())) for at in ("before", "after"))
    bodies, starts = zip(*map(_apart, parts), strict=True)
    return "\n".join([before, *bodies, after, *starts])


def _apart(part: str) -> tuple[str, str]:
    """A block up to `if __name__ == "__main__":`, and from there on."""
    at = part.find("if __name__ ==")
    return (part, "") if at < 0 or part.startswith('"""') else (part[:at], part[at:])


def blocks(text: str) -> list[str]:
    """The literal blocks of a page in reStructuredText that may be Python."""
    found, inside, indent = [], False, 0
    for line in text.splitlines():
        here = len(line) - len(line.lstrip())
        if inside and line.strip() and here <= indent:
            inside = False
        if inside:
            found[-1] += line + "\n"
            continue
        directive = re.match(r"\s*\.\. code(?:-block)?:: *(\w*)", line)
        if directive:
            inside = directive.group(1).lower() in ("python", "python3", "")
        else:
            inside = line.rstrip().endswith("::") and not line.lstrip().startswith("..")
        if inside:
            indent = here
            found.append("")
    return [textwrap.dedent(re.sub(r"^\s+:\w+:.*\n", "", block, flags=re.M)) for block in found]
