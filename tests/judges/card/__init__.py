"""68 models of transformers, timm and torchvision, as an H100 and an H200 took them, beside what is simulated."""

from tests.judges.card.judge import main

__all__ = ["main"]
