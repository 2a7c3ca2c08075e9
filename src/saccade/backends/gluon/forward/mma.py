"""The forward's consumers: groups of four warps, each with the online softmax of its own 64 query rows."""

# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from saccade.backends.device.dropout import factor as dropout_factor
from saccade.backends.device.dropout import opened
from saccade.backends.device.records import LOG2E
from saccade.backends.device.sequences import is_packed, numbered
from saccade.backends.device.tiles import largest, used_length
from saccade.backends.gluon.forward.block_list import listed_tile, work_list
from saccade.backends.gluon.forward.epilogue import store_out
from saccade.backends.gluon.forward.scores import hidden, modified, risen, row_terms, thinned, weighed
from saccade.backends.gluon.ptx import fast_log2, pack_pairs, unpack_pairs
from saccade.backends.gluon.tile_scheduler import (
    BATCH,
    CONSUMER,
    CORE,
    CORE_END,
    END,
    FIRST,
    FIRST_ROW,
    HI,
    IN_GROUP,
    KEY_HEAD,
    KEYS,
    LO,
    ROW,
    THERE,
    USED,
)
from saccade.backends.gluon.tiles import row_maxima, row_sums

# A row's maximum starts here: finite, so that no difference of two is NaN.
LOWEST = gl.constexpr(-1e30)
# The lowest number, which functions of scores take to hide keys; no factor comes before the difference there.
LOWEST_VAST = gl.constexpr(-3.4028234e38)


@gluon.jit
def issue_scores(pipe, q_at, stage):
    """Starts q k^T [64, BLOCK_K], chunk by chunk of d."""
    BLOCK_K: gl.constexpr = pipe.shape.BLOCK_K
    CHUNK: gl.constexpr = pipe.shape.D_CHUNK
    CHUNKS: gl.constexpr = pipe.shape.D_CHUNKS
    LAST: gl.constexpr = pipe.shape.D_LAST
    s = gl.zeros([64, BLOCK_K], gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_K, 16]))
    for chunk in gl.static_range(CHUNKS):
        # [64, CHUNK]
        q = pipe.slots.tiles.index(q_at + chunk).reshape([64, CHUNK])
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
def step(
    c: gl.constexpr, acc, row_max, row_sum, p, pipe, q_at, n, tile, MASKED: gl.constexpr, LOWER: gl.constexpr, mask,
    score, dropout, terms, inside, factor, b, h, q_idx, rows, keys,
):  # fmt: skip
    """One more tile of keys: its scores, and the values of the tile before, whose probabilities are p."""
    stage = pipe.keys.wait(n + 1)
    pipe.turns.take(c)
    s = issue_scores(pipe, q_at, stage)
    acc = issue_values(pipe, p, pipe.values.wait(n), acc)
    pipe.turns.give(c)
    # [64, BLOCK_K]
    s = warpgroup_mma_wait(1, [s])
    pipe.keys.release(n + 1)
    s = modified(s, tile, score, terms, inside, b, h, q_idx)
    if MASKED:
        s = hidden(s, tile, LOWER, mask, b, h, q_idx, rows, keys)
    # [64]
    new_max = gl.maximum(row_max, risen(row_maxima(s), tile, score, terms, 1, s.shape[1]))
    # The difference first: of two equal maxima as low as LOWEST a multiply-add would leave 2^70, and 0 inf is NaN.
    alpha = gl.exp2((row_max - new_max) * factor)
    # [64, BLOCK_K]
    weights = weighed(s, new_max, tile, score, terms, factor)
    # [64, 8]
    decay = gl.convert_layout(alpha, gl.SliceLayout(1, row_sum.type.layout))
    row_sum = row_sum * decay[:, None] + row_sums(weights)
    # [64, BLOCK_DV]
    acc = warpgroup_mma_wait(0, [acc])
    pipe.values.release(n)
    acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, acc.type.layout))[:, None]
    weights = thinned(weights, tile, dropout, b, h, q_idx)
    return acc, new_max, row_sum, pack_pairs(weights, pipe.slots.tiles.dtype)


@gluon.jit
def run_of_tiles(
    c: gl.constexpr, acc, row_max, row_sum, p, pipe, q_at, n, tile, end, hi, listing, MASKED: gl.constexpr,
    LOWER: gl.constexpr, mask, score, dropout, terms, inside, factor, b, h, q_idx, rows, keys,
):  # fmt: skip
    """The tiles of keys before `tile` down to `end`, all of them with the mask or without."""
    # All numbers from the loop's own: with one of them carried along, d = 64 lost 4 %.
    for i in range(tile - end):
        number = listed_tile(mask, listing, hi, tile - 1 - i)
        acc, row_max, row_sum, p = step(
            c, acc, row_max, row_sum, p, pipe, q_at, n + i, number, MASKED, LOWER, mask, score, dropout, terms, inside,
            factor, b, h, q_idx, rows, keys,
        )  # fmt: skip
    return acc, row_max, row_sum, p, n + gl.maximum(tile - end, 0), gl.minimum(tile, end)


@gluon.jit
def further_tiles(
    c: gl.constexpr, acc, row_max, row_sum, p, pipe, q_at, n, tile, first, core, core_end, hi, listing, mask, score,
    dropout, terms, inside, factor, b, h, q_idx, rows, keys,
):  # fmt: skip
    """All tiles of keys before `tile`, whose probabilities are p. Without a lower bound `core` is the first tile that
    needs the mask, and the plain ones are before it."""
    if mask.lower:
        # Twice through two loops: the tiles behind the core, the core, the tiles before it, and none. A branch inside
        # one loop costs 8 %, and a third loop moves p around. Where there are no tiles before the core, as under a
        # causal mask, two loops are all: a nest cost the backward 15 % at d = 64.
        for half in range(2):
            edge = gl.where(half == 0, gl.minimum(core_end, tile), first)
            acc, row_max, row_sum, p, n, tile = run_of_tiles(
                c, acc, row_max, row_sum, p, pipe, q_at, n, tile, edge, hi, listing, True, True, mask, score, dropout,
                terms, inside, factor, b, h, q_idx, rows, keys,
            )  # fmt: skip
            acc, row_max, row_sum, p, n, tile = run_of_tiles(
                c, acc, row_max, row_sum, p, pipe, q_at, n, tile, core, hi, listing, False, True, mask, score, dropout,
                terms, inside, factor, b, h, q_idx, rows, keys,
            )  # fmt: skip
    else:
        acc, row_max, row_sum, p, n, tile = run_of_tiles(
            c, acc, row_max, row_sum, p, pipe, q_at, n, tile, core, hi, listing, True, False, mask, score, dropout,
            terms, inside, factor, b, h, q_idx, rows, keys,
        )  # fmt: skip
        acc, row_max, row_sum, p, n, tile = run_of_tiles(
            c, acc, row_max, row_sum, p, pipe, q_at, n, tile, first, hi, listing, False, False, mask, score, dropout,
            terms, inside, factor, b, h, q_idx, rows, keys,
        )  # fmt: skip
    return acc, row_max, row_sum, p, n


@gluon.jit
def skip(c: gl.constexpr, pipe, n, tiles):
    """Hands tiles that none of this consumer's rows see back unread. Returns n behind them."""
    for _ in range(tiles):
        pipe.turns.take(c)
        pipe.turns.give(c)
        pipe.keys.skip(n)
        pipe.values.skip(n)
        n += 1
    return n


@gluon.jit
def leave(pipe, done):
    """Gives back the slot of the work before, once its out has left from there."""
    if done > 0:
        tma.store_wait(0)
        pipe.slots.release(done - 1)


@gluon.jit
def finish(acc, row_max, row_sum, score, terms, live, h, sink, dropout, DEAD: gl.constexpr):
    """out [64, BLOCK_DV], lse and max_scores [64] from the sums; row_max [64] is natural. The sink is one more column,
    and no score.

    DEAD: there are rows that are not in use, of which acc may be NaN.
    """
    total = gl.convert_layout(gl.sum(row_sum, 1), row_max.type.layout)
    if score.linear:  # -inf for all of a row hides it, and what is NaN stays NaN
        total = gl.where(terms[2] == float("-inf"), 0.0, total + terms[2] * 0)
        row_max = gl.maximum(row_max + terms[2], LOWEST_VAST)
    top_score = largest(row_max, total, live)
    share = total * 0 + 1
    if sink is not None:
        column = gl.load(sink + h, mask=live, other=0.0).to(gl.float32)
        top = gl.maximum(row_max, column)
        share = gl.exp2((row_max - top) * LOG2E)
        total = total * share + gl.exp2((column - top) * LOG2E)
        row_max = top
    seen = live & (total != 0)  # a NaN counts as seen, and stays one
    lse = gl.where(seen, row_max + fast_log2(gl.where(seen, total, 1.0)) / LOG2E, float("-inf"))
    layout: gl.constexpr = gl.SliceLayout(1, acc.type.layout)
    weight = gl.convert_layout(gl.where(seen, share / gl.where(seen, total, 1.0), 0.0), layout)
    if dropout is not None:
        weight *= dropout_factor(dropout)
    if DEAD:
        acc = gl.where(gl.convert_layout(live, layout)[:, None], acc, 0.0)
    return acc * weight[:, None], lse, top_score


@gluon.jit
def lengths(pipe, at, b, used_q, used_k, s_q, s_k):
    """Rows and keys in use, and what masks call the batch row."""
    if is_packed(used_q):
        return pipe.slots.get(at, USED), pipe.slots.get(at, KEYS), numbered(used_q, b)
    else:
        return used_length(used_q, b, s_q), used_length(used_k, b, s_k), b


@gluon.jit
def destination(pipe, at, b, used_q, s_q):
    """Batch row, first row, and how many rows there are: read when they are needed, as registers are few until then."""
    if is_packed(used_q):
        return b * 0, pipe.slots.get(at, FIRST_ROW), pipe.slots.get(at, THERE)
    else:
        return b, 0, s_q


@gluon.jit
def consume(
    c: gl.constexpr, out_desc, out, lse, max_scores, sink, pipe, used_q, used_k, mask, score, dropout, group, h_q, s_q,
    s_k, scale,
):  # fmt: skip
    """Consumer c: the online softmax of its 64 query rows over every tile of keys that they see."""
    DTYPE: gl.constexpr = pipe.slots.tiles.dtype
    BLOCK_K: gl.constexpr = pipe.shape.BLOCK_K
    BLOCK_DV: gl.constexpr = pipe.shape.BLOCK_DV
    ROWS: gl.constexpr = pipe.shape.ROWS
    EARLY: gl.constexpr = pipe.slots.SLOTS > 1
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_DV, 16])
    CONSUMERS: gl.constexpr = pipe.shape.CONSUMERS
    rows_layout: gl.constexpr = gl.SliceLayout(1, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_K, 16]))
    # Scores keep the units of the products, or of the modification's core, up to the exponential, where a factor costs
    # nothing.
    inside, outside = score.parts(score.data)
    inside *= scale
    natural = inside if score.identity or score.linear else outside
    factor = natural * LOG2E
    if dropout is not None:
        dropout = opened(dropout)
    n = gl.to_tensor(0)
    done = gl.to_tensor(0)
    pipe.turns.open(c)
    slot = pipe.slots.wait(0)
    at = pipe.slots.record_of(0)
    b = pipe.slots.get(at, BATCH)
    while b >= 0:
        in_group = pipe.slots.get(at, IN_GROUP)
        h_k = pipe.slots.get(at, KEY_HEAD)
        lo = pipe.slots.get(at, LO)
        hi = pipe.slots.get(at, HI)
        first = pipe.slots.get(at, CONSUMER + 4 * c + FIRST)
        core = pipe.slots.get(at, CONSUMER + 4 * c + CORE)
        core_end = pipe.slots.get(at, CONSUMER + 4 * c + CORE_END)
        end = pipe.slots.get(at, CONSUMER + 4 * c + END)
        if end <= first:  # nothing to see: the last tile that is there, hidden
            first, core, core_end, end = hi - 1, hi, hi, hi
        rows, keys, b = lengths(pipe, at, b, used_q, used_k, s_q, s_k)
        # [64]
        place = gl.arange(0, 64, rows_layout)
        row = pipe.slots.get(at, ROW) + c * ROWS
        q_idx = row + place % ROWS
        h = h_k * group + in_group + place // ROWS
        q_at = (slot * CONSUMERS + c) * pipe.slots.CHUNKS
        listing = work_list(mask, pipe, at, b, h_k * group + in_group, row, used_q)

        n = skip(c, pipe, n, hi - end)
        tile = end - 1
        s = issue_scores(pipe, q_at, pipe.keys.wait(n))
        if EARLY:
            leave(pipe, done)
        # [64, BLOCK_K]
        s = warpgroup_mma_wait(0, [s])
        pipe.keys.release(n)
        number = listed_tile(mask, listing, hi, tile)
        terms = row_terms(score, scale, b, h, q_idx, keys - rows)
        s = modified(s, number, score, terms, inside, b, h, q_idx)
        if not mask.lower:
            core = gl.where(core < core_end, core_end, first)
            core_end = core
        if tile >= core_end:
            s = hidden(s, number, False, mask, b, h, q_idx, rows, keys)
        elif mask.lower:  # noqa: SIM102 - known when this is compiled, and the next is not
            if tile < core:
                s = hidden(s, number, True, mask, b, h, q_idx, rows, keys)
        # [64]
        lowest: gl.constexpr = LOWEST_VAST if score.vast else LOWEST
        row_max = gl.maximum(risen(row_maxima(s), number, score, terms, 1, BLOCK_K), lowest)
        # [64, BLOCK_K]
        weights = weighed(s, row_max, number, score, terms, factor)
        # [64, 8]
        row_sum = row_sums(weights)
        # [64, BLOCK_K / 2]
        p = pack_pairs(thinned(weights, number, dropout, b, h, q_idx), DTYPE)
        # [64, BLOCK_DV]
        acc = gl.zeros([64, BLOCK_DV], gl.float32, o_layout)
        acc, row_max, row_sum, p, n = further_tiles(
            c, acc, row_max, row_sum, p, pipe, q_at, n, tile, first, core, core_end, hi, listing, mask, score, dropout,
            terms, inside, factor, b, h, q_idx, rows, keys,
        )  # fmt: skip
        acc = issue_values(pipe, p, pipe.values.wait(n), acc)
        acc = warpgroup_mma_wait(0, [acc])
        pipe.values.release(n)
        n = skip(c, pipe, n + 1, first - lo)
        done += 1

        batch, first_row, all_rows = destination(pipe, at, b, used_q, s_q)
        there = (q_idx < all_rows) & (h < h_k * group + group)
        result, row_lse, top_score = finish(
            acc, row_max * natural, row_sum, score, terms, there & (q_idx < rows), h, sink, dropout, used_q is not None
        )
        corner = [batch, h_k, in_group, row + first_row, 0]
        store_out(out_desc, out, pipe, slot * CONSUMERS + c, result, corner, all_rows - row, group)
        if lse is not None:
            gl.store(lse + (batch.to(gl.int64) * h_q + h) * s_q + first_row + q_idx, row_lse, mask=there)
        if max_scores is not None:
            gl.store(max_scores + (batch.to(gl.int64) * h_q + h) * s_q + first_row + q_idx, top_score, mask=there)
        if not EARLY:
            leave(pipe, done)
        slot = pipe.slots.wait(done)
        at = pipe.slots.record_of(done)
        b = pipe.slots.get(at, BATCH)
    tma.store_wait(0)
