"""`python -m virtualgpu --explain`: where an optimizer's step goes, and which changes would gain most.

`runs` runs the program, as it is and with each change that could gain (`changes`). In its processes `watch` notes what the GPUs did, `loader` what a
batch takes, and `applied` simulates one change. `table` prints. `real` does it on real GPUs by
torch.profiler.
"""
