"""`python -m virtualgpu fit` and `virtualgpu.fit`: a program over cards, numbers of GPUs and values of its own options.

`cli` has the two ways in, and tells how far it is; `search` makes the trials, `table` tells what came of it.
"""
