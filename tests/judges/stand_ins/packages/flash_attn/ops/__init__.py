"""flash-attn's operations."""
