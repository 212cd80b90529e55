"""`python -m virtualgpu --explain`: where an optimizer's step goes, and which changes would gain most.

`runs` runs the program, as it is and with each of the `candidates`. In its processes `watch` notes what the GPUs did, `loader` what a
batch takes, and `changes` simulates one change. `parts` divides a step by cause, `table` prints. `real` does it on real GPUs by
torch.profiler, whose traces `real_trace` reads.
"""
