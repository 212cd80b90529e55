"""What the forkserver of ranks imports before it forks any, so that a rank starts with all of it there.

Python's garbage collector stays off meanwhile (a fifth of the time that the import takes), and then leaves these million objects
alone: in each rank a collection would walk through them all, 0.4 s each, and copy the pages that ranks share.
"""

import atexit
import contextlib
import gc

gc.disable()
try:
    import virtualgpu.run.ranks
    import virtualgpu.session  # noqa: F401
    from virtualgpu import _compat

    _compat.import_compiler()
    # What each rank would import by itself, half of the time until its function begins
    with contextlib.suppress(ImportError):  # not installed; or PyTorch without torch.distributed
        import cloudpickle  # noqa: F401

        from virtualgpu.distributed import dtensor, operations, parallel  # noqa: F401
finally:
    gc.enable()
gc.freeze()
# what Python takes apart at its end, it takes apart whole: Triton's bindings print what was not
atexit.register(gc.unfreeze)
