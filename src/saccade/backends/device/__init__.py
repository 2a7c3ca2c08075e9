"""Device functions that the Triton and the Gluon kernels share: records, masks, scores, tiles."""


def block_d(d: int) -> int:
    """The head dim that a tile has: the next power of two, as Triton's shapes are, and at least 16 for its dots."""
    return max(16, 1 << (d - 1).bit_length())
