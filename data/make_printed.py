"""Make printed.npz: the digits 0-9 printed in ten fonts, each copy turned, sheared, stretched, shifted and bent at random.

They stand in for the large data set that a backbone is pretrained on: plentiful and labelled for nothing, of the same size as
the handwritten digits, and without a single handwritten one. Run once; the fonts are those of matplotlib.
"""

from pathlib import Path

import matplotlib
import numpy as np
import torch
from make_digits import write
from PIL import Image, ImageDraw, ImageFont
from torch.nn import functional as F

FONTS = ["DejaVuSans", "DejaVuSans-Bold", "DejaVuSans-Oblique", "DejaVuSansMono", "DejaVuSansMono-Bold",
         "DejaVuSerif", "DejaVuSerif-Bold", "DejaVuSerif-Italic", "STIXGeneral", "STIXGeneralItalic"]  # fmt: skip


def glyphs(size: int = 32) -> torch.Tensor:
    """Every digit in every font, cut out, fitted into a square as the handwritten are: [10 * fonts, 1, size, size]."""
    folder = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
    fonts = [
        ImageFont.truetype(folder / f"{name}.ttf", 3 * size, layout_engine=ImageFont.Layout.BASIC) for name in FONTS
    ]
    squares = []
    for digit in "0123456789":
        for font in fonts:
            page = Image.new("L", (6 * size, 6 * size))
            ImageDraw.Draw(page).text((3 * size, 3 * size), digit, fill=255, font=font, anchor="mm")
            ink = page.crop(page.getbbox())
            width = round(0.85 * min(size, max(size // 4, size * ink.width / ink.height)))
            square = Image.new("L", (size, size))
            square.paste(ink.resize((width, size), Image.Resampling.LANCZOS), ((size - width) // 2, 0))
            squares.append(np.asarray(square))
    return torch.from_numpy(np.stack(squares)).float().div(255).unsqueeze(1)


def distorted(images: torch.Tensor, rng: torch.Generator) -> torch.Tensor:
    """A random view of each image, brought down to 8 x 8 by averaging: an affine map, and a wobble as of a hand."""
    n = len(images)

    def uniform(low, high):
        return torch.empty(n).uniform_(low, high, generator=rng)

    angle, shear = uniform(-0.2, 0.2), uniform(-0.35, 0.35)
    wide, tall = uniform(0.9, 1.3), uniform(0.92, 1.08)
    left, top = uniform(-0.1, 0.1), uniform(-0.05, 0.05)
    rows = [angle.cos() * wide, (shear - angle.sin()) * wide, left, angle.sin() * tall, angle.cos() * tall, top]
    grid = F.affine_grid(torch.stack(rows, 1).view(n, 2, 3), list(images.shape), align_corners=False)
    wobble = 0.12 * torch.randn(n, 2, 4, 4, generator=rng)
    wobble = F.interpolate(wobble, size=images.shape[-2:], mode="bicubic", align_corners=True).permute(0, 2, 3, 1)
    small = F.avg_pool2d(F.grid_sample(images, grid + wobble, align_corners=False), images.shape[-1] // 8)
    return small / small.amax((1, 2, 3), keepdim=True).clamp_min(1e-6)


def main(copies: int = 12_500, seed: int = 0) -> None:
    rng = torch.Generator().manual_seed(seed)
    every = glyphs()
    chosen = torch.randint(len(every), (copies,), generator=rng)
    images = distorted(every[chosen], rng).mul(16).round().byte().squeeze(1).numpy()
    labels = (chosen // len(FONTS)).byte().numpy()
    write(Path(__file__).with_name("printed.npz"), {"images": images, "labels": labels})


if __name__ == "__main__":
    main()
