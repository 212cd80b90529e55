"""Make digits.npz from scikit-learn's copy of the UCI digits. Run once; needs `pip install scikit-learn`.

The file is written without dates, so that the same input gives the same bytes.
"""

import io
import zipfile
from pathlib import Path

import numpy as np


def write(path: Path, arrays: dict[str, np.ndarray]) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, array in arrays.items():
            buffer = io.BytesIO()
            np.save(buffer, array)
            archive.writestr(zipfile.ZipInfo(f"{name}.npy"), buffer.getvalue(), zipfile.ZIP_DEFLATED)


def main() -> None:
    from sklearn.datasets import load_digits

    found = load_digits()
    arrays = {"images": found.images.astype(np.uint8), "labels": found.target.astype(np.uint8)}
    assert (arrays["images"] == found.images).all(), "the images are whole numbers from 0 to 16"
    write(Path(__file__).with_name("digits.npz"), arrays)


if __name__ == "__main__":
    main()
