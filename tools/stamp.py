"""What is generated: the opening of each lesson, from the facts at the top of its text; its set-up cell, from pyproject's repository
and tag; in the README the first links, the table of lessons, and a picture, which is a notebook's cover. And the older file of each lesson
is brought up to the newer one, its text or its notebook.

    stamp.py --fix      write them
    stamp.py --check    exit status 1 where one is missing or differs (a guard in the tests)

After a fork, change `repository` under [tool.series] in pyproject.toml and run `python -m tools.stamp --fix`.
"""

import argparse
import ast
import base64
import sys
import textwrap
from pathlib import Path

import lesson_text
import nbformat
import series

ADDRESSES = {
    "Colab": "https://colab.research.google.com/github/{repository}/blob/{tag}/notebooks/{name}",
    # Kaggle lends two T4s for nothing; it opens a notebook by the address of its file
    "Kaggle": "https://kaggle.com/kernels/welcome?src=https://github.com/{repository}/blob/{tag}/notebooks/{name}",
}
BADGES = {
    "Colab": "https://colab.research.google.com/assets/colab-badge.svg",
    "Kaggle": "https://kaggle.com/static/images/open-in-kaggle.svg",
}

PICTURES = {"03_pipeline_parallel.ipynb": "pipeline.png"}  # under docs/

# Import name -> what pip installs, for what Colab does not have. The helpers themselves need the first two.
HELPERS_NEED = {"GPUtil": "GPUtil", "pynvml": "nvidia-ml-py"}
LESSONS_NEED = {
    "torchsummary": "torchsummary",
    "torchinfo": "torchinfo",
    "safetensors": "safetensors",
    "accelerate": "accelerate",
    "ray": "ray[tune]",
    "optuna": "optuna",
}

# What the set-up cell fetches: 4 MB, where a whole clone is 60
FETCHED = [
    "/checks/",
    "/data/",
    "/helpers/",
    "/notebooks/figures/",
    "/notebooks/scripts/",
    "/tests/accuracy/published.csv",  # lesson 12 reads it
    "/virtualgpu/",
]

# The notebook's own checkout comes first, so that no other package called helpers can stand in for it; then one that
# `pip install -e` put on sys.path, then what is fetched.
BOOTSTRAP = """# @title Set-up: finds the helpers; fetches them where they are missing, as on Colab and Kaggle {{ display-mode: "form" }}
import importlib.util, os, pathlib, shutil, subprocess, sys

here = pathlib.Path.cwd()
home = next((p for p in map(pathlib.Path, (here, *here.parents, *sys.path)) if (p / "checks" / "grader.py").exists()), here / "{project}")
if str(home) not in sys.path:
    missing = [pip for name, pip in {needs}.items() if importlib.util.find_spec(name) is None]
    git, address = ["git", "-C", str(home)], "https://github.com/{repository}"
    steps = [["git", "clone", "-q", "--depth", "1", "--filter=blob:none", "--sparse", "-b", "{tag}", address, str(home)],
             [*git, "sparse-checkout", "set", "--no-cone", *{fetched}]] if not (home / "checks").exists() else []
    steps += [[sys.executable, "-m", "pip", "install", "-q", *missing]] if missing else []
    new = not home.exists()
    for step in steps:
        try:
            done = subprocess.run(step, capture_output=True, text=True, env={{**os.environ, "GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C"}})
        except OSError as error:
            raise SystemExit(f"What this lesson needs could not be fetched: {{error}}. Install {{step[0]}}, then run this cell again.") from None
        if done.returncode:
            if step[0] == "git" and new:  # what was there before is not ours
                shutil.rmtree(home, ignore_errors=True)
            why = (done.stderr.strip() or "it said nothing").splitlines()[-1]
            cure = (f"Rename or remove {{home}}." if "already exists" in why else
                    f"{{address}} or its tag {tag} does not exist: is there a newer notebook?" if "not found" in why else
                    "Is there a network? On Kaggle: Settings, Internet on. Then run this cell again.")
            raise SystemExit(f"What this lesson needs could not be fetched ({{why}}). {{cure}}")
    sys.path.insert(0, str(home))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(home), os.environ.get("PYTHONPATH")]))  # programs that cells start
    if steps or home.parent == here:
        print(f"helpers from {{home.name}}/; installed: {{', '.join(missing) or 'nothing, all was there'}}")
try:
    importlib.import_module("virtualgpu.environment").check_pytorch()
except ImportError as error:
    raise SystemExit(str(error)) from None"""


def imports(notebook) -> set[str]:
    """Top-level modules that the notebook's cells import."""
    found = set()
    for cell in series.code_cells(notebook):
        source = "\n".join(line for line in cell.source.splitlines() if not line.lstrip().startswith(("%", "!")))
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Import):
                found |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                found.add(node.module.split(".")[0])
    return found


def addresses(notebook, name: str) -> dict[str, str]:
    """Where this notebook opens: on Kaggle where its two GPUs are used."""
    found = {where: address.format(name=name, **series.settings()) for where, address in ADDRESSES.items()}
    return found if series.summary(notebook).gpus in (1, 2) else {"Colab": found["Colab"]}


def badges(notebook, name: str) -> str:
    return " ".join(
        f"[![Open in {where}]({BADGES[where]})]({address})" for where, address in addresses(notebook, name).items()
    )


def bootstrap(notebook) -> str:
    lesson = {name: pip for name, pip in LESSONS_NEED.items() if name in imports(notebook)}
    repository = series.settings()["repository"]
    return BOOTSTRAP.format(
        needs={**HELPERS_NEED, **lesson}, project=repository.split("/")[-1], fetched=FETCHED, **series.settings()
    )


def opening(notebook, name: str) -> str:
    """The first cell: the title, the badges, and what the facts of the text say. The minutes are counted."""
    facts, first = series.summary(notebook), notebook.cells[0].source
    if "lesson" not in notebook.metadata:  # none are written yet
        lines = [line for line in first.splitlines() if not line.startswith("[![Open in ")]
        while len(lines) > 1 and not lines[1].strip():
            del lines[1]
        return "\n".join([lines[0], "", badges(notebook, name), "", *lines[1:]]).rstrip()
    goals = "\n".join(f"- {goal}" for goal in facts.teaches)
    words = (
        f"**Time:** runs in {facts.runs} on 2 CPU cores; plan {minutes(notebook)} to {2 * minutes(notebook)} minutes. **Level:** {facts.level}. "
        f"**Before this:** {facts.needs}. {facts.note}"
    )
    title = f"# {name[:2]} · {notebook.metadata.lesson.title}"
    return "\n\n".join([title, badges(notebook, name), "**You will**", goals, textwrap.fill(words, 140, **UNBROKEN)])


UNBROKEN = {"break_long_words": False, "break_on_hyphens": False}


def minutes(notebook) -> int:
    """As the opening tells them: of five. An edition in another language has those of the English one."""
    return notebook.metadata.get("lesson", {}).get("minutes") or 5 * round(lesson_text.count(notebook).minutes / 5)


def stamp(notebook, name: str) -> list[str]:
    """Write the opening into the first cell, the set-up into the one tagged `bootstrap`, and close what tags say; return what had to
    change."""
    changed = []
    cell = next((cell for cell in notebook.cells if "bootstrap" in series.tags(cell)), None)
    if cell is None:
        cell = nbformat.v4.new_code_cell(metadata={"tags": ["bootstrap"]})
        notebook.cells.insert(1, cell)
    if cell.source != (wanted := bootstrap(notebook)):
        cell.source = wanted
        changed.append("set-up cell")
    for other in notebook.cells:
        before = dict(other.metadata)
        lesson_text.fold(other)
        if other.metadata != before and "folding" not in changed:
            changed.append("folding")
    if notebook.cells[0].source != (wanted := opening(notebook, name)):
        notebook.cells[0].source = wanted
        changed.append("opening")
    return changed


def stamp_lesson(path: Path, fix: bool) -> list[str]:
    """Bring text and notebook of a lesson together, and stamp both; return what had to change."""
    text = lesson_text.text_of(path)
    notebook = lesson_text.paired(path)
    changed = stamp(notebook, path.name)
    old = text.read_text(encoding="utf-8") if text.exists() else ""
    if old != (new := lesson_text.written(notebook)):
        changed.append("text")
    if not path.exists() or not lesson_text.same(notebook, series.read(path)):
        changed.append("notebook")
    if changed and fix:
        text.parent.mkdir(exist_ok=True)
        text.write_text(new, encoding="utf-8")
        nbformat.write(notebook, path)
    return changed


def lessons() -> str:
    """The table of the README: a row a lesson, from its opening."""
    rows = ["| lesson | you build | level, minutes | open |", "| --- | --- | --- | --- |"]
    for path in series.notebooks():
        notebook = series.read(path)
        found = series.summary(notebook)
        opened = " · ".join(f"[{where}]({address})" for where, address in addresses(notebook, path.name).items())
        page = f"{site()}/notebooks/{path.stem}.html"
        rows.append(f"| [{found.title}]({page}) | {found.builds} | {found.level}, {minutes(notebook)} | {opened} |")
    return "\n".join(rows)


def start() -> str:
    """The README's first links."""
    first = series.notebooks()[0]
    colab, kaggle = addresses(series.read(first), first.name).values()
    return f"**[Read the course]({site()})** · **[Start lesson 01 in Colab]({colab})** (nothing to install) · [on Kaggle]({kaggle})"


def site() -> str:
    """GitHub's pages of the repository."""
    owner, name = series.settings()["repository"].split("/")
    return f"https://{owner}.github.io/{name}"


def stamp_readme(fix: bool) -> list[str]:
    """The README's first links and its table of lessons; return what had to change."""
    readme = series.ROOT / "README.md"
    new = old = readme.read_text(encoding="utf-8")
    for name, write in {"start": start, "lessons": lessons}.items():
        new = series.marked(new, name, "stamp", write())
    if new == old:
        return []
    if fix:
        readme.write_text(new, encoding="utf-8")
    return ["links and table of lessons"]


def stamp_pictures(fix: bool) -> list[str]:
    """The README's pictures; return what had to change."""
    changed = []
    for path in series.notebooks():
        if path.name in PICTURES:
            picture = series.ROOT / "docs" / PICTURES[path.name]
            found = series.summary(series.read(path)).picture
            if found is None:  # outputs cleared: the last picture stays until the notebook has run again
                continue
            cover = base64.b64decode(found)
            if not picture.exists() or picture.read_bytes() != cover:
                changed.append(picture.name)
                if fix:
                    picture.parent.mkdir(exist_ok=True)
                    picture.write_bytes(cover)
    return changed


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    mode = parser.add_mutually_exclusive_group(required=True)
    mode.add_argument("--check", action="store_true")
    mode.add_argument("--fix", action="store_true")
    options = parser.parse_args(arguments)
    wrong = {}
    for path in lesson_text.lessons():
        wrong[path.name] = stamp_lesson(path, options.fix)
    wrong["README.md"] = stamp_readme(options.fix) + stamp_pictures(options.fix)
    for name, changed in wrong.items():
        if changed:
            print(
                f"{name}: {' and '.join(changed)} {'written' if options.fix else 'not as generated; cure: make store, or python -m tools.stamp --fix'}"
            )
    return int(any(wrong.values()) and options.check)


if __name__ == "__main__":
    sys.exit(main())
