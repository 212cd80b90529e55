"""Apex's names with PyTorch's own means: DDP is PyTorch's, mixed precision is autocast without a scaled loss."""
