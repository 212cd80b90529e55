"""`python -m virtualgpu fit` and `virtualgpu.fit`: a program over cards, numbers of GPUs and values of its own options.

`cli` and `call` are the two ways in, `search` makes the trials, `command` puts values into the program's words and counts samples,
`table`, `picture` and `prices` tell what came of it, `progress` how far it is.
"""
