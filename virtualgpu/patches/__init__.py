"""What stands in for PyTorch's GPUs, one file for each face of it; `installed` puts all of them in place.

A face has `install(machine, patches)`. It replaces attributes through `patches` (`registry`), which puts each one back
when the virtual GPUs go.
"""
