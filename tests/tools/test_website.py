"""The site: nothing broken, nothing from outside, and each thing on a page that a notebook shows by itself."""

import doctest
import re
from urllib.parse import unquote

import pytest
import series
import stamp
import website
from bs4 import BeautifulSoup

import virtualgpu

TAG = stamp.settings()["tag"]

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
    for name, page in pages.items():
        links = [tag["href"] for tag in page.find_all("a", href=True)] + [tag["src"] for tag in page.find_all("img")]
        for link in (link for link in links if not ELSEWHERE.match(link)):
            target, _, section = unquote(link).partition("#")
            file = (site / name).parent.joinpath(target).resolve() if target else site.resolve() / name
            known = ids.get(file.relative_to(site.resolve()).as_posix()) if file.suffix == ".html" else None
            if not file.is_file() or (section and known is not None and section not in known):
                lost.append(f"{name}: {link}")
    assert not lost


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


def test_the_table_of_lessons(pages):
    page = pages["lessons.html"]
    headings = [heading.text for heading in page.select("article h2")]
    assert len(headings) == len(series.notebooks()) and headings[0].startswith("01 · Save")
    facts = [paragraph.text for paragraph in page.select(".lesson-facts")]
    minutes = "Beginner; runs in a minute and a half on two cores; here it ran in 41 s; plan [0-9]+ minutes. Before it: nothing"
    assert re.match(minutes, facts[0]), facts[0]
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
        website.sphinx("html", source, tmp_path / "out", "-W", "--keep-going")
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
    lessons = [(path, series.read(path)) for path in series.notebooks()]
    drawing = website.series_map(lessons)
    needed = "".join(series.summary(notebook).needs for _, notebook in lessons).count(".ipynb)")
    assert drawing.count("<a href=") == len(lessons) and drawing.count("marker-end") == needed > 8
