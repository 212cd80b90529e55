"""A progress bar that knows when nobody watches."""

import os
from collections.abc import Iterable

from tqdm.auto import tqdm


def progress(iterable: Iterable, description: str) -> tqdm:
    """tqdm's bar, drawn as a widget in JupyterLab and Colab; none where TQDM_DISABLE is set, as when outputs are compared.

    (tqdm reads that variable itself, but not for its notebook bar.)
    """
    return tqdm(iterable, desc=description, disable=bool(os.environ.get("TQDM_DISABLE")))
