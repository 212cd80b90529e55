"""What stands in for PyTorch's GPUs, one module for each part of it; `session` puts all of them in place.

A module has `install(machine, patches)`. It replaces attributes through `patches` (`patches`), which puts each one back
when the virtual GPUs go.
"""
