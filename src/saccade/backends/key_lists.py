"""What GPUs make of lists of keys in each call: tables of bits, whose size bounds what they run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import reduce
from operator import and_
from typing import NamedTuple

import torch
from torch import Tensor

from saccade.call import Call
from saccade.layouts.slots import rows_apart
from saccade.masks import TILE, And, Mask, Selected
from saccade.scores import Traced

MOST_BYTES = 1 << 32
"""Of a table: 128 K rows of one head, of as many keys each, take half of it."""


class TableShape(NamedTuple):
    """A bit for each list and each key, or block of keys."""

    batch: int
    heads: int
    groups: int
    """lists of a head; of queries end to end one for each row"""
    blocks: int

    @property
    def lists(self) -> int:
        return self.batch * self.heads * self.groups

    @property
    def words(self) -> int:
        """int32 of a list"""
        return -(-self.blocks // 32)

    @staticmethod
    def of(mask: Selected, call: Call) -> TableShape:
        lists, lengths = mask.lists, mask.lengths
        s_k = call.layout.capacity(call.k.shape[2])
        batch = lists.shape[0] if lists.dim() == 4 else 1
        if lengths is not None and lengths.dim() == 1 and lists.dim() == 4:
            batch = max(batch, lengths.shape[0])
        heads, groups = lists.shape[-3:-1]
        return TableShape(batch, heads, groups, -(-s_k // mask.keys))


class ListTile(NamedTuple):
    """The rows of a program that gathers keys: those of `share` heads, whose lists are the same."""

    share: int
    rows: int
    entries: int
    """Of the list of each row, a power of two, where their union is made first; 0 where all rows have one list."""


MOST_ROWS = 128
"""Rows of a program that gathers the keys of a list, those of all heads that share it."""
MOST_ENTRIES = 1 << 30
"""Of the table of slots that lists of latent keys become: 4 GB."""
UNION_ROWS = 64
"""The same where lists of neighbouring rows are joined; half as many of float32 and of wide heads. A bit for each of 32
rows says whose list has an entry."""
FEW = 256
"""Keys times the heads that share a list, over the keys that it names, from which gradients gather these: what each row
adds to a key is written and read once for each list, and other kernels take time for every key and head."""
MOST_SORTED = 2048
"""Entries that a program sorts, so that each comes once."""
LEAST_KEYS = 16
"""Of blocks whose lists are joined, and inverted for gradients: a product of tensor cores has so many."""


def lists_and_rest(mask: Mask | None) -> tuple[list[Selected], Mask | None]:
    """The lists that a mask combines by `&`, and what is beside them."""
    parts = mask.parts if isinstance(mask, And) else () if mask is None else (mask,)
    return _lists(parts), joined([part for part in parts if not isinstance(part, Selected)])


def joined(parts: Sequence[Mask]) -> Mask | None:
    """Parts of an `&` as one mask; None for no part."""
    return None if not parts else parts[0] if len(parts) == 1 else And(tuple(parts))


def listed_keys(call: Call) -> Tensor | None:
    """Which keys any list of a batch names, (b or 1, h_k or 1, s_k); None where a call has no lists. What is in others
    reaches no result."""
    if call.mask is None or not call.mask.bounds_per_row:
        return None
    h_k = call.k.shape[1]
    named = [x.named(call.extent.s_k) for x in lists_and_rest(call.mask)[0]]
    if not named:
        return None
    return reduce(and_, [x if x.shape[1] <= h_k else x.unflatten(1, (h_k, -1)).any(2) for x in named])


def one_list(call: Call) -> tuple[Selected, Mask | None] | None:
    """The list of a mask that has one, and what is beside it by `&`."""
    if call.mask is None or not call.mask.bounds_per_row:
        return None
    lists, rest = lists_and_rest(call.mask)
    return (lists[0], rest) if len(lists) == 1 else None


def listed_heads(lists: Selected, call: Call) -> int:
    """How many heads have lists, or share one with others, where programs are of key heads at most."""
    return max(lists.lists.shape[-3], call.k.shape[1])


def list_tile(call: Call) -> ListTile | None:
    """How portable kernels gather the keys of lists: where few rows share a list that names few keys, so that tiles of
    rows would visit many more. None where they look lists up in a table."""
    layout = call.layout
    if (found := one_list(call)) is None or not (call.q.numel() and call.k.numel()) or layout.starts_k is not None:
        return None
    if layout.has_pages and (layout.num_splits or layout.shared_pages or call.keeps_tail or not layout.sequences):
        return None
    lists, d, d_v, s_k = found[0], call.k.shape[3], call.v.shape[3], layout.capacity(call.k.shape[2])
    if call.k.dtype != call.q.dtype:
        return None
    share, n = call.q.shape[1] // listed_heads(lists, call), lists.lists.shape[-1]
    if lists.rows >= TILE or n * lists.keys >= s_k or max(d, d_v) > 256 or call.dropout is not None or call.descale:
        return None
    entries = 1 << (n - 1).bit_length() if n else 1
    room = UNION_ROWS // 2 if call.q.dtype == torch.float32 or max(d, d_v) > 128 else UNION_ROWS
    most = min(32, room // share, MOST_SORTED // entries)
    if lists.keys >= LEAST_KEYS and most > max(1, lists.rows):
        return ListTile(share, 1 << (most.bit_length() - 1), entries)
    return ListTile(share, lists.rows, 0) if lists.rows * share <= MOST_ROWS else None


def gathers(call: Call, gradient: bool = False) -> bool:
    """Whether the portable forward, or backward, gathers the keys of lists. Gradients are those of blocks, without any
    of captured tensors."""
    if list_tile(call) is None or not gradient:
        return list_tile(call) is not None
    (lists, _), score = lists_and_rest(call.mask), call.score
    return lists[0].keys >= LEAST_KEYS and (score is None or not score.tensors)


def row_lists_obstacle(call: Call) -> str | None:
    """Why no kernel gathers the keys of lists for each row and all heads, or None."""
    found = one_list(call)
    if found is None:
        return "one list of keys, beside other masks by &"
    lists, others = found
    entries = call.q.shape[0] * call.q.shape[2] * lists.lists.shape[-1] * lists.keys
    if lists.end_to_end or call.layout.cu_seqlens_q is not None:
        return "lists of keys for equally many queries of each sequence, not end to end"
    if lists.lists.shape[1] != 1 or (others is not None and "h" in others.indices):
        return "lists of keys that all heads share"
    if isinstance(call.score, Traced) and "kv_idx" in call.score.program.inputs:
        return "lists of keys with functions of scores that do not depend on kv_idx"
    if entries > MOST_ENTRIES:
        return f"lists of up to {MOST_ENTRIES} entries in all, not {entries}"
    return None if rows_apart(call.k.transpose(1, 2)) is not None else "keys whose batch rows are whole rows apart"


def tokens_of_rows(call: Call, gradient: bool = False) -> bool:
    """Whether the portable kernels gather the keys that each row of latents lists, for all of its heads. Gradients are
    those of other keys too, where rows list few of them."""
    if call.q.dtype.itemsize != 2 or call.dropout is not None or call.layout.has_pages:
        return False
    if gradient and call.score is not None and call.score.tensors:
        return False
    return _lists_latents(call) or (gradient and _few_tokens(call))


def _lists_latents(call: Call) -> bool:
    """Whether rows list latents as wide as caches hold."""
    return call.latent and call.q.shape[3] > 256 and row_lists_obstacle(call) is None


def _few_tokens(call: Call) -> bool:
    """Whether gradients of lists of keys are faster without a table, or have no room for one."""
    if (found := one_list(call)) is None or call.layout.cu_seqlens_q is not None or call.k.dtype != call.q.dtype:
        return False
    (lists, others), d, d_v = found, call.k.shape[3], call.v.shape[3]
    if others is not None and "h" in others.indices:
        return False
    n, s_k, share = lists.lists.shape[-1] * lists.keys, call.k.shape[2], call.q.shape[1] // listed_heads(lists, call)
    if lists.rows >= TILE or lists.keys >= LEAST_KEYS or lists.end_to_end or max(d, d_v) > 512 or not call.k.numel():
        return False
    return n * FEW <= s_k * share or _bytes(call) > MOST_BYTES


def _lists(masks: Iterable[Mask]) -> list[Selected]:
    return [mask for mask in masks if isinstance(mask, Selected)]


def _all_lists(call: Call) -> list[Selected]:
    return [] if call.mask is None or not call.mask.bounds_per_row else _lists(call.mask.leaves())


def _bytes(call: Call) -> int:
    shapes = [TableShape.of(leaf, call) for leaf in _all_lists(call)]
    return sum(4 * shape.lists * shape.words for shape in shapes)


GATHERING = "gluon", "triton"
"""Backends whose gradients gather keys, those of gluon by triton's kernels."""


def explanation(call: Call, backend: str) -> str | None:
    """One line on how a backend runs the lists of a call, if it has some."""
    if not (lists := _all_lists(call)) or backend == "reference":
        return None
    if backend == "triton" and gathers(call):
        joined = list_tile(call)
        rows = f", joined for {joined.rows} rows" if joined is not None and joined.entries else ""
        whole = "too" if gathers(call, True) or tokens_of_rows(call, True) else "by a table of bits"
        text = f"a program gathers the keys of a list{rows}, for the rows and heads that share it"
        return f"lists of keys: {text}" + ("" if call.layout.has_pages else f"; gradients {whole}")
    if (backend == "gluon" and _lists_latents(call)) or (backend == "triton" and tokens_of_rows(call)):
        return "lists of keys: each call makes slots of them, 4 bytes an entry, and a program gathers those of a row"
    made = "" if backend == "cpu" else f"each call makes {_bytes(call) / 1e6:.1f} MB of bits of them, and "
    if call.layout.has_pages:
        return f"lists of keys: {made}all tiles of keys in use are computed and masked"
    whole = all(leaf.rows >= TILE and leaf.keys >= TILE for leaf in lists)
    masked = "masked only where a list ends inside" if whole else "masked key by key"
    also = "; gradients gather the keys of each row" if backend in GATHERING and tokens_of_rows(call, True) else ""
    return f"lists of keys: {made}tiles of {TILE} rows and {TILE} keys with a listed key are computed, {masked}{also}"


def refusals(call: Call) -> list[str]:
    """Why no GPU takes the lists of a mask."""
    if (size := _bytes(call)) <= MOST_BYTES:
        return []
    return [f"makes a table of a bit for each list and key of up to {MOST_BYTES >> 30} GB, not {size / 2**30:.1f}"]
