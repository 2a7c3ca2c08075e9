"""A gallery of masks that are not intervals, by name, for any length: for tests, pictures and benchmarks."""

from __future__ import annotations

from collections.abc import Callable
from math import isqrt

import torch
from torch import Tensor

from saccade.masks import Mask, causal, documents, interval, mask_mod, prefix


def sliding_tiles(tile: int, reach: int) -> Mask:
    """Tiles of tokens see those at most `reach` tiles away: a sliding window in steps (STA)."""
    return mask_mod(lambda b, h, q_idx, kv_idx: (q_idx // tile - kv_idx // tile).abs() <= reach)


def neighborhood_plane(height: int, width: int, reach: int) -> Mask:
    """Pixels, row by row, see the square of 2 reach + 1 around them, moved inwards at the borders (NATTEN)."""

    def seen(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        y, x = q_idx // width, q_idx % width
        y, x = y.clamp(reach, height - 1 - reach), x.clamp(reach, width - 1 - reach)
        return ((kv_idx // width - y).abs() <= reach) & ((kv_idx % width - x).abs() <= reach)

    return mask_mod(seen)


def neighborhood_volume(depth: int, height: int, width: int, reach: int) -> Mask:
    """The same for pixels of several frames: a cube."""
    plane = height * width

    def seen(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        z = (q_idx // plane).clamp(reach, depth - 1 - reach)
        y = (q_idx % plane // width).clamp(reach, height - 1 - reach)
        x = (q_idx % width).clamp(reach, width - 1 - reach)
        near = (kv_idx // plane - z).abs() <= reach
        near = near & ((kv_idx % plane // width - y).abs() <= reach)
        return near & ((kv_idx % width - x).abs() <= reach)

    return mask_mod(seen)


def dilated_window(reach: int, step: int) -> Mask:
    """Every `step`-th token of the `reach` before (Longformer)."""

    def seen(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return ((q_idx - kv_idx) % step == 0) & (q_idx - kv_idx < reach)

    return causal() & mask_mod(seen)


def tree(parents: list[int], context: int, device: torch.device | str = "cpu") -> Mask:
    """Drafted tokens of a speculative decoder see the context, their ancestors and themselves.

    `parents` has the parent of each drafted token, -1 for a root. The context precedes them, and is causal. It is an
    interval, so that no kernel asks the predicate there.
    """
    n = len(parents)
    ancestors = torch.eye(n, dtype=torch.bool)
    for i, parent in enumerate(parents):
        if parent >= 0:
            ancestors[i] |= ancestors[parent]
    ancestors = ancestors.to(device)

    def seen(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        i, j = ((idx - context).clamp(0, max(n - 1, 0)) for idx in (q_idx, kv_idx))
        return ancestors[i, j]

    return causal() & (interval(None, context) | mask_mod(seen))


def modalities(segments: Tensor, images: Tensor) -> Mask:
    """Text is causal, and each image sees all of itself. `segments` numbers the pieces, and `images` says which tokens
    belong to an image, both (s,)."""

    def seen(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return images[q_idx] & (segments[q_idx] == segments[kv_idx])

    return causal() | mask_mod(seen)


def random_blocks(
    blocks: int, share: float, size: int = 128, seed: int = 0, device: torch.device | str = "cpu"
) -> Mask:
    """Blocks of `size` rows and keys. The diagonal is visible, and of the other blocks a random `share`."""
    drawn = torch.rand(blocks, blocks, generator=torch.Generator().manual_seed(seed)) < share
    table = (drawn | torch.eye(blocks, dtype=torch.bool)).to(device)
    return mask_mod(lambda b, h, q_idx, kv_idx: table[q_idx // size, kv_idx // size])


def _packed(s: int, device: torch.device | str) -> Tensor:
    """(1, s): the ids of documents, each longer than the one before."""
    starts = torch.tensor([s * i * i // 36 for i in range(1, 6)], dtype=torch.int64)
    return torch.bucketize(torch.arange(s), starts, right=True)[None].to(device)


def _tree(s: int, device: torch.device | str, keys: int | None = None) -> Mask:
    """Of half of the tokens, up to 15; or of all rows, after the other keys. Every draft has two children."""
    drafted = min(s // 2, 15) if keys is None else s
    return tree([(i - 1) // 2 for i in range(drafted)], (keys or s) - drafted, device)


def _modalities(s: int, device: torch.device | str) -> Mask:
    segments = (torch.arange(s, device=device) * 7 / s).sqrt().mul(4).long()
    return modalities(segments, segments % 2 == 1)


def _plane(s: int, device: torch.device | str) -> Mask:
    width = 1 << (isqrt(s) - 1).bit_length() if s & (s - 1) == 0 else max(1, isqrt(s))
    height = -(-s // width)
    return neighborhood_plane(height, width, max(1, min(height, width) // 10))


def _volume(s: int, device: torch.device | str) -> Mask:
    depth = max(3, round(s ** (1 / 3)) // 2)
    width = max(3, isqrt(s // depth))
    return neighborhood_volume(depth, -(-s // (depth * width)), width, 1)


_MADE: dict[str, Callable[[int, torch.device | str], Mask]] = {
    "prefix_lm": lambda s, device: prefix(s // 4),
    "packed": lambda s, device: documents(_packed(s, device)) & causal(),
    "sliding_tiles": lambda s, device: sliding_tiles(max(1, s // 16), 1),
    "neighborhood_plane": _plane,
    "neighborhood_volume": _volume,
    "dilated_window": lambda s, device: dilated_window(max(4, s // 3), 4),
    "tree": _tree,
    "modalities": _modalities,
    "random_blocks": lambda s, device: random_blocks(
        -(-s // max(4, min(128, s // 16))), 0.25, max(4, min(128, s // 16)), device=device
    ),
}
NAMES = tuple(_MADE)


def made(name: str, s: int, device: torch.device | str = "cpu", keys: int | None = None) -> Mask:
    """One of `NAMES` for s rows and keys; or for a paged cache of so many keys, of which the last s are the rows'.

    >>> print(made("tree", 8).draw(8))
    (interval(None,4)|mask_mod(seen))&causal
    ■ · · · · · · ·
    ■ ■ · · · · · ·
    ■ ■ ■ · · · · ·
    ■ ■ ■ ■ · · · ·
    ■ ■ ■ ■ ■ · · ·
    ■ ■ ■ ■ ■ ■ · ·
    ■ ■ ■ ■ ■ · ■ ·
    ■ ■ ■ ■ ■ ■ · ■
    """
    return _tree(s, device, keys) if name == "tree" else _MADE[name](s, device)
