"""HTML under build/, a small site: a page for each executed notebook, with its contents and the way to the next one; one on
the virtual GPUs, which is their README; and index.html with what each notebook teaches, its time and one picture."""

import base64
import html
import posixpath
import re
import threading
from pathlib import Path
from urllib.parse import quote

import series
import stamp
from jupyter_core.paths import jupyter_path
from nbconvert import HTMLExporter
from nbconvert.filters import markdown2html
from nbformat.v4 import new_markdown_cell, new_notebook

ENGINE = "virtualgpu"

INDEX = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Beyond One GPU</title>
<style>
  :root {{ color-scheme: light dark; }}
  body {{ font: 17px/1.55 system-ui, sans-serif; max-width: 58rem; margin: 2rem auto; padding: 0 1rem; }}
  article {{ display: grid; grid-template-columns: 1fr 1fr; gap: 0 2rem; margin: 2.5rem 0; }}
  article h2, article p.error {{ grid-column: 1 / -1; margin: 0 0 0.5rem; }}
  article h2 small {{ font-weight: normal; opacity: 0.7; margin-left: 0.6rem; }}
  article img {{ width: 100%; border-radius: 6px; background: white; }}
  ul {{ margin: 0; padding-left: 1.2rem; }}
  .error {{ color: #c22; }}
  @media (max-width: 40rem) {{ article {{ grid-template-columns: 1fr; }} }}
</style>
</head>
<body>
<h1>Beyond One GPU</h1>
<p>Multi-GPU PyTorch, tuning and out-of-memory debugging, on a laptop or free Colab.</p>
{engine}
{articles}
</body>
</html>
"""


class Site:
    """The pages of these notebooks, each written as soon as it was executed, and then the index."""

    def __init__(self, paths: list[Path]):
        self._exporter = HTMLExporter(
            template_name="page",
            extra_template_basedirs=[str(Path(__file__).parent / "templates")],
        )
        # all that stands in them is ours; to search it for scripts takes as long as all else
        self._exporter.register_filter("clean_html", lambda text: text)
        self._one_at_a_time = threading.Lock()  # the exporter is not made for two threads
        self._colors = dark()
        self._found: dict[str, series.Summary] = {}  # of each page that is written
        self._links = [(f"{path.stem}.html", inline(series.summary(series.read(path)).title)) for path in paths]

    def page(self, path: Path) -> None:
        """That of the executed notebook at `path`."""
        notebook = series.read(path)
        found = self._found[path.stem] = series.summary(notebook)
        notebook.metadata["title"] = plain(found.title)
        opening = notebook.cells[0]
        # the badge is fetched from outside: its words do
        opening.source = re.sub(r"\[!\[(.+?)\]\(.+?\)\]", r"[\1]", opening.source)
        names = [link for link, _ in self._links]
        at = names.index(f"{path.stem}.html")
        before, after = self._links[:at][-1:], self._links[at + 1 :][:1]
        around = [
            *([(link, f"← {title}") for link, title in before] or [("", "")]),
            ("index.html", "All notebooks"),
            *((link, f"{title} →") for link, title in after),
        ]
        text = re.sub(r'href="(?!https?:|data:|#|index\.html)([^"]+)"', onward, self._rendered(notebook, around))
        (series.BUILD / names[at]).write_text(text, encoding="utf-8")

    def index(self, results: list[dict]) -> Path:
        """The first page, and the engine's, when those of `results` are written: path of the notebook, seconds or None, error or None."""
        engine = ""
        if (readme := series.ROOT / ENGINE / "README.md").exists():
            text = self._rendered(read_me(readme), [("", ""), ("index.html", "All notebooks")])
            (series.BUILD / f"{ENGINE}.html").write_text(text, encoding="utf-8")
            engine = f'<p>They run without a GPU, on <a href="{ENGINE}.html">virtual GPUs</a>, and so do your own scripts and tests.</p>'
        articles = "\n".join(article(result, self._found[result["path"].stem]) for result in results)
        index = series.BUILD / "index.html"
        index.write_text(INDEX.format(engine=engine, articles=articles), encoding="utf-8")
        return index

    def _rendered(self, notebook, around: list[tuple[str, str]]) -> str:
        resources = {"page": {"around": around, "contents": contents(notebook), "dark": self._colors}}
        with self._one_at_a_time:
            return self._exporter.from_notebook_node(notebook, resources=resources)[0]


def onward(link: re.Match) -> str:
    """A notebook's link to a file as its page has it: to the other notebook's page, the engine's, or the file in the repository."""
    target, _, section = link[1].partition("#")
    if re.fullmatch(r"\d\d_\w+\.(ipynb|html)", target):
        return f'href="{target.partition(".")[0]}.html{section and f"#{section}"}"'
    target = posixpath.normpath(f"{series.NOTEBOOKS.name}/{target}")
    if target == f"{ENGINE}/README.md":
        return f'href="{ENGINE}.html{section and f"#{anchors(series.ROOT / target)[section]}"}"'
    return f'href="{in_repository(target)}"'


def anchors(path: Path) -> dict[str, str]:
    """What GitHub calls each section of a README: what nbconvert calls it."""
    headings = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), re.M)
    return {re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-"): text.replace(" ", "-") for text in headings}


def in_repository(target: str) -> str:
    """The address of a file of the project."""
    project = stamp.settings()
    return f"https://github.com/{project['repository']}/blob/{project['branch']}/{target}"


def read_me(path: Path):
    """A README as a notebook of one cell: its pictures within, its links to other files leading to the repository."""

    def within(match) -> str:
        kind = match[2].rsplit(".", 1)[1]
        return (
            f"{match[1]}(data:image/{kind};base64,{base64.b64encode((path.parent / match[2]).read_bytes()).decode()})"
        )

    def outside(match) -> str:
        return f"]({in_repository(posixpath.normpath(f'{path.parent.name}/{match[1]}'))})"

    text = path.read_text(encoding="utf-8")
    text = re.sub(r"(!\[[^]]*\])\(([^):]+\.(?:png|svg))\)", within, text)
    text = re.sub(r"\]\((?!#)([^):]+)\)", outside, text)
    return new_notebook(cells=[new_markdown_cell(text)], metadata={"title": path.parent.name})


def contents(notebook) -> list[tuple[str, str]]:
    """Anchor and text of each section, as nbconvert writes them into the page."""
    prose = "\n\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    headings = re.findall(r'<h2 id="([^"]*)">(.*?)</h2>', markdown2html(prose), re.S)
    return [(quote(html.unescape(anchor)), re.sub(r"<a.*?</a>", "", text)) for anchor, text in headings]


def dark() -> str:
    """JupyterLab's dark colours, from nbconvert's own template."""
    places = (Path(folder, "templates", "lab", "static", "theme-dark.css") for folder in jupyter_path("nbconvert"))
    return next((file.read_text(encoding="utf-8") for file in places if file.exists()), "")


def article(result: dict, found: series.Summary) -> str:
    """What the index says of a notebook."""
    link = f"{result['path'].stem}.html"
    time = f" <small>{result['seconds']:.0f} s</small>" if result["seconds"] is not None else ""
    error = f'<p class="error">{html.escape(result["error"])}</p>' if result["error"] else ""
    picture = ""
    if found.picture:
        says = html.escape(found.picture_says, quote=True)
        picture = f'<a href="{link}"><img src="data:image/png;base64,{found.picture}" alt="{says}"></a>'
    bullets = "".join(f"<li>{inline(bullet)}</li>" for bullet in found.teaches)
    return f'<article><h2><a href="{link}">{inline(found.title)}</a>{time}</h2>{error}<ul>{bullets}</ul>{picture}</article>'


def inline(markdown: str) -> str:
    """The little markdown that titles and bullets hold: `code`, **bold**, *emphasis*."""
    text = re.sub(r"`(.+?)`", r"<code>\1</code>", html.escape(markdown))
    text = re.sub(r"\*\*(.+?)\*\*", r"<b>\1</b>", text)
    return re.sub(r"\*(.+?)\*", r"<em>\1</em>", text)


def plain(markdown: str) -> str:
    return re.sub(r"[`*]", "", markdown)
