"""A progress bar that knows when nobody watches."""

import os
from collections.abc import Iterable


def progress(iterable: Iterable, description: str) -> Iterable:
    """tqdm's bar, drawn as a widget in JupyterLab and Colab; none where TQDM_DISABLE is set, as when outputs are compared.

    (tqdm reads that variable itself, but not for its notebook bar.)
    """
    from tqdm.auto import tqdm  # brings ipywidgets along; virtual GPUs alone do without

    return tqdm(iterable, desc=description, disable=bool(os.environ.get("TQDM_DISABLE")))
