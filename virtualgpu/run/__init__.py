"""The runner, `python -m virtualgpu`: programs on virtual GPUs, from before their first line to a table after their last.

`cli` reads the command line (`options`), starts the program with the cards and the environment that `launcher` finds, and waits for it;
`processes` keeps signals straight and ends what is left; `prefork` forks what would import PyTorch anew; `child` is what happens inside each
of the program's processes (`site/sitecustomize.py` calls it). `report` is what is told at the end, of the `results` that these have left and of
their `peaks`; `nvidia_smi` is the program's `nvidia-smi`. `fit/` tries a program over cards and options, `explain/` says where its steps go;
both try `trials`, of which `steps` counts the steps. `ranks/` runs a notebook's function in several processes (`launch`), and `inherit` is
what these have of the notebook's GPUs.
"""
