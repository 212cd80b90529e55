"""Tests of several processes from PyTorch's own suite, on virtual GPUs: the collectives of nccl, and FSDP2.

    python -m tests.judges distributed FOLDER [--only EXPRESSION] [file ...]      FOLDER: PyTorch's test/ (README.md says how to get it)

As `pytorch`, but for what the processes of a test need: GPUS of them (variable; 2 unless it says 4, with which fewer tests skip), more time,
and the names that 2.6 knew, in each.
"""

import os

from tests.judges import pytorch

FSDP2 = ["init", "state", "comm", "training", "memory", "overlap", "autograd", "clip_grad_norm_", "frozen"]
FSDP2 += ["mixed_precision", "grad_scaler", "state_dict"]
FILES = ["distributed/test_c10d_ops_nccl.py"]
FILES += [f"distributed/_composable/fsdp/test_fully_shard_{name}.py" for name in FSDP2]


def main(arguments: list[str]) -> int:
    gpus = int(os.environ.get("GPUS", "2"))
    how = pytorch.How("distributed", FILES, gpus, "tests.judges.older_tests", limit=300, again=False)
    return pytorch.main(arguments, how)
