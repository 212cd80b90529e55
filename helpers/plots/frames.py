"""A picture to play with: drawn for each value beforehand, so that it needs no kernel, on a page as in Colab or JupyterLab."""

import html
import json
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from helpers.plots.figures import FRAMES, WIDTH, put
from helpers.predictions import picture

# Without scripts (a notebook that is not trusted, GitHub): a line a picture, which opens it. With them: a slider, and two buttons,
# for JupyterLab keeps the arrow keys for itself
PAGE = """<figure class="frames" id="{name}" style="margin: 0; max-width: {width}px">
{pictures}
<script>(() => {{
  const figure = document.getElementById('{name}'), frames = [...figure.querySelectorAll('details')];
  const make = (kind, facts) => Object.assign(document.createElement(kind), facts);
  const bar = make('div', {{style: 'font: 14px sans-serif'}}), said = make('output', {{}});
  const slider = make('input', {{type: 'range', min: 0, max: frames.length - 1, value: {start}, ariaLabel: {label}}});
  slider.style = 'width: 45%; vertical-align: middle';
  slider.oninput = () => frames.forEach((frame, i) => {{
    frame.open = true, frame.style.display = i == slider.value ? '' : 'none';
    if (i == slider.value) said.value = frame.dataset.value;
  }});
  const step = (sign, by, words) => make('button', {{type: 'button', textContent: sign, ariaLabel: words,
    onclick: () => {{ slider.value = +slider.value + by; slider.oninput(); }}}});
  bar.append({label} + ' ', step('\u25c0', -1, 'previous'), slider, step('\u25b6', 1, 'next'), ' ', said);
  frames.forEach(frame => frame.querySelector('summary').style.display = 'none');
  figure.prepend(bar), slider.oninput();
}})()</script>
</figure>"""


def slider(draw: Callable[[Any], None], values: Sequence[Any] | Mapping[str, Any], label: str, start: int = 0) -> None:
    """draw(value) for each of `values` calls one function of plots; a slider called `label` shows the picture of one of them.

    values: or {what stands beside the slider: value}. start: the place of the first to be seen; it alone is seen where there is no browser.

    Raises ValueError where it draws another number of pictures.
    """
    named = values if isinstance(values, Mapping) else {str(value): value for value in values}
    frames: list[tuple[str, str]] = []
    token = FRAMES.set(frames)
    try:
        for value in named.values():
            draw(value)
    finally:
        FRAMES.reset(token)
    if len(frames) != len(named):
        raise ValueError(
            f"a slider over {len(named)} values needs as many pictures, one a value; {len(frames)} were drawn"
        )
    width, label = int(WIDTH * 100), html.escape(label)
    pictures = "\n".join(
        f'<details data-value="{value}"{" open" if place == start else ""}><summary>{label}: {value}</summary>\n'
        f"{picture(encoded, {'image/png': {'alt': words, 'width': width}})}</details>"
        for place, (value, (words, encoded)) in enumerate(zip(map(html.escape, named), frames, strict=True))
    )
    told = re.sub(r"\d", "", repr((label, *named, *(words for words, _ in frames))))  # measured figures differ
    name = f"frames-{zlib.crc32(told.encode()):08x}"
    page = PAGE.format(name=name, width=width, start=start, label=json.dumps(label), pictures=pictures)
    put(*frames[start], **{"text/html": page})
