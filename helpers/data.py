"""The images that the lessons train on, all shipped (origins and licences: data/README.md)."""

from pathlib import Path

import numpy as np
import torch

DATA = Path(__file__).resolve().parent.parent / "data"


def digits(folder: Path = DATA) -> tuple[torch.Tensor, torch.Tensor]:
    """1,797 handwritten digits, in the order in which 13 people wrote them.

    Returns images, float32 [n, 1, 8, 8] from 0 (paper) to 1 (ink), and labels, int64 [n].
    Raises FileNotFoundError where the file is not beside the helpers.
    """
    with np.load(shipped("digits.npz", folder)) as stored:
        images = torch.from_numpy(stored["images"]).float().div(16).unsqueeze(1)
        return images, torch.from_numpy(stored["labels"]).long()


def hands(folder: Path = DATA) -> tuple[torch.Tensor, torch.Tensor]:
    """600 photographs: 60 students sign the digits 0 to 9, ten pictures a student, in this order.

    Returns images, float32 [600, 3, 64, 64] from 0 to 1, and the digits, int64 [600].
    """
    from PIL import Image

    sheet = torch.from_numpy(np.array(Image.open(shipped("hands.jpg", folder)))).float().div(255)
    images = sheet.view(-1, 64, 10, 64, 3).permute(0, 2, 4, 1, 3).reshape(-1, 3, 64, 64)
    return images, torch.arange(len(images)) % 10


def shipped(name: str, folder: Path = DATA) -> Path:
    """The path of a file that is part of the repository. Raises FileNotFoundError where it is missing."""
    path = Path(folder) / name
    if not path.exists():
        made = f"make_{name.split('_')[0].split('.')[0]}.py"
        raise FileNotFoundError(f"{path} is missing. It is part of the repository: clone it whole, or run data/{made}.")
    return path
