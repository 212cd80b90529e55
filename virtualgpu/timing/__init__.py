"""Simulated time: the clock of a process, what an operation and a collective cost, and what is to be seen of it.

`clock` is the work of the GPUs that a `host` launches, on `streams` made of `queues`, with `collectives` beside it; `host_weights` says what of it
costs the host how much, `own_work` what the program does beside. `beside` is what NCCL's kernels take of a GPU, `priorities` who goes before whom. `flops` counts an operation's FLOPs and bytes, with
`convolutions` and `attention`; `kernels` makes seconds of them, with `products`, `attention_kernels` and `cudnn_attention`; on a Hopper `hopper` knows
cuDNN's kernels. `memory_bound` is the table of what memory holds up, with models of its own in `norms` and `reductions`; `winograd` and
`depthwise` are kinds of convolutions. `nccl` is
PyTorch's model of a collective. `usage` says how busy GPUs were, `trace` what they did, `profiled` what real ones did.
"""
