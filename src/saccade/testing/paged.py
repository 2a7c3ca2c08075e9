"""Paged caches in named problems, poisoned wherever they are not in use, and their keys for the oracle."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from saccade.layouts import Paged
from saccade.testing.packed import drawn_lengths

if TYPE_CHECKING:
    from saccade.testing.cases import Case


def named() -> list[Case]:
    """The calls of a server: decoding, several tokens at once, chunks of prompts, and all of them in one batch."""
    from saccade.testing.cases import Case

    decode = Case("decode", b=4, h_q=8, h_k=2, s_q=1, s_k=150, d=64, mask="causal", order="paged")
    drafts = decode.replace(name="drafts", s_q=5, page_size=8, h_q=6, splits=3)
    chunk = decode.replace(name="chunk", b=3, s_q=70, s_k=200, d=40, d_v=24, page_size=64, cache="heads")
    latent = decode.replace(name="latent", h_q=16, h_k=1, d=576, d_v=512, page_size=64, cache="latent")
    mixed = decode.replace(name="mixed", b=5, s_k=180, lengths=(1, 60, 0, 7, 1), tail=9)
    return [
        decode,
        decode.replace(name="decode-window", mask="window(50,0)", sink=True, page_size=32, cache="heads"),
        decode.replace(name="decode-alibi", score="alibi", page_size=1, splits=2, cache="rows"),
        decode.replace(name="decode-fixed", score="softcap(5)", splits=1, d=128),
        drafts,
        drafts.replace(name="drafts-predicate", mask="dilated_window", sink=True),
        chunk,
        chunk.replace(name="chunk-everything", mask="prefixes", score="alibi", sink=True, page_size=48, d=128, d_v=0),
        mixed,
        mixed.replace(name="mixed-fixed", mask="window(40,0)", sink=True, splits=1, page_size=8, cache="heads"),
        mixed.replace(name="mixed-union", mask="prefix(7)|window(30,2)", score="softcap(9)", page_size=128, splits=4),
        mixed.replace(name="many-heads", h_q=71, h_k=1, d=64, b=3, s_k=70, lengths=(1, 9, 2), tail=0, page_size=16),
        # As in gpt-oss, whose layers have a window in turns, Gemma 2 and models with ALiBi, on the caches of servers.
        mixed.replace(name="gpt-oss", h_q=16, mask="window(127,0)", sink=True, s_k=300, cache="heads"),
        decode.replace(name="gpt-oss-full", h_q=16, sink=True, s_k=300, cache="heads"),
        mixed.replace(name="gemma", d=256, mask="window(99,0)", score="softcap(50)", s_k=190, cache="heads"),
        chunk.replace(name="wide", d=512, d_v=320, cache="heads"),
        decode.replace(name="decode-wide", d=384, score="softcap(9)"),
        mixed.replace(name="one-head-alibi", h_q=4, h_k=1, score="alibi", d=128, page_size=1, cache="one-head"),
        chunk.replace(name="chunk-one-head", h_q=3, h_k=1, mask="window(60,0)", page_size=16, cache="one-head"),
        mixed.replace(name="mixed-pages", d=80, d_v=64, score="softcap(9)", page_size=32, cache="pages"),
        # As in DeepSeek's models: one head of keys, of which values are the first columns.
        latent,
        latent.replace(name="latent-apart", cache="apart", page_size=16, splits=2),
        latent.replace(name="latent-drafts", h_q=20, s_q=2, mask="window(70,0)", sink=True, page_size=1),
        latent.replace(name="latent-capped", h_q=128, b=2, s_k=90, score="softcap(5)", page_size=1),
        latent.replace(name="latent-fixed", mask="dilated_window", splits=1, lengths=(1, 0, 3, 2), tail=3),
        latent.replace(name="latent-narrow", h_q=6, h_k=2, d=64, d_v=40, score="alibi", splits=3),
        latent.replace(name="latent-padded", h_q=6, d=304, d_v=264, page_size=8),
        decode.replace(name="no-keys", b=2, s_k=0, sink=True),
        decode.replace(name="no-sequences", b=0),
        mixed.replace(name="no-rows", lengths=(0, 0), b=2, tail=0),
    ]


def operands(case: Case, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor, Paged]:
    """q, k, v and the layout: one sequence of the full length, drawn ones, and empty ones. Unused rows and pages of the
    cache are NaN, and the tables end in page numbers out of range."""
    size, width = case.page_size, -(-case.s_k // case.page_size) + 2
    used = drawn_lengths(case.s_k, case.b, generator)
    mapped = -(-used // size)
    pages = int(mapped.sum()) + 3
    free = torch.randperm(pages, generator=generator)
    table = torch.tensor([-1, pages, 1 << 30])[torch.arange(width) % 3].repeat(case.b, 1)  # out of range
    in_use = torch.zeros(pages, size, dtype=torch.bool)
    for b, (n, length) in enumerate(zip(mapped.tolist(), used.tolist(), strict=True)):
        table[b, :n], free = free[:n], free[n:]
        in_use.view(-1)[(table[b, :n, None] * size + torch.arange(size)).flatten()[:length]] = True
    both = torch.randn(pages, size, case.h_k, case.d + case.d_v, generator=generator)
    both.masked_fill_(~in_use[..., None, None], torch.nan)
    k, v = both.split([case.d, case.d_v], dim=-1)
    offsets = None
    shape: tuple[int, ...] = case.b, case.s_q
    if case.lengths or case.tail:
        lengths = torch.tensor(case.lengths) if case.lengths else drawn_lengths(case.s_q, case.b, generator)
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]).int()
        shape = (int(offsets[-1]) + case.tail,)
    q = torch.randn(*shape, case.h_q, case.d, generator=generator)
    if offsets is not None:
        q[int(offsets[-1]) :] = torch.nan
    return q, k, v, Paged(table.int(), used.int(), offsets, case.splits or None)


def moved(layout: Paged, device: torch.device | str) -> Paged:
    offsets = None if layout.cu_seqlens_q is None else layout.cu_seqlens_q.to(device)
    return Paged(layout.block_table.to(device), layout.seqused_k.to(device), offsets, layout.num_splits)


CACHES = {
    "apart": "a tensor for each cache",
    "rows": "a tensor (pages, page_size, h_k, d + d_v): a row holds a key and its value",
    "heads": "a tensor (pages, h_k, page_size, d + d_v), as vLLM has it",
    "pages": "a tensor (pages, 3, 2, page_size, h_k, max(d, d_v)): a page of 3 layers, keys and values",
    "one-head": "as `rows`, with h_k = 1 and head strides that no kernel may read",
    "latent": "a tensor (pages, page_size, h_k, max(d, d_v)): values begin where keys do",
}
"""How keys and values lie, by Case.cache."""


def stored(cache: str, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Copies of k (pages, page_size, h_k, d) and v in memory of that form, NaN between them."""
    caches = empty(cache, k.shape[:3], k.shape[3], v.shape[3], k.new_empty(0))
    return caches[0].copy_(k), caches[1].copy_(v)


def empty(cache: str, rows: tuple[int, ...], d: int, d_v: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Room for caches of rows (pages, page_size, h_k) in memory of that form, of the dtype and device of `like`."""
    pages, size, h_k = rows
    if cache == "apart":
        return like.new_empty(*rows, d), like.new_empty(*rows, d_v)
    if cache == "pages":
        memory = like.new_full((pages, 3, 2, size, h_k, max(d, d_v)), torch.nan)
        return memory[:, 1, 0, ..., :d], memory[:, 1, 1, ..., :d_v]
    if cache == "latent":
        row = like.new_empty(*rows, max(d, d_v))
        return row[..., :d], row[..., :d_v]
    if cache == "heads":
        both = like.new_empty(pages, h_k, size, d + d_v).transpose(1, 2)
    else:
        both = like.new_empty(*rows, d + d_v)
    k, v = both.split([d, d_v], dim=-1)
    if cache == "one-head":
        k, v = (x.as_strided(x.shape, (*x.stride()[:2], 1, 1)) for x in (k, v))
    return k, v


def spaced(cache: Tensor) -> Tensor:
    """A copy of (pages, page_size, h_k, d) whose rows start at multiples of 16 bytes, with NaN between them."""
    whole = 16 // cache.element_size()
    made = cache.new_full((*cache.shape[:3], -(-cache.shape[3] // whole) * whole), torch.nan)
    return made[..., : cache.shape[3]].copy_(cache)
