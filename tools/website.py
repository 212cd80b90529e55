"""The site: the lessons with their outputs, the engine's guide and its API, by Sphinx; under build/site/, opened from the disk as well.

The sources are put together under build/site-source/: docs/ as it is, each lesson (`lesson_page`), the engine's
README and docs/, and what Sphinx cannot know: the table of lessons and the front page's picture.
"""

import html
import itertools
import posixpath
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import lesson_page
import nbformat
import series
import stamp

from virtualgpu.hardware import specs
from virtualgpu.run import cli
from virtualgpu.run.fit import cli as fit_cli

ENGINE = "virtualgpu"
ENGINE_README, ENGINE_DOCS = f"{ENGINE}/README.md", f"{ENGINE}/docs"
MOVED = {  # pages that had another name: where the old address leads
    "08_ddp_in_the_wild": "08_when_ddp_goes_wrong",
    "09_models_that_do_not_fit": "10_models_that_do_not_fit",
    "10_pipelines_of_processes": "11_pipelines_of_processes",
}
LINK = re.compile(r"\]\((?!https?:|data:|mailto:)([^)\s]+)\)")
WIDE = "---\nhtml_theme.sidebar_secondary.remove: true\n---\n"  # a page whose lines need the column of contents, too


class Broken(RuntimeError):
    """A link, a reference or a picture of the site leads nowhere."""


def build(paths: list[Path], seconds: dict[str, float] | None = None) -> Path:
    """The site of these notebooks. seconds: how long each ran here, by name. Returns its first page.

    Raises Broken with Sphinx's words where a link, a reference or a picture is broken.
    """
    source = series.BUILD / "site-source"
    begin(source)
    lessons = [(path, series.read(path)) for path in paths]
    for path, notebook in lessons:
        page = lesson_page.made_of(notebook, path.stem, source / "_static", onward)
        nbformat.write(page, source / "notebooks" / path.name)
    for name, text in engine_pages():
        (source / "engine" / f"{name}.md").write_text(text, encoding="utf-8")
    (source / "engine" / "options.md").write_text(options(), encoding="utf-8")
    (source / "changelog.md").write_text(
        onward((series.ROOT / "CHANGELOG.md").read_text("utf-8"), ""), encoding="utf-8"
    )
    (source / "engine" / "cards.md").write_text(card_table(), encoding="utf-8")
    (source / "lessons.md").write_text(contents(lessons, seconds or {}), encoding="utf-8")
    (source / "buttons.md").write_text(buttons(*lessons[0]), encoding="utf-8")
    (source / "plays.html").write_text(plays(lessons, source / "_static"), encoding="utf-8")
    site = series.BUILD / "site"
    sphinx(source, site)
    leave_unused_icons(site)
    for old, new in MOVED.items():
        moved = f'<!doctype html>\n<title>Moved</title>\n<meta http-equiv="refresh" content="0; url={new}.html">\n<a href="{new}.html">This lesson has moved.</a>\n'
        (site / "notebooks" / f"{old}.html").write_text(moved, encoding="utf-8")
    return site / "index.html"


ICON = re.compile(r'"?([a-z0-9-]+)"?:\[\d+,\d+,(\[[^\]]*\]),"[0-9a-f]+",(?:"[^"]*"|\["[^\]]*\])\],?')


def leave_unused_icons(site: Path) -> None:
    """Each page loads the theme's icons, two thousand of them in 1.5 MB: those that no page uses go."""
    scripts = site / "_static" / "scripts"
    icons = scripts / "fontawesome.js"
    texts = [path.read_text("utf-8") for kind in ("*.html", "*.js") for path in site.rglob(kind) if path != icons]
    used = {name for text in texts for name in re.findall(r"\bfa-([a-z0-9-]+)", text)}

    def kept(icon: re.Match) -> str:
        return icon[0] if {icon[1], *re.findall(r'"([\w-]+)"', icon[2])} & used else ""

    icons.write_text(ICON.sub(kept, icons.read_text("utf-8")), encoding="utf-8")
    for source_map in scripts.glob("*.map"):
        source_map.unlink()


def begin(source: Path) -> None:
    """A new folder for what Sphinx reads: docs/, and room for the rest."""
    shutil.rmtree(source, ignore_errors=True)
    shutil.copytree(series.ROOT / "docs", source, ignore=shutil.ignore_patterns("conf.py", "_static"))
    (source / "_static").mkdir()
    (source / "notebooks").mkdir()
    (source / "engine").mkdir()


def sphinx(source: Path, target: Path) -> None:
    """Build with the settings of docs/conf.py. Raises Broken with Sphinx's words."""
    docs = Path(__file__).resolve().parent.parent / "docs"
    static = f"html_static_path={docs / '_static'},{source / '_static'}"
    strict = ["-q", "-W", "--keep-going", "-j", "2"]
    command = [sys.executable, "-m", "sphinx", *strict, "-b", "html", "-c", docs, "-D", static, source, target]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise Broken(f"The site is not whole:\n{done.stderr.strip()}")


def engine_pages() -> list[tuple[str, str]]:
    """The engine's README and its docs/: name and text of each page."""
    pages = sorted((series.ROOT / ENGINE_DOCS).glob("*.md"))
    texts = [(page.stem, onward(page.read_text(encoding="utf-8"), ENGINE_DOCS)) for page in pages]
    return [(ENGINE, onward((series.ROOT / ENGINE_README).read_text(encoding="utf-8"), ENGINE)), *texts]


def options() -> str:
    """Every option of the runner, in its own words."""
    texts = {"python -m virtualgpu": cli.USAGE, "python -m virtualgpu fit": fit_cli.USAGE}
    sections = (f"## {command}\n\n```text\n{usage.strip()}\n```\n" for command, usage in texts.items())
    return f"{WIDE}# Command line\n\n" + "\n".join(sections)


def card_table() -> str:
    """The cards, and the file that says where each figure is from."""
    data = (series.ROOT / ENGINE / "hardware" / "data" / "cards.toml").read_text(encoding="utf-8")
    table, _, notes = specs.table().strip().partition("\n\n")
    return (
        f"{WIDE}# Cards\n\n```text\n{table}\n```\n\n{notes}\n\n"
        f"## With their sources\n\nThe file that is read:\n\n```toml\n{data.strip()}\n```\n"
    )


def anchor(heading: str) -> str:
    """What GitHub calls a section."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def onward(text: str, folder: str) -> str:
    """The text with its links as the site has them; they are as from `folder` of the repository.

    To a lesson's page, to a section of the engine's guide, to a picture of docs/; any other file is the repository's.
    """

    def link(match: re.Match) -> str:
        target, _, section = match[1].partition("#")
        if folder == "notebooks" or target.endswith(".ipynb"):
            section = anchor(section.replace("-", " "))  # JupyterLab keeps a heading's capitals and signs
        if not target:  # within the same text
            return f"](#{section})"
        target = posixpath.normpath(posixpath.join(folder, target))
        if target == ENGINE_README:
            return f"](/engine/{ENGINE}.md)"
        if posixpath.dirname(target) == ENGINE_DOCS:
            return f"](/engine/{posixpath.basename(target)}{section and f'#{section}'})"
        if re.fullmatch(r"notebooks/\d\d_\w+\.ipynb", target):
            return f"](/{target}{section and f'#{section}'})"
        if target.startswith("docs/"):
            return f"](/{target.removeprefix('docs/')})"
        return f"]({in_repository(target)}{section and f'#{section}'})"

    return LINK.sub(link, text)


def in_repository(target: str) -> str:
    """The address of a file of the project."""
    project = series.settings()
    return f"https://github.com/{project['repository']}/blob/{project['tag']}/{target}"


def buttons(path: Path, notebook) -> str:
    """To the first lesson, where it can be run, and to the other ways to begin."""
    colab = stamp.addresses(notebook, path.name)["Colab"]
    return (
        f"````{{div}} first-steps\n```{{button-link}} {colab}\n:color: primary\nStart lesson {path.name[:2]} in Colab\n```\n"
        "```{button-ref} lessons\n:ref-type: doc\n:color: primary\n:outline:\nRead the lessons\n```\n"
        "```{button-ref} start\n:ref-type: doc\n:color: primary\n:outline:\nGet started on your machine\n```\n````\n"
    )


def contents(lessons: list, seconds: dict[str, float]) -> str:
    """The page of all lessons, in the order of reading: what each teaches, its time, its picture."""
    cards = []
    for path, notebook in lessons:
        summary = series.summary(notebook)
        here = f"; here it ran in {seconds[path.stem]:.0f} s" if path.stem in seconds else ""
        bullets = "\n".join(f"- {bullet}" for bullet in summary.teaches)
        picture = lesson_page.cover(path.stem) if summary.picture else ""
        cards.append(
            f"## [{summary.title}]({path.name})\n\n"
            f":::::{{grid}} 1 1 2 2\n::::{{grid-item}}\n{bullets}\n::::\n::::{{grid-item}}\n"
            + (f'<img src="{picture}" alt="{html.escape(summary.picture_says)}">\n' if picture else "")
            + f"::::\n:::::\n\n{{.lesson-facts}}\n{summary.level.capitalize()}; runs in {summary.runs or 'a minute'} on two cores{here}; plan {stamp.minutes(notebook)} minutes. Before it: {summary.needs or 'nothing'}.\n"
        )
    text = (
        f"# The lessons\n\nIn the order of reading, which is that of their numbers ([their words](../docs/words.md)). What comes before what:\n\n{series_map(lessons)}\n\n"
        + "\n".join(cards)
    )
    return onward(text, series.NOTEBOOKS.name)


def series_map(lessons: list) -> str:
    """Which lesson builds on which, as a drawing: a column for each step of the way, from the openings' links."""
    needs = {path.stem: re.findall(r"\]\((\w+)\.ipynb\)", series.summary(notebook).needs) for path, notebook in lessons}
    column: dict[str, int] = {}
    for name, before in sorted(needs.items()):
        column[name] = 1 + max((column[other] for other in before if other in column), default=-1)
    rows = [sum(column[other] == column[name] for other in column if other < name) for name in column]
    corner = {name: (212 * column[name], 62 * row) for name, row in zip(column, rows, strict=True)}
    above = {}  # all that comes before a lesson: an arrow that others imply is not drawn
    for name in sorted(needs):
        before = [other for other in needs[name] if other in corner]
        above[name] = set(before).union(*(above[other] for other in before))
    arrows = [
        f'<path d="M{corner[other][0] + 182} {corner[other][1] + 22} L{x - 2} {y + 22}" marker-end="url(#tip)"/>'
        for name, (x, y) in corner.items()
        for other in needs[name]
        if other in corner and not any(other in above.get(between, ()) for between in needs[name])
    ]
    boxes = []
    for path, notebook in lessons:
        (x, y), found = corner[path.stem], series.summary(notebook)
        short = found.title.partition(":")[0].partition(" · ")[2]
        first, _, second = textwrap.fill(f"{path.stem[:2]} {short}", 24, max_lines=2, placeholder=" …").partition("\n")
        lines = f'<tspan x="{x + 8}" dy="0">{html.escape(first)}</tspan><tspan x="{x + 8}" dy="16">{html.escape(second)}</tspan>'
        boxes.append(
            f'<a href="notebooks/{path.stem}.html"><title>{html.escape(found.title)}, {found.level}</title>'
            f'<rect x="{x}" y="{y}" width="182" height="44" rx="6"/><text x="{x + 8}" y="{y + 18}">{lines}</text></a>'
        )
    width, height = 212 * max(column.values()) + 184, 62 * max(rows) + 46
    tip = '<marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto"><path d="M0 0 L8 4 L0 8"/></marker>'
    drawing = f'<svg class="series-map" viewBox="-1 -1 {width} {height}" width="{width}" role="img" aria-label="Which lesson builds on which"><defs>{tip}</defs>{"".join(arrows + boxes)}</svg>'
    return f'```{{raw}} html\n<div class="series-map-frame">{drawing}</div>\n```'


def plays(lessons: list, static: Path) -> str:
    """The front page's picture that moves: lesson 03's slider, once from one micro-batch to many, or until somebody takes it in hand.

    Its pictures become files below `static`, as those of the lessons.
    """
    for path, notebook in lessons:
        if path.name.startswith("03"):
            for output in (output for cell in series.code_cells(notebook) for output in cell.outputs):
                slider = output.get("data", {}).get("text/html", "")
                if '<figure class="frames"' in slider:
                    names = (f"plays-{number}.png" for number in itertools.count(1))
                    slider = lesson_page.with_files(slider, static / lesson_page.PICTURES, names, up="")
                    return f'<div class="plays">{slider}</div>\n<script>{PLAY}</script>\n'
    return ""


# The slider itself is made by a script of its own, which stands before this one
PLAY = """
if (!matchMedia('(prefers-reduced-motion: reduce)').matches) {
  const slider = document.querySelector('.plays input'), count = +slider.max + 1;
  let moves = 0;
  const timer = setInterval(() => {
    slider.value = (+slider.value + 1) % count, slider.oninput();
    if (++moves == count) clearInterval(timer);
  }, 1500);
  for (const event of ['pointerdown', 'keydown', 'focusin']) document.querySelector('.plays').addEventListener(event, () => clearInterval(timer));
}
"""
