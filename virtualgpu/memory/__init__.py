"""The memory of one GPU: PyTorch's caching allocator in Python, its figures and its history. Sizes in bytes.

`allocator` is what others use, with short ways for malloc and free; `general` has the long ones, `segments` takes
memory from the GPU and gives it back, `expandable` lets segments grow, `private` has the pools of a program's own,
`blocks` what all of them are made of, `untimed` what they ask of a clock. `config` reads PYTORCH_CUDA_ALLOC_CONF, `statistics` counts, `history` records.
`ledger` is what processes on one GPU share.
"""
