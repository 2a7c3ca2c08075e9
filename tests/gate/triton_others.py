"""Triton's kernels over pages, of quantization, and of what goes between ranks, compiled from stand-in tensors."""

# pyright: reportCallIssue=false

from __future__ import annotations

from typing import Any

import torch

from saccade.backends import Append, Quantization, Rotary
from saccade.backends.device import slot_lists
from saccade.backends.device.records import TensorArgs
from saccade.backends.triton import append as append_rows
from saccade.backends.triton import paged as pages
from saccade.backends.triton import quantize as quantizing
from saccade.backends.triton import rank_rows, token_lists
from saccade.call import Call
from saccade.call.descale import EIGHT_BITS, Factors
from saccade.layouts import CacheSlots, Dense, Paged, empty_bytes
from saccade.masks import causal, prefix, selected, window
from tests.gate.rows import warmed

ROWS = "decode", "fixed", "prompt", "drafts", "drafts16", "merge", "merges"
"""What comes after `triton paged 16bit d128/128`."""
LATENT = {"decode": 12, "fixed": 4, "singles": 44, "rows": 100, "prompt": 500}
"""Rows of d576/512, whose values are read with their keys, and the bytes that they spill. The prompt's are 276 on
Triton 3.6, where 64 keys are faster than 32 with fewer spills, and 640 on 3.9, not timed. It has parts: of a whole
one ptxas serialises the products on 3.6 (C7515), whatever the tile."""


def paged(word: str, d: int, d_v: int, dtype: torch.dtype, max_scores: bool = False, latent: bool = False) -> Any:
    """Decoding over pages of 16 in parts, its queries end to end, or whole, a query each; `singles` over pages of 1,
    `rows` over slots, which need no mask;
    `few` rows, or a chunk of a prompt, over pages of 64, which have whole tiles; 4 or 16 drafts, whose mask must be
    asked; or merges, of few parts and of many. `latent`: 16 heads of queries on one of keys."""
    forms = {
        "prompt": (1, 64 if latent else 512, 64),
        "fixed": (128, 1, 16),
        "drafts": (4, 4, 16),
        "drafts16": (4, 16, 16),
        "singles": (4, 1, 1),
        "rows": (4, 1, 1),
        "few": (4, 4, 64),
    }
    b, s_q, size = forms.get(word, (4, 1, 16))
    mask = prefix(7) | window(30, 2) if word.startswith("drafts") else None if word == "rows" else causal()
    offsets = torch.zeros(b + 1, dtype=torch.int32) if word == "decode" else None
    splits = 1 if word == "fixed" else None
    layout = Paged(torch.zeros(b, 512, dtype=torch.int32), torch.zeros(b, dtype=torch.int32), offsets, splits)
    h_q, h_k = (16, 1) if latent else (32, 8)
    shape = (b, h_q, s_q) if offsets is None else (1, h_q, b * s_q)
    eight = dtype in EIGHT_BITS
    q, out = (torch.empty(*shape, n, dtype=torch.bfloat16 if eight else dtype) for n in (d, d_v))
    caches = [torch.empty(256, h_k, size, n, dtype=dtype) for n in (d, d_v)]
    if latent:
        caches[1] = caches[0][..., :d_v]
    factors = Factors(None, torch.empty(b, h_k, 1), torch.empty(b, h_k, 1)) if eight else None
    call = Call.of_views(q, caches[0], caches[1], layout, mask=mask, descale=factors)
    split = pages.split_kv(call, 132)
    lse, parts = torch.empty(split.splits, *shape), torch.empty(split.splits, *shape, d_v)
    top = lse if max_scores else None
    name = "whole" if split.splits == 1 else "part"
    if word.startswith("merge"):
        name = {"merges": "merge many"}.get(word, word)
        numbers = out[..., 0].numel(), split.splits, *shape[1:]
        return warmed(pages.prepare(name, call, split), (parts, lse, top, TensorArgs.of(out), lse, top, None, *numbers))
    target = (TensorArgs.of(out), None) if split.splits == 1 else (parts, lse)
    operands = TensorArgs.of(q), TensorArgs.of(caches[0]), None if pages.reads_once(call) else TensorArgs.of(caches[1])
    given = pages.arguments(call, split, parted=name == "part")
    return warmed(pages.prepare(name, call, split), (*operands, *target, top, *given))


def tokens(kernel: str, d: int, d_v: int, dtype: torch.dtype) -> Any:
    """Gradients of lists of tokens: 128 heads of 512 rows, each with 2,048 keys."""
    q, k = torch.empty(1, 128, 512, d, dtype=dtype), torch.empty(1, 1, 4096, d, dtype=dtype)
    tables = torch.zeros(1, 1, 512, 2048, dtype=torch.int32), torch.zeros(1, 1, 512, dtype=torch.int32)
    call = Call.of_views(q, k, k[..., :d_v], Dense(), mask=selected(tables[0]) & causal())
    if kernel == "token_keys":
        return warmed(*slot_lists.keys_launch(call, {}, *tables))
    work, numbers = token_lists.TokenWork.of(call, {}, 1, 2048), torch.empty(16)
    memory = torch.empty(16, dtype=dtype), torch.empty(16, dtype=token_lists.PARTS_OF[dtype])
    if kernel == "token_sums":
        order = torch.empty(16, dtype=torch.int32)
        return warmed(*token_lists.sums_launch(work, torch.empty(4096, d + d_v), memory[1], order, order))
    v = None if d > 256 else TensorArgs.of(k[..., :d_v])
    rows = TensorArgs.of(q), TensorArgs.of(k), v, TensorArgs.of(q[..., :d_v]), TensorArgs.of(q), numbers
    made = [*work.made(rows, work.keys(tables, memory, 0), 64)]
    return warmed(*made[["token_weights", "token_dq", "token_parts"].index(kernel)])


def append(d: int, d_v: int, dtype: torch.dtype, by_slot: bool = False) -> Any:
    """Packed sequences, or rows by their slots; keys and queries rotate. An
    8-bit dtype is the caches', and rows are wider."""
    eight_bits = dtype in quantizing.TYPES
    dtypes = (dtype, dtype, *(torch.bfloat16 if eight_bits else dtype,) * 3)
    shapes = (9, 16, 8, d), (9, 16, 8, d_v), (4, 8, d), (4, 8, d_v), (4, 32, d)
    *operands, q = (torch.empty(*shape, dtype=kind) for shape, kind in zip(shapes, dtypes, strict=True))
    factor = torch.empty(1 if by_slot else 3, 8, 1)
    descale = Factors(None, factor, factor) if eight_bits else Factors()
    layout = Paged(torch.zeros(3, 9, dtype=torch.int32), torch.zeros(3).int(), torch.zeros(4).int())
    places = CacheSlots(torch.zeros(4).long(), torch.zeros(4).long()) if by_slot else layout
    call = Append(*operands, places, Rotary(torch.empty(99, d // 2), torch.empty(99, d // 2), False), q, descale)
    return warmed(append_rows.prepare(call), append_rows.arguments(call, torch.empty_like(q)))


def quantize(name: str, d: int, dtype: torch.dtype, words: list[str]) -> Any:
    """Words say what the call has besides."""
    group = 4 if "grouped" in words else 1
    x = torch.empty(2, 2 * group, 512, d, dtype=dtype)
    per = next((word for word in words if word in quantizing._PER), "block")
    mean = torch.empty(2, 2, d) if {"centred", "shifted"} & {*words} else None
    kind = torch.float8_e5m2 if "e5m2" in words else torch.float8_e4m3fn
    starts = torch.zeros(3, dtype=torch.int32) if "packed" in words else None
    flags = "rotated" in words, "keys_first" in words
    call = Quantization(x, 2, starts, None, mean, "centred" in words, per, kind, 4, *flags)
    parts, found = torch.empty(2, 2, d), quantizing.maxima(call)
    made, shift = empty_bytes(x, kind, call.keys_first), torch.empty(x.shape[:3]) if "shifted" in words else None
    given = {
        "largest": lambda: quantizing.largest_arguments(call, torch.zeros(2, 2, dtype=torch.int32)),
        "quantize": lambda: quantizing.arguments(call, made, found, torch.empty(2, 2, 4), shift),
        "parts": lambda: quantizing.parts_arguments(call, parts),
        "mean": lambda: quantizing.mean_arguments(call, parts, parts),
    }[name]()
    return warmed(quantizing.prepare(name, call), given)


def rank_sums(dtype: torch.dtype, d: int) -> Any:
    """Four places, eight heads."""
    own, table = torch.empty(9, 8, d, dtype=dtype), torch.zeros(4, 5, dtype=torch.int32)
    return warmed(rank_rows.sums_launch(own[:5], 4), ((own,) * 4, table, own[:5], 5))


def spread_rows(dtype: torch.dtype, d: int) -> Any:
    """Three places, eight heads."""
    x, table = torch.empty(9, 8, d, dtype=dtype), torch.zeros(3, 9, dtype=torch.int32)
    both = torch.empty(9, 8, 2 * d, dtype=dtype)
    return warmed(rank_rows.spread_launch(x, x, 3), (x, x, (both,) * 3, table, 9))
