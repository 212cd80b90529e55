"""`python -m tests.judges JUDGE ...`: other people's programs on our virtual GPUs. README.md beside this file says how to get them.

examples CHECKOUT [name ...]   multi-GPU examples of PyTorch, unmodified; small programs by other libraries
tutorials CHECKOUT [name ...]  PyTorch's tutorials that use several GPUs
torchtitan CHECKOUT [name ...] torchtitan's debug model, two steps on four GPUs
pytorch FOLDER [file ...]      tests of PyTorch's own suite
distributed FOLDER [file ...]  tests of several processes from it
fit CHECKOUT [name ...]        "will it fit": other people's programs as they stand; `fit published`: batch sizes that others published
card [--card H200] [name ...]  models of transformers, timm and torchvision beside what an H100 and an H200 took
op_db [--dry] [name ...]       every operation of PyTorch's own database
"""

import importlib
import sys

JUDGES = {  # and the module of each
    **dict.fromkeys(("examples", "tutorials", "torchtitan"), "programs"),
    **dict.fromkeys(("pytorch", "distributed"), "pytorch"),
    **{name: name for name in ("op_db", "fit", "card")},
}

if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1] not in JUDGES:
        print(__doc__.strip())
        sys.exit(2)
    judge = sys.argv[1]
    sys.exit(importlib.import_module(f"tests.judges.{JUDGES[judge]}").main(sys.argv[2:], judge))
