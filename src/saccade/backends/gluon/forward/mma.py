"""The forward's consumers: groups of four warps, each with the online softmax of its own 64 query rows."""

# No `from __future__ import annotations` here: an aggregate reads its fields' types.
# pyright: reportArgumentType=false, reportCallIssue=false

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from saccade.backends.device.sequences import is_packed, numbered
from saccade.backends.device.tiles import used_length
from saccade.backends.gluon.forward.epilogue import store_results
from saccade.backends.gluon.forward.scores import (
    LOWEST,
    LOWEST_VAST,
    ScoreRows,
    bounds_of_rows,
    linear_terms,
    score_rule,
)
from saccade.backends.gluon.forward.work_tile import BATCH, KEYS, USED, tile_at, work_tile
from saccade.backends.gluon.ptx import pack_pairs, unpack_pairs
from saccade.backends.gluon.shim import aggregate
from saccade.backends.gluon.tiles import row_sums


@aggregate
class SoftmaxState:
    """What the online softmax carries from tile to tile."""

    acc: gl.tensor
    """[64, BLOCK_DV]: p v of all tiles but the last"""
    row_max: gl.tensor
    row_sum: gl.tensor
    """[64, 8]"""
    p: gl.tensor
    """[64, BLOCK_K / 2]: the last tile's weights, as 16-bit pairs"""


@gluon.jit
def issue_scores(pipe, part, stage):
    """Starts q k^T [64, BLOCK_K], chunk by chunk of d."""
    BLOCK_K: gl.constexpr = pipe.shape.BLOCK_K
    CHUNK: gl.constexpr = pipe.shape.D_CHUNK
    CHUNKS: gl.constexpr = pipe.shape.D_CHUNKS
    LAST: gl.constexpr = pipe.shape.D_LAST
    s = gl.zeros([64, BLOCK_K], gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_K, 16]))
    for chunk in gl.static_range(CHUNKS):
        # [64, CHUNK]
        q = pipe.slots.tiles.index(part * pipe.slots.CHUNKS + chunk).reshape([64, CHUNK])
        # [BLOCK_K, CHUNK]
        k = pipe.keys.tiles.index(stage * CHUNKS + chunk).reshape([BLOCK_K, CHUNK])
        if chunk == CHUNKS - 1 and LAST < CHUNK:
            q = q.slice(0, LAST, 1)
            k = k.slice(0, LAST, 1)
        s = warpgroup_mma(q, k.permute((1, 0)), s, use_acc=chunk > 0, is_async=True)
    return s


@gluon.jit
def issue_values(pipe, p, stage, acc):
    """Starts acc += p v; p comes from registers."""
    # [64, BLOCK_K]
    p = gl.convert_layout(unpack_pairs(p, pipe.slots.tiles.dtype), gl.DotOperandLayout(0, acc.type.layout, 2))
    # [BLOCK_K, BLOCK_DV]
    v = pipe.values.tiles.index(stage).reshape([pipe.shape.BLOCK_K, pipe.shape.BLOCK_DV])
    return warpgroup_mma(p, v, acc, is_async=True)


@gluon.jit
def first_softmax(pipe, rows, item, s):
    """The state after the scores of the last tile, the first to come."""
    place = item.end - 1
    tile = tile_at(rows.rule.mask, item.block_list, item.hi, place)
    s = rows.apply_score(s, tile)
    if place >= item.core_end:
        s = rows.apply_mask(s, tile, False)
    elif rows.rule.mask.lower:  # noqa: SIM102 - known when this is compiled, and the next is not
        if place < item.core:
            s = rows.apply_mask(s, tile, True)
    LEAST: gl.constexpr = LOWEST_VAST if rows.rule.score.vast else LOWEST
    least = gl.full([64], LEAST, gl.float32, gl.SliceLayout(1, s.type.layout))
    weights, _, row_max = rows.softmax_weights(s, tile, least)
    row_sum = row_sums(weights)
    p = pack_pairs(rows.apply_dropout(weights, tile), pipe.slots.tiles.dtype)
    BLOCK_DV: gl.constexpr = pipe.shape.BLOCK_DV
    acc = gl.zeros([64, BLOCK_DV], gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_DV, 16]))
    return SoftmaxState(acc, row_max, row_sum, p)


@gluon.jit
def step(c: gl.constexpr, pipe, rows, item, state, n, tile, MASKED: gl.constexpr, LOWER: gl.constexpr):
    """The state after one more tile of keys: its scores, and the values of the tile before."""
    stage = pipe.keys.wait(n + 1)
    pipe.turns.take(c)
    s = issue_scores(pipe, item.part, stage)
    acc = issue_values(pipe, state.p, pipe.values.wait(n), state.acc)
    pipe.turns.give(c)
    # [64, BLOCK_K]
    s = warpgroup_mma_wait(1, [s])
    pipe.keys.release(n + 1)
    s = rows.apply_score(s, tile)
    if MASKED:
        s = rows.apply_mask(s, tile, LOWER)
    weights, alpha, row_max = rows.softmax_weights(s, tile, state.row_max)
    # [64, 8]
    decay = gl.convert_layout(alpha, gl.SliceLayout(1, state.row_sum.type.layout))
    row_sum = state.row_sum * decay[:, None] + row_sums(weights)
    # [64, BLOCK_DV]
    acc = warpgroup_mma_wait(0, [acc])
    pipe.values.release(n)
    acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, acc.type.layout))[:, None]
    p = pack_pairs(rows.apply_dropout(weights, tile), pipe.slots.tiles.dtype)
    return SoftmaxState(acc, row_max, row_sum, p)


@gluon.jit
def run_of_tiles(
    c: gl.constexpr, pipe, rows, item, state, n, place, end, MASKED: gl.constexpr, LOWER: gl.constexpr
):  # fmt: skip
    """The tiles before `place` down to `end`, all of them with the mask or without. Returns the state, n and place."""
    # All numbers from the loop's own: with one of them carried along, d = 64 lost 4 %.
    for i in range(place - end):
        tile = tile_at(rows.rule.mask, item.block_list, item.hi, place - 1 - i)
        state = step(c, pipe, rows, item, state, n + i, tile, MASKED, LOWER)
    return state, n + gl.maximum(place - end, 0), gl.minimum(place, end)


@gluon.jit
def further_tiles(c: gl.constexpr, pipe, rows, item, state, n):
    """All tiles before the last one: those after the core, the core, and those before it, where rows may not see the
    first keys. Each run has a loop of its own: a branch inside one loop costs 8 %, and two loops inside another 1 % or
    more, as does one in the backward (docs/findings/gluon.md)."""
    place = item.end - 1
    if rows.rule.mask.lower:
        edge = gl.minimum(item.core_end, place)
        state, n, place = run_of_tiles(c, pipe, rows, item, state, n, place, edge, True, False)
        state, n, place = run_of_tiles(c, pipe, rows, item, state, n, place, item.core, False, True)
        state, n, place = run_of_tiles(c, pipe, rows, item, state, n, place, item.first, True, True)
    else:
        state, n, place = run_of_tiles(c, pipe, rows, item, state, n, place, item.core, True, False)
        state, n, place = run_of_tiles(c, pipe, rows, item, state, n, place, item.first, False, False)
    return state, n


@gluon.jit
def skip_tiles(c: gl.constexpr, pipe, n, tiles):
    """Hands tiles back unread that this consumer's mask excludes. Returns the next n."""
    for _ in range(tiles):
        pipe.turns.take(c)
        pipe.turns.give(c)
        pipe.keys.skip(n)
        pipe.values.skip(n)
        n += 1
    return n


@gluon.jit
def release_last_slot(pipe, done):
    """Gives back the slot of the work item before, once its out has left from there."""
    if done > 0:
        tma.store_wait(0)
        pipe.slots.release(done - 1)


@gluon.jit
def score_rows(rule, args, pipe, item, at, b):
    """The ScoreRows of a work item: its rows, and the lengths in use."""
    ROWS: gl.constexpr = pipe.shape.ROWS
    BLOCK_K: gl.constexpr = pipe.shape.BLOCK_K
    if is_packed(args.used_q):
        rows, keys, b = pipe.slots.get(at, USED), pipe.slots.get(at, KEYS), numbered(args.used_q, b)
    else:
        rows, keys = used_length(args.used_q, b, args.s_q), used_length(args.used_k, b, args.s_k)
    layout: gl.constexpr = gl.SliceLayout(1, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_K, 16]))
    # [64]
    i = gl.arange(0, 64, layout)
    q_idx = item.row + i % ROWS
    h = item.h_k * args.group + item.in_group + i // ROWS
    bounds = bounds_of_rows(rule.mask, b, q_idx, rows, keys)
    return ScoreRows(rule, linear_terms(rule, b, h, q_idx, keys - rows), b, h, q_idx, rows, keys, bounds)


@gluon.jit
def consume(c: gl.constexpr, args, pipe):
    """Consumer c: the online softmax of its 64 query rows over every tile of keys that they see, the last one first."""
    EARLY: gl.constexpr = pipe.slots.SLOTS > 1
    rule = score_rule(args.mask, args.score, args.dropout, args.scale)
    n = gl.to_tensor(0)
    done = gl.to_tensor(0)
    pipe.turns.open(c)
    slot = pipe.slots.wait(0)
    at = pipe.slots.record_of(0)
    b = pipe.slots.get(at, BATCH)
    while b >= 0:
        item = work_tile(c, args, pipe, slot, at, b)
        rows = score_rows(rule, args, pipe, item, at, b)

        n = skip_tiles(c, pipe, n, item.hi - item.end)
        s = issue_scores(pipe, item.part, pipe.keys.wait(n))
        if EARLY:
            release_last_slot(pipe, done)
        # [64, BLOCK_K]
        s = warpgroup_mma_wait(0, [s])
        pipe.keys.release(n)
        state = first_softmax(pipe, rows, item, s)
        state, n = further_tiles(c, pipe, rows, item, state, n)
        acc = issue_values(pipe, state.p, pipe.values.wait(n), state.acc)
        acc = warpgroup_mma_wait(0, [acc])
        pipe.values.release(n)
        n = skip_tiles(c, pipe, n + 1, item.first - item.lo)
        done += 1

        store_results(args, pipe, rows, item, at, b, acc, state.row_max, state.row_sum)
        if not EARLY:
            release_last_slot(pipe, done)
        slot = pipe.slots.wait(done)
        at = pipe.slots.record_of(done)
        b = pipe.slots.get(at, BATCH)
    tma.store_wait(0)
