"""What maintains the series: `python -m tools.run`, and each file here alike (docs/contribute.md)."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))  # they import each other by their names, as the tests do
