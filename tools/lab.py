"""JupyterLab's settings for `make lab`: it serves the checkout, for a lesson's text lies beside notebooks/, and begins in notebooks/."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import lesson_text
import series

c = get_config()  # noqa: F821 - JupyterLab's
c.ServerApp.root_dir = str(series.ROOT)
c.LabApp.default_url = "/lab/tree/notebooks"
c.FileContentsManager.pre_save_hook = lesson_text.saved
