"""The memory of one GPU: PyTorch's caching allocator in Python, its figures and its history. Sizes in bytes.

`allocator` is what others use: malloc and free, which ask `special` where something special is on. `segments` takes memory from the GPU
and gives it back, `expandable` lets segments grow, `blocks` is what all of them are made of, `untimed` what they ask of a clock. `config`
reads PYTORCH_CUDA_ALLOC_CONF, `statistics` counts, `history` records. `ledger` is what processes on one GPU share,
`addresses` where segments lie, `phases` what a recorded step held.
"""
