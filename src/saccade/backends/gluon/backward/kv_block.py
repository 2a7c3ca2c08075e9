"""A block of keys of one key head: which rows see it, and what a mask makes of its products with them."""

# No `from __future__ import annotations` here: an aggregate reads its fields' types.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from saccade.backends.device.masks import FAR
from saccade.backends.device.tiles import visible
from saccade.backends.gluon.shim import aggregate
from saccade.backends.gluon.tiles import between


@aggregate
class KVBlock:
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
        """All heads of the share: first their blocks outside of the core, then the core's, head after head."""
        return group * (self.end - self.first)

    @gluon.jit
    def edges(self, group):
        """The steps that need the mask."""
        return group * (self.end - self.first - (self.core_end - self.core))

    @gluon.jit
    def edge(self, i):
        """A head's i-th block of rows before the core or behind it."""
        return edge_of(self, i)

    @gluon.jit
    def inner(self, i):
        """A head's i-th block of rows of the core."""
        return self.core + i

    @gluon.jit
    def place(self, n, group):
        """Head and block of rows of step n."""
        h, i = place_of(self, n, group)
        return h, i

    @gluon.jit
    def number(self, blocks, BLOCK_K: gl.constexpr):
        """This block of keys among those of all batch rows."""
        return self.b * blocks + self.start // BLOCK_K

    @gluon.jit
    def rows_number(self, h, h_q, q_blocks, i):
        """A head's block of rows among those of all heads and batch rows."""
        return (self.b * h_q + h) * q_blocks + i

    @gluon.jit
    def rows_at(self, row):
        """Batch row and row of q and dout."""
        return self.b, row

    @gluon.jit
    def keys_at(self, key):
        """Batch row and row of k and v."""
        return self.b, key


@aggregate
class ListedKVBlock:
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
    block_list_number: gl.tensor

    @gluon.constexpr_function
    def __init__(self, b, h_k, share, start, rows, keys, first, core, core_end, end, listing, block_list_number):
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
        self.block_list_number = block_list_number

    @gluon.jit
    def steps(self, group):
        return group * self.end

    @gluon.jit
    def edges(self, group):
        return group * self.core

    @gluon.jit
    def edge(self, i):
        return gl.load(self.listing + i)

    @gluon.jit
    def inner(self, i):
        return gl.load(self.listing + self.core + i)

    @gluon.jit
    def place(self, n, group):
        h, i = place_of(self, n, group)
        return h, gl.load(self.listing + i)

    @gluon.jit
    def number(self, blocks, BLOCK_K: gl.constexpr):
        return self.block_list_number

    rows_number = KVBlock.rows_number
    rows_at = KVBlock.rows_at
    keys_at = KVBlock.keys_at


@aggregate
class PackedKVBlock:
    """The same of a packed sequence: b is what masks call it, and rows, keys and blocks count from its first ones."""

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
    first_row: gl.tensor
    first_key: gl.tensor
    first_block: gl.tensor
    own_number: gl.tensor
    there: gl.tensor

    @gluon.constexpr_function
    def __init__(
        self, b, h_k, share, start, rows, keys, first, core, core_end, end, first_row, first_key, first_block,
        own_number, there,
    ):  # fmt: skip
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
        self.first_row = first_row
        self.first_key = first_key
        self.first_block = first_block
        self.own_number = own_number
        self.there = there

    steps = KVBlock.steps
    edges = KVBlock.edges
    edge = KVBlock.edge
    inner = KVBlock.inner
    place = KVBlock.place

    @gluon.jit
    def number(self, blocks, BLOCK_K: gl.constexpr):
        return self.own_number

    @gluon.jit
    def rows_number(self, h, h_q, q_blocks, i):
        return h * q_blocks + self.first_block + i

    @gluon.jit
    def rows_at(self, row):
        return self.b * 0, self.first_row + row

    @gluon.jit
    def keys_at(self, key):
        return self.b * 0, self.first_key + key


@aggregate
class PackedListedKVBlock:
    """Both: of a packed sequence, whose blocks of rows a list has."""

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
    first_row: gl.tensor
    first_key: gl.tensor
    first_block: gl.tensor
    there: gl.tensor
    listing: gl.tensor
    block_list_number: gl.tensor

    @gluon.constexpr_function
    def __init__(
        self, b, h_k, share, start, rows, keys, first, core, core_end, end, first_row, first_key, first_block, there,
        listing, block_list_number,
    ):  # fmt: skip
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
        self.first_row = first_row
        self.first_key = first_key
        self.first_block = first_block
        self.there = there
        self.listing = listing
        self.block_list_number = block_list_number

    steps = ListedKVBlock.steps
    edges = ListedKVBlock.edges
    edge = ListedKVBlock.edge
    inner = ListedKVBlock.inner
    place = ListedKVBlock.place
    number = ListedKVBlock.number
    rows_number = PackedKVBlock.rows_number
    rows_at = PackedKVBlock.rows_at
    keys_at = PackedKVBlock.keys_at


# Two loops over all steps, one with the mask and one without: a nest of loops over heads and over the parts of their
# rows cost 15 % at d = 64 (docs/findings/gluon_backward.md).


@gluon.jit
def edge_of(block, i):
    place = block.first + i
    return gl.where(place < block.core, place, place - block.core + block.core_end)


@gluon.jit
def following(h, i, blocks):
    """The next head and block where each head has so many of them; cheaper than a division in every step."""
    last = i + 1 == blocks
    return gl.where(last, h + 1, h), gl.where(last, 0, i + 1)


@gluon.jit
def place_of(block, n, group):
    early = n < block.edges(group)
    inside = block.core_end - block.core
    outside = block.end - block.first - inside
    blocks = gl.where(early, outside, inside)
    n -= gl.where(early, 0, group * outside)
    place = gl.where(early, block.first, block.core) + n % blocks
    return block.share * group + n // blocks, place + gl.where(early & (place >= block.core), inside, 0)


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
        if mask.lower:
            return between(x, lo - row, gl.where(kv_idx < block.keys, hi, 0) - row, True, True)
        else:  # the last rows see all that any do
            return between(x, gl.where(kv_idx < block.keys, lo, FAR) - row, hi, True, False)
    else:  # only the branch that is taken has a type
        q_idx = row + gl.arange(0, x.shape[1], gl.SliceLayout(0, x.type.layout))
        seen = visible(mask, block.b, h, q_idx[None, :], kv_idx[:, None], block.rows, block.keys, off)
        return gl.where(seen, x, float("-inf"))
