"""What becomes of each operation of PyTorch: which GPU it runs on, room for its results, their values, and its time.

`gpu` is one of them, `machine` all, `allocation` the label that says where a storage lives. `dispatch` meets every operation; `operations`
is what is known of it, `place` finds its GPU, `eager` carries it out with numbers (`draws`: random ones) and `dry` on shapes alone
(`crosscheck` looks whether what it remembers is right, `in_thread` says for whom), `outputs` places what it returns,
`timing` tells the clock. `factories` are operations that make a tensor, `overrides` those that are like no other, with `mixed_batch_norm` and `attention`; `kernels` and `meta_kernels` have kernels that the CPU and a dry run lack.
"""
