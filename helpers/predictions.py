"""A prediction beside what came out. While nothing is predicted, all that the answer's cell prints and draws is folded: for Colab, Kaggle,
JupyterLab, GitHub and a page alike, for it is one element of HTML (<details>) that needs neither a script nor a kernel."""

import html
import io
import itertools
import numbers
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

from IPython.display import display

REVEALS = re.compile(r"^\s*(?:helpers\.)?reveal\((\w+),", re.M)
FOLD = """<details><summary>The answer</summary>
{said}
</details>"""
CLOSED = "The answer is folded. Write your own into the cell above first, and run both again: then it is judged."
RIGHT, POINTS = 0.05, 2.0  # a prediction is right within 5 %, one in percent within two points

Value = float | str | bool | None | Sequence


def reveal(guess: Value, answer: Value, unit: str = "", origin: str = "simulated") -> None:
    """Print the answer and, where the reader wrote one, the prediction judged beside it: right, too low by a factor, off by so many points.

    A call of it ends a cell. guess: None where nothing was written; then the whole cell's output is folded, and *Run all* passes.
    guess, answer: a number, a text with one ("200 %"), a choice ("DDP", True), or several of them in a list.
    unit: behind each number ("ms", "GiB", "%"). origin: "simulated", "measured", "counted" ...
    """
    print(f"{origin}: {_in_words(answer, unit)}")
    if guess is not None:
        print(f"you said: {_in_words(guess, unit)} ({judged(guess, answer, unit)})")


def judged(guess: Value, answer: Value, unit: str = "") -> str:
    """What is said of a prediction."""
    if _several(answer):
        if _several(guess) and len(guess) == len(answer):
            return "; ".join(judged(one, other, unit) for one, other in zip(guess, answer, strict=True))
        return f"{len(answer)} answers are wanted, in a list"
    of_guess, of_answer = _number(guess), _number(answer)
    if of_guess is None or of_answer is None:
        return "right" if _words(guess) == _words(answer) else "not so"
    (said, said_unit), (true, true_unit) = of_guess, of_answer
    unit = unit or said_unit or true_unit
    direction = "high" if said > true else "low"
    if unit.startswith("%"):
        return "right" if abs(said - true) <= POINTS else f"too {direction} by {_short(abs(said - true))} points"
    if said == true or (true and abs(said / true - 1) <= RIGHT):
        return "right"
    if said * true <= 0:
        return f"too {direction} by {_in_words(abs(said - true), unit)}"
    return f"too {direction} by a factor of {max(said / true, true / said):.2g}"


def _several(value: Any) -> TypeGuard[Sequence]:
    return isinstance(value, Sequence) and not isinstance(value, str)


def _number(value: Any) -> tuple[float, str] | None:
    """The number in it, and the unit behind; None for a choice."""
    if isinstance(value, bool):
        return None
    if isinstance(value, str):
        found = re.fullmatch(r"\s*(-?[\d,]*\.?\d+)\s*(%|[A-Za-z]\w*)?\s*", value)
        return (float(found[1].replace(",", "")), found[2] or "") if found else None
    try:
        return float(value), ""
    except (TypeError, ValueError):
        return None


def _words(value: Any) -> str:
    return " ".join(str(value).split()).casefold()


def _short(value: float) -> str:
    return f"{value:,.3g}" if abs(value) < 1000 else f"{value:,.0f}"


def _in_words(value: Value, unit: str) -> str:
    if _several(value):
        return ", ".join(_in_words(one, unit) for one in value)
    if isinstance(value, numbers.Real) and not isinstance(value, bool):
        return f"{_short(value) if not isinstance(value, numbers.Integral) else value} {unit}".strip()
    return str(value)


class _Fold(io.TextIOBase):
    """Holds what a cell prints and displays, from its beginning to its end, and shows it in one folded element."""

    def __init__(self, shell):
        self.shell, self.held, self.stdout = shell, [], None
        shell.events.register("pre_run_cell", self.begin)
        shell.events.register("post_run_cell", self.end)

    def begin(self, info) -> None:
        asked = REVEALS.search(info.raw_cell or "")
        if asked and self.shell.user_ns.get(asked[1], ...) is None and hasattr(self.shell.display_pub, "register_hook"):
            self.held, self.stdout, sys.stdout = [], sys.stdout, self
            self.shell.display_pub.register_hook(self.displayed)

    def end(self, result) -> None:
        if self.stdout is None:
            return
        self.shell.display_pub.unregister_hook(self.displayed)
        sys.stdout, self.stdout = self.stdout, None
        if not result.success:  # what was printed before an error is to be seen
            print(*(text for text, page in self.held if not page), sep="", end="")
            return
        said: list[str] = []
        for is_page, group in itertools.groupby(self.held, key=lambda part: bool(part[1])):
            texts, pages = zip(*group, strict=True)
            said += pages if is_page else [f"<pre>{html.escape(''.join(texts))}</pre>"]
        display({"text/html": FOLD.format(said="\n".join(said)), "text/plain": CLOSED}, raw=True)

    def write(self, text: str) -> int:
        """As sys.stdout."""
        self.held.append((text, ""))
        return len(text)

    def displayed(self, message: dict) -> dict | None:
        """As ipykernel's hook for each message that displays something: None, and it is not sent."""
        content = message["content"]
        data = content.get("data", {})
        if message["header"]["msg_type"] != "display_data" or "application/vnd.jupyter.widget-view+json" in data:
            return message  # a progress bar
        if "text/html" not in data and "image/png" not in data:
            self.write(data.get("text/plain", "") + "\n")
            return None
        self.held.append(
            ("", data["text/html"] if "text/html" in data else picture(data["image/png"], content["metadata"]))
        )
        return None


def picture(png: str, metadata: Mapping) -> str:
    """A picture in base64 as HTML."""
    facts = metadata.get("image/png", {})
    size = f'width="{facts.get("width", 800)}" style="max-width: 100%; height: auto"'
    return f'<img alt="{html.escape(facts.get("alt", ""))}" {size} src="data:image/png;base64,{png}">'


if "IPython" in sys.modules and (_shell := sys.modules["IPython"].get_ipython()) is not None:
    _Fold(_shell)
