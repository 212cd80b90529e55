"""A picture to play with: drawn for each value beforehand, so that it needs no kernel, on a page as in Colab or JupyterLab."""

import base64
import html
import io
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from IPython.display import display
from PIL import Image  # matplotlib needs it, too

from helpers.plots.figures import FRAMES, WIDTH

PAGE = """<figure style="margin: 0; max-width: {width}px">
<label style="font: 14px sans-serif">{label} <input type="range" min="0" max="{last}" value="{start}" style="width: 50%; vertical-align: middle"
oninput="const f = this.closest('figure'); f.querySelector('output').value = f.querySelectorAll('img')[this.value].dataset.value;
f.querySelectorAll('img').forEach((img, i) => img.hidden = i != this.value)"> <output>{value}</output></label>
{pictures}
</figure>"""


def slider(draw: Callable[[Any], None], values: Sequence[Any] | Mapping[str, Any], label: str, start: int = 0) -> None:
    """draw(value) for each of `values` calls one function of plots; a slider called `label` shows the picture of one of them.

    values: or {what stands beside the slider: value}. start: the place of the first to be seen; it alone is seen where there is no browser.
    """
    named = values if isinstance(values, Mapping) else {str(value): value for value in values}
    token = FRAMES.set([])
    try:
        for value in named.values():
            draw(value)
        frames = [(words, _in_few_colors(encoded)) for words, encoded in FRAMES.get()]
    finally:
        FRAMES.reset(token)
    if len(frames) != len(named):
        raise ValueError(
            f"a slider over {len(named)} values needs as many pictures, one a value; {len(frames)} were drawn"
        )
    pictures = "\n".join(
        f'<img data-value="{html.escape(name)}" alt="{html.escape(words)}" width="{int(WIDTH * 100)}" style="max-width: 100%; height: auto"'
        f' src="data:image/png;base64,{encoded}"{"" if place == start else " hidden"}>'
        for place, (name, (words, encoded)) in enumerate(zip(named, frames, strict=True))
    )
    page = PAGE.format(
        width=int(WIDTH * 100),
        label=html.escape(label),
        last=len(named) - 1,
        start=start,
        value=html.escape(list(named)[start]),
        pictures=pictures,
    )
    words, encoded = frames[start]
    bundle = {"text/html": page, "image/png": encoded, "text/plain": words}
    display(bundle, raw=True, metadata={"image/png": {"alt": words, "width": int(WIDTH * 100)}})


def _in_few_colors(encoded: str) -> str:
    """The same PNG in 64 colors, which look the same: a third of the bytes, and a notebook holds a dozen."""
    few = io.BytesIO()
    picture = Image.open(io.BytesIO(base64.b64decode(encoded))).convert("RGB")
    picture.quantize(64, Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE).save(few, "PNG", optimize=True)
    return base64.b64encode(few.getvalue()).decode()
