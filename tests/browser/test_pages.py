"""The site in a real browser, from a desktop to a phone, light and dark: nothing broken, nothing cut, nothing from outside."""

import re

import pytest
import run
import series
from website import MOVED

from tests.browser.conftest import SLIDERS

SCREENS = [(1440, "light"), (1440, "dark"), (1200, "light"), (820, "light"), (390, "light"), (390, "dark")]
PHONE = 390  # a line of 105 columns cannot be whole there


@pytest.fixture(scope="module")
def pages():
    """The pages of the stored outputs; nothing is executed."""
    assert run.main(["--stored"]) == 0
    site = series.BUILD / "site"
    pages = [path for path in site.rglob("*.html") if "_static" not in path.parts]
    return sorted(path for path in pages if path.stem not in MOVED)


@pytest.mark.parametrize("width, scheme", SCREENS)
def test_a_page_is_whole(browser, pages, width, scheme):
    page = browser.new_page(viewport={"width": width, "height": 1000}, color_scheme=scheme)
    heard = []
    page.on("console", lambda message: message.type == "error" and heard.append(message.text))
    page.on("pageerror", lambda error: heard.append(str(error)))
    page.on("request", lambda request: request.url.startswith(("file:", "data:", "blob:")) or heard.append(request.url))
    for path in pages:
        page.goto(path.as_uri())
        assert page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth"), path.name
        assert page.evaluate(WIDE) == [], f"{path.name}: beyond the page's edge"
        assert width == PHONE or page.evaluate(CUT) == [], f"{path.name}: code that is cut"
        page.evaluate("document.querySelectorAll('img').forEach(image => image.loading = 'eager')")
        page.wait_for_function("[...document.images].every(image => image.complete)")
        assert page.evaluate("[...document.images].every(i => i.alt && i.naturalWidth)"), path.name
        assert page.evaluate(DIM) == [], f"{path.name}: text that is hard to read"
        shots = series.BUILD / "browser" / "pages"
        shots.mkdir(parents=True, exist_ok=True)
        page.screenshot(path=shots / f"{path.stem}-{width}-{scheme}.png")
    assert not heard
    page.close()


def test_the_contents_of_a_page_are_beside_it_or_behind_a_button(browser, pages):
    page = browser.new_page()
    for width in (1440, 1200, 390):
        page.set_viewport_size({"width": width, "height": 1000})
        page.goto(next(path for path in pages if path.stem == SLIDERS).as_uri())
        if width < 1440:
            page.locator("button.secondary-toggle").click()
        page.locator(".bd-sidebar-secondary a", has_text="What to remember").click()
        assert page.url.endswith("#what-to-remember")
        page.locator("#what-to-remember h2").wait_for(state="visible")
    page.close()


def test_the_search_works_from_the_disk(browser, pages):
    page = browser.new_page()
    page.goto(next(path for path in pages if path.stem == "search").as_uri() + "?q=bubble")
    page.wait_for_selector("#search-results li a")
    assert any("Keep both GPUs busy" in text for text in page.locator("#search-results li a").all_inner_texts())
    page.close()


FOLDED_FIGURE = "article details:has(figure.frames) > summary:text-is('The answer')"


def test_without_javascript_all_is_there_to_read(browser, pages):
    page = browser.new_context(java_script_enabled=False).new_page()
    page.goto(next(path for path in pages if path.stem.startswith("02_")).as_uri())
    text = page.inner_text("article")
    assert "AlexNet" in text and re.search(r"simulated: one GPU \d+ ms", text), "what a cell printed is there"
    assert page.locator("details.hide").count() > 2, "solutions stay folded"
    answer = page.locator("article details", has_text="The answer").first
    assert answer.locator("pre").is_hidden()
    answer.locator("summary").click()
    assert answer.locator("pre").is_visible()
    page.goto(next(path for path in pages if path.stem == SLIDERS).as_uri())
    page.locator(FOLDED_FIGURE).first.click()
    assert page.locator("figure.frames img").filter(visible=True).count() == 1
    page.close()


def test_from_the_index_one_reads_on_to_the_last_lesson(browser, pages):
    page = browser.new_page()
    page.goto(next(path for path in pages if path.stem == "lessons").as_uri())
    page.locator("article h2 a").first.click()
    read = []
    while "/notebooks/" in page.url:
        read.append(page.title())
        page.locator(".prev-next-footer a.right-next").click()
    assert len(read) == len(series.notebooks())
    page.close()


def test_the_slider_moves_by_keyboard(browser, pages):
    page = browser.new_page()
    page.goto(next(path for path in pages if path.stem == SLIDERS).as_uri())
    page.locator(FOLDED_FIGURE).first.click()
    slider = page.locator("input[type=range]").first
    slider.focus()
    before = page.locator("figure output").first.inner_text()
    page.keyboard.press("ArrowRight")
    assert page.locator("figure output").first.inner_text() != before
    page.locator("figure.frames img").filter(visible=True).wait_for()  # exactly one, once the browser has drawn it
    page.close()


def test_the_front_pages_slider_moves_once(browser, pages):
    """All of its pictures, and back to the first; a click holds it. The clock is the test's."""
    page = browser.new_page()
    page.clock.install()
    page.goto(next(path for path in pages if path.stem == "index").as_uri())
    slider = page.locator(".plays input")
    start, last = slider.input_value(), int(slider.get_attribute("max"))
    page.clock.run_for(1600)
    assert slider.input_value() != start
    page.clock.run_for(1500 * (last + 10))
    assert slider.input_value() == start
    page.reload()
    page.locator(".plays button").first.click()
    held = slider.input_value()
    page.clock.run_for(10_000)
    assert slider.input_value() == held
    page.close()


# The longest line of each code cell whose lines are cut off
CUT = """() => [...document.querySelectorAll('div.cell_input pre')].filter(e => e.checkVisibility() && e.scrollWidth > e.clientWidth + 1)
    .map(e => e.innerText.split('\\n').reduce((a, b) => a.length < b.length ? b : a))"""
# What is wider than the page, unless it scrolls in a box of its own
WIDE = """() => [...document.querySelectorAll('article :is(table, pre, img, svg, figure, p, li, h1, h2, h3)')].filter(e => {
    if (!e.checkVisibility() || e.getBoundingClientRect().right <= innerWidth + 1) return false;
    for (; e; e = e.parentElement)
        if (/auto|scroll/.test(getComputedStyle(e).overflowX) && e.getBoundingClientRect().right <= innerWidth + 1) return false;
    return true; }).map(e => e.tagName + ': ' + (e.alt || e.innerText || '').slice(0, 60))"""
# Text whose contrast with its background is under 3 to 1, on the page or in an element of it. A traceback's colours are IPython's.
DIM = """(within) => {
    const rgba = color => (color.match(/[\\d.]+/g) || [0, 0, 0, 0]).map(Number);
    const light = color => rgba(color).slice(0, 3).map(v => v / 255).map(v => v <= 0.04 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
        .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
    const behind = e => { for (; e; e = e.parentElement) { const c = rgba(getComputedStyle(e).backgroundColor);
        if (c.length < 4 || c[3] > 0.5) return getComputedStyle(e).backgroundColor; }
        return matchMedia('(prefers-color-scheme: dark)').matches ? 'rgb(18, 18, 18)' : 'rgb(255, 255, 255)'; };
    const words = document.createTreeWalker(within || document.body, NodeFilter.SHOW_TEXT), found = [];
    for (let n; (n = words.nextNode());) {
        const e = n.parentElement;
        if (!n.data.trim() || e.closest('style, script, .headerlink, [class*=ansi-]') || !e.getClientRects().length) continue;
        const [a, b] = [light(getComputedStyle(e).color), light(behind(e))];
        if ((Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05) < 3) found.push(n.data.trim().slice(0, 60) + ' ' + getComputedStyle(e).color + ' on ' + behind(e));
    }
    return found.slice(0, 8);
}"""
