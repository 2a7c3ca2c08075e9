"""Device functions that the Triton and the Gluon kernels share: records, masks, scores, tiles."""


def recorder() -> object:
    """What notes a call to be repeated; None where Triton's interpreter runs it."""
    from saccade.backends.device.replay import new_launch_recorder

    return new_launch_recorder()


def block_d(d: int) -> int:
    """The head dim that a tile has: the next power of two, as Triton's shapes are, and at least 16 for its dots."""
    return max(16, 1 << (d - 1).bit_length())
