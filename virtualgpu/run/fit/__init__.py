"""`python -m virtualgpu fit` and `virtualgpu.fit`: a program over cards, numbers of GPUs and values of its own options.

`cli` has the two ways in, `search` makes the trials, `table` tells what came of it, `progress` how far it is.
"""
