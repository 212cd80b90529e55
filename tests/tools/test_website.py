"""The site: nothing broken, nothing from outside, and each thing on a page that a notebook shows by itself."""

import doctest
import re
from pathlib import Path
from urllib.parse import unquote

import lesson_page
import pytest
import series
import stamp
import website
from bs4 import BeautifulSoup
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

import virtualgpu

TAG = series.settings()["tag"]

ELSEWHERE = re.compile(r"^(https?:|data:|mailto:|#$|javascript:)")


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The site of the stored outputs, in a folder of its own. Sphinx's warnings are failures."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(series, "BUILD", tmp_path_factory.mktemp("build"))
        return website.build(series.notebooks(), {"01_save_load_transfer_learning": 41.4}).parent


@pytest.fixture(scope="module")
def pages(site):
    """Each page, by its path in the site."""
    paths = [path for path in site.rglob("*.html") if "_static" not in path.parts]
    return {path.relative_to(site).as_posix(): BeautifulSoup(path.read_text("utf-8"), "html.parser") for path in paths}


def test_each_lesson_has_a_page_with_a_button_for_colab(pages):
    names = {path.stem for path in series.notebooks()}
    for path in series.notebooks():
        page = pages[f"notebooks/{path.stem}.html"]
        in_colab = re.search(r"https://colab[^)]*/github/[^)]*", stamp.badges(series.read(path), path.name))[0]
        assert page.find("a", class_="open-in", href=in_colab), path.stem
        assert page.select_one(".next-page, .right-next, .prev-next-footer a"), "the way to the next page"
    for old, new in website.MOVED.items():
        assert new in names and old not in names
        assert pages[f"notebooks/{old}.html"].find("meta", content=f"0; url={new}.html")


def test_links_and_pictures_lead_somewhere(site, pages):
    ids = {name: {tag["id"] for tag in page.find_all(id=True)} for name, page in pages.items()}
    lost = []
    ours = website.in_repository("")
    for name, page in pages.items():
        links = [tag["href"] for tag in page.find_all("a", href=True)] + [tag["src"] for tag in page.find_all("img")]
        files = [unquote(link.removeprefix(ours).partition("#")[0]) for link in links if link.startswith(ours)]
        lost += [f"{name}: {file} of the repository" for file in files if not (series.ROOT / file).exists()]
        for link in (link for link in links if not ELSEWHERE.match(link)):
            target, _, section = unquote(link).partition("#")
            file = (site / name).parent.joinpath(target).resolve() if target else site.resolve() / name
            known = ids.get(file.relative_to(site.resolve()).as_posix()) if file.suffix == ".html" else None
            if not file.is_file() or (section and known is not None and section not in known):
                lost.append(f"{name}: {link}")
    assert not lost


def test_links_of_the_repositorys_own_pages_lead_somewhere():
    """As GitHub shows them: README.md and its like; docs/ is the site's, whose links Sphinx checks."""
    names = ["*.md", "virtualgpu/*.md", "virtualgpu/docs/*.md", "data/*.md", "tests/*/*.md", "tests/*/*/*.md"]
    pages = [path for name in names for path in series.ROOT.glob(name)]
    lost = []
    for page in pages:
        for target, _, section in (link.partition("#") for link in website.LINK.findall(page.read_text("utf-8"))):
            file = page.parent / unquote(target) if target else page
            if not file.exists() or (section and file.suffix == ".md" and section not in sections(file)):
                lost.append(f"{page.relative_to(series.ROOT)}: {target}#{section}")
    assert len(pages) > 15 and not lost


def sections(page: Path) -> set[str]:
    """The addresses that GitHub gives to a page's headings."""
    text = re.sub(r"^```.*?^```", "", page.read_text("utf-8"), flags=re.M | re.S)
    return {website.anchor(heading) for heading in re.findall(r"^#+ (.+)$", text, re.M)}


def test_a_page_is_light_asks_nothing_of_the_outside_and_has_words_for_each_picture(site, pages):
    for name, page in pages.items():
        asking = page.find_all(["script", "img", "iframe"]) + page.select("link[rel=stylesheet], link[rel=preload]")
        sources = [tag.get("src") or tag.get("href") or "" for tag in asking]
        assert not [source for source in sources if source.startswith(("http:", "https:", "//"))], name
        assert [image for image in page.find_all("img") if not image.get("alt")] == [], name
        assert (site / name).stat().st_size < 3_000_000, name


def test_the_search_works_from_the_disk_and_only_icons_that_are_used_are_loaded(site, pages):
    """searchindex.js is read by a script tag."""
    index = (site / "searchindex.js").read_text("utf-8")
    assert index.startswith("Search.setIndex(") and "micro" in index and "notebooks/03_pipeline_parallel" in index
    icons = (site / "_static/scripts/fontawesome.js").read_text("utf-8")
    assert 50_000 < len(icons) < 200_000
    shown = {
        name
        for page in pages.values()
        for name in re.findall(r"fa-(bars|magnifying-glass|circle-half-stroke)\b", str(page))
    }
    assert len(shown) == 3 and all(re.search(rf'"?{name}"?:\[', icons) or f'"{name}"' in icons for name in shown)


def covering(path):
    """The pictures of the cell whose first one is the lesson's in the table of lessons."""
    return next(series.pictures(cell) for cell in series.code_cells(series.read(path)) if "cover" in series.tags(cell))


def test_the_table_of_lessons(pages):
    page = pages["lessons.html"]
    headings = [heading.text for heading in page.select("article h2")]
    assert len(headings) == len(series.notebooks()) and headings[0].startswith("01 · Save")
    facts = [paragraph.text for paragraph in page.select(".lesson-facts")]
    minutes = "Beginner; runs in a minute and a half on two cores; here it ran in 41 s; plan [0-9]+ minutes. Before it: nothing"
    assert re.match(minutes, facts[0]), facts[0]
    covers = [image["alt"] for image in page.select("article img")]
    titles = [pictures[0][1] for pictures in map(covering, series.notebooks())]
    assert all(re.match(r"Figure \((measured|simulated|data)\): .*\d", says) for says in covers), (
        "the data, in a sentence"
    )
    assert len(covers) == len(titles) and not set(covers) & set(titles)
    assert "Before it: 02 (" in facts[2] and sum("Before it: " in fact for fact in facts) == len(facts)


def test_options_and_cards_are_those_of_the_runner(pages):
    found = {
        "changelog.html": "Changes",
        "engine/options.html": "--gpus-per-node",
        "engine/cards.html": "NVIDIA T4 data sheet (2019)",
    }
    assert all(words in pages[name].text for name, words in found.items())
    assert "--vary" in pages["engine/options.html"].text


def test_sliders_and_answers_are_on_the_pages(pages):
    """An answer is closed and so is a solution, nobody is told that nothing was predicted, and each picture is a file."""
    for path in series.notebooks():
        cells = series.code_cells(series.read(path))
        stored = "".join(output.get("data", {}).get("text/html", "") for cell in cells for output in cell.outputs)
        page = pages[f"notebooks/{path.stem}.html"]
        assert len(page.select("figure.frames")) == stored.count('<figure class="frames"')
        answers = [summary.parent for summary in page.select("details > summary") if summary.text == "The answer"]
        assert len(answers) == stored.count("<summary>The answer") and not any("open" in fold.attrs for fold in answers)
        shown = "".join(series.said(cell) for cell in cells if "exercise" not in series.tags(cell))
        assert "predicted nothing" not in page.text and page.text.count("[not yet]") == shown.count("[not yet]")
        solutions = [summary.text.split() for summary in page.select(".tag_solution.tag_hide-cell summary")]
        assert solutions == [["Solution", "Solution"]] * sum("solution" in series.tags(cell) for cell in cells)
        assert "@title" not in page.text
        images = [image for image in page.find_all("img") if "/pictures/" in image["src"]]
        assert images and all(image.get("width") and image.get("loading") == "lazy" for image in images)
        assert "data:image/png" not in str(page.select_one("article"))
    assert "setInterval" in str(pages["index.html"]) and len(pages["index.html"].select(".plays figure.frames img")) > 5


def test_a_broken_link_is_said(tmp_path):
    source = tmp_path / "source"
    (source / "_static").mkdir(parents=True)
    (source / "index.md").write_text("# Here\n\n[gone](gone.md)\n\n![](gone.png)\n", "utf-8")
    with pytest.raises(website.Broken, match="not whole") as broken:
        website.sphinx(source, tmp_path / "out")
    assert "gone.md" in str(broken.value) and "gone.png" in str(broken.value)


BLOB = f"/blob/{TAG}/"


@pytest.mark.parametrize("target, folder, led", [
    ("../virtualgpu/docs/accuracy.md#other-peoples-programs", "notebooks", "/engine/accuracy.md#other-peoples-programs"),
    ("../virtualgpu/README.md", "notebooks", "/engine/virtualgpu.md"),
    ("docs/races.md", "virtualgpu", "/engine/races.md"),
    ("races.md", "virtualgpu/docs", "/engine/races.md"),
    ("#a-section", "virtualgpu/docs", "#a-section"),
    ("04_dataparallel_vs_ddp.ipynb#A-Section,-named", "notebooks", "/notebooks/04_dataparallel_vs_ddp.ipynb#a-section-named"),
    ("scripts/llama.py", "notebooks", BLOB + "notebooks/scripts/llama.py"),
    ("../tests/judges/README.md#what-fit-says", "notebooks", BLOB + "tests/judges/README.md#what-fit-says"),
    ("../docs/accuracy.png", "notebooks", "/accuracy.png"),
    ("https://a.b/c", "notebooks", "https://a.b/c"),
])  # fmt: skip
def test_links_of_the_repository_are_the_sites(target, folder, led):
    found = website.onward(f"[x]({target})", folder).removeprefix("[x](").removesuffix(")")
    assert found.endswith(led) if led.startswith(BLOB) else found == led


def test_what_a_page_lacks_is_put_into_words(tmp_path):
    def shown(**data):
        return new_output("display_data", data, metadata={"image/png": {"alt": 'It "rises"', "width": 700}})

    hidden = {"jupyter": {"source_hidden": True}, "tags": ["solution"]}
    image = '<img alt="It" width="700" src="data:image/png;base64,cGFnZQ==">'
    said = [new_output("stream", text="[not yet] it raises\n")]
    two = {"image/png": "cGFnZQ==", "text/html": f"<p>{image}{image}</p>"}
    notebook = new_notebook(cells=[
        new_markdown_cell("# 01\n\n[![Open in Colab](https://badge.svg)](https://colab/01)"),
        new_code_cell('# @title Solution { display-mode: "form" }\nx = 1', metadata=hidden, outputs=said),
        new_code_cell('# @title Drawing { display-mode: "form" }\ny = 1', metadata={"jupyter": hidden["jupyter"]}),
        new_code_cell("guess = None", metadata={"tags": ["prediction"]}),
        new_code_cell("fit()", outputs=[new_output("stream", text="card  GPUs\n" + "a sentence " * 20)]),
        new_code_cell("table()", outputs=[new_output("stream", text="a  b" * 40)]),
        new_code_cell("checks.x()", metadata={"tags": ["exercise"]}, outputs=said),
        new_code_cell("plot()", outputs=[shown(**{"image/png": "cGljdHVyZQ=="})]),
        new_code_cell("slide()", outputs=[shown(**two)]),
    ])  # fmt: skip
    page = lesson_page.made_of(notebook, "01_x", tmp_path, lambda text, folder: text)
    badge, solution, drawing, _, fits, table, exercise, drawn, slider = page.cells
    assert fits.metadata["tags"] == ["columns"] and table.metadata["tags"] == ["wide-columns"]
    assert "[Open in Colab](https://colab/01)" in badge.source and "svg" not in badge.source
    assert solution.source == "x = 1" and "hide-cell" in solution.metadata["tags"], "with its output"
    assert solution.metadata["mystnb"]["code_prompt_show"] == "Solution"
    assert drawing.metadata["tags"] == ["hide-input"] and exercise.outputs == []
    assert 'alt="It &quot;rises&quot;" width="700"' in drawn.outputs[0].data["text/html"]
    files = [f'<img alt="It" width="700" loading="lazy" src="../_static/pictures/01_x-{i}.png">' for i in (2, 3)]
    assert slider.outputs[0].data == {"text/html": f"<p>{''.join(files)}</p>"}
    assert [(tmp_path / "pictures" / f"01_x-{i}.png").read_bytes() for i in (1, 2, 3)] == [b"picture", b"page", b"page"]
    assert notebook.cells[1].source.startswith("# @title"), "the notebook itself stays"


def test_the_examples_of_the_names_run():
    """docs/api.md has one for each public name, or says where it is shown."""
    text = (series.ROOT / "docs" / "api.md").read_text("utf-8")
    assert [name for name in virtualgpu.__all__ if f"virtualgpu.{name}" not in text] == []
    test = doctest.DocTestParser().get_doctest(re.sub(r"^```.*$", "", text, flags=re.M), {}, "api.md", "docs/api.md", 0)
    assert len(test.examples) > 20
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.IGNORE_EXCEPTION_DETAIL)
    try:
        assert runner.run(test).failed == 0
    finally:
        virtualgpu.reset()


def test_the_map_shows_what_builds_on_what():
    drawing = website.series_map([(path, series.read(path)) for path in series.notebooks()])
    assert drawing.count("<a href=") == len(series.notebooks())
    assert 8 < drawing.count("marker-end") < 2 * len(series.notebooks())


def test_the_map_leaves_out_what_follows():
    """01 to 02 to 03: that 03 needs 01 as well is seen already."""
    needs = {"01_a": "nothing", "02_b": "[01](01_a.ipynb)", "03_c": "[01](01_a.ipynb) and [02](02_b.ipynb)"}
    lessons = [
        (Path(f"{name}.ipynb"), new_notebook(metadata={"lesson": {"needs": text}})) for name, text in needs.items()
    ]
    drawing = website.series_map(lessons)
    assert drawing.count("marker-end") == 2 and drawing.count("<a href=") == 3
