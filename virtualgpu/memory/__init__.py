"""The memory of one GPU: PyTorch's caching allocator in Python, its figures and its history. Sizes in bytes.

`allocator` is what others use: malloc and free. `segments` takes memory from the GPU and gives it back, `blocks` is what these are made of,
and where it lies. `config` reads PYTORCH_CUDA_ALLOC_CONF, `statistics` counts, `snapshot` records. `ledger` is what processes on one GPU share.
"""
