"""A picture to play with: drawn for each value beforehand, so that it needs no kernel, on a page as in Colab or JupyterLab."""

import base64
import html
import io
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from PIL import Image  # matplotlib needs it, too

from helpers.plots.figures import FRAMES, WIDTH, put

PAGE = """<figure style="margin: 0; max-width: {width}px">
<label style="font: 14px sans-serif">{label} <input type="range" min="0" max="{last}" value="{start}" style="width: 50%; vertical-align: middle"
oninput="const f = this.closest('figure'); f.querySelector('output').value = f.querySelectorAll('img')[this.value].dataset.value;
f.querySelectorAll('img').forEach((img, i) => img.hidden = i != this.value)"> <output>{value}</output></label>
{pictures}
</figure>"""


def slider(draw: Callable[[Any], None], values: Sequence[Any] | Mapping[str, Any], label: str, start: int = 0) -> None:
    """draw(value) for each of `values` calls one function of plots; a slider called `label` shows the picture of one of them.

    values: or {what stands beside the slider: value}. start: the place of the first to be seen; it alone is seen where there is no browser.

    Raises ValueError where it draws another number of pictures.
    """
    named = values if isinstance(values, Mapping) else {str(value): value for value in values}
    token = FRAMES.set([])
    try:
        for value in named.values():
            draw(value)
        frames = [(words, few_colors(encoded)) for words, encoded in FRAMES.get()]
    finally:
        FRAMES.reset(token)
    if len(frames) != len(named):
        raise ValueError(
            f"a slider over {len(named)} values needs as many pictures, one a value; {len(frames)} were drawn"
        )
    width, names = int(WIDTH * 100), list(map(html.escape, named))
    pictures = "\n".join(
        f'<img data-value="{name}" alt="{html.escape(words)}" width="{width}" style="max-width: 100%; height: auto"'
        f' src="data:image/png;base64,{encoded}"{"" if place == start else " hidden"}>'
        for place, (name, (words, encoded)) in enumerate(zip(names, frames, strict=True))
    )
    last, label, value = len(named) - 1, html.escape(label), names[start]
    page = PAGE.format(width=width, label=label, last=last, start=start, value=value, pictures=pictures)
    put(*frames[start], **{"text/html": page})


def few_colors(png: str) -> str:
    """A picture in 64 colors, which looks the same: a third of the bytes, and a notebook holds a dozen."""
    image = Image.open(io.BytesIO(base64.b64decode(png))).convert("RGB").quantize(64)
    image.save(few := io.BytesIO(), "PNG", optimize=True)
    return base64.b64encode(few.getvalue()).decode()
