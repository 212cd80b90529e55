"""Virtual GPUs: multi-GPU PyTorch on a machine without a GPU. In the making; no notebook uses it yet."""
