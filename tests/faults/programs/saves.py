"""Saves ever newer states under one name, and loads what it saved."""

import sys

import torch

from helpers import checkpoint

if __name__ == "__main__":
    path = sys.argv[1]
    for step in range(60):
        checkpoint.save({"weight": torch.full((500_000,), float(step)), "step": step}, path)
        state = checkpoint.load(path)
        if not (state["weight"] == state["step"]).all() or state["step"] != step:
            sys.exit(f"what was loaded is not what was saved: {state['step']} for {step}")
    print("saved", step)
