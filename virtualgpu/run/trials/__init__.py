"""What `fit` and `--explain` share: programs side by side, ended after a few steps of their optimizer, and what they said.

`programs` and `progress` are of the runner, `messages` reads what a program printed; `steps` and `rows` count in the program's processes.
"""
