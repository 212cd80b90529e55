"""flash-attn's names by PyTorch's own operations: numbers, not speed."""

from flash_attn.flash_attn_interface import flash_attn_func

__all__ = ["flash_attn_func"]
__version__ = "2.8.0"
