"""Virtual GPUs: multi-GPU PyTorch on a machine without a GPU.

    cuda0, cuda1 = gpus(2)                 # from here on, plain PyTorch
    model.to("cuda:0"); x.to("cuda:1"); torch.cuda.memory_allocated(0)

Numbers are computed on the CPU. Places, memory and time are kept account of: tensors on two devices do not mix, a GPU that is
full says so, and each has a simulated clock. A reading guide: `specs` (what a GPU is), `allocator` (its memory), `clock` (its
time), `machine` (all of it together); `dispatch` (every operation passes there), with `operations` (what is known of each),
`costs` and `dry` (operations on shapes alone); `placement` (`.to` and its kind); `cuda`, `streams` and `gputil` (the faces);
`session` (on and off) and `patches`.
"""

from virtualgpu.hardware.specs import SPECS, Spec
from virtualgpu.session import dry_run, gpus, machine, recording, reset

__all__ = ["SPECS", "Spec", "dry_run", "gpus", "machine", "recording", "reset"]
