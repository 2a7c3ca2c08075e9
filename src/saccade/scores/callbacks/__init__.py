"""Score functions that build a cuDNN graph."""
