"""The runner, `python -m virtualgpu`: programs on virtual GPUs, from before their first line to a table after their last.

`cli` reads the command line (by `options`), `program` starts the program and waits for it, `supervisor` keeps signals straight, `child` is what
happens inside each of the program's processes (`site/sitecustomize.py` calls it), `spawned` is where those come from that multiprocessing spawns,
`table`, `traces` and `report` are what is told at the end, of what these have `left`; `smi/` is the program's `nvidia-smi`. `fit/` tries a
program over cards and options, `explain/` says where its steps go; `trials/` is what both share. `ranks/` runs a notebook's function in several
processes (`launch`), and `inherit` is what these have of the notebook's GPUs.
"""
