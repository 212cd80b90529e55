"""Make hands.jpg of a clone of github.com/ardamavi/Sign-Language-Digits-Dataset: python data/make_hands.py CLONE. Run once.

Each student signed the digits 0 to 9 in front of a camera, one after the other. A row of the sheet is a student, 64 x 64 pixels a
picture; the order of the students is drawn, since those who were photographed on one day look alike.
"""

import random
import re
import sys
from pathlib import Path

from PIL import Image

STUDENTS, SIZE = 60, 64


def students(clone: Path) -> list[dict[int, Path]]:
    """The pictures of each, by digit. The camera numbered them: where the digits begin anew, somebody else signs."""
    pictures = sorted(clone.glob("Dataset/*/*.JPG"), key=lambda path: int(re.search(r"IMG_(\d+)", path.name)[1]))
    rows: list[dict[int, Path]] = [{}]
    for picture in pictures:
        digit = int(picture.parent.name)
        if rows[-1] and digit <= max(rows[-1]):
            rows.append({})
        rows[-1][digit] = picture
    return [row for row in rows if len(row) == 10]


def main(clone: Path) -> None:
    chosen = random.Random(0).sample(students(clone), STUDENTS)
    sheet = Image.new("RGB", (10 * SIZE, STUDENTS * SIZE))
    for row, pictures in enumerate(chosen):
        for digit, path in pictures.items():
            small = Image.open(path).convert("RGB").resize((SIZE, SIZE), Image.Resampling.BICUBIC)
            sheet.paste(small, (digit * SIZE, row * SIZE))
    sheet.save(Path(__file__).with_name("hands.jpg"), quality=80)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
