"""Virtual GPUs: multi-GPU PyTorch on a machine without a GPU.

    cuda0, cuda1 = gpus(2)                 # from here on, plain PyTorch
    model.to("cuda:0"); x.to("cuda:1"); torch.cuda.memory_allocated(0)

Numbers are computed on the CPU. Places, memory and time are kept account of: tensors on two devices do not mix, a GPU that is
full says so, and each has a simulated clock. `README.md` beside this file says what is in which folder.
"""

from virtualgpu.hardware.specs import SPECS, Spec
from virtualgpu.session import dry_run, gpus, machine, recording, reset

__all__ = ["SPECS", "Spec", "dry_run", "gpus", "machine", "recording", "reset"]
