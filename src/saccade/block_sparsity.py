"""Which tiles of a mask are empty, partial or full: found once for a mask and a shape, and kept as long as it is true.

The states are uint8 (b or 1, h_q or 1, tiles of rows, tiles of keys), of tiles of 64 rows and 64 keys. Nothing of the
size s_q s_k is ever held. Each backend makes of them what its own tiles need, such as block lists
(`backends/device/block_lists.py`).
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from saccade.layouts import Packed
from saccade.masks import EMPTY, FULL, PARTIAL, TILE, Blocked, Extent, Mask
from saccade.problem import Problem

PAIRS_AT_ONCE = 1 << 22
MAXSIZE = 64


def states_of(problem: Problem, make: Callable[[Problem], Tensor]) -> Tensor:
    """The states of the tiles of a listed mask: those that it brings along, those that are known, or new ones."""
    mask = problem.mask
    assert mask is not None
    assert mask.listed, mask
    if isinstance(mask, Blocked):
        if _made_of(mask.states) in (None, _contents(mask.mask)):
            return mask.states
        mask = mask.mask  # which is another one than it was when they were made
        problem = replace(problem, mask=mask, launches={})
    lengths = problem.q.shape[2], problem.k.shape[2]  # tiles alone do not say where the last ones end
    numbers = (*mask.ints, *mask.floats, problem.layout.text, *shape(problem), *lengths)
    key = "states", mask.identity, numbers, str(problem.q.device)
    return kept(key, [*mask.records, *problem.layout.records], lambda: make(problem))


def made_now(mask: Blocked) -> Blocked:
    """Says that the states of a mask are those of the mask as it is now."""
    for old in [old for old, (alive, _) in _made.items() if alive.expired()]:
        _made.pop(old, None)
    _made[mask.states.untyped_storage()._cdata] = (
        StorageWeakRef(mask.states.untyped_storage()),
        _contents(mask.mask.bound()),
    )
    return mask


def _made_of(states: Tensor) -> Hashable | None:
    """What the mask was that states were made of, where it is known."""
    alive, found = _made.get(states.untyped_storage()._cdata, (None, None))
    return None if alive is None or alive.expired() else found


def _contents(mask: Mask) -> Hashable:
    """All that the states of a mask depend on, besides the shape of the call."""
    return mask.identity, tuple(mask.ints), tuple(mask.floats), tuple(map(_version, mask.records))


_made: dict[int, tuple[StorageWeakRef, Hashable]] = {}


def shape(problem: Problem) -> tuple[int, int, int, int]:
    """b or 1, h_q or 1, tiles of rows and of keys.

    Packed sequences are one batch row, in which each has whole tiles of rows, of which the first one of sequence b is
    number `cu_seqlens_q[b] // TILE + b`, and keys count within it.
    """
    mask, q, k, layout = problem.mask, problem.q, problem.k, problem.layout
    assert mask is not None
    if isinstance(layout, Packed):
        heads = q.shape[1] if "h" in mask.indices else min(q.shape[1], 1)
        return 1, heads, q.shape[2] // TILE + layout.sequences + 1, -(-k.shape[2] // TILE)
    batches = q.shape[0] if "b" in mask.indices or layout.records else min(q.shape[0], 1)
    heads = q.shape[1] if "h" in mask.indices else min(q.shape[1], 1)
    return batches, heads, -(-q.shape[2] // TILE), -(-k.shape[2] // TILE)


def states(problem: Problem) -> Tensor:
    """The states by plain PyTorch operations, on any device, some rows at a time."""
    assert problem.mask is not None
    extent, device = problem.extent, problem.q.device
    b, h, rows, keys = shape(problem)
    found = torch.zeros(b, h, rows, keys, dtype=torch.uint8, device=device)
    hull = problem.mask.hull(extent).clipped(extent)
    step = max(1, PAIRS_AT_ONCE // max(1, b * h * TILE * extent.s_k))
    for row in range(0, rows, step):
        q_idx = torch.arange(row * TILE, min((row + step) * TILE, extent.s_q), device=device)
        lo, hi = hull.lo[:, q_idx], hull.hi[:, q_idx]
        seeing = hi > lo
        if not bool(seeing.any()):
            continue
        first, stop = int(lo[seeing].min()) // TILE, -(-int(hi[seeing].max()) // TILE)
        kv_idx = torch.arange(first * TILE, min(stop * TILE, extent.s_k), device=device)
        seen = _seen(problem.mask, extent, b, h, q_idx, kv_idx)
        # What is missing of the last tiles counts as hidden.
        missing = (0, -len(kv_idx) % TILE, 0, -len(q_idx) % TILE)
        seen = torch.nn.functional.pad(seen, missing).unflatten(3, (-1, TILE)).unflatten(2, (-1, TILE))
        some, full = seen.any(3).any(-1), seen.all(3).all(-1)
        found[:, :, row : row + step, first:stop] = torch.where(full, FULL, torch.where(some, PARTIAL, EMPTY))
    return found


def _seen(mask: Mask, extent: Extent, b: int, h: int, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    """(b, h, rows, keys) bool, False where rows or keys are not in use"""
    batch, head = (torch.arange(n, device=q_idx.device) for n in (b, h))
    seen = mask.sees(extent, batch[:, None, None, None], head[:, None, None], q_idx[:, None], kv_idx)
    rows, keys = (edge[..., None, None] for edge in (extent.rows, extent.keys))
    inside = (q_idx[:, None] < rows) & (kv_idx < keys)
    return (seen & inside).expand(b, h, len(q_idx), len(kv_idx))


def kept(key: Hashable, tensors: Sequence[Tensor], make: Callable[[], Any]) -> Any:
    """What `make` makes, kept while the tensors that it is made of live and are not written to.

    A CUDA graph makes it itself, in every replay, of what the tensors hold then: it outlives what is kept here. Results
    of one stream are for that stream alone.
    """
    capturing = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
    versions = [_version(x) for x in tensors]
    if capturing or None in versions:
        return make()
    stream = torch.cuda.current_stream().cuda_stream if torch.cuda.is_initialized() else 0
    key = key, stream, tuple(versions)
    with _lock:
        if key in _kept:
            _kept.move_to_end(key)
            return _kept[key][0]
    made = make()
    with _lock:
        for old in [old for old, (_, alive) in _kept.items() if any(x.expired() for x in alive)]:
            del _kept[old]
        _kept[key] = made, [StorageWeakRef(x.untyped_storage()) for x in tensors]
        if len(_kept) > MAXSIZE:
            _kept.popitem(last=False)
    return made


_kept: OrderedDict[Hashable, tuple[Any, list[StorageWeakRef]]] = OrderedDict()
_lock = threading.Lock()
os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release)


def _version(x: Tensor) -> Hashable | None:
    """Where a tensor's numbers are, and how often they were written; None if that is not counted."""
    if x.is_inference():
        return None
    return x.untyped_storage()._cdata, x.storage_offset(), tuple(x.shape), x.stride(), x.dtype, x._version
