"""What `fit` and `--explain` share: programs side by side, ended after a few steps of their optimizer, and what they said.

`programs` starts them, `steps` and `rows` count in the program's processes, and `steps` reads what they printed.
"""
