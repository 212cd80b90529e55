"""`python -m virtualgpu --explain`: where an optimizer's step goes, and which changes would gain most.

`cli` reads the options and prints. `runs` runs the program, as it is and with each change that could gain (`changes`). In its processes `watch`
notes what the GPUs did and what a batch takes, and `applied` simulates one change. `real` does it on real GPUs by torch.profiler.
"""
