"""Loads a checkpoint."""

import sys

from helpers import checkpoint

if __name__ == "__main__":
    print("loaded", sorted(checkpoint.load(sys.argv[1])))
