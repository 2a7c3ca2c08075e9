"""Latent attention on Hopper: 64 query rows of one key head, two consumers with half of out's columns each."""

# No `from __future__ import annotations` here: an aggregate reads its fields' types.
# pyright: reportArgumentType=false, reportCallIssue=false

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from saccade.backends.device.records import plain_int
from saccade.backends.device.tiles import head
from saccade.backends.hopper.forward.epilogue import weights_of_rows
from saccade.backends.hopper.forward.scores import (
    LOWEST,
    LOWEST_FINITE,
    ScoreRows,
    bounds_of_rows,
    heads_of_rows,
    in_group,
    linear_terms,
    score_rule,
)
from saccade.backends.hopper.latent.load import (
    CORE,
    CORE_END,
    FIRST,
    HALF,
    KEYS,
    NUMBERS,
    PART,
    ROWS_USED,
    SEQUENCE,
    TILES,
    WHOLE,
    Seesaw,
    load,
    row_of,
    row_tile,
)
from saccade.backends.hopper.pipeline import Slots, new_barriers
from saccade.backends.hopper.ptx import opaque
from saccade.backends.hopper.shim import Value, aggregate
from saccade.backends.hopper.tiles import product_layout, row_sums

# The latent kernel's consumers: two groups of four warps that share 64 query rows.


@aggregate
class PartState:
    """State that a consumer keeps from tile to tile."""

    acc: gl.tensor
    """[64, 256]: p v, of its half of the columns"""
    row_max: gl.tensor
    """[64]: of all tiles so far"""
    row_sum: gl.tensor
    """[64, 8]: of its own tiles"""


@aggregate
class PartTiles:
    """The key tiles of a part, for a consumer."""

    rows: ScoreRows
    first: gl.tensor
    """the number of the first tile"""
    n: gl.tensor
    """what it is counted as"""
    core: gl.tensor
    core_end: gl.tensor
    shared: Value
    """where the table is that ROWS rows share, and ROWS; or ()"""


@gluon.jit
def shared_table(args, number):
    """`PartTiles.shared` of a group of rows."""
    if args.shape.LISTED and args.shape.ROWS > 1:
        return args.pages.table + number.to(gl.int64) * plain_int(args.pages.stride), args.shape.ROWS
    else:
        return ()


@gluon.jit
def of_those_that_see(s, tiles, tile):
    """Returns the scores, with -inf where a row of a shared table does not see a key, by the entry's low bits."""
    kv_idx = tile * 64 + gl.arange(0, 64, gl.SliceLayout(0, s.type.layout))
    entry = gl.load(tiles.shared[0] + kv_idx, mask=kv_idx < tiles.rows.keys, other=0)[None, :]
    return gl.where((entry >> (tiles.rows.q_idx % tiles.shared[1])[:, None]) & 1 != 0, s, float("-inf"))


@gluon.jit
def issue_first(c: gl.constexpr, pipe, n):
    """Starts q k^T [64, 64] of consumer c's tile n, over the half of the columns that it sums, which arrives first."""
    s = gl.zeros([64, 64], gl.float32, product_layout(64, pipe.latent.dtype))
    pipe.wait(n, c, c)
    return warpgroup_mma(pipe.half_of_queries(c), pipe.values(c, c).permute((1, 0)), s, use_acc=False, is_async=True)


@gluon.jit
def issue_rest(c: gl.constexpr, pipe, s, n):
    """Starts s += q k^T over the other columns, in two groups of products."""
    pipe.wait(n, c, 1 - c)
    s = warpgroup_mma(pipe.half_of_queries(1 - c), pipe.values(c, 1 - c).permute((1, 0)), s, is_async=True)
    q = pipe.queries.tiles.index(opaque(2 * HALF)).reshape([64, 64])
    return warpgroup_mma(q, pipe.weights(c).permute((1, 0)), s, is_async=True)


@gluon.jit
def issue_scores(c: gl.constexpr, pipe, n):
    """Starts q k^T [64, 64] of consumer c's tile n."""
    return issue_rest(c, pipe, issue_first(c, pipe, n), n)


@gluon.jit
def shrunk(acc, alpha):
    """Returns acc [64, 256] times alpha [64]."""
    return acc * gl.convert_layout(alpha, gl.SliceLayout(1, acc.type.layout), assert_trivial=True)[:, None]


@gluon.jit
def issue_others(c: gl.constexpr, pipe, acc, n):
    """Starts acc += p v of tile n, whose weights p the other consumer has handed over."""
    pipe.wait(n, 1 - c, c)
    return warpgroup_mma(pipe.weights(1 - c), pipe.values(1 - c, c), acc, is_async=True)


@gluon.jit
def issue_own(c: gl.constexpr, pipe, acc, p):
    """Starts acc += p v of the consumer's own tile."""
    p = gl.convert_layout(p, gl.DotOperandLayout(0, acc.type.layout, 2), assert_trivial=True)
    return warpgroup_mma(p, pipe.values(c, c), acc, is_async=True)


@gluon.jit
def softmax(c: gl.constexpr, pipe, tiles, s, row_max, row_sum, n):
    """Hands over the weights of tile n, from its products s [64, 64]. Returns them, alpha, row_max and row_sum."""
    rows = tiles.rows
    tile = tiles.first + n - tiles.n
    s = rows.apply_score(s, tile, (), ())
    if len(tiles.shared) > 0:
        s = of_those_that_see(s, tiles, tile)
    elif (tile < tiles.core) | (tile >= tiles.core_end):
        s = rows.apply_mask(s, tile, rows.rule.mask.has_lower_bound)
    weights, alpha, row_max = rows.softmax_weights(s, tile, row_max, ())
    p = weights.to(pipe.latent.dtype)
    pipe.hand_over(c, p, row_max, alpha)
    decay = gl.convert_layout(alpha, gl.SliceLayout(1, row_sum.type.layout))
    return p, alpha, row_max, row_sum * decay[:, None] + row_sums(weights)


@gluon.jit
def first_tile(c: gl.constexpr, pipe, tiles, state, n):
    """Returns the state after tile n, the first tile of a part, which is consumer c's."""
    s = warpgroup_mma_wait(0, [issue_scores(c, pipe, n)])
    p, _, row_max, row_sum = softmax(c, pipe, tiles, s, state.row_max, state.row_sum, n)
    acc = warpgroup_mma_wait(0, [issue_own(c, pipe, state.acc, p)])
    pipe.release(c, c)
    return PartState(acc, row_max, row_sum)


@gluon.jit
def others_tile(c: gl.constexpr, pipe, state, n):
    """Takes over tile n from the other consumer. Returns the state with rescaled sums and the new maximum."""
    pipe.take_over(c)
    # [64]
    row_max = pipe.maxima.index(1 - c).load(state.row_max.type.layout)
    alpha = pipe.decays.index(1 - c).load(state.row_max.type.layout)
    row_sum = state.row_sum * gl.convert_layout(alpha, gl.SliceLayout(1, state.row_sum.type.layout))[:, None]
    return PartState(shrunk(state.acc, alpha), row_max, row_sum)


@gluon.jit
def two_tiles(c: gl.constexpr, pipe, tiles, state, n):
    """Returns the state after the other consumer's tile n - 1 and the own tile n.

    The values of the one come between the first scores of the other and the rest: so they wait for no copy of keys, and
    their stage is free soon (notes/gluon_latent.md).
    """
    s = issue_first(c, pipe, n)
    state = others_tile(c, pipe, state, n - 1)
    part = issue_others(c, pipe, state.acc, n - 1)
    s = issue_rest(c, pipe, s, n)
    acc = warpgroup_mma_wait(2, [part])  # two groups of products came after it
    pipe.release(1 - c, c)
    s = warpgroup_mma_wait(0, [s])
    p, alpha, row_max, row_sum = softmax(c, pipe, tiles, s, state.row_max, state.row_sum, n)
    acc = warpgroup_mma_wait(0, [issue_own(c, pipe, shrunk(acc, alpha), p)])
    pipe.release(c, c)
    return PartState(acc, row_max, row_sum)


@gluon.jit
def score_rows(args, rule, rows, number, used, keys):
    """Returns the ScoreRows of a part."""
    ROWS: gl.constexpr = args.shape.ROWS
    layout: gl.constexpr = gl.SliceLayout(1, product_layout(64, args.q_desc.dtype))
    b, row = row_of(args, number, rows.row)
    # [64]
    i = gl.arange(0, 64, layout)
    q_idx = row + i % ROWS
    h = heads_of_rows(rows, args.group, i, ROWS)
    bounds = bounds_of_rows(rule.mask, b, q_idx, used, keys)
    return ScoreRows(rule, linear_terms(rule, b, h, q_idx, used, keys), b, h, q_idx, used, keys, bounds, (), ())


@gluon.jit
def store_part(c: gl.constexpr, args, tile, rows, state, total, part):
    """Writes a part's out, LSE and largest scores."""
    layout: gl.constexpr = state.acc.type.layout
    live = (rows.q_idx < rows.rows) & in_group(tile, args.group, rows.q_idx, args.shape.ROWS)
    weight, lse, top = weights_of_rows(state.row_max, total, rows, None, live)
    first = (part.to(gl.int64) * args.tiles + tile.number) * 64
    if c == 0:
        offset = first + gl.arange(0, 64, state.row_max.type.layout)
        gl.store(args.part_lse + offset, lse)
        if args.part_max is not None:
            gl.store(args.part_max + offset, top)
    i = gl.arange(0, 64, gl.SliceLayout(1, layout))
    column = gl.arange(0, 256, gl.SliceLayout(0, layout))
    there = gl.convert_layout(live, gl.SliceLayout(1, layout))[:, None]
    out = shrunk(state.acc, weight)
    gl.store(args.parts + (first * 512 + c * 256) + (i[:, None] * 512 + column[None, :]), out, mask=there)


@gluon.jit
def store_whole(c: gl.constexpr, args, tile, rows, state, total):
    """Writes out, LSE and largest scores of a sequence whose keys are all in one part."""
    layout: gl.constexpr = state.acc.type.layout
    there = (rows.q_idx < args.s_q) & in_group(tile, args.group, rows.q_idx, args.shape.ROWS)
    live = there & (rows.q_idx < rows.rows)
    weight, lse, top = weights_of_rows(state.row_max, total, rows, args.sink, live)
    b = rows.b.to(gl.int64)
    if c == 0:
        if args.lse is not None:
            gl.store(head(args.lse, b, rows.h, rows.q_idx), lse, mask=there)
        if args.max_scores is not None:
            gl.store(head(args.max_scores, b, rows.h, rows.q_idx), top, mask=there)
    pointers = gl.convert_layout(head(args.out, b, rows.h, rows.q_idx), gl.SliceLayout(1, layout))
    column = c * 256 + gl.arange(0, 256, gl.SliceLayout(0, layout))
    there = gl.convert_layout(there, gl.SliceLayout(1, layout))[:, None]
    out = shrunk(state.acc, weight).to(args.out.ptr.dtype.element_ty)
    gl.store(pointers[:, None] + column[None, :], out, mask=there)


@gluon.jit
def consume(c: gl.constexpr, args, pipe):
    """Runs consumer c: scores and weights of every second tile, and one half of the columns of out."""
    rule = score_rule(args.mask, args.score, None, args.scale)
    tile = row_tile(args)
    LEAST: gl.constexpr = LOWEST_FINITE if rule.score.large_scores else LOWEST
    s_layout: gl.constexpr = product_layout(64, pipe.latent.dtype)
    sums: gl.constexpr = row_sums(gl.zeros([64, 64], gl.float32, s_layout)).type.layout
    begin = tile.number * 0
    done = begin
    pipe.queries.wait(0)
    at = pipe.queries.record_of(0)
    number = pipe.queries.get(at, SEQUENCE)
    while number >= 0:
        rows = score_rows(args, rule, tile, number, pipe.queries.get(at, ROWS_USED), pipe.queries.get(at, KEYS))
        end = begin + pipe.queries.get(at, TILES)
        first, part, whole = pipe.queries.get(at, FIRST), pipe.queries.get(at, PART), pipe.queries.get(at, WHOLE)
        core, core_end = pipe.queries.get(at, CORE), pipe.queries.get(at, CORE_END)
        tiles = PartTiles(rows, first, begin, core, core_end, shared_table(args, number))
        state = PartState(
            gl.zeros([64, 256], gl.float32, product_layout(256, pipe.latent.dtype)),
            gl.full([64], LEAST, gl.float32, gl.SliceLayout(1, s_layout)),
            gl.zeros([64, 8], gl.float32, sums),
        )
        n = begin
        if begin % 2 == c:
            state = first_tile(c, pipe, tiles, state, n)
            n += 2
        else:
            n += 1
        for i in range((end - n + 1) // 2):
            state = two_tiles(c, pipe, tiles, state, n + 2 * i)
        pipe.queries.release(done)
        if end % 2 == c:  # the last tile is the other's
            state = others_tile(c, pipe, state, end - 1)
            acc = warpgroup_mma_wait(0, [issue_others(c, pipe, state.acc, end - 1)])
            pipe.release(1 - c, c)
            state = PartState(acc, state.row_max, state.row_sum)
        total = pipe.total(c, done, gl.convert_layout(gl.sum(state.row_sum, 1), state.row_max.type.layout))
        if whole != 0:
            store_whole(c, args, tile, rows, state, total)
        else:
            store_part(c, args, tile, rows, state, total, part)
        begin = end
        done += 1
        pipe.queries.wait(done)
        at = pipe.queries.record_of(done)
        number = pipe.queries.get(at, SEQUENCE)


# Latent attention on Hopper: 64 query rows of one key head, two consumers with half of out's columns each.
#
# A tile of 64 keys is read once and is in shared memory as keys [64, 576], of which the first 512 columns are the
# values. 64 rows of out are half of a multiprocessor's registers, so there is no second tile of rows whose products
# could run under a softmax. Instead the consumers take turns at the tiles, and each one's weights go through shared
# memory to the other: the seesaw of FlashMLA (https://github.com/deepseek-ai/FlashMLA,
# docs/20250422-new-kernel-deep-dive.md). Here tiles are added up in their order, so that no weight is rounded twice.


RECORD = gl.constexpr(NUMBERS)


class LatentShape(NamedTuple):
    """The constants of a compiled latent kernel."""

    ROWS: Any
    """of the 64 rows those of one head"""
    LISTED: Any
    """whether each row, or group of ROWS rows, is a sequence, with slots of its own"""
    RECORDS: Any
    """whether keys are records of bytes, which the producer widens"""
    REGISTERS: Any
    LOADER_REGISTERS: Any


@aggregate
class LatentArgs:
    """The arguments of the kernel."""

    q_desc: Value
    k_desc: Value
    cache: Value
    """TensorArgs of the cache, where rows are gathered; else None"""
    out: Value
    lse: Value
    max_scores: Value
    parts: Value
    part_lse: Value
    part_max: Value
    used_q: Value
    used_k: Value
    pages: Value
    schedule: Value
    mask: Value
    score: Value
    sink: Value
    tiles: gl.tensor
    """of query rows"""
    blocks: gl.tensor
    """of each head's rows"""
    h_k: gl.tensor
    group: gl.tensor
    s_q: gl.tensor
    s_k: gl.tensor
    scale: Value
    shape: Value


@gluon.jit(do_not_specialize=["tiles", "blocks", "h_k", "group", "s_q", "s_k"])
def latent_kernel(
    q_desc, k_desc, cache, out, lse, max_scores, parts, part_lse, part_max, sink, used_q, used_k, pages, schedule, mask,
    score, tiles, blocks, h_k, group, s_q, s_k, scale, shape,
):  # fmt: skip
    """out = softmax(q k^T) k[:, :512], lse and max_scores, or None, of sequences that a line has whole; of others those
    of each part, without the sink: parts float32 (2 lines, tiles, 64, 512), part_lse and part_max (2 lines, tiles, 64).

    q_desc: (b, h_k, group, s_q, 576) in tiles of 64 rows, which are ROWS rows of 64 / ROWS heads; k_desc: (pages, h_k,
    page_size, 576) in boxes; cache: the same as TensorArgs where rows are gathered. A program for each tile of
    rows and each line.
    """
    DTYPE: gl.constexpr = q_desc.dtype
    ROWS: gl.constexpr = shape.ROWS
    args = LatentArgs(
        q_desc, k_desc, cache, out, lse, max_scores, parts, part_lse, part_max, used_q, used_k, pages, schedule, mask,
        score, sink, tiles, blocks, h_k, group, s_q, s_k, scale, shape,
    )  # fmt: skip
    GATHERS: gl.constexpr = cache is not None
    CHUNKS: gl.constexpr = 2 * HALF + 1
    q_tiles = gl.allocate_shared_memory(DTYPE, [CHUNKS, 1, 1, 64 // ROWS, ROWS, 64], q_desc.layout)
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([1, 1, 64, 64], DTYPE)
    latent = gl.allocate_shared_memory(DTYPE, [4 * HALF, 1, 1, 64, 64], LAYOUT)
    rest = gl.allocate_shared_memory(DTYPE, [2, 1, 1, 64, 64], LAYOUT)
    records = gl.allocate_shared_memory(gl.int32, [2 * RECORD, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    ROWWISE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    pipe = Seesaw(
        Slots(q_tiles, records, new_barriers(1, 1), new_barriers(1, 2), 1, RECORD, CHUNKS),
        latent,
        rest,
        new_barriers(4, 128) if GATHERS and not shape.RECORDS else new_barriers(5, 1),
        gl.allocate_shared_memory(gl.float32, [2, 64], ROWWISE),
        gl.allocate_shared_memory(gl.float32, [2, 64], ROWWISE),
        gl.allocate_shared_memory(gl.float32, [4, 64], ROWWISE),
        GATHERS,
        256 if GATHERS else 160,
        shape,
    )
    gl.warp_specialize(
        [(consume, (0, args, pipe)), (consume, (1, args, pipe)), (load, (args, pipe))],
        [4, 4 if GATHERS else 1],
        [shape.REGISTERS, shape.LOADER_REGISTERS],
    )
