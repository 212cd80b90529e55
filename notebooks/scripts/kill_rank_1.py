"""A machine that fails: runs another script, and kills its rank 1 in the middle of epoch 2, when that comes for the first time.

torchrun ... kill_rank_1.py train_ddp.py --checkpoint ddp.pt
"""

import os
import runpy
import signal
import sys

from torch.utils.data import DistributedSampler


class Deadly(DistributedSampler):
    def __iter__(self):
        first_start = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
        for number, index in enumerate(super().__iter__()):
            if first_start and os.environ["RANK"] == "1" and self.epoch == 2 and number == len(self) // 2:
                os.kill(os.getpid(), signal.SIGKILL)
            yield index


if __name__ == "__main__":
    import torch.utils.data

    torch.utils.data.DistributedSampler = Deadly
    sys.argv.pop(0)
    runpy.run_path(sys.argv[0], run_name="__main__")
