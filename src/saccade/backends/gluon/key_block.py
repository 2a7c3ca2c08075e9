"""A block of keys of one key head: which rows see it, and what a mask makes of its products with them."""

# No `from __future__ import annotations` here: an aggregate reads its fields' types.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from saccade.backends.device.lists_kernel import list_number, list_of
from saccade.backends.device.records import plain_int
from saccade.backends.device.tiles import tile_range, used_length, visible
from saccade.backends.gluon.shim import aggregate
from saccade.backends.gluon.tiles import between


@aggregate
class KeyBlock:
    """Where a program's keys are, and which blocks of rows see them: [first, end), and all of them [core, core_end).

    The query heads of one key head are `share` after share; `group` is how many a share has.
    """

    b: gl.tensor
    h_k: gl.tensor
    share: gl.tensor
    start: gl.tensor
    rows: gl.tensor
    keys: gl.tensor
    first: gl.tensor
    core: gl.tensor
    core_end: gl.tensor
    end: gl.tensor

    @gluon.constexpr_function
    def __init__(self, b, h_k, share, start, rows, keys, first, core, core_end, end):
        self.b = b
        self.h_k = h_k
        self.share = share
        self.start = start
        self.rows = rows
        self.keys = keys
        self.first = first
        self.core = core
        self.core_end = core_end
        self.end = end

    @gluon.jit
    def steps(self, group):
        """All heads of the share, one after the other."""
        return group * (self.end - self.first)

    @gluon.jit
    def place(self, n, group):
        """Head and block of rows of step n.

        In one loop over steps: a variable of an outer loop that only bounds an inner one is lost by Gluon 3.6.
        """
        blocks = self.end - self.first
        return self.share * group + n // blocks, self.first + n % blocks

    @gluon.jit
    def rows_at(self, place):
        """Which block of rows is at a place of [first, end)."""
        return place

    @gluon.jit
    def number(self, blocks, BLOCK_K: gl.constexpr):
        """This block of keys among those of all batch rows."""
        return self.b * blocks + self.start // BLOCK_K


@aggregate
class ListedKeyBlock:
    """The same where a list has the blocks of rows: first, core, core_end and end are places in it. Its share is one
    head where heads see other keys."""

    b: gl.tensor
    h_k: gl.tensor
    share: gl.tensor
    start: gl.tensor
    rows: gl.tensor
    keys: gl.tensor
    first: gl.tensor
    core: gl.tensor
    core_end: gl.tensor
    end: gl.tensor
    listing: gl.tensor
    list_number: gl.tensor

    @gluon.constexpr_function
    def __init__(self, b, h_k, share, start, rows, keys, first, core, core_end, end, listing, list_number):
        self.b = b
        self.h_k = h_k
        self.share = share
        self.start = start
        self.rows = rows
        self.keys = keys
        self.first = first
        self.core = core
        self.core_end = core_end
        self.end = end
        self.listing = listing
        self.list_number = list_number

    @gluon.jit
    def steps(self, group):
        return group * self.end

    @gluon.jit
    def place(self, n, group):
        return self.share * group + n // self.end, gl.load(self.listing + n % self.end)

    @gluon.jit
    def rows_at(self, place):
        return gl.load(self.listing + place)

    @gluon.jit
    def number(self, blocks, BLOCK_K: gl.constexpr):
        return self.list_number


@gluon.jit
def key_block(
    order, mask, used_q, used_k, s_q, s_k, BLOCK_Q: gl.constexpr, BLOCK_K: gl.constexpr, LAST_FIRST: gl.constexpr
):
    """This program's KeyBlock. In a section of heads the first keys come first, as a causal mask gives them most rows,
    or the last ones."""
    blocks = plain_int(order.blocks)
    size = plain_int(order.section)
    number = gl.program_id(0) // (blocks * size)
    rest = gl.program_id(0) - number * (blocks * size)
    size = gl.minimum(size, plain_int(order.heads) - number * size)
    bh = number * plain_int(order.section) + rest % size
    b = bh // plain_int(order.shares)
    share = bh % plain_int(order.shares)
    i = rest // size
    if LAST_FIRST:
        i = blocks - 1 - i
    h_k = share // plain_int(order.divided)
    return key_block_at(b, h_k, share, i * BLOCK_K, mask, used_q, used_k, s_q, s_k, BLOCK_Q, BLOCK_K)


@gluon.jit
def key_block_at(b, h_k, share, start, mask, used_q, used_k, s_q, s_k, BLOCK_Q: gl.constexpr, BLOCK_K: gl.constexpr):
    """The KeyBlock of these BLOCK_K keys."""
    if mask.listed:
        return listed_key_block(b, h_k, share, start, mask, used_q, used_k, s_q, s_k, BLOCK_K)
    else:
        return key_block_of_interval(b, h_k, share, start, mask, used_q, used_k, s_q, s_k, BLOCK_Q, BLOCK_K)


@gluon.jit
def listed_key_block(b, h_k, share, start, mask, used_q, used_k, s_q, s_k, BLOCK_K: gl.constexpr):
    number = list_number(mask.lists, b, share, start // BLOCK_K)
    listing, some, tiles = list_of(mask.lists, number)
    none = (tiles == 0).to(gl.int32)  # nobody sees these keys: one block, all hidden
    end = tiles + none
    rows = used_length(used_q, b, s_q)
    keys = used_length(used_k, b, s_k)
    return ListedKeyBlock(b, h_k, share, start, rows, keys, end * 0, some + none, end, end, listing, number)


@gluon.jit
def key_block_of_interval(
    b, h_k, share, start, mask, used_q, used_k, s_q, s_k, BLOCK_Q: gl.constexpr, BLOCK_K: gl.constexpr
):
    rows = used_length(used_q, b, s_q)
    keys = used_length(used_k, b, s_k)
    # [BLOCK_K]
    kv_idx = start + gl.arange(0, BLOCK_K, gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    lo, hi, core_lo, core_hi = mask.rows_of(mask.data, b, kv_idx, keys - rows)
    first, core, core_end, end = tile_range(lo, hi, core_lo, core_hi, kv_idx < keys, rows, BLOCK_Q)
    if start + BLOCK_K > keys:  # some keys are not in use, and nothing but the mask hides them
        core = end
        core_end = end
    if end <= first:  # nobody sees these keys: one block, all hidden, so that no loop has to think of none
        first = first * 0
        core = first + BLOCK_Q
        core_end = core
        end = core
    return KeyBlock(
        b, h_k, share, start, rows, keys, first // BLOCK_Q, core // BLOCK_Q, core_end // BLOCK_Q, end // BLOCK_Q
    )


@gluon.jit
def onto(numbers, zero):
    """One number [BLOCK_Q] for each row as the start [64, BLOCK_Q] of a product."""
    start, _ = gl.broadcast(gl.expand_dims(numbers, 0), zero)
    return start


@gluon.jit
def hidden(x, mask, block, h, row, kv_idx):
    """x [64, BLOCK_Q] where the keys see the rows from `row` on, and -inf elsewhere. Rows that are not in use need no
    mask: their start is -inf."""
    off = block.keys - block.rows
    if mask.exact:
        lo, hi, _, _ = mask.rows_of(mask.data, block.b, kv_idx, off)
        return between(x, lo - row, gl.where(kv_idx < block.keys, hi, 0) - row, True)
    else:  # only the branch that is taken has a type
        q_idx = row + gl.arange(0, x.shape[1], gl.SliceLayout(0, x.type.layout))
        seen = visible(mask, block.b, h, q_idx[None, :], kv_idx[:, None], block.rows, block.keys, off)
        return gl.where(seen, x, float("-inf"))
