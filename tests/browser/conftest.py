"""A real browser: Debian's chromium, or Chrome. Without one, or without playwright, these tests fail: who asks for them by
name would take what was skipped for success."""

import shutil

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
QUIET = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
SLIDERS = "10_models_that_do_not_fit"  # a lesson whose answers hold sliders; it has solutions, too


def installed() -> str:
    """The path of this machine's browser; the test that asks fails where there is none."""
    program = next(filter(None, map(shutil.which, NAMES)), None)
    if program is None:
        pytest.fail("no chromium here: apt install chromium", pytrace=False)
    return program


@pytest.fixture(scope="session")
def browser():
    """chromium, driven by playwright."""
    program = installed()
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        pytest.fail("no playwright here: make browser, or pip install -e '.[browser]'", pytrace=False)
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=program, args=QUIET)
        yield chromium
        chromium.close()
