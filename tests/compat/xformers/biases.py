"""Biases of every class, made by ours or by an installed xformers, and which keys they mean."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

ROWS, KEYS = [3, 1, 5], [4, 7, 5]
TABLES = [[4, 0], [2, 5], [1, 3]]
STARTS, LENGTHS = [1, 0, 2], [3, 7, 5]


class Example(NamedTuple):
    """How a bias is made, and its definition: the places of a row and of its keys, of which it sees some."""

    name: str
    make: Callable[[Any, Any, str], Any]
    """(the module of biases, the class, the device)"""
    sees: Callable[[Any, Any, int, int], Any]
    """(i, j, rows, keys) of a sequence; j counts from its first key"""
    form: str = "blocks"
    keys: int = sum(KEYS)


def bottom_right(left, right):
    return lambda i, j, rows, keys: (j <= i + keys - rows + right) & (j >= i + keys - rows - left)


def top_left(left):
    return lambda i, j, rows, keys: (j <= i) & (j >= i - left)


def everything(i, j, rows, keys):
    return (i >= 0) & (j >= 0)


def gappy_pages(module, cls, device):
    """By way of keys without pages: `from_seqlens` of xformers 0.0.35 refuses every argument."""
    starts = [start + 8 * b for b, start in enumerate(STARTS)]
    gappy = module.BlockDiagonalGappyKeysMask.from_seqlens(ROWS, [*starts, 24], LENGTHS, device=device)
    return gappy.make_paged(tables(device), 4, 8, cls)


FAR = 1 << 20
EXAMPLES = [
    Example("LowerTriangularMask", lambda m, c, d: c(), top_left(FAR), "dense"),
    Example("LowerTriangularFromBottomRightMask", lambda m, c, d: c(), bottom_right(FAR, 0), "dense"),
    Example("LowerTriangularFromBottomRightLocalAttentionMask", lambda m, c, d: c(4), bottom_right(3, 0), "dense"),
    Example("LocalAttentionFromBottomRightMask", lambda m, c, d: c(3, 2), bottom_right(3, 2), "dense"),
    *(
        Example(name, lambda m, c, d: c.from_seqlens(ROWS, KEYS, device=d), sees)
        for name, sees in (
            ("BlockDiagonalMask", everything),
            ("BlockDiagonalCausalMask", top_left(FAR)),
            ("BlockDiagonalCausalFromBottomRightMask", bottom_right(FAR, 0)),
        )
    ),
    Example(
        "BlockDiagonalCausalLocalAttentionMask",
        lambda m, c, d: m.BlockDiagonalMask.from_seqlens(ROWS, KEYS, device=d).make_local_attention(2),
        top_left(1),
    ),
    Example(
        "BlockDiagonalCausalLocalAttentionFromBottomRightMask",
        lambda m, c, d: m.BlockDiagonalMask.from_seqlens(ROWS, KEYS, device=d).make_local_attention_from_bottomright(2),
        bottom_right(1, 0),
    ),
    *(
        Example(name, lambda m, c, d: c.from_seqlens(ROWS, 8, KEYS, device=d), sees, keys=24)
        for name, sees in (
            ("BlockDiagonalPaddedKeysMask", everything),
            ("BlockDiagonalCausalWithOffsetPaddedKeysMask", bottom_right(FAR, 0)),
        )
    ),
    Example(
        "BlockDiagonalLocalAttentionPaddedKeysMask",
        lambda m, c, d: c.from_seqlens_local(ROWS, 8, KEYS, 2, 1).to(d), bottom_right(2, 1), keys=24,
    ),
    Example(
        "BlockDiagonalCausalLocalAttentionPaddedKeysMask",
        lambda m, c, d: c.from_seqlens_local(ROWS, 8, KEYS, 2).to(d), bottom_right(1, 0), keys=24,
    ),
    *(
        Example(name, lambda m, c, d: c.from_seqlens(ROWS, [6, 0, 3, 20], KEYS, device=d), sees, keys=20)
        for name, sees in (
            ("BlockDiagonalGappyKeysMask", everything),
            ("BlockDiagonalCausalWithOffsetGappyKeysMask", bottom_right(FAR, 0)),
        )
    ),
    *(
        Example(name, lambda m, c, d: c.from_seqlens(ROWS, KEYS, tables(d), 4, device=d), sees, "pages", 24)
        for name, sees in (
            ("PagedBlockDiagonalPaddedKeysMask", everything),
            ("PagedBlockDiagonalCausalWithOffsetPaddedKeysMask", bottom_right(FAR, 0)),
        )
    ),
    *(
        Example(name, gappy_pages, sees, "gappy pages", 24)
        for name, sees in (
            ("PagedBlockDiagonalGappyKeysMask", everything),
            ("PagedBlockDiagonalCausalWithOffsetGappyKeysMask", bottom_right(FAR, 0)),
        )
    ),
]  # fmt: skip


def tables(device):
    return torch.tensor(TABLES, dtype=torch.int32, device=device)


def made(module, example, device):
    return example.make(module, getattr(module, example.name), torch.device(device))


def seen(example):
    """bool (rows, keys): what the definition says."""
    rows = sum(ROWS)
    if example.form == "dense":
        i, j = torch.arange(rows)[:, None], torch.arange(example.keys)[None]
        return example.sees(i, j, rows, example.keys)
    mask = torch.zeros(rows, example.keys, dtype=torch.bool)
    for b, n in enumerate(ROWS):
        places = key_places(example, b)
        i, j = torch.arange(n)[:, None], torch.arange(len(places))[None]
        mask[sum(ROWS[:b]) : sum(ROWS[: b + 1]), places] = example.sees(i, j, n, len(places))
    return mask


def key_places(example, b):
    """Where the keys of a sequence lie in the tensor."""
    if "pages" in example.form:
        return rows_in_use(example, b)[STARTS[b] if "gappy" in example.form else 0 :]
    starts = [6, 0, 3] if "Gappy" in example.name else [0, 8, 16] if "Padded" in example.name else [0, 4, 11]
    return list(range(starts[b], starts[b] + KEYS[b]))


def rows_in_use(example, b):
    """The rows of a sequence's pages up to its last key, those that are masked too."""
    stop = STARTS[b] + LENGTHS[b] if "gappy" in example.form else KEYS[b]
    return [TABLES[b][j // 4] * 4 + j % 4 for j in range(stop)]
