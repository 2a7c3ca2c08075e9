"""The cases of the grids `dims` and `odd`: head dims, lengths and numbers of heads that papers do not measure."""

from __future__ import annotations

from collections.abc import Iterator

from saccade.testing.cases import Case


def _both(b: int, h: int, s: int, d: int, d_v: int = 0, dtype: str = "bf16") -> Iterator[Case]:
    """Full and causal."""
    for mask in ("none", "causal"):
        yield Case("", dtype=dtype, b=b, h_q=h, h_k=h, s_q=s, s_k=s, d=d, d_v=d_v, mask=mask)


def dims() -> Iterator[Case]:
    """One problem at each head dim, for comparison with its neighbours in the same run."""
    yield from _both(4, 16, 4096, 128)
    yield from _both(4, 16, 4096, 128, dtype="fp16")
    for d, d_v in ((192, 128), (96, 96), (80, 80)):
        yield from _both(4, 16, 4096, d, d_v)


def _layer(b: int, h: int, s: int, d: int, keys: int = 0) -> Case:
    """A layer of a vision model: b images of s patches, which attend to so many keys of a text; 0: to themselves."""
    return Case("", b=b, h_q=h, h_k=h, s_q=s, s_k=keys or s, d=d)


_LAYERS = (
    _layer(64, 16, 577, 64),  # ViT-L/14 at 336 pixels
    _layer(32, 16, 729, 72),  # SigLIP so400m/14 at 384 pixels
    _layer(32, 16, 1024, 80),  # ViT-H/14 at 448 pixels
    _layer(8, 10, 4096, 64),  # SDXL: 64 x 64 patches
    _layer(8, 10, 4096, 64, 77),  # and its text
    _layer(16, 8, 4096, 40, 77),  # Stable Diffusion 1
)


def odd() -> Iterator[Case]:
    """Short rows of many heads; head dims that are no power of two; layers of vision models; and few heads, so that
    there are fewer tiles than multiprocessors."""
    for d in (64, 128):
        for s in (128, 256, 512):
            yield from _both(16384 // s, 2048 // d, s, d)
    for d in (72, 80, 96, 160, 192):
        yield from _both(4, 16, 2048, d)
    yield from _LAYERS
    for h, s in ((8, 1024), (16, 1024), (8, 4096), (16, 4096)):
        for d in (64, 128):
            yield from _both(1, h, s, d)
