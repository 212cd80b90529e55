"""Simulated time: the clock of a process, what an operation and a collective cost, and what is to be seen of it.

`clock` is the work of the GPUs that a `host` launches, on `streams`, with collectives beside it (`nccl`, with PyTorch's model of their time).
`flops` counts and times what multiplies, with `convolutions` and `attention`; `memory_bound` what moves bytes, with `reductions` and norms; `kernels`
knows one card's rates, its products of matrices, and what kernels took on it (`data/`). `trace` is what GPUs did.
"""
