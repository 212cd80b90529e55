"""A machine that fails: runs another script, and in the middle of epoch 2, when that comes for the first time, kills rank 1, or
all processes of the second node, as if it had lost its power.

    torchrun ... kill.py rank train_ddp.py --checkpoint ddp.pt
    torchrun ... kill.py node train_ddp.py --checkpoint ddp.pt
"""

import os
import runpy
import sys

import psutil
import torch.utils.data


class Deadly(torch.utils.data.DistributedSampler):
    what = "rank"

    def __iter__(self):
        first_start = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
        for number, index in enumerate(super().__iter__()):
            if first_start and self.epoch == 2 and number == len(self) // 2:
                self.die()
            yield index

    def die(self):
        this = psutil.Process()
        if self.what == "rank" and os.environ["RANK"] == "1":
            this.kill()
        if self.what == "node" and os.environ["GROUP_RANK"] == "1" and os.environ["LOCAL_RANK"] == "0":
            agent = [parent for parent in this.parents() if {"torch.distributed.run", "torchrun"} & names(parent)][-1]
            others = [process for process in agent.children(recursive=True) if process != this]
            for process in (agent, *others, this):
                process.kill()


def names(process):
    """What stands in its command, without the folders."""
    return {os.path.basename(word) for word in process.cmdline()}


if __name__ == "__main__":
    Deadly.what, *sys.argv = sys.argv[1:]
    torch.utils.data.DistributedSampler = Deadly
    runpy.run_path(sys.argv[0], run_name="__main__")
