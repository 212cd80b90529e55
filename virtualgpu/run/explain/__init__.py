"""`python -m virtualgpu --explain`: where an optimizer's step goes, and which changes would gain most.

`cli` runs the program, as it is and with each change that could gain (`changes`), and prints. In the program's processes `watch` notes what the
GPUs did and what a batch takes, and simulates one change.
"""
