"""PyTorch's tutorials that use several GPUs, their own text, on virtual GPUs.

    python -m tests.judges tutorials CHECKOUT [name ...]      CHECKOUT: a copy of github.com/PyTorchKorea/tutorials-kr, whose code is
                                                              that of pytorch/tutorials (a tenth as large)

A page is made a program: its blocks of code, one after the other, and what it leaves to the reader (tutorials_given.py). Shorter where
it trains for long; where a page itself has a mistake, that line is corrected. A page of which the checkout is too new is read from its
history. Exit status 0: all end well, and print what they are to print, but those that need_not_pass.toml lists.
"""

import argparse
import json
import re
import subprocess
import tempfile
import textwrap
from pathlib import Path

from tests.judges import examples
from tests.judges.examples import Case
from tests.judges.report import BUILD, excused, table
from tests.judges.tutorials_given import STAND_INS, Tutorial
from tests.judges.tutorials_list import TUTORIALS


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.judges tutorials")
    parser.add_argument("checkout", type=Path)
    parser.add_argument(
        "names", nargs="*", choices=[*TUTORIALS, []], default=[], metavar="name", help=", ".join(TUTORIALS)
    )
    options = parser.parse_args(arguments)
    BUILD.mkdir(parents=True, exist_ok=True)
    results = {}
    for name in options.names or TUTORIALS:
        results[name] = result = run(name, options.checkout.resolve())
        good = "ends well" if result["good"] else "skipped" if result["lacks"] else "fails"
        print(f"{name:24} {good:10} {result['seconds']:6.1f} s  {result['why']}", flush=True)
    (BUILD / "tutorials.json").write_text(json.dumps(results, indent=1))
    ran = {name: result for name, result in results.items() if not result["lacks"]}
    excuses = {name: excused("tutorials", name) for name, result in ran.items() if not result["good"]}
    ends, excusable = sum(result["good"] for result in ran.values()), sum(map(bool, excuses.values()))
    rows = [("tutorials", f"{ends} of {len(ran) - excusable}")]
    if excusable:
        rows.append(("need not pass", ", ".join(sorted(set(filter(None, excuses.values()))))))
    if len(ran) < len(results):
        rows.append(("skipped", ", ".join(f"{name}: {r['why']}" for name, r in results.items() if r["lacks"])))
    print()
    table(rows)
    return int(not all(excuses.values()))


def run(name: str, checkout: Path) -> dict:
    """How one tutorial ends."""
    tutorial = TUTORIALS[name]
    text = page(tutorial, checkout)
    if text is None:
        return {"good": False, "lacks": tutorial.page, "why": f"the checkout has no {tutorial.page}", "seconds": 0.0}
    with tempfile.TemporaryDirectory() as folder:
        for module, lines in STAND_INS.items():
            Path(folder, f"{module}.py").write_text(lines)
        Path(folder, "tutorial.py").write_text(program(tutorial, text))
        start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(tutorial.ranks)]
        arguments = ["--like", tutorial.like, *(start if tutorial.ranks else []), "tutorial.py", *tutorial.arguments]
        result = examples.run(f"tutorial_{name}", Path(folder), Case(".", arguments, tutorial.gpus), tutorial.limit)
    log = (BUILD / f"tutorial_{name}.log").read_text(errors="replace")
    if result["good"] and not re.search(tutorial.shows, log, re.S):
        result |= {"good": False, "why": f"its output has no {tutorial.shows!r}"}
    return result


def page(tutorial: Tutorial, checkout: Path) -> str | None:
    """The page's text, from the checkout or its history; None where neither has it."""
    if not tutorial.commit:
        path = checkout / tutorial.page
        return path.read_text() if path.is_file() else None
    shown = subprocess.run(
        ["git", "-C", checkout, "show", f"{tutorial.commit}:{tutorial.page}"], capture_output=True, check=False
    )
    return shown.stdout.decode() if shown.returncode == 0 else None


def program(tutorial: Tutorial, text: str) -> str:
    """The program that a page is made: the chosen blocks in the given order, what starts them last. Raises LookupError where it changed."""
    parts = [text] if tutorial.page.endswith(".py") else blocks(text)
    parts = [parts[at] for at in tutorial.blocks] if tutorial.blocks else parts
    for old, new in tutorial.changes.items():
        if not any(old in part for part in parts):
            raise LookupError(f"{tutorial.page} has no {old!r}")
        parts = [part.replace(old, new) for part in parts]
    bodies, starts = zip(*(_apart(part) for part in parts), strict=True)
    return "\n".join([tutorial.before, *bodies, tutorial.after, *starts])


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
