"""What becomes of each operation of PyTorch: which GPU it runs on, room for its results, their values, and its time.

`gpu` is one GPU and its memory, `machine` all of them, and what each thread is doing with them; `storage` the label that says where a
storage lives, and what collectives still fill; `frames` where in the program an operation was called.
`dispatch` meets every operation and finds its GPU, `placement` is what is refused there; `operations` is what is known of each. `eager`
carries it out with numbers, random ones by `rng`, `dry_run` on shapes alone, by PyTorch's `meta_kernels`, with `values`, the shadow values
of small tensors; `dry_checks` refuses in a dry run what a run with numbers does. `timing` tells the clock; `scratch_memory` is memory that
kernels take while they run.
`factories` are operations that make a tensor, or copy one from place to place; `overrides` those that are like no other, with `rnn` and
`attention`. Where CUDA differs from the CPU: `cuda_differences` (half precision, types, layouts, derivatives in place),
`cuda_only_ops` (kernels that PyTorch has for CUDA alone); `cuda_checks` refuses what CUDA does, in its words.
"""
