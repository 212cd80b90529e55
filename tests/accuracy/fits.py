"""Whether a batch is trained or runs out of memory, on an RTX 3090 of 24 GB: timm's table of training.

Settings: those of published.csv's rows of this program. timm's benchmark begins with a batch of 512 (1024 for some) and takes less until
one fits, so that the table says a batch that fits and, one step above, one that does not.
"""

import torch

import virtualgpu
from tests.accuracy.published import Published, published
from tests.accuracy.row import Row
from tests.accuracy.vision import URL, name, prepare

__all__ = ["URL", "rows"]


def fits(row: Published) -> bool:
    """Whether two steps are taken: the optimizer's own memory comes with the first."""
    with virtualgpu.dry_run(1, like=row.card, host=row.host):
        try:
            _, step = prepare(row)
            step()
            step()
            torch.cuda.synchronize()
        except torch.cuda.OutOfMemoryError:
            return False
    return True


def rows() -> list[Row]:
    return [row.beside(name(row), float(fits(row))) for row in published("fits")]
