"""The images the lessons train on: handwritten digits and photographs (shipped), printed digits (drawn here)."""

from pathlib import Path

import numpy as np
import torch
from torch.nn import functional as F

DATA = Path(__file__).resolve().parent.parent / "data"
FONTS = ["DejaVuSans", "DejaVuSans-Bold", "DejaVuSans-Oblique", "DejaVuSansMono", "DejaVuSansMono-Bold",
         "DejaVuSerif", "DejaVuSerif-Bold", "DejaVuSerif-Italic", "STIXGeneral", "STIXGeneralItalic"]  # fmt: skip


def digits(folder: Path = DATA) -> tuple[torch.Tensor, torch.Tensor]:
    """The 1,797 handwritten digits that scikit-learn ships (origin and licence: data/README.md).

    Returns images, float32 [1797, 1, 8, 8] from 0 (paper) to 1 (ink), and labels, int64 [1797].
    Raises FileNotFoundError where the file is not beside the helpers.
    """
    with np.load(shipped("digits.npz", folder)) as stored:
        images = torch.from_numpy(stored["images"]).float().div(16).unsqueeze(1)
        return images, torch.from_numpy(stored["labels"]).long()


def photos(folder: Path = DATA) -> tuple[torch.Tensor, list[str]]:
    """Six photographs and their names (origin and licences: data/README.md).

    Returns images, float32 [6, 1, 320, 320] from 0 (black) to 1 (white), and six names.
    Raises FileNotFoundError where the file is not beside the helpers.
    """
    with np.load(shipped("photos.npz", folder)) as stored:
        return torch.from_numpy(stored["images"]).float().div(255).unsqueeze(1), stored["names"].tolist()


def shipped(name: str, folder: Path = DATA) -> Path:
    """The path of a file that is part of the repository. Raises FileNotFoundError where it is missing."""
    path = Path(folder) / name
    if not path.exists():
        made = f"make_{name.split('_')[0].split('.')[0]}.py"
        raise FileNotFoundError(f"{path} is missing. It is part of the repository: clone it whole, or run data/{made}.")
    return path


def printed_digits(copies: int = 2000, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """The digits 0-9 printed in ten fonts, each copy turned, sheared, stretched, shifted and bent at random.

    They stand in for the large data set that a backbone is pretrained on: plentiful and labelled for nothing, of the
    same size as the handwritten digits, and without a single handwritten one. The fonts are those of matplotlib.

    Returns images, float32 [10 * copies, 1, 8, 8] from 0 to 1, and labels, int64 [10 * copies], in random order.
    """
    glyphs = _glyphs()
    rng = torch.Generator().manual_seed(seed)
    chosen = torch.randint(len(glyphs), (10 * copies,), generator=rng)
    return _distorted(glyphs[chosen], rng), chosen // len(FONTS)


def _glyphs(size: int = 32) -> torch.Tensor:
    """Every digit in every font, cut out, fitted into a square as the handwritten are: [10 * fonts, 1, size, size]."""
    import matplotlib
    from PIL import Image, ImageDraw, ImageFont

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


def _distorted(images: torch.Tensor, rng: torch.Generator) -> torch.Tensor:
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
