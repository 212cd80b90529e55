"""A model of timm's table, trained with a batch of one's own: `python -m virtualgpu fit` searches the largest (tests/judges/fit.py).

python -m virtualgpu fit --like "RTX 3090" --vary batch-size=32..1024 -m tests.accuracy.one_batch resnet101 first
"""

import argparse

from tests.accuracy.published import published
from tests.accuracy.vision import prepare

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("layout", choices=["first", "last"])
    parser.add_argument("--batch-size", type=int, required=True)
    options = parser.parse_args()
    row = next(row for row in published("fits") if (row.model, row.layout) == (options.model, options.layout))
    _, step = prepare(row._replace(batch=options.batch_size))
    for _ in range(4):
        step()
