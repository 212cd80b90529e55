"""The private names of PyTorch that the engine needs, each in one place; no other file of this package spells one.

`tests/virtualgpu/test_compat.py` calls what is here, and guards that rule. Versions 2.11 to 2.15, wheels with CUDA and wheels for
the CPU alone. `internals` has most; `distributed` those of torch.distributed, imported by who needs them; `dynamo` what keeps PyTorch's compiler
for later. What virtual GPUs put in the place of a private function is named where it is replaced, and listed in `torch_api/surface.toml`.
"""

from virtualgpu import environment

with environment.names_of_pytorch():
    from virtualgpu._compat.dynamo import (  # noqa: F401
        compiled_later,
        compiler_has_settings,
        import_compiler,
        import_when_needed,
        inductor,
    )
    from virtualgpu._compat.internals import *  # noqa: F403
