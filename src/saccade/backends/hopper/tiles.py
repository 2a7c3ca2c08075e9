"""What the kernels do to whole tiles, in shared memory and in registers."""

# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma_wait

from saccade.backends.device.records import plain_int


@gluon.jit
def zero_tail(tile, used, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """Clears the rows of a tile from `used` on: what lies behind a sequence's end may be NaN, and 0 NaN = NaN."""
    WIDTH: gl.constexpr = min(64, COLUMNS)
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [8, 4], [1, 1], [1, 0])
    for start in gl.static_range(0, ROWS, 8):
        if start + 8 > used:
            kept = start + gl.arange(0, 8, gl.SliceLayout(1, layout)) < used
            for column in gl.static_range(0, COLUMNS, WIDTH):
                # [8, WIDTH]
                part = tile.slice(start, 8, 0).slice(column, WIDTH, 1)
                if start >= used:  # no load to wait for
                    part.store(gl.zeros([8, WIDTH], tile.dtype, layout))
                else:
                    part.store(gl.where(kept[:, None], part.load(layout), 0.0))
    fence_async_shared()


@gluon.jit
def store_rows(
    tile, x, h, row, there, heads, COLUMNS: gl.constexpr, ROWS: gl.constexpr, FIRST: gl.constexpr = 0
):  # fmt: skip
    """Writes `tile` [64, COLUMNS], ROWS rows of each of 64 / ROWS heads, to x from head h, `row` and column FIRST on:
    `there` rows of heads below `heads`."""
    WIDTH: gl.constexpr = min(64, COLUMNS)
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 * 8 // WIDTH, WIDTH // 8], [gl.num_warps(), 1], [1, 0])
    # [64]
    i = gl.arange(0, 64, gl.SliceLayout(1, layout))
    at = (h + i // ROWS).to(gl.int64) * plain_int(x.stride_h) + (row + i % ROWS).to(gl.int64) * plain_int(x.stride_s)
    kept = (i % ROWS < there) & (h + i // ROWS < heads)
    for start in gl.static_range(0, COLUMNS, WIDTH):
        # [64, WIDTH]
        column = FIRST + start + gl.arange(0, WIDTH, gl.SliceLayout(0, layout))
        mask = kept[:, None] & (column < plain_int(x.columns))[None, :]
        gl.store(x.ptr + at[:, None] + column[None, :], tile.slice(start, WIDTH, 1).load(layout), mask=mask)


@gluon.jit
def between(s, lo, hi, LOWER: gl.constexpr, UPPER: gl.constexpr):
    """s [64, N] in columns lo <= j < hi of each row (lo only if LOWER, hi only if UPPER), and -inf elsewhere.

    A thread has columns 8 i + 2 lane + e. The part that its lane decides goes to the bounds, so that what remains are
    constants in the instructions, and not N / 4 registers.
    """
    # [64, N / 8, 4, 2]
    x = s.reshape([s.shape[0], s.shape[1] // 8, 4, 2])
    layout: gl.constexpr = x.type.layout
    lanes: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, layout))
    lane = 2 * gl.arange(0, 4, gl.SliceLayout(0, lanes))[None, :]
    i = gl.arange(0, s.shape[1] // 8, gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, layout))))
    e = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(0, gl.SliceLayout(0, layout))))
    i = gl.expand_dims(gl.expand_dims(gl.expand_dims(i, 0), 2), 3)
    e = gl.expand_dims(gl.expand_dims(gl.expand_dims(e, 0), 0), 0)
    # low and high: [64, 1, 4, 1]
    if UPPER:
        high = gl.convert_layout(hi, gl.SliceLayout(1, lanes))[:, None] - lane
        high = gl.expand_dims(gl.expand_dims(high, 1), 3)
        x = gl.where(8 * i + e < high, x, float("-inf"))
    if LOWER:
        low = gl.convert_layout(lo, gl.SliceLayout(1, lanes))[:, None] - lane
        low = gl.expand_dims(gl.expand_dims(low, 1), 3)
        x = gl.where(8 * i + e >= low, x, float("-inf"))
    return gl.convert_layout(x.reshape([s.shape[0], s.shape[1]]), s.type.layout)


@gluon.constexpr_function
def product_layout(columns, dtype=gl.bfloat16):
    """The layout of a product [64, columns] of operands of this dtype, by one group of four warps."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 256 // dtype.primitive_bitwidth])


@gluon.jit
def wait_for_sums(pending: gl.constexpr, sums):
    """Sums in parts of their columns, a tuple of tiles, once all products but the `pending` last are done."""
    done = warpgroup_mma_wait(pending, sums)
    if len(sums) == 1:
        return (done,)
    else:
        return done


@gluon.jit
def store_sums(tile, sums, factor=1.0):
    """Stores factor sums, part by part, in a tile of shared memory. What lies behind them is beyond the tensor."""
    for i in gl.static_range(len(sums)):
        part = tile.slice(i * sums[0].shape[1], sums[i].shape[1], 1)
        part.store((sums[i] * factor).to(tile.dtype))


@gluon.constexpr_function
def bytes_of(dtype):
    return dtype.primitive_bitwidth // 8


@gluon.constexpr_function
def is_eight_bit(dtype):
    """constexpr: operands have 8 bits, of which the tensor cores add up products in too few: sums are of two levels"""
    return dtype.primitive_bitwidth == 8


@gluon.constexpr_function
def log2(n):
    return n.bit_length() - 1


@gluon.jit
def _halves(x):
    """Both halves of the last axis of x [M, L, N]."""
    return gl.split(x.reshape([x.shape[0], x.shape[1], 2, x.shape[2] // 2]).permute((0, 1, 3, 2)))


@gluon.jit
def one_by_one(x, combine: gl.constexpr):
    """Combines the last axis of x [M, L, N], all of it in registers, from its first element to its last: [M, L].

    gl.reduce does that in Triton 3.6, but makes a tree in 3.9, of which ptxas makes a longer way from the products to
    the last weight (notes/gluon.md).
    """
    M: gl.constexpr = x.shape[0]
    L: gl.constexpr = x.shape[1]
    parts = (x,)
    for level in gl.static_range(log2(x.shape[2])):
        halves = ()
        for i in gl.static_range(2**level):
            first, second = _halves(parts[i])
            halves = halves + (first, second)  # noqa: RUF005 - Triton has no starred tuples
        parts = halves
    made = parts[0]
    for i in gl.static_range(1, x.shape[2]):
        made = combine(made, parts[i])
    return made.reshape([M, L])


@gluon.jit
def _sum(a, b):
    return a + b


@gluon.jit
def _largest(a, b):
    return gl.maximum(a, b)


@gluon.jit
def row_sums(p):
    """Sums [64, 8] of p [64, BLOCK_K] within each thread; the four threads of a row meet when the work item ends."""
    # [64, 8, BLOCK_K / 8]
    return one_by_one(p.reshape([p.shape[0], p.shape[1] // 8, 8]).permute((0, 2, 1)), _sum)


@gluon.jit
def thread_sums(x):
    """The sums [32, 4] of what each thread has of x [64, N]: four sums of its own, and then those."""
    N: gl.constexpr = x.shape[1]
    # Warp, half, lane; column / 8, lane, column % 2
    x = x.reshape([4, 2, 8, N // 8, 4, 2]).permute((0, 2, 4, 1, 5, 3))
    # [32, 16, N / 8]
    x = one_by_one(x.reshape([32, 16, N // 8]), _sum)
    return one_by_one(x.reshape([32, 4, 4]), _sum)


@gluon.jit
def row_maxima(s, pitch=()):
    """The largest of each row of s [64, BLOCK_K]: [64]. pitch: of `add_columns`, in a tuple."""
    # [64, 4, BLOCK_K / 4]: the four threads of a row, and what each of them has
    x = s.reshape([s.shape[0], s.shape[1] // 8, 4, 2]).permute((0, 2, 1, 3))
    x = one_by_one(x.reshape([s.shape[0], 4, s.shape[1] // 4]), _largest)
    if len(pitch) == 1:
        layout: gl.constexpr = x.type.layout
        x += lane_columns(pitch[0], layout)
    return gl.convert_layout(gl.max(x, 1), gl.SliceLayout(1, s.type.layout), assert_trivial=True)


@gluon.jit
def lane_columns(pitch, LAYOUT: gl.constexpr):
    """[64, 4]: pitch [64] times the first column of each of a row's four threads."""
    lane = gl.arange(0, 4, gl.SliceLayout(0, LAYOUT)) * 2
    return gl.convert_layout(pitch, gl.SliceLayout(1, LAYOUT))[:, None] * lane.to(gl.float32)[None, :]


@gluon.jit
def add_columns(s, pitch):
    """s [64, N] plus pitch [64] times each column's number, of which `lane_columns` is left out: a thread has columns
    8 i + 2 lane + e, and what remains are constants in the instructions, and not N / 4 registers."""
    # [64, N / 8, 4, 2]
    x = s.reshape([s.shape[0], s.shape[1] // 8, 4, 2])
    layout: gl.constexpr = x.type.layout
    i = gl.arange(0, s.shape[1] // 8, gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, layout))))
    e = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(0, gl.SliceLayout(0, layout))))
    i = gl.expand_dims(gl.expand_dims(gl.expand_dims(i, 0), 2), 3)
    e = gl.expand_dims(gl.expand_dims(gl.expand_dims(e, 0), 0), 0)
    rows: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, layout)))
    pitch = gl.expand_dims(gl.expand_dims(gl.convert_layout(pitch, rows)[:, None], 2), 3)
    # A product and a sum would spill: all products would be taken out of the loop.
    x = gl.fma(gl.broadcast(pitch, x)[0], gl.broadcast((8 * i + e).to(gl.float32), x)[0], x)
    return gl.convert_layout(x.reshape([s.shape[0], s.shape[1]]), s.type.layout, assert_trivial=True)


@gluon.jit
def subtract_rows(s, inner, shift, pitch):
    """s inner - shift [64], and what `add_columns` left out of s, times inner."""
    # [64, N / 8, 4, 2]
    x = s.reshape([s.shape[0], s.shape[1] // 8, 4, 2])
    lanes: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, x.type.layout))
    # [64, 4]
    shift = gl.convert_layout(shift, gl.SliceLayout(1, lanes))[:, None] - lane_columns(pitch * inner, lanes)
    x = x * inner - gl.expand_dims(gl.expand_dims(shift, 1), 3)
    return gl.convert_layout(x.reshape([s.shape[0], s.shape[1]]), s.type.layout, assert_trivial=True)
