"""`python -m virtualgpu SCRIPT`: a program on virtual GPUs."""

import sys

if __name__ == "__main__":
    try:
        from virtualgpu.run.cli import main

        status = main(sys.argv[1:])
    except KeyboardInterrupt:  # while modules load: main() catches it later
        status = 130
    sys.exit(status)
