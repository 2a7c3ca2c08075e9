"""Attention in tiles of plain PyTorch operations: one block of query rows against the keys that it sees."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import cache
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from saccade.backends import Gradients, Outputs, Saved
from saccade.backends.cpu.tiling import (
    LARGE,
    TILE_ELEMENTS,
    OnlineSoftmax,
    Tile,
    Tiling,
    Worker,
    exp_less,
    product,
    scores_dtype,
    tiling_of,
    wide_dtype,
    wide_product,
)
from saccade.call import Call
from saccade.layouts import empty_like_rows

# Work spread over threads of our own, each of which runs PyTorch's operations alone.
#
# An operation that PyTorch itself spreads over threads ends in a barrier, and a tile has a dozen of them: with
# another process on one of the cores, each of them waits for the slowest thread. Here a thread draws the next item
# after it has done one. A slow core takes fewer items, and threads wait only at the end. A result has the same bits
# on any thread.


Item = TypeVar("Item")


def threads() -> int:
    """How many the caller may use: torch's number, or one where threads cannot have numbers of their own."""
    return torch.get_num_threads() if _own_numbers() else 1


def spread(items: Iterable[Item], start_worker: Callable[[], Callable[[Item], None]], workers: int) -> None:
    """Runs every item once, by at most `workers` threads, each of which calls `start_worker` for what runs its items.

    After the first exception no more items are drawn; it is raised when all threads are done.
    """
    queue, lock, stopped = iter(items), threading.Lock(), threading.Event()
    inference = torch.is_inference_mode_enabled()

    def draw() -> None:
        with torch.inference_mode(inference), torch.no_grad():
            run = start_worker()
            try:
                while not stopped.is_set():
                    with lock:
                        item = next(queue, _END)
                    if item is _END:
                        return
                    run(item)  # pyright: ignore[reportArgumentType]
            except BaseException:
                stopped.set()
                raise

    if workers <= 1:
        run = start_worker()
        for item in items:
            run(item)
        return
    futures: list[Future[None]] = []
    try:
        try:
            futures += [_executor().submit(draw) for _ in range(workers)]
        except RuntimeError:  # no more threads, as when the interpreter ends
            draw()
        wait(futures)
    except BaseException:
        stopped.set()
        wait(futures)
        raise
    for future in futures:
        future.result()


_END = object()


@cache
def _own_numbers() -> bool:
    """Whether each thread has a number of threads of its own, as with OpenMP, not one for the process."""
    return "ATen parallel backend: OpenMP" in torch.__config__.parallel_info()


@cache
def _executor() -> ThreadPoolExecutor:
    """It starts threads as they are needed, and keeps them."""
    return ThreadPoolExecutor(max(64, os.cpu_count() or 1), "saccade", _alone)


def _alone() -> None:
    """Makes this thread use no other. `set_num_threads` also sets what later threads begin with, so another thread
    restores that."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    again = threading.Thread(target=torch.set_num_threads, args=(before,))
    again.start()
    again.join()


if hasattr(os, "register_at_fork"):  # a forked process has none of the threads
    os.register_at_fork(after_in_child=_executor.cache_clear)


# The sink: one more logit per query head, in the sum of the softmax but not in its value.


def join(out: Tensor, lse: Tensor, sink: Tensor) -> Tensor:
    """Rescales `out` (b, h, s, d_v) in place for a softmax that holds the sink (h) too; returns its lse (b, h, s)."""
    joined = torch.logaddexp(lse, sink.to(lse.dtype)[:, None])
    share = torch.where(lse == -torch.inf, 0, torch.exp(lse - joined))  # a row without keys takes no NaN from its sink
    out.mul_(share[..., None])
    return joined


def gradient(call: Call, saved: Saved, delta: Tensor) -> Tensor | None:
    """`-sum p_sink delta`, with p_sink = exp(sink - lse) and delta (b, h, s) = rowsum(dout out) - dlse."""
    if call.sink is None:
        return None
    share = torch.exp(call.sink.to(saved.lse.dtype)[:, None] - saved.lse)
    # Rows that are not in use have lse = -inf, and anything in dout; a sink of +inf, with lse = +inf, has no gradient.
    return -torch.where(saved.lse.isinf(), 0, share * delta).sum((0, 2)).to(call.sink.dtype)


def delta(saved: Saved) -> Tensor:
    """rowsum(dout out) - dlse, (b, h, s) in lse's dtype."""
    dtype = saved.lse.dtype
    delta = (saved.dout.to(dtype) * saved.out.to(dtype)).sum(-1)
    return delta if saved.dlse is None else delta - saved.dlse


# Attention in tiles of plain PyTorch operations: one block of query rows against the keys that it can see.
#
# A tile holds whole score rows where they fit, as PyTorch's matrix products are fast only on large operands; longer
# rows are streamed with the online softmax. Memory is a few tiles for each thread, whatever the lengths.
#
# In bfloat16 a score is not rounded: PyTorch has no product of bfloat16 on a CPU that leaves in float32, so that the
# two whose results are tiles, q k^T and dout v^T, are products of float32, but for scores so small that they may be
# rounded (`worker.scores_dtype`). The others, whose results are rows, are of bfloat16 where this CPU multiplies those.
# Everything else is float32: scale, score functions, masks, the softmax, and the gradient of the scores.


ALONE = 1 << 18
"""Scores of a call that one thread does in less time than it takes to wake another."""


def forward(call: Call, lse: bool) -> Outputs:
    """out (b, h_q, s_q, d_v), lse (b, h_q, s_q) if it is asked for or a sink needs it, and max_scores if asked for."""
    # The LSE and the largest scores are float32, which bfloat16 is not good enough for.
    tiling, scores = tiling_of(call), (wide_dtype if lse or call.max_scores else scores_dtype)(call)
    out = call.empty_out().zero_()
    row_lse = torch.full(call.q.shape[:3], -torch.inf, dtype=call.lse_dtype(), device="cpu")
    top = torch.full_like(row_lse, -torch.inf) if call.max_scores else None
    want_lse = lse or call.sink is not None

    def start_worker() -> Callable[[list[list[Tile]]], None]:
        worker = Worker(call, tiling, scores)

        def run(groups: list[list[Tile]]) -> None:
            for tiles in groups:
                k = worker.keys(call.k, tiles[0], scores)
                v = worker.keys(call.v, tiles[0], worker.products)
                for tile in tiles:
                    softmax = _softmax(worker, tile, k, v)
                    if softmax is None:
                        continue
                    worker.store(out, softmax.out().mul_(worker.rescale), tile)
                    if want_lse:
                        worker.store(row_lse[..., None], softmax.lse(), tile)
                    if top is not None:
                        worker.store(top[..., None], softmax.top, tile)

        return run

    workers = _workers(tiling)
    spread(_forward_items(tiling, workers), start_worker, workers)
    if call.sink is None:
        return out, row_lse if lse else None, top
    joined = join(out, row_lse, call.sink)
    # Rows that are not in use have no sink either.
    unused = call.extent.q_idx() >= call.extent.rows
    return out, joined.masked_fill_(unused[:, None], -torch.inf), top


def _softmax(worker: Worker, tile: Tile, k: Tensor, v: Tensor | None) -> OnlineSoftmax | None:
    """Of a tile's rows, with v or for `top` and `total` alone; None where nothing is visible."""
    q = worker.queries(worker.call.q, tile, worker.scores)
    pieces = worker.pieces(tile)
    plain = v is not None and worker.call.score is None and worker.call.dropout is None
    if plain and len(pieces) > 1 and all(piece.core == piece.keys for piece in pieces):  # one product instead of many
        k, v = (torch.cat([x[:, piece.keys] for piece in pieces], 1) for x in (k, v) if x is not None)
        together = slice(0, k.shape[1])
        pieces = worker.tiling.split([tile._replace(keys=together, core=together)])
    bounded = worker.scores != worker.wide and not worker.call.max_scores
    softmax = OnlineSoftmax(worker.scratch, bounded=bounded)
    for piece in pieces:
        score, _ = worker.score(q, k, piece)
        if v is None:
            softmax.add(score)
        else:
            softmax.add(score, v[:, piece.keys], worker.dropout_mask(piece))
    return softmax if pieces else None


def backward(call: Call, saved: Saved) -> Gradients:
    """dq, dk, dv, dsink and those of captured tensors; a block of rows at a time recomputes its softmax and adds to dk
    and dv in float32.

    With dropout the factor 1 / (1 - p) waits for the sums, where nothing rounds it to bfloat16.
    """
    tiling, scores = tiling_of(call), scores_dtype(call)
    work = _Backward(call, saved)
    workers = _workers(tiling)
    items, captures = _backward_items(tiling, workers), work.zeros()
    captured = sum(x.numel() for x in captures if x is not None)
    if captured * len(items) > TILE_ELEMENTS:  # with several threads each item has sums of its own
        workers, items = 1, _backward_items(tiling, 1)
    sums = [_Sums([], [])] * len(items)

    def start_worker() -> Callable[[int], None]:
        worker = Worker(call, tiling, scores)

        def run(number: int) -> None:
            sums[number] = work.run(worker, items[number], captures if workers == 1 else work.zeros())

        return run

    spread(range(len(items)), start_worker, workers)
    return work.gradients(items, sums, captures)


class _Sums(NamedTuple):
    """What an item adds to gradients that it shares with others."""

    dk_dv: list[Tensor]
    """(n, s_k, d) each, of the item's heads; none where the item alone has these heads, and has stored them"""
    captures: list[Tensor | None]


def _add(totals: Sequence[Tensor | None], more: Sequence[Tensor | None]) -> None:
    for total, x in zip(totals, more, strict=True):
        if total is not None and x is not None:
            total += x


class _Item(NamedTuple):
    """Tiles of the same heads."""

    tiles: list[Tile]
    first: bool
    """Whether it is the first item of these heads."""
    last: bool


class _Backward:
    """One backward, by items."""

    def __init__(self, call: Call, saved: Saved) -> None:
        self.call, self.saved = call, saved
        self.delta = delta(saved)
        self.dq, self.dk, self.dv = (empty_like_rows(x, x.shape[3]).zero_() for x in (call.q, call.k, call.v))
        # exp(score - lse) must be zero, not NaN, where a row sees nothing.
        self.lse = torch.where(saved.lse == -torch.inf, 0, saved.lse)
        self.own_sums = bool((self.lse.abs() > LARGE).any())
        """Whether each tile computes the sum of its softmax itself, in one more product."""
        self.rescale = call.dropout.rescale if call.dropout else 1.0
        self.captures = call.score.tensors if call.score else ()

    def zeros(self) -> list[Tensor | None]:
        """Sums of captured tensors' gradients."""
        pairs = zip(self.captures, self.saved.wanted, strict=True)
        return [torch.zeros(x.shape, dtype=self.call.lse_dtype(), device="cpu") if want else None for x, want in pairs]

    def run(self, worker: Worker, item: _Item, captures: list[Tensor | None]) -> _Sums:
        """Adds to `captures`; stores dk and dv where no other item has the same heads."""
        tiles, call = item.tiles, self.call
        k, v = worker.keys(call.k, tiles[0], worker.scores), worker.keys(call.v, tiles[0], worker.wide)
        sums = _Sums([torch.zeros_like(x, dtype=worker.inside) for x in (k, v)], captures)
        keys = k, worker.keys(call.k, tiles[0], worker.products), v
        for tile in tiles:
            if pieces := worker.pieces(tile):
                self._tile(worker, tile, pieces, keys, sums)
        if not (item.first and item.last):
            return sums
        self._store(tiles[0], sums.dk_dv)
        return _Sums([], captures)

    def _tile(self, worker: Worker, tile: Tile, pieces: list[Tile], keys: tuple[Tensor, ...], sums: _Sums) -> None:
        """One block of rows against its keys, k for scores, k for dq, and v: dq, and what it adds to the sums."""
        (k, k_of_dq, v), (dk, dv) = keys, sums.dk_dv
        q, dout = (worker.queries(x, tile, worker.products) for x in (self.call.q, self.saved.dout))
        q_of_score = worker.queries(self.call.q, tile, worker.scores)
        dout_of_dp = worker.queries(self.saved.dout, tile, worker.wide)
        delta = worker.queries(self.delta[..., None], tile, worker.inside) / self.rescale
        shift, share = self._shift(worker, tile, k)
        dq = torch.zeros_like(q, dtype=worker.inside)
        none = worker.queries(self.saved.lse[..., None], tile, worker.inside) == -torch.inf
        if self.call.sink is not None:  # which the LSE of a row without keys is
            none = torch.ones_like(none)
        for piece in pieces:
            score, modification = worker.score(q_of_score, k, piece, derivative=True)
            if self.call.sink is not None:
                none &= score.amax(-1, keepdim=True) == -torch.inf
            p = exp_less(score, shift)
            if share is not None:
                p.mul_(share)
            dp = worker.scratch("dp", p.shape, worker.inside)
            ds = wide_product(dout_of_dp, v[:, piece.keys].mT, out=dp).sub_(delta)
            keep, dropped = worker.dropout_mask(piece), p
            if keep is not None:
                ds, dropped = torch.where(keep != 0, ds, -delta), keep.mul_(p)
            dv[:, piece.keys] += product(worker.scratch.cast("p", dropped, worker.products).mT, dout)
            ds = ds.mul_(p)
            if modification is not None:
                ds = modification.apply_slope(ds, sums.captures)
            rounded = worker.scratch.cast("ds", ds, worker.products)
            dk[:, piece.keys] += product(rounded.mT, q)
            # Of several pieces each would be rounded, and their sum again.
            ds, multiply = (rounded, product) if len(pieces) == 1 else (ds, wide_product)
            dq += multiply(ds, k_of_dq[:, piece.keys], self.call.scale * self.rescale)
        if bool(none.any()):
            dq.masked_fill_(none, 0)
        worker.store(self.dq, dq, tile)

    def _shift(self, worker: Worker, tile: Tile, k: Tensor) -> tuple[Tensor, Tensor | None]:
        """p = exp(score - shift) share, (n, m, 1) each. The LSE is the shift where float32 is fine enough for it; else
        the largest score is, and the share one over the sum."""
        if not self.own_sums:
            return worker.queries(self.lse[..., None], tile, worker.inside), None
        softmax = _softmax(worker, tile, k, None)
        assert softmax is not None
        shift, total = torch.where(softmax.top == -torch.inf, 0, softmax.top), softmax.total
        if self.call.sink is not None:
            column = self.call.sink.to(worker.inside)[:, None, None].expand(*self.saved.lse.shape, 1)
            total = total + (worker.queries(column, tile, worker.inside) - shift).exp()
        return shift, 1 / torch.where(total == 0, 1, total)

    def _store(self, tile: Tile, dk_dv: list[Tensor]) -> None:
        for target, total, scale in zip((self.dk, self.dv), dk_dv, (self.call.scale, 1.0), strict=True):
            rows_of_tile = target[tile.batch, tile.heads]
            rows_of_tile.copy_(total.mul_(scale * self.rescale).view(rows_of_tile.shape))

    def gradients(self, items: Sequence[_Item], sums: Sequence[_Sums], captures: list[Tensor | None]) -> Gradients:
        """All gradients. Sums are added in the order of the items, whichever was first."""
        dk_dv: list[Tensor] = []
        for item, more in zip(items, sums, strict=True):
            if more.captures is not captures:
                _add(captures, more.captures)
            if not more.dk_dv:
                continue
            if item.first:
                dk_dv = more.dk_dv
            else:
                _add(dk_dv, more.dk_dv)
            if item.last:
                self._store(item.tiles[0], dk_dv)
        pairs = zip(captures, self.captures, strict=True)
        of_captures = [None if x is None else x.mul_(self.rescale).to(capture.dtype) for x, capture in pairs]
        return self.dq, self.dk, self.dv, gradient(self.call, self.saved, self.delta), of_captures


def _workers(tiling: Tiling) -> int:
    shape = tiling.shape
    small = shape.b * shape.h_k * shape.group * shape.s_q * tiling.width <= ALONE
    return 1 if small else threads()


def _chunks(n: int, count: int) -> list[slice]:
    """n things in about so many slices, of the same size but for the last."""
    step = max(1, -(-n // max(count, 1)))
    return [slice(start, start + step) for start in range(0, n, step)]


def _forward_items(tiling: Tiling, workers: int) -> list[list[list[Tile]]]:
    """Each tile of rows with some groups of heads, as all of them have the same tiles as a rule; the longest first."""
    groups = [tiles for tiles in tiling.groups if tiles]
    if workers == 1:
        return [[tiles] for tiles in groups]
    if tiling.hull.lo.shape[0] > 1:
        return [[[tile]] for tiles in groups for tile in tiles]
    first = groups[0] if groups else []
    chunks = _chunks(len(groups), -(-8 * workers // max(len(first), 1)))
    order = sorted(range(len(first)), key=lambda i: first[i].keys.start - first[i].keys.stop)
    return [[[tiles[i]] for tiles in groups[chunk]] for i in order for chunk in chunks]


def _backward_items(tiling: Tiling, workers: int) -> list[_Item]:
    """Some tiles of a group of heads: all, where that is enough work for all threads."""
    pieces = 1 if workers == 1 else -(-2 * workers // max(len(tiling.groups), 1))
    chunks = [(tiles, chunk) for tiles in tiling.groups for chunk in _chunks(len(tiles), pieces)]
    return [_Item(tiles[chunk], chunk.start == 0, chunk.stop >= len(tiles)) for tiles, chunk in chunks]
