"""pytest for tests that were written for an older PyTorch: names that it spelt otherwise are there, in every process of a test.

    python -m tests.judges.older_tests [pytest's arguments]

A process that multiprocessing starts imports its parent's main module, and so this one, before it imports the test.
"""

import contextlib

with contextlib.suppress(ImportError):
    from torch.testing._internal import common_distributed, common_fsdp

    # as 2.6 had them: module, name, today's name
    for module, old, new in (
        (common_distributed, "MultiProcContinousTest", "MultiProcContinuousTest"),
        (common_fsdp, "test_compiled_fsdp", "compiled_fsdp_test"),
    ):
        if not hasattr(module, old):
            setattr(module, old, getattr(module, new))

if __name__ == "__main__":
    import sys

    import pytest

    # tests are methods there; a function that begins with test_ is an imported helper
    sys.exit(pytest.main([*sys.argv[1:], "-o", "python_functions=-"]))
