"""Simulated time: the clock of a process, what an operation and a collective cost, and what is to be seen of it.

`clock` is the work of the GPUs that a `host` launches, on `streams`, with `collectives` beside it; `host_weights` says what of it costs the host
how much. `flops` counts and times what multiplies, with `products`, `convolutions` and `attention`;
`memory_bound` what moves bytes, with `norms` and `reductions`; `kernels` knows one card's rates, `measured` what kernels took on a card (`data/`).
`nccl` is PyTorch's model of a collective, `trace` what GPUs did.
"""
