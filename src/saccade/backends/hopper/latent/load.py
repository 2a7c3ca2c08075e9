"""The barriers, the producer and the schedule of the latent kernel.

There are two stages. Tile n of keys, counted over all parts, is in stage n % 2, and the consumer of that number owns
it: it computes the tile's scores and weights. The first 512 columns are the values too, of which each consumer sums
256, so a stage is given back in two halves. The last 64 columns of a tile are keys alone, and their place takes the
weights, as many bytes, once the scores are there.
"""

# No `from __future__ import annotations` here: an aggregate reads its fields' types.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportOperatorIssue=false, reportAttributeAccessIssue=false

from typing import Any, NamedTuple

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from saccade.backends.device.positions import extent
from saccade.backends.device.records import plain_int
from saccade.backends.device.tiles import finite, head, infinite, tile_range
from saccade.backends.hopper.forward.load import load_pages, pages_of
from saccade.backends.hopper.pipeline import Slots
from saccade.backends.hopper.ptx import barrier_arrive, barrier_sync, bf16_parts, opaque, to_l2, widened
from saccade.backends.hopper.shim import Value, aggregate, copy_async, tma_load, view
from saccade.backends.hopper.tiles import zero_tail

READY = gl.constexpr(6)
"""6 and 7: the weights of each stage's tile are there."""
SUMS = gl.constexpr(8)
"""Both consumers' sums of a part are there."""
EMPTY = gl.constexpr(10)
"""10 to 13: halves of the stages."""
HALF = gl.constexpr(4)
"""Chunks of 64 columns of one half of the values."""


@aggregate
class Seesaw:
    """Shared memory and barriers of the warps of the latent kernel."""

    queries: Slots
    """one slot of chunks [64, 64] of q"""
    latent: gl.shared_memory_descriptor
    """chunks [64, 64] of the first 512 columns, 8 for each stage"""
    rest: gl.shared_memory_descriptor
    """the last 64 columns, and then the weights, of each stage"""
    full: gl.shared_memory_descriptor
    """a barrier for each half of each stage, and of bulk copies one for those that the producer waits for"""
    maxima: gl.shared_memory_descriptor
    """[64] for each stage: rows' maxima after its tile"""
    decays: gl.shared_memory_descriptor
    """[64] for each stage: by what sums shrink with its tile"""
    sums: gl.shared_memory_descriptor
    """[64] for each consumer, of this part and of the one before"""
    GATHERS: gl.constexpr
    """whether four warps load, row by row"""
    THREADS: gl.constexpr
    """of the producer and one consumer"""
    shape: Value

    @gluon.jit
    def claim(self, n, stage, half):
        """The producer waits until a half of tile n's stage is free."""
        if n >= 2:
            barrier_sync(EMPTY + 2 * stage + half, self.THREADS)

    @gluon.jit
    def wait(self, n, stage: gl.constexpr, half: gl.constexpr):
        """A consumer waits until half of tile n has arrived."""
        mbarrier.wait(self.full.index(2 * stage + half), (n // 2) & 1)
        if self.GATHERS and not self.shape.RECORDS:
            fence_async_shared()  # products read what bulk copies write; what threads write they see behind a fence

    @gluon.jit
    def release(self, stage: gl.constexpr, half: gl.constexpr):
        """Consumer `half` reads its half of a stage no longer, and of the other's stage the weights neither."""
        barrier_arrive(EMPTY + 2 * stage + half, self.THREADS)

    @gluon.jit
    def values(self, stage, half):
        """Returns half of a stage's values, [64, 256]."""
        LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, 256], self.latent.dtype)
        return view(self.latent, [4, 64, 256], LAYOUT).index(opaque(2 * stage + half))

    @gluon.jit
    def half_of_queries(self, half: gl.constexpr):
        """Returns the columns of q that belong to half of the values, [64, 256]."""
        LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, 256], self.latent.dtype)
        return view(self.queries.tiles, [2, 64, 256], LAYOUT).index(opaque(half))

    @gluon.jit
    def weights(self, stage: gl.constexpr):
        """Returns the weights of a stage's tile, [64, 64]."""
        return self.rest.index(opaque(stage)).reshape([64, 64])

    @gluon.jit
    def hand_over(self, c: gl.constexpr, p, row_max, alpha):
        """Consumer c hands over p [64, 64], the weights of its tile."""
        self.weights(c).store(p)
        self.maxima.index(c).store(row_max)
        self.decays.index(c).store(alpha)
        fence_async_shared()
        barrier_arrive(READY + c, 256)

    @gluon.jit
    def take_over(self, c: gl.constexpr):
        """Consumer c waits until the other consumer has handed over its weights."""
        barrier_sync(READY + 1 - c, 256)

    @gluon.jit
    def total(self, c: gl.constexpr, done, own):
        """Returns the sums [64] of both consumers for part `done`."""
        at = done % 2 * 2
        self.sums.index(at + c).store(own)
        barrier_sync(SUMS, 256)
        return own + self.sums.index(at + 1 - c).load(own.type.layout)


# The latent kernel's producer, and the schedule that says which keys each program takes.


# Which keys of which sequence a program of the latent kernel takes, from lengths that only the device knows.
#
# The tiles of keys of all sequences, one sequence after the other, are a row that is cut in lines of equal length.
# Where it costs little, places behind a sequence are left free, so that lines end with sequences.
# Each line is worked on by one program for each tile of query rows, so that programs side by side read the same keys.
# A part is what a line and a sequence have in common, unless it is all of the sequence: the first of a line, or its
# last one, which begins inside of it. Every sequence has a tile at least, so that the next one follows it in the row.
#
# Where rows have lists of keys, each row is a sequence, or each group of rows that share a table.


class Schedule(NamedTuple):
    """Where the key tiles of each sequence are, if the tiles of all sequences stand in one row."""

    starts: Any
    """int32 (sequences + 1): places before each sequence, as many as tiles, and those that are left free"""
    firsts: Any
    """int32 (sequences): the number of its first tile"""
    tiles: Any
    """int32 (sequences): how many it has"""
    lines_first: Any
    """int32 (lines + 1): which sequence has the first tile of each line that has some, then their tiles"""
    sequences: Any
    """runtime_ints, as the next"""
    lines: Any


LEAST_TILES = tl.constexpr(2)
"""Tiles of a line at least: fewer are not worth a merge."""
MERGE = tl.constexpr(4)
"""Tiles that take as long as a merge, about."""


@triton.jit
def length_of_line(schedule):
    """Returns the number of tiles of each line except the last ones."""
    return tl.load(schedule.lines_first + plain_int(schedule.lines))


@triton.jit
def _cut(schedule, total, longest, count, lines, AT_ONCE: tl.constexpr):
    """Returns the tiles of each line, and of what the places of a sequence are a multiple, 1 if of none.

    A line that ends with its sequences has one part of each, and no query is loaded twice. So lines have some sequences
    whole, or a part of one, where that costs less than merges.
    """
    exact = tl.maximum(tl.cdiv(total, lines), LEAST_TILES)
    several = tl.cdiv(count, lines) * longest
    # [8]: lengths of lines of one part each, and how many lines it takes
    lengths = exact + tl.arange(0, 8)
    needed = lengths * 0
    for at in range(0, count, AT_ONCE):
        i = at + tl.arange(0, AT_ONCE)
        tiles = tl.load(schedule.tiles + i, mask=i < count, other=0)
        needed += tl.sum(tl.cdiv(tiles[:, None], lengths[None, :]), 0)
    single = tl.min(tl.where(needed <= lines, lengths, 1 << 30), 0)
    length = tl.where(exact >= longest, several, single)
    fits = length <= exact + MERGE
    unit = tl.where(exact >= longest, longest, single)
    return tl.where(fits, length, exact), tl.where(fits, unit, 1)


@triton.jit(do_not_specialize=["s_q", "s_k"])
def schedule_kernel(
    schedule, used_q, used_k, mask, s_q, s_k, BLOCK_K: tl.constexpr, LINES: tl.constexpr, AT_ONCE: tl.constexpr
):  # fmt: skip
    """Writes the schedule: of each sequence the tiles that some row sees, by the bounds of its first and last row, or
    one. LINES: a power of two, not below the lines; AT_ONCE: sequences that are looked at together."""
    count = plain_int(schedule.sequences)
    total = count * 0
    longest = count * 0
    for at in range(0, count, AT_ONCE):
        # [AT_ONCE]
        i = at + tl.arange(0, AT_ONCE)
        b = tl.minimum(i, count - 1)
        _, _, _, rows = extent(used_q, b, s_q)
        _, _, _, keys = extent(used_k, b, s_k)
        rows = rows + b * 0
        keys = keys + b * 0
        if mask.ordered:
            lo, _, _, _ = mask.keys_of(mask.data, b, b * 0, keys - rows)
            _, hi, _, _ = mask.keys_of(mask.data, b, tl.maximum(rows - 1, 0), keys - rows)
            lo = tl.maximum(lo, 0)
            hi = tl.minimum(hi, keys)
        else:
            lo = keys * 0
            hi = keys
        some = (hi > lo) & (rows > 0)
        first = tl.where(some, lo // BLOCK_K, 0)
        tiles = tl.where(i < count, tl.where(some, tl.cdiv(hi, BLOCK_K) - first, 1), 0)
        tl.store(schedule.firsts + i, first, mask=i < count)
        tl.store(schedule.tiles + i, tiles, mask=i < count)
        total += tl.sum(tiles, 0)
        longest = tl.maximum(longest, tl.max(tiles, 0))
    lines = plain_int(schedule.lines)
    tl.debug_barrier()  # other threads wrote some of what is read now
    length, unit = _cut(schedule, total, longest, count, lines, AT_ONCE)
    total = count * 0
    for at in range(0, count, AT_ONCE):
        i = at + tl.arange(0, AT_ONCE)
        tiles = tl.load(schedule.tiles + i, mask=i < count, other=0)
        width = tl.cdiv(tiles, unit) * unit
        tl.store(schedule.starts + 1 + i, total + tl.cumsum(width, 0), mask=i < count)
        total += tl.sum(width, 0)
    tl.store(schedule.starts, 0)
    tl.store(schedule.lines_first + lines, length)
    tl.debug_barrier()  # other threads wrote some of what is read now
    # [LINES]
    line = tl.arange(0, LINES)
    first = line * 0  # as many sequences as end before the line
    end = first + count
    left = count
    while left > 0:
        middle = (first + end) // 2
        before = tl.load(schedule.starts + 1 + middle, mask=first < end, other=1 << 30) <= line * length
        first = tl.where(before, middle + 1, first)
        end = tl.where(before, end, middle)
        left = left // 2
    tl.store(schedule.lines_first + line, first, mask=(line < lines) & (line * length < total))


@triton.jit(do_not_specialize=["h_q", "s_q"])
def merge_kernel(
    parts, part_lse, part_max, out, lse, max_scores, sink, used_q, schedule, h_q, s_q, GROUP: tl.constexpr,
    ROWS: tl.constexpr, D_V: tl.constexpr, SPLITS: tl.constexpr, CHUNK: tl.constexpr, LISTED: tl.constexpr,
    BY_LINE: tl.constexpr,
):  # fmt: skip
    """`lse = log(exp(sink) + sum_i exp(lse_i))`, `out = sum_i exp(lse_i - lse) out_i` of one row's parts, unless it has
    one, whose results are in out and lse already.

    parts: float32 (2 lines, tiles of rows, 64, d_v), not written where part_lse is -inf; SPLITS: lines, at least;
    BY_LINE: programs are not of all sequences, but of those that a line begins inside of.
    """
    PACK: tl.constexpr = 64 // ROWS
    PACKS: tl.constexpr = (GROUP + PACK - 1) // PACK
    count = ROWS if LISTED else s_q
    number = tl.program_id(0).to(tl.int64)
    row = (number % count).to(tl.int32)
    h = (number // count % h_q).to(tl.int32)
    b = (number // count // h_q).to(tl.int32)
    blocks = tl.cdiv(count, ROWS)
    member = h % GROUP
    tile = (h // GROUP * PACKS + member // PACK) * blocks + row // ROWS
    tiles = h_q // GROUP * PACKS * blocks
    within = member % PACK * ROWS + row % ROWS

    length = length_of_line(schedule)
    line = b + 1
    if BY_LINE:
        if line * length >= tl.load(schedule.starts + plain_int(schedule.sequences)):
            return
        b = tl.load(schedule.lines_first + line)
    start = tl.load(schedule.starts + b)
    end = start + tl.load(schedule.tiles + b)
    first = start // length
    if BY_LINE and (first + 1 != line) | (start == line * length):  # another line's, or none begins inside
        return
    count = (end - 1) // length - first + 1
    if count == 1:
        return
    if LISTED:
        groups = tl.cdiv(s_q, ROWS)
        row += b % groups * ROWS
        b = b // groups
        if row >= s_q:
            return
    # [SPLITS]
    i = tl.arange(0, SPLITS)
    row_of_parts = (first.to(tl.int64) * 2 * tiles + tile) * 64 + within
    stride = tiles.to(tl.int64) * 64
    inside = (start % length > 0).to(tl.int32)
    there_are = i < count
    offsets = row_of_parts + number_of_part(i, inside) * stride
    lses = tl.load(part_lse + offsets, mask=there_are, other=float("-inf"))
    top = tl.max(lses, 0)
    column = tl.full([], float("-inf"), tl.float32) if sink is None else finite(tl.load(sink + h).to(tl.float32))
    _, _, _, rows = extent(used_q, b, s_q)
    column = tl.where(row < rows, column, float("-inf"))  # padding has no sink
    top = tl.maximum(top, column)
    top = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(tl.exp(lses - top), 0) + tl.exp(column - top)
    empty = total == 0
    total = tl.where(empty, 1.0, total)
    # [D_V]
    column_v = tl.arange(0, D_V)
    acc = tl.zeros([D_V], tl.float32)
    for at in range(0, count, CHUNK):
        # [CHUNK]
        some = at + tl.arange(0, CHUNK)
        index_of_part = row_of_parts + number_of_part(some, inside) * stride
        found = tl.load(part_lse + index_of_part, mask=some < count, other=float("-inf"))
        # A part without a key takes no NaN from the sink, and was not written.
        weight = tl.where(found == float("-inf"), 0.0, tl.exp(found - top) / total)
        there = (weight != 0)[:, None]
        values = tl.load(parts + index_of_part[:, None] * D_V + column_v[None, :], mask=there, other=0.0)
        acc += tl.sum(values * weight[:, None], 0)
    base = out.ptr + (
        b.to(tl.int64) * plain_int(out.stride_b) + h.to(tl.int64) * plain_int(out.stride_h)
        + row.to(tl.int64) * plain_int(out.stride_s)
    ) * out.unit  # fmt: skip
    tl.store(base + column_v, acc.to(out.ptr.dtype.element_ty))
    if lse is not None:
        tl.store(head(lse, b.to(tl.int64), h, row), tl.where(empty, float("-inf"), infinite(top + tl.log(total), top)))
    if max_scores is not None:
        tops = tl.load(part_max + offsets, mask=there_are, other=float("-inf"))
        broken = tl.max((tops != tops).to(tl.int32), 0) > 0
        tl.store(head(max_scores, b.to(tl.int64), h, row), tl.where(broken, float("nan"), tl.max(tops, 0)))


@triton.jit
def number_of_part(i, inside):
    """A sequence's part i, in parts after the first of the line where it begins, `inside` of that line or with it."""
    return 2 * i + tl.where(i == 0, inside, 0)


# The latent kernel's producer, which walks along a line of tiles of keys.
#
# It is one warp that copies in bulk, or four that gather rows of pages which are too short for that.


# Of a part: its sequence (-1: no more parts), its number, its first tile of keys and how many there are, those between
# which no mask is needed, the sequence's rows and keys in use, and whether it is all of the sequence.
SEQUENCE, PART, FIRST, TILES, CORE, CORE_END, ROWS_USED, KEYS, WHOLE = (gl.constexpr(i) for i in range(9))
NUMBERS = 9


@aggregate
class RowTile:
    """The query rows of a program: 64 / ROWS heads of a group, and ROWS rows of each."""

    number: gl.tensor
    """of all tiles of rows"""
    line: gl.tensor
    h_k: gl.tensor
    in_group: gl.tensor
    row: gl.tensor


@gluon.jit
def row_tile(args):
    """Returns the RowTile of this program."""
    ROWS: gl.constexpr = args.shape.ROWS
    number = gl.program_id(0) % args.tiles
    pack = number // args.blocks
    packs = args.tiles // args.blocks // args.h_k
    return RowTile(
        number, gl.program_id(0) // args.tiles, pack // packs, pack % packs * (64 // ROWS), number % args.blocks * ROWS
    )


@gluon.jit
def row_of(args, number, row):
    """Returns the batch row and the query row of a row of a sequence."""
    if args.shape.LISTED:
        groups = gl.cdiv(args.s_q, args.shape.ROWS)
        return number // groups, number % groups * args.shape.ROWS + row
    else:
        return number, row


@gluon.jit
def open_part(args, pipe, rows, number, tile, begin, stop, drawn):
    """Writes the numbers of the part that begins at `tile`. Returns its first tile, how many there are, keys, and where
    the next part begins."""
    start = gl.load(args.schedule.starts + number)
    end = start + gl.load(args.schedule.tiles + number)
    first = gl.load(args.schedule.firsts + number) + tile - start
    tiles = gl.minimum(end, stop) - tile
    b, row = row_of(args, number, rows.row)
    _, _, _, used = extent(args.used_q, b, args.s_q)
    _, _, _, keys = extent(args.used_k, number, args.s_k)
    # [64]
    q_idx = row + gl.arange(0, 64, gl.BlockedLayout([1], [32], [gl.num_warps()], [0])) % args.shape.ROWS
    lo, hi, core_lo, core_hi = args.mask.keys_of(args.mask.data, b, q_idx, keys - used)
    _, core, core_end, _ = tile_range(lo, hi, core_lo, core_hi, q_idx < used, keys, 64)
    at = pipe.queries.record_of(drawn)
    pipe.queries.put(at, SEQUENCE, number)
    pipe.queries.put(at, PART, 2 * rows.line + (tile > begin).to(gl.int32))
    pipe.queries.put(at, FIRST, first)
    pipe.queries.put(at, TILES, tiles)
    pipe.queries.put(at, CORE, core // 64)
    pipe.queries.put(at, CORE_END, core_end // 64)
    pipe.queries.put(at, ROWS_USED, used)
    pipe.queries.put(at, KEYS, keys)
    pipe.queries.put(at, WHOLE, ((tile == start) & (end <= stop)).to(gl.int32))
    return first, tiles, keys, gl.load(args.schedule.starts + number + 1)


@gluon.jit
def load_queries(args, pipe, rows, number, drawn):
    """Loads the program's query rows into the slot."""
    b, row = row_of(args, number, rows.row)
    CHUNKS: gl.constexpr = pipe.queries.CHUNKS
    pipe.queries.claim(drawn)
    full = pipe.queries.full.index(0)
    mbarrier.expect(full, CHUNKS * 64 * 64 * 2)
    for chunk in gl.static_range(CHUNKS):
        tma_load(args.q_desc, [b, rows.h_k, rows.in_group, row, chunk * 64], full, pipe.queries.tiles.index(chunk))


@gluon.jit
def copy_half(args, pipe, page, h_k, start, stage, half, REST: gl.constexpr, barrier):
    """Copies the half of a tile that is consumer `half`'s values, and the last columns if REST."""
    SIZE: gl.constexpr = args.pages.size
    WIDTH: gl.constexpr = 64 * HALF
    mbarrier.expect(barrier, (HALF + REST) * 64 * 64 * 2)
    load_pages(args.k_desc, pipe.latent, 2 * stage + half, page, h_k, start, SIZE, WIDTH, 64, barrier, half * WIDTH)
    if REST:
        load_pages(args.k_desc, pipe.rest, stage, page, h_k, start, SIZE, 64, 64, barrier, 2 * WIDTH)


@gluon.jit
def load_half(args, pipe, page, h_k, n, start, keys, half, REST: gl.constexpr, tails):
    """Fills a half of a stage with that of the tile of keys from `start` on, and with zeros after the last key, as
    values may be NaN there. Returns the number of copies so far that the producer has waited for."""
    stage = n % 2
    pipe.claim(n, stage, half)
    whole = start + 64 <= keys
    full = pipe.full.index(2 * stage + half)
    landing = pipe.full.index(gl.where(whole, 2 * stage + half, 4))
    copy_half(args, pipe, page, h_k, start, stage, half, REST, landing)
    if not whole:
        mbarrier.wait(landing, tails & 1)
        zero_tail(pipe.values(stage, half), keys - start, 64, 256)
        mbarrier.arrive(full, count=1)
        tails += 1
    return tails


@gluon.jit
def copy_columns(tile, COLUMNS: gl.constexpr, pointers, there):
    """Starts copies of each row [64] from `pointers` on that is `there`, and zeros of others, to [64, COLUMNS]."""
    layout: gl.constexpr = pointers.type.layout.parent
    # [64, COLUMNS]
    at = pointers[:, None] + gl.arange(0, COLUMNS, gl.SliceLayout(0, layout))[None, :]
    copy_async(tile, at, mask=there[:, None])


@gluon.jit
def gather_half(pipe, n, pointers, there, half, REST: gl.constexpr):
    """Loads columns of rows [64] into half of a stage."""
    WIDTH: gl.constexpr = 64 * HALF
    stage = n % 2
    pipe.claim(n, stage, half)
    copy_columns(pipe.values(stage, half), WIDTH, pointers + half * WIDTH, there)
    if REST:
        copy_columns(pipe.rest.index(stage).reshape([64, 64]), 64, pointers + 2 * WIDTH, there)
    async_copy.mbarrier_arrive(pipe.full.index(2 * stage + half), increment_count=False)


# The numbers of a record of format "v3.2" are four to a word: 128 words of e4m3, 4 factors, and 32 words of bfloat16.
RECORD = gl.constexpr(164)
FACTORS = gl.constexpr(128)
LAST_COLUMNS = gl.constexpr(132)
WIDE_WORDS = gl.constexpr(gl.NVMMASharedLayout(128, 32, 2))
"""Of a chunk [64, 64] of 16-bit numbers as words [64, 32]."""


@gluon.constexpr_function
def rows_layout(records):
    """Of rows that four warps read: 16 bytes a thread. Of records the threads of two rows are neighbours, so that what
    they write, twice as many bytes, is in different banks."""
    elements, lanes = ([1, 4], [8, 4]) if records else ([1, 8], [4, 8])
    return gl.BlockedLayout(elements, lanes, [4, 1], [1, 0])


@gluon.jit
def prefetch(pointers, N: gl.constexpr):
    """Brings rows [64] of N words to the L2 cache."""
    layout: gl.constexpr = gl.BlockedLayout([1, 1], [8, 4], [4, 1], [1, 0])
    word = gl.minimum(gl.arange(0, 8, gl.SliceLayout(0, layout)) * 24, N - 1)
    to_l2(gl.convert_layout(pointers, gl.SliceLayout(1, layout), assert_trivial=True)[:, None] + word[None, :])


@gluon.jit
def words_at(pointers, there, first, COLUMNS: gl.constexpr):
    """Returns words [64, COLUMNS] of records [64] from `first` on; zeros of those that are not there."""
    column = first + gl.arange(0, COLUMNS, gl.SliceLayout(0, pointers.type.layout.parent))
    return gl.load(pointers[:, None] + column[None, :], mask=there[:, None], other=0)


@gluon.jit
def widen_tile(pipe, n, pointers, there):
    """Fills a stage with the numbers of records [64]. Words are loaded two chunks ahead, and factors before all."""
    own = n % 2
    tiles = view(pipe.latent, [4 * HALF, 64, 32], WIDE_WORDS, gl.int32)
    words = words_at(pointers, there, 64 * own, 16)
    factors = (
        gl.load(pointers + (FACTORS + 2 * own), mask=there, other=0),
        gl.load(pointers + (FACTORS + 2 * own + 1), mask=there, other=0),
        gl.load(pointers + (FACTORS + 2 - 2 * own), mask=there, other=0),
        gl.load(pointers + (FACTORS + 3 - 2 * own), mask=there, other=0),
    )
    second = words_at(pointers, there, 64 * own + 16, 16)
    for k in gl.static_range(2 * HALF):
        half = own if k < HALF else 1 - own
        third = words
        if k + 2 < 2 * HALF:
            first = 64 * (own if k + 2 < HALF else 1 - own)
            third = words_at(pointers, there, first + 16 * ((k + 2) % HALF), 16)
        elif k + 2 == 2 * HALF:
            third = words_at(pointers, there, LAST_COLUMNS, 32)
        if k % 2 == 0:
            high, low = bf16_parts(factors[k // 2].to(gl.float32, bitcast=True))
        if k % HALF == 0:
            pipe.claim(n, own, half)
        tiles.index(opaque(HALF * (2 * own + half) + k % HALF)).store(widened(words, high, low))
        words = second
        second = third
        if k % HALF == HALF - 1:
            if k == 2 * HALF - 1:
                view(pipe.rest, [2, 64, 32], WIDE_WORDS, gl.int32).index(own).store(words)
            fence_async_shared()
            mbarrier.arrive(pipe.full.index(2 * own + half), count=1)


@gluon.jit
def numbers_of(args, b, start, keys):
    """What the table says of the tile of keys from `start` on: of all keys [64], or, in bulk, of its boxes [32]."""
    if args.cache is None:
        return pages_of(args.pages, b, start, keys, 64)
    else:
        # [64]
        kv_idx = start + gl.arange(0, 64, gl.SliceLayout(1, rows_layout(args.shape.RECORDS)))
        table = args.pages.table + b.to(gl.int64) * plain_int(args.pages.stride)
        return gl.load(table + kv_idx // args.pages.size, mask=kv_idx < keys, other=0)


@gluon.jit
def rows_at(args, h_k, page, start):
    """Returns pointers [64] to the rows of a tile, from the pages of `numbers_of`."""
    kv_idx = start + gl.arange(0, 64, gl.SliceLayout(1, rows_layout(args.shape.RECORDS)))
    if args.shape.LISTED and args.shape.ROWS > 1:
        page = page >> args.shape.ROWS
    known = gl.minimum(gl.maximum(page, 0), plain_int(args.pages.count) - 1)
    return head(args.cache, known.to(gl.int64), h_k, (kv_idx % args.pages.size).to(gl.int64))


@gluon.jit
def gather_tile(args, pipe, h_k, page, n, start, keys):
    """Loads a stage as `load_tile` does, row by row."""
    pointers = rows_at(args, h_k, page, start)
    there = start + gl.arange(0, 64, pointers.type.layout) < keys
    if args.shape.RECORDS:
        widen_tile(pipe, n, pointers, there)
    else:
        gather_half(pipe, n, pointers, there, n % 2, 0)
        gather_half(pipe, n, pointers, there, 1 - n % 2, 1)


@gluon.jit
def load_tile(args, pipe, h_k, page, n, start, keys, tails):
    """Loads a stage from the pages of `numbers_of`. The owner's half comes first, because it is free first."""
    if args.cache is None:
        tails = load_half(args, pipe, page, h_k, n, start, keys, n % 2, 0, tails)
        tails = load_half(args, pipe, page, h_k, n, start, keys, 1 - n % 2, 1, tails)
    else:
        gather_tile(args, pipe, h_k, page, n, start, keys)
    return tails


@gluon.jit
def load(args, pipe):
    """Runs the producer: loads the tiles of all parts."""
    rows = row_tile(args)
    length = length_of_line(args.schedule)
    begin = rows.line * length
    stop = gl.minimum(begin + length, gl.load(args.schedule.starts + plain_int(args.schedule.sequences)))
    tile = begin
    number = gl.load(args.schedule.lines_first + rows.line, mask=begin < stop, other=0)
    n = begin * 0
    drawn = n
    tails = n
    while tile < stop:
        first, tiles, keys, tile = open_part(args, pipe, rows, number, tile, begin, stop, drawn)
        begun = gl.minimum(tiles, 2) - 1  # stages are free sooner than the slot of the queries
        page = numbers_of(args, number, first * 64, keys)
        following = numbers_of(args, number, first * 64 + 64, keys)
        for j in range(tiles):
            start = (first + j) * 64
            # Numbers come two tiles ahead, and records a tile ahead, to the L2 cache: loads take as long as products.
            later = numbers_of(args, number, start + 128, keys)
            if args.shape.RECORDS:
                prefetch(rows_at(args, rows.h_k, following, start + 64), RECORD)
            tails = load_tile(args, pipe, rows.h_k, page, n, start, keys, tails)
            page = following
            following = later
            n += 1
            if j == begun:
                load_queries(args, pipe, rows, number, drawn)
        drawn += 1
        number += 1
    pipe.queries.put(pipe.queries.record_of(drawn), SEQUENCE, -1)
    pipe.queries.claim(drawn)
    mbarrier.arrive(pipe.queries.full.index(0), count=1)
