"""`python -m virtualgpu SCRIPT`: a program on virtual GPUs."""

import sys

from virtualgpu.run.cli import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
