"""flash-attn's layers."""
