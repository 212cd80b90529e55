"""Simulated time: the clock of a process, what an operation and a collective cost, and what is to be seen of it.

`clock` is the work of the GPUs that a `host` launches, on `streams` made of `queues`, with `collectives` beside it; `host_weights` says what of it
costs the host how much, `own_work` what the program does beside. `beside` is what NCCL's kernels take of a GPU, `priorities` who goes before whom. `costs` counts an operation's FLOPs
and bytes, with `convolutions` and `attention`; `kernels` and `arithmetic` make seconds of them, with `products`; `measured` knows
what kernels took on a card (`data/`). `kinds` knows what is bound by memory, `cycles` what by the multiprocessors;
with rules of their own: `elementwise`, `atomics`, `reductions`, `norms`, `batch_norms`, `pools`, `upsampling`. `nccl` is
PyTorch's model of a collective. `usage` says how busy GPUs were, `trace` what they did, `profiled` what real ones did.
"""
