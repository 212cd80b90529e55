"""Sphinx: the site. `tools/website.py` puts these pages, the lessons and the engine's guide into one folder and builds it."""

import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
repository = f"https://github.com/{pyproject['tool']['series']['repository']}"
tag = pyproject["tool"]["series"]["tag"]

project = "Beyond One GPU"
author = "the Beyond One GPU authors"
copyright = f"{author}; text CC BY 4.0, code MIT"
language = "en"

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_design", "sphinx_copybutton"]
exclude_patterns = ["_build", "buttons.md"]  # buttons.md is a part of index.md
myst_enable_extensions = ["colon_fence", "attrs_block", "attrs_inline"]
myst_heading_anchors = 4
suppress_warnings = ["mystnb.unknown_mime_type"]

nb_execution_mode = "off"  # the outputs are there: tools/run.py executed the lessons
nb_ipywidgets_js = {}  # nothing comes from outside
nb_merge_streams = True
nb_code_prompt_show = "Show the code"
nb_code_prompt_hide = "Hide the code"

autodoc_typehints = "description"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
copybutton_exclude = ".linenos, .gp, .go"
copybutton_prompt_text = r"\$ (?!per )"  # fit's last line begins with "$ per GPU and hour"
copybutton_prompt_is_regexp = True

html_theme = "sphinx_book_theme"
html_title = project
html_css_files = ["series.css"]
html_favicon = "_static/favicon.svg"
html_copy_source = False
html_show_sourcelink = False
html_context = {"default_mode": "auto"}
html_theme_options = {
    "navbar_persistent": [],
    "navbar_start": [],
    "navbar_center": [],
    "navbar_end": [],
    "repository_url": repository,
    "repository_branch": tag,
    "path_to_docs": "",
    "use_repository_button": True,
    "use_issues_button": True,
    "use_download_button": False,
    "use_fullscreen_button": False,
    "launch_buttons": {"colab_url": "https://colab.research.google.com"},
    "footer_content_items": ["copyright.html"],  # which names the authors
    "show_navbar_depth": 1,
    "show_toc_level": 2,
    "home_page_in_toc": True,
}
