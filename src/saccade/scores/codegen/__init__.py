"""Programs of score functions, and the source of the Triton functions that kernels call."""
