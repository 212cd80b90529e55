"""pytest for tests that were written for an older PyTorch: names that it spelt otherwise are there, in every process of a test.

    python -m tests.judges.older_tests [pytest's arguments]

A process that multiprocessing starts imports its parent's main module, and so this one, before it imports the test.
"""

import contextlib

with contextlib.suppress(ImportError):
    from torch.testing._internal import common_cuda, common_mkldnn, common_nn

    common_nn.new_module_tests = common_nn.get_new_module_tests()  # a list then
    common_cuda.tf32_is_not_fp32 = lambda: common_cuda.SM80OrLater
    common_mkldnn.bf32_on_and_off = common_mkldnn.reduced_f32_on_and_off

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
