"""Make photos.npz from the sample pictures that scikit-image and scikit-learn ship. Run once; needs both of them.

Each is made gray, cut to a square and brought to 320 x 320 pixels. The file is written without dates, so that the same input
gives the same bytes.
"""

from pathlib import Path

import numpy as np
import skimage
import sklearn
from make_digits import write
from PIL import Image

SKIMAGE = Path(skimage.__file__).parent / "data"
SKLEARN = Path(sklearn.__file__).parent / "datasets" / "images"
PHOTOS = {  # what data/README.md says of them stands there in this order
    "brick": SKIMAGE / "brick.png",
    "grass": SKIMAGE / "grass.png",
    "gravel": SKIMAGE / "gravel.png",
    "cat": SKIMAGE / "chelsea.png",
    "coffee": SKIMAGE / "coffee.png",
    "temple": SKLEARN / "china.jpg",
}
SIZE = 320  # pixels


def square(path: Path) -> np.ndarray:
    picture = Image.open(path).convert("L")
    side = min(picture.size)
    left, top = ((length - side) // 2 for length in picture.size)
    cut = picture.crop((left, top, left + side, top + side))
    return np.asarray(cut.resize((SIZE, SIZE), Image.Resampling.BICUBIC))


def main() -> None:
    arrays = {"images": np.stack([square(path) for path in PHOTOS.values()]), "names": np.array(list(PHOTOS))}
    write(Path(__file__).with_name("photos.npz"), arrays)


if __name__ == "__main__":
    main()
