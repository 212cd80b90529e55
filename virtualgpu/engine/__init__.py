"""What becomes of each operation of PyTorch: which GPU it runs on, room for its results, their values, and its time.

`machine` is all GPUs, and what each thread is doing with them; `storage` the label that says where a storage lives, and what collectives still
fill; `frames` where in the program it is.
`dispatch` meets every operation; `operations` is what is known of it, `placement` finds its GPU and places what it returns, `eager` carries
it out with numbers, `dry_run` on shapes alone, with `values`, the shadow values of small tensors; `timing` tells the clock, `host_waits` for
what the host waits. `scratch_memory` is memory that kernels take while they run.
`factories` are operations that make a tensor, or copy one from place to place, `overrides` those that are like no other, with `rnn`,
`attention` and `nested`. Where CUDA differs from the CPU: `half_precision`, `cuda_differences` (other types, layouts, derivatives in place),
`cuda_only_ops` (kernels that PyTorch has for CUDA alone), `rng` (random numbers). `cuda_checks` refuses what CUDA does, in its words,
`dry_checks` what a dry run does not take.
"""
