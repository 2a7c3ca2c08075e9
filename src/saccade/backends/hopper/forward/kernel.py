"""The Hopper forward kernel: a scheduler warp draws work, a producer warp loads, and two or three consumer warpgroups
compute 64 query rows each."""

# No `from __future__ import annotations` here: an aggregate reads its fields' types.
# pyright: reportArgumentType=false, reportCallIssue=false

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma, warpgroup_mma, warpgroup_mma_wait

from saccade.backends.device.positions import is_packed, numbered
from saccade.backends.device.tiles import used_length
from saccade.backends.hopper.forward.epilogue import store_results
from saccade.backends.hopper.forward.load import is_split, load
from saccade.backends.hopper.forward.schedule import schedule
from saccade.backends.hopper.forward.scores import (
    LOWEST,
    LOWEST_FINITE,
    ScoreRows,
    bounds_of_rows,
    factors_of_rows,
    heads_of_rows,
    linear_terms,
    score_rule,
)
from saccade.backends.hopper.forward.transpose import transpose
from saccade.backends.hopper.forward.work_item import BATCH, KEYS, NUMBERS, USED, TileScheduler, tile_at, work_item
from saccade.backends.hopper.pipeline import (
    KEYS_EMPTY,
    VALUES_EMPTY,
    Pipeline,
    Plans,
    Slots,
    Turns,
    new_barriers,
    new_ring,
)
from saccade.backends.hopper.ptx import pack_pairs, pack_quads, unpack_pairs, unpack_quads
from saccade.backends.hopper.shim import Value, aggregate
from saccade.backends.hopper.tiles import bytes_of, is_eight_bit, log2, product_layout, row_sums, wait_for_sums

# The forward's consumers: groups of four warps, each with the online softmax of its own 64 query rows.


@aggregate
class SoftmaxState:
    """The state of the online softmax between tiles."""

    acc: Value
    """DV_PARTS of [64, columns]: p v of all tiles but the last"""
    row_max: gl.tensor
    row_sum: gl.tensor
    """[64, 8]"""
    p: gl.tensor
    """[64, BLOCK_K / 2]: the last tile's weights, as 16-bit pairs; or [64, BLOCK_K / 4], as 8-bit quads"""
    decay: Value
    """of 8 bits: [64], as a tuple: by what acc shrinks before the last tile is added to it"""
    factor: Value
    """the descale of the last tile's values, as a tuple, where it goes by blocks"""


@gluon.jit
def issue_scores(pipe, part, stage):
    """Starts q k^T [64, BLOCK_K], chunk by chunk of d."""
    BLOCK_K: gl.constexpr = pipe.shape.BLOCK_K
    CHUNK: gl.constexpr = pipe.shape.D_CHUNK
    CHUNKS: gl.constexpr = pipe.shape.D_CHUNKS
    LAST: gl.constexpr = pipe.shape.D_LAST
    s = gl.zeros([64, BLOCK_K], gl.float32, product_layout(BLOCK_K, pipe.slots.tiles.dtype))
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
def captured_tile(c: gl.constexpr, pipe, stage):
    """A 1-tuple of the captured tile [64, BLOCK_K]; () if the score function takes no tiles."""
    if pipe.captured is None:
        return ()
    else:
        BLOCK_K: gl.constexpr = pipe.shape.BLOCK_K
        tile = pipe.captured.index(stage * pipe.shape.CONSUMERS + c).reshape([64, BLOCK_K])
        return (tile.load(product_layout(BLOCK_K, pipe.slots.tiles.dtype)),)


@gluon.jit
def pack_weights(weights, DTYPE: gl.constexpr):
    """Weights [64, BLOCK_K] packed into 32-bit registers."""
    if is_eight_bit(DTYPE):
        return pack_quads(weights)
    else:
        return pack_pairs(weights, DTYPE)


@gluon.constexpr_function
def width_of_part(part, parts, columns, last):
    """The number of columns of out's `part`. Only the last part may be narrower than the others."""
    return last if part == parts - 1 else columns // parts


@gluon.jit
def no_sum(pipe, WIDTH: gl.constexpr):
    """[64, WIDTH]: zeros."""
    return gl.zeros([64, WIDTH], gl.float32, product_layout(WIDTH, pipe.slots.tiles.dtype))


@gluon.jit
def no_sums(pipe):
    """DV_PARTS of [64, columns]: zeros."""
    DV_PARTS: gl.constexpr = pipe.shape.DV_PARTS
    acc = ()
    for i in gl.static_range(DV_PARTS):
        part = no_sum(pipe, width_of_part(i, DV_PARTS, pipe.shape.BLOCK_DV, pipe.shape.DV_LAST))
        acc = acc + (part,)  # noqa: RUF005 - Triton has no starred tuples
    return acc


@gluon.jit
def issue_part(pipe, state, stage, PART: gl.constexpr):
    """Starts acc += p v in the columns of PART, with p from registers. For 8-bit operands it starts p v alone, since
    sums of 8-bit products leave the tensor cores early (notes/fp8.md)."""
    START: gl.constexpr = PART * (pipe.shape.BLOCK_DV // pipe.shape.DV_PARTS)
    WIDTH: gl.constexpr = width_of_part(PART, pipe.shape.DV_PARTS, pipe.shape.BLOCK_DV, pipe.shape.DV_LAST)
    acc = state.acc[PART]
    if is_eight_bit(pipe.slots.tiles.dtype):
        # [64, BLOCK_K]
        p = gl.convert_layout(unpack_quads(state.p), gl.DotOperandLayout(0, acc.type.layout, 4), assert_trivial=True)
        # [BLOCK_DV, BLOCK_K]
        v = pipe.values.tiles.index(stage).reshape([pipe.shape.BLOCK_DV, pipe.shape.BLOCK_K])
        v = v.slice(START, WIDTH, 0).permute((1, 0))
        return warpgroup_mma(p, v, no_sum(pipe, WIDTH), use_acc=False, is_async=True)
    else:
        # [64, BLOCK_K]
        p = gl.convert_layout(unpack_pairs(state.p, pipe.slots.tiles.dtype), gl.DotOperandLayout(0, acc.type.layout, 2))
        # [BLOCK_K, BLOCK_DV]
        v = pipe.values.tiles.index(stage).reshape([pipe.shape.BLOCK_K, pipe.shape.BLOCK_DV])
        if pipe.shape.DV_PARTS > 1:
            v = v.slice(START, WIDTH, 1)
        return warpgroup_mma(p, v, acc, is_async=True)


@gluon.jit
def issue_values(pipe, state, stage):
    """Starts the products with the last tile's values: of all parts, or of the first one for 8-bit operands."""
    parts = (issue_part(pipe, state, stage, 0),)
    if not is_eight_bit(pipe.slots.tiles.dtype):
        for i in gl.static_range(1, pipe.shape.DV_PARTS):
            parts = parts + (issue_part(pipe, state, stage, i),)  # noqa: RUF005 - Triton has no starred tuples
    return parts


@gluon.jit
def add_part(state, part, PART: gl.constexpr):
    """A part of acc plus the last tile's p v, in float32."""
    if len(state.factor) == 1:
        part = part * state.factor[0]
    acc = state.acc[PART]
    return acc * gl.convert_layout(state.decay[0], gl.SliceLayout(1, acc.type.layout))[:, None] + part


@gluon.jit
def finish_values(pipe, state, stage, parts):
    """acc plus the last tile's products `parts`, for which it waits."""
    if is_eight_bit(pipe.slots.tiles.dtype):
        part = warpgroup_mma_wait(0, [parts[0]])
        acc = (add_part(state, part, 0),)
        for i in gl.static_range(1, pipe.shape.DV_PARTS):
            part = warpgroup_mma_wait(0, [issue_part(pipe, state, stage, i)])
            acc = acc + (add_part(state, part, i),)  # noqa: RUF005 - Triton has no starred tuples
        return acc
    else:
        return wait_for_sums(0, parts)


@gluon.jit
def shrink(acc, alpha):
    """acc times alpha [64], part by part."""
    shrunk = ()
    for i in gl.static_range(len(acc)):
        factor = gl.convert_layout(alpha, gl.SliceLayout(1, acc[i].type.layout))
        shrunk = shrunk + (acc[i] * factor[:, None],)  # noqa: RUF005
    return shrunk


@gluon.jit
def first_softmax(pipe, rows, item, s, captured):
    """The state after the scores of the first tile, which is the last in memory."""
    index = item.end - 1
    tile = tile_at(rows.rule.mask, item.block_list, item.hi, index)
    unit = rows.key_factor(tile, pipe.shape.BLOCK_K)
    s = rows.apply_score(s, tile, unit, captured)
    if index >= item.core_end:
        s = rows.apply_mask(s, tile, False)
    elif rows.rule.mask.has_lower_bound:  # noqa: SIM102 - known when this is compiled, and the next is not
        if index < item.core:
            s = rows.apply_mask(s, tile, True)
    LEAST: gl.constexpr = LOWEST_FINITE if rows.rule.score.large_scores else LOWEST
    least = gl.full([64], LEAST, gl.float32, gl.SliceLayout(1, s.type.layout))
    weights, alpha, row_max = rows.softmax_weights(s, tile, least, unit)
    row_sum = row_sums(weights)
    p = pack_weights(rows.apply_dropout(weights, tile), pipe.slots.tiles.dtype)
    decay = (alpha,) if is_eight_bit(pipe.slots.tiles.dtype) else ()
    return SoftmaxState(no_sums(pipe), row_max, row_sum, p, decay, rows.value_factor(tile, pipe.shape.BLOCK_K))


@gluon.jit
def step(c: gl.constexpr, pipe, rows, item, state, n, tile, MASKED: gl.constexpr, LOWER: gl.constexpr):
    """The state after the scores of one more tile, and the values of the tile before."""
    unit = rows.key_factor(tile, pipe.shape.BLOCK_K)
    factor = rows.value_factor(tile, pipe.shape.BLOCK_K)
    if pipe.shape.OVERLAP:
        stage = pipe.keys.wait(n + 1)
        pipe.turns.take(c)
        s = issue_scores(pipe, item.part, stage)
        values = pipe.values.wait(n)
        parts = issue_values(pipe, state, values)
        pipe.turns.give(c)
        captured = captured_tile(c, pipe, stage)
        # [64, BLOCK_K]
        s = warpgroup_mma_wait(len(parts), [s])
    else:
        values = pipe.values.wait(n)
        pipe.turns.take(c)
        acc = finish_values(pipe, state, values, issue_values(pipe, state, values))
        pipe.values.release(n)
        stage = pipe.keys.wait(n + 1)
        s = issue_scores(pipe, item.part, stage)
        pipe.turns.give(c)
        captured = captured_tile(c, pipe, stage)
        # [64, BLOCK_K]
        s = warpgroup_mma_wait(0, [s])
    pipe.keys.release(n + 1)
    s = rows.apply_score(s, tile, unit, captured)
    if MASKED:
        s = rows.apply_mask(s, tile, LOWER)
    weights, alpha, row_max = rows.softmax_weights(s, tile, state.row_max, unit)
    # [64, 8]
    decay = gl.convert_layout(alpha, gl.SliceLayout(1, state.row_sum.type.layout))
    row_sum = state.row_sum * decay[:, None] + row_sums(weights)
    if pipe.shape.OVERLAP:
        acc = finish_values(pipe, state, values, parts)
        pipe.values.release(n)
        if pipe.out is not None:
            acc = wait_for_sums(0, acc)  # else ptxas may release up to 190 instructions later (notes/gluon.md)
    if is_eight_bit(pipe.slots.tiles.dtype):
        p = pack_weights(rows.apply_dropout(weights, tile), pipe.slots.tiles.dtype)
        return SoftmaxState(acc, row_max, row_sum, p, (alpha,), factor)
    else:
        shrunk = shrink(acc, alpha)
        p = pack_weights(rows.apply_dropout(weights, tile), pipe.slots.tiles.dtype)
        return SoftmaxState(shrunk, row_max, row_sum, p, (), ())


@gluon.jit
def run_of_tiles(
    c: gl.constexpr, pipe, rows, item, state, n, index, end, MASKED: gl.constexpr, LOWER: gl.constexpr
):  # fmt: skip
    """The tiles before `index` down to `end`, all of them with the mask or without. Returns the state, n and place."""
    # All numbers from the loop's own: with one of them carried along, d = 64 lost 4 %.
    for i in range(index - end):
        tile = tile_at(rows.rule.mask, item.block_list, item.hi, index - 1 - i)
        state = step(c, pipe, rows, item, state, n + i, tile, MASKED, LOWER)
    return state, n + gl.maximum(index - end, 0), gl.minimum(index, end)


@gluon.jit
def further_tiles(c: gl.constexpr, args, pipe, rows, item, state, n):
    """The state and n after all tiles but the last: those after the core, the core, and those before it, where rows may
    not see the first keys. Each run of tiles has its own loop, since a branch inside a loop costs more
    (notes/gluon.md)."""
    index = item.end - 1
    if rows.rule.mask.has_lower_bound:
        edge = gl.minimum(item.core_end, index)
        state, n, index = run_of_tiles(c, pipe, rows, item, state, n, index, edge, True, False)
        state, n, index = run_of_tiles(c, pipe, rows, item, state, n, index, item.core, False, True)
        state, n, index = run_of_tiles(c, pipe, rows, item, state, n, index, item.first, True, True)
    elif rows.rule.score.constant_beyond and not rows.rule.mask.block_sparse and pipe.shape.ROWS == 64:
        state, n, index = run_of_tiles(c, pipe, rows, item, state, n, index, item.core, True, False)
        # Tiles right of the reach, in the reach, and left of it.
        left, right = tiles_in_reach(args, pipe, rows, item)
        far = rows.beyond_reach(bias_of_tile(args, pipe, rows, item, index - 1))
        state, n, index = run_of_tiles(c, pipe, far, item, state, n, index, right, False, False)
        state, n, index = run_of_tiles(c, pipe, rows, item, state, n, index, left, False, False)
        far = rows.beyond_reach(bias_of_tile(args, pipe, rows, item, index - 1))
        state, n, index = run_of_tiles(c, pipe, far, item, state, n, index, item.first, False, False)
    else:
        state, n, index = run_of_tiles(c, pipe, rows, item, state, n, index, item.core, True, False)
        state, n, index = run_of_tiles(c, pipe, rows, item, state, n, index, item.first, False, False)
    return state, n


@gluon.jit
def tiles_in_reach(args, pipe, rows, item):
    """The tiles [left, right) of the item that the score's tables reach; none if left = right."""
    BLOCK_K: gl.constexpr = pipe.shape.BLOCK_K
    h = item.h_k * args.group + item.in_group
    low, high = rows.rule.score.reach(rows.rule.score.data, rows.b, h)
    # Beyond it: the last key's distance from the first row is `low` at most, or the first key's from the last row
    # `high` at least. Shifts round down, as negative numbers do not by division.
    left = gl.maximum((low + item.row + 1) >> log2(BLOCK_K), item.first)
    right = (high + item.row + 63 + BLOCK_K - 1) >> log2(BLOCK_K)
    return left, gl.maximum(right, left)


@gluon.jit
def bias_of_tile(args, pipe, rows, item, tile):
    """The number added to all scores of a tile beyond the reach."""
    h = item.h_k * args.group + item.in_group
    key = gl.maximum(tile, 0) * pipe.shape.BLOCK_K
    return rows.rule.score.bias(rows.rule.score.data, rows.b, h, item.row, key)


@gluon.jit
def skip_tiles(c: gl.constexpr, pipe, n, tiles):
    """The next n, after handing back unread the tiles that this consumer's mask excludes."""
    for _ in range(tiles):
        pipe.turns.take(c)
        pipe.turns.give(c)
        pipe.keys.skip(n)
        pipe.values.skip(n)
        n += 1
    return n


@gluon.jit
def release_last_slot(pipe, done):
    """Releases the slot of the previous work item once its out is stored."""
    if done > 0:
        tma.store_wait(0)
        pipe.slots.release(done - 1)


@gluon.jit
def score_rows(rule, args, pipe, item, at, b):
    """The ScoreRows of a work item."""
    ROWS: gl.constexpr = pipe.shape.ROWS
    BLOCK_K: gl.constexpr = pipe.shape.BLOCK_K
    if is_packed(args.used_q):
        rows, keys, b = pipe.slots.get(at, USED), pipe.slots.get(at, KEYS), numbered(args.used_q, b)
    else:
        rows, keys = used_length(args.used_q, b, args.s_q), used_length(args.used_k, b, args.s_k)
    layout: gl.constexpr = gl.SliceLayout(1, product_layout(BLOCK_K, pipe.slots.tiles.dtype))
    # [64]
    i = gl.arange(0, 64, layout)
    q_idx = item.row + i % ROWS
    h = heads_of_rows(item, args.group, i, ROWS)
    bounds = bounds_of_rows(rule.mask, b, q_idx, rows, keys)
    factors = factors_of_rows(args.descale, b, item.h_k, item.row)
    if args.descale is not None:
        rule = score_rule(args.mask, args.score, args.dropout, args.scale * factors[0].products)
    return ScoreRows(rule, linear_terms(rule, b, h, q_idx, rows, keys), b, h, q_idx, rows, keys, bounds, factors, ())


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
        item = work_item(c, args, pipe, slot, at, b)
        rows = score_rows(rule, args, pipe, item, at, b)

        n = skip_tiles(c, pipe, n, item.hi - item.end)
        stage = pipe.keys.wait(n)
        s = issue_scores(pipe, item.part, stage)
        if EARLY and pipe.out is None:
            release_last_slot(pipe, done)
        captured = captured_tile(c, pipe, stage)
        # [64, BLOCK_K]
        s = warpgroup_mma_wait(0, [s])
        pipe.keys.release(n)
        state = first_softmax(pipe, rows, item, s, captured)
        state, n = further_tiles(c, args, pipe, rows, item, state, n)
        if pipe.out is not None:  # q is read no more
            pipe.slots.release(done)
        values = pipe.values.wait(n)
        acc = finish_values(pipe, state, values, issue_values(pipe, state, values))
        pipe.values.release(n)
        n = skip_tiles(c, pipe, n + 1, item.first - item.lo)
        done += 1

        store_results(args, pipe, rows, item, at, b, acc, state.row_max, state.row_sum)
        if not EARLY and pipe.out is None:
            release_last_slot(pipe, done)
        slot = pipe.slots.wait(done)
        at = pipe.slots.record_of(done)
        b = pipe.slots.get(at, BATCH)
    tma.store_wait(0)


# The kernel: shared memory, barriers and the warps' tasks.
#
# A persistent grid draws work from a counter. One work item is the query rows of all consumers of one head; its keys
# come in tiles, from the last to the first, which all consumers share. A consumer issues `q k^T` of tile j and then `p
# v` of tile j + 1, and takes the softmax of tile j while the second product runs. The schedule is FlashAttention-3's
# (Shah et al., 2024, https://arxiv.org/abs/2407.08608) without its turns where they do not pay; notes/gluon.md has what
# each choice was worth.
#
# d is cut in chunks, the last one narrower; `p v` is one tile of BLOCK_DV columns. Bulk copies fill what lies beyond
# the tensors with zeros, and do not write there.


RAW = gl.constexpr(2)
"""Tiles of values that wait for their transposition."""


class ForwardShape(NamedTuple):
    """How the forward is cut: constants of a compiled kernel."""

    D_CHUNK: Any
    D_CHUNKS: Any
    D_LAST: Any
    """columns of the last chunk"""
    BLOCK_K: Any
    BLOCK_DV: Any
    ROWS: Any
    """the number of a consumer's 64 rows that belong to one head"""
    CONSUMERS: Any
    SLOTS: Any
    STAGES: Any
    TURNS: Any
    REGISTERS: Any
    LOADER_REGISTERS: Any
    OVERLAP: Any
    DV_PARTS: Any
    TRANSPOSER_REGISTERS: Any
    """registers of the four warps that transpose 8-bit values; 0 without them"""
    DV_LAST: Any
    """columns of the last one of out's DV_PARTS"""
    OUT_COLUMNS: Any
    """columns of out that have their own buffer in shared memory; 0: out reuses q's"""


@aggregate
class ForwardArgs:
    """The kernel's arguments."""

    q_desc: Value
    k_desc: Value
    v_desc: Value
    out_desc: Value
    out: Value
    parts: Value
    lse: Value
    max_scores: Value
    sink: Value
    counter: Value
    used_q: Value
    used_k: Value
    pages: Value
    mask: Value
    score: Value
    captured: Value
    """a CapturedTileArgs, or None"""
    captured_desc: Value
    arrivals: Value
    """an ArrivalArgs, or None"""
    dropout: Value
    descale: Value
    scheduler: TileScheduler
    h_k: gl.tensor
    group: gl.tensor
    s_q: gl.tensor
    s_k: gl.tensor
    scale: Value


@gluon.jit(do_not_specialize=["blocks", "heads", "section", "early", "group", "s_q", "s_k"])
def forward_kernel(
    q_desc, k_desc, v_desc, out_desc, captured_desc, out, lse, max_scores, sink, counter, used_q, used_k, pages, mask,
    score, captured, arrivals, dropout, descale, blocks, heads, section, early, group, s_q, s_k, scale, shape,
):  # fmt: skip
    """out = softmax(q k^T) v, and lse and max_scores (b, h_q, s_q) contiguous or None. out, the tensor itself: packed,
    PackedRowsArgs; UnseeingRowsArgs where the scheduler writes the results of work items that see no key; else None.
    With `pages` keys may be cut in parts, whose results are what is written then: out, and lse and max_scores
    (splits, b, s_q, h_q).

    q_desc and out_desc: (b, h_k, group, s_q, d) in tiles of 64 rows, which are ROWS rows of 64 / ROWS heads; k_desc and
    v_desc: (b, h_k, s_k, d), or with `pages` caches (pages, h_k, page_size, d) in boxes. Of 8-bit operands, whose
    factors are `descale`, v_desc is what `transpose` makes of v. captured_desc: of a captured tensor of which the score
    function takes tiles, (b or 1, h_q or 1, s_q, s_k) in tiles of 64 rows, or None. counter: two zeros, which are zeros
    again in the end. used_q and used_k: SequenceSpans, or None where all rows and keys are in use. captured: a
    CapturedTileArgs or None. arrivals: an ArrivalArgs or None. blocks, heads, section, early: see TileScheduler.
    """
    DTYPE: gl.constexpr = q_desc.dtype
    D_CHUNK: gl.constexpr = shape.D_CHUNK
    D_CHUNKS: gl.constexpr = shape.D_CHUNKS
    BLOCK_DV: gl.constexpr = shape.BLOCK_DV
    ROWS: gl.constexpr = shape.ROWS
    CONSUMERS: gl.constexpr = shape.CONSUMERS
    SLOTS: gl.constexpr = shape.SLOTS
    STAGES: gl.constexpr = shape.STAGES
    h_k = q_desc.shape[1]
    scheduler = TileScheduler(blocks, heads, section, early, h_k, (group + 64 // ROWS - 1) // (64 // ROWS))
    parts = None
    if is_split(pages):
        parts = pages.parts
    args = ForwardArgs(
        q_desc, k_desc, v_desc, out_desc, out, parts, lse, max_scores, sink, counter, used_q, used_k, pages, mask,
        score, captured, captured_desc, arrivals, dropout, descale, scheduler, h_k, group, s_q, s_k, scale,
    )  # fmt: skip
    READERS: gl.constexpr = 32 + 128 * CONSUMERS
    # A consumer's part of a slot holds its q and, unless that has a place of its own, later its out: whole tiles.
    OUT_COLUMNS: gl.constexpr = shape.OUT_COLUMNS
    LATER: gl.constexpr = 0 if OUT_COLUMNS > 0 else BLOCK_DV * bytes_of(out_desc.dtype) // bytes_of(DTYPE)
    WIDER: gl.constexpr = max(D_CHUNK, LATER)
    CHUNKS: gl.constexpr = (D_CHUNKS * D_CHUNK + WIDER - 1) // WIDER * WIDER // D_CHUNK
    q_shape: gl.constexpr = [SLOTS * CONSUMERS * CHUNKS, 1, 1, 64 // ROWS, ROWS, D_CHUNK]
    q_tiles = gl.allocate_shared_memory(DTYPE, q_shape, q_desc.layout)
    k_tiles = gl.allocate_shared_memory(DTYPE, [STAGES * D_CHUNKS, 1, 1, shape.BLOCK_K, D_CHUNK], k_desc.layout)
    v_shape: gl.constexpr = [BLOCK_DV, shape.BLOCK_K] if is_eight_bit(DTYPE) else [shape.BLOCK_K, BLOCK_DV]
    TURNED: gl.constexpr = shape.TRANSPOSER_REGISTERS > 0
    v_layout: gl.constexpr = (
        gl.NVMMASharedLayout.get_default_for([1, 1, v_shape[0], v_shape[1]], DTYPE) if TURNED else v_desc.layout
    )
    v_tiles = gl.allocate_shared_memory(DTYPE, [STAGES, 1, 1, v_shape[0], v_shape[1]], v_layout)
    captured_tiles = None
    if captured_desc is not None:
        captured_shape: gl.constexpr = [STAGES * CONSUMERS, 1, 1, 64, shape.BLOCK_K]
        captured_tiles = gl.allocate_shared_memory(captured_desc.dtype, captured_shape, captured_desc.layout)
    out_tiles = None
    if OUT_COLUMNS > 0:
        out_shape: gl.constexpr = [CONSUMERS, 1, 1, 64 // ROWS, ROWS, OUT_COLUMNS]
        out_tiles = gl.allocate_shared_memory(out_desc.dtype, out_shape, out_desc.layout)
    RECORDS: gl.constexpr = SLOTS + (2 if OUT_COLUMNS > 0 else 1)
    records = gl.allocate_shared_memory(gl.int32, [RECORDS * NUMBERS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    if TURNED:
        raw_tiles = gl.allocate_shared_memory(DTYPE, [RAW, 1, 1, shape.BLOCK_K, BLOCK_DV], v_desc.layout)
        numbers = gl.allocate_shared_memory(gl.int32, [RAW + 1, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
        raw = Slots(raw_tiles, numbers, new_barriers(RAW, 1), new_barriers(RAW, 1), RAW, 1, 1)
    else:
        raw = None
    pipe = Pipeline(
        Slots(q_tiles, records, new_barriers(SLOTS, 1), new_barriers(SLOTS, CONSUMERS), SLOTS, NUMBERS, CHUNKS),
        Plans(new_barriers(RECORDS, 1)), new_ring(k_tiles, KEYS_EMPTY, STAGES, READERS),
        new_ring(v_tiles, VALUES_EMPTY, STAGES, READERS + 96 if TURNED else READERS), Turns(shape.TURNS, CONSUMERS),
        raw, captured_tiles, out_tiles, shape,
    )  # fmt: skip
    REGISTERS: gl.constexpr = shape.REGISTERS
    LOADER_REGISTERS: gl.constexpr = shape.LOADER_REGISTERS
    if CONSUMERS == 2 and not TURNED:
        gl.warp_specialize(
            [(consume, (0, args, pipe)), (consume, (1, args, pipe)), (schedule, (args, pipe)), (load, (args, pipe))],
            [4, 1, 1],
            [REGISTERS, LOADER_REGISTERS, LOADER_REGISTERS],
        )
    else:
        THIRD: gl.constexpr = shape.TRANSPOSER_REGISTERS if TURNED else REGISTERS
        gl.warp_specialize([
            (consume, (0, args, pipe)), (consume, (1, args, pipe)),
            (transpose if TURNED else consume, (args, pipe) if TURNED else (2, args, pipe)),
            (schedule, (args, pipe)), (load, (args, pipe)),
        ], [4, 4, 1, 1], [REGISTERS, THIRD, LOADER_REGISTERS, LOADER_REGISTERS])  # fmt: skip
