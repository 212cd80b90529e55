"""Those it has as Triton kernels."""
