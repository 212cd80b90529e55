"""A machine that fails: runs another script, and kills its rank 1 when that comes to epoch 2 for the first time.

torchrun ... kill_rank_1.py train_ddp.py --checkpoint ddp.pt
"""

import os
import runpy
import signal
import sys

from torch.utils.data import DistributedSampler


class Deadly(DistributedSampler):
    def set_epoch(self, epoch):
        first_start = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
        if epoch == 2 and first_start and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        super().set_epoch(epoch)


if __name__ == "__main__":
    import torch.utils.data

    torch.utils.data.DistributedSampler = Deadly
    sys.argv.pop(0)
    runpy.run_path(sys.argv[0], run_name="__main__")
