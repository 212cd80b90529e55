"""Simulated time: the clock of a process, what an operation and a collective cost, and what is to be seen of it.

`clock` is the work of the GPUs that a `host` launches, on `streams`, with `collectives` beside it; `host_weights` says what of it
costs the host how much, `own_work` what the program does beside. `costs` counts an operation's FLOPs
and bytes, with `convolutions` and `attention`; `kernels` and `arithmetic` make seconds of them, with `products`, `attention_kernels` and
`cudnn_attention`; on a Hopper `hopper` knows cuDNN's kernels. `kinds` knows what is bound by memory, `cycles` what by the multiprocessors;
with rules of their own: `winograd`, `elementwise`, `atomics`, `reductions`, `norms`, `batch_norms`, `pools`, `upsampling`, `depthwise`. `nccl` is
PyTorch's model of a collective, `trace` what GPUs did.
"""
