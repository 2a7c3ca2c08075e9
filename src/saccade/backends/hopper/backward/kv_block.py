"""A kv block: which q blocks see it, and where its rows are, in every layout and of every mask."""

# No `from __future__ import annotations` here: an aggregate reads its fields' types.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from saccade.backends.device.block_lists_kernel import block_list_number, load_block_list
from saccade.backends.device.positions import blocks_before, extent, is_packed, numbered
from saccade.backends.device.tiles import tile_range, used_length
from saccade.backends.hopper.shim import Value, aggregate
from saccade.backends.hopper.tiles import log2


@aggregate
class PackedPlace:
    """Where a packed sequence begins: its first row of q and of k, and its first q block of all. `there` keys are the
    sequence's, in use or not."""

    first_row: gl.tensor
    first_key: gl.tensor
    first_block: gl.tensor
    there: gl.tensor


@aggregate
class KVBlock:
    """BLOCK_K keys of one key head, and the q blocks that see them: [first, end), and all of them [core, core_end).

    The query heads of one key head are `share` after share; `group` is how many a share has. In a packed sequence, b is
    its number as masks know it, and rows, keys and blocks count from its first ones. With a block list, first, core,
    core_end and end are places in it, and its share is one head where heads see other keys.
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
    packed: Value
    """a PackedPlace, or None"""
    block_list: Value
    """where its list of q blocks begins, or None"""
    own_number: Value
    """with a list which list it is, and packed which of all kv blocks; else None"""
    OWN_EDGES: gl.constexpr
    """Each consumer has the mask where its own keys need it, see `own_edges`: all heads have one such block before the
    next one"""
    BEYOND: gl.constexpr
    """[core, core_end) are those in reach of the score's tables, and those that need the mask; all others, which come
    after them, do not"""

    # Two loops over all steps, one with the mask and one without: a nest of loops over heads and over the parts of
    # their rows cost 15 % at d = 64 (notes/gluon_backward.md).

    @gluon.jit
    def steps(self, group):
        """All heads of the share: first their blocks outside of the core, then the core's, head after head; if BEYOND
        the other way round."""
        if self.block_list is None:
            return group * (self.end - self.first)
        else:
            return group * self.end

    @gluon.jit
    def edges(self, group):
        """The steps that come first: those that need the mask."""
        if self.BEYOND:
            return group * (self.core_end - self.core)
        elif self.block_list is None:
            return group * (self.end - self.first - (self.core_end - self.core))
        else:
            return group * self.core

    @gluon.jit
    def edge(self, i):
        """A head's i-th q block of those."""
        if self.BEYOND:
            return self.core + i
        elif self.block_list is None:
            return self.outside(i)
        else:
            return gl.load(self.block_list + i)

    @gluon.jit
    def outside(self, i):
        """A head's i-th q block before or after the core."""
        offset = self.first + i
        return gl.where(offset < self.core, offset, offset - self.core + self.core_end)

    @gluon.jit
    def inner(self, i):
        """A head's i-th q block of the others."""
        if self.BEYOND:
            return self.outside(i)
        else:
            return self.q_block(self.core + i)

    @gluon.jit
    def q_block(self, offset):
        """The q block at a place of [first, end)."""
        if self.block_list is None:
            return offset
        else:
            return gl.load(self.block_list + offset)

    @gluon.jit
    def step_at(self, n, group):
        """Head and q block of step n."""
        outer = n < self.edges(group)
        early = outer
        if self.BEYOND:
            outer = n >= self.edges(group)
        inside = self.core_end - self.core
        outside = self.end - self.first - inside
        blocks = gl.where(outer, group if self.OWN_EDGES else outside, inside)
        n -= gl.where(early, 0, group * (inside if self.BEYOND else outside))
        h, i = n // blocks, n % blocks
        if self.OWN_EDGES:
            h, i = gl.where(outer, i, h), gl.where(outer, h, i)
        offset = gl.where(outer, self.first, self.core) + i
        h += self.share * group
        return h, self.q_block(offset + gl.where(outer & (offset >= self.core), inside, 0))

    @gluon.jit
    def own_edges(self, kv_blocks, c: gl.constexpr):
        """Of a head's q blocks how many of the first ones have 64 first rows that see none of consumer c's keys, and
        how many, with these, need the mask. Later rows see neither earlier first keys nor earlier last ones."""
        BLOCK_Q: gl.constexpr = kv_blocks.BLOCK_Q
        key = self.start + c * 64
        off = self.keys - self.rows
        # The first row that sees the first of the keys, and the first that sees the last one.
        row, _, _, _ = kv_blocks.mask.rows_of(kv_blocks.mask.data, self.b, key, off)
        last, _, _, _ = kv_blocks.mask.rows_of(kv_blocks.mask.data, self.b, key + 63, off)
        unseen = (gl.maximum(row, 0) + BLOCK_Q - 64) >> log2(BLOCK_Q)
        edges = (gl.maximum(last, 0) + BLOCK_Q - 1) >> log2(BLOCK_Q)
        # Keys that are not in use no row sees.
        unseen = gl.minimum(gl.where(key < self.keys, unseen, self.end), self.end)
        edges = gl.minimum(gl.where(key + 64 <= self.keys, edges, self.end), self.end)
        if kv_blocks.mask.has_lower_bound:
            edges = self.first + self.edges(1)
        return gl.maximum(unseen - self.first, 0), gl.maximum(edges - self.first, 0)

    @gluon.jit
    def side(self, q_block, score, h, BLOCK_Q: gl.constexpr, BLOCK_K: gl.constexpr):
        """Whether all of a q block's rows lie so far behind these keys that the score's tables do not reach, and
        whether they lie so far before them."""
        low, high = score.reach(score.data, self.b, h)
        row = q_block * BLOCK_Q
        return self.start + BLOCK_K - 1 - row <= low, self.start - row - BLOCK_Q + 1 >= high

    @gluon.jit
    def number(self, blocks, BLOCK_K: gl.constexpr):
        """This kv block among those of all batch rows."""
        if self.own_number is None:
            return self.b * blocks + self.start // BLOCK_K
        else:
            return self.own_number

    @gluon.jit
    def q_block_number(self, h, i, h_q, q_blocks):
        """A head's q block i among those of all heads and batch rows."""
        if self.packed is None:
            return (self.b * h_q + h) * q_blocks + i
        else:
            return h * q_blocks + self.packed.first_block + i

    @gluon.jit
    def row_of_q(self, row):
        """Batch row and row of q and dout."""
        if self.packed is None:
            return self.b, row
        else:
            return self.b * 0, self.packed.first_row + row

    @gluon.jit
    def row_of_k(self, key):
        """Batch row and row of k and v."""
        if self.packed is None:
            return self.b, key
        else:
            return self.b * 0, self.packed.first_key + key


@gluon.jit
def next_step(h, i, blocks):
    """The next head and block where each head has so many of them; cheaper than a division in every step."""
    last = i + 1 == blocks
    return gl.where(last, h + 1, h), gl.where(last, 0, i + 1)


@gluon.jit
def all_steps(consumer, state, block, group, first, end, MASKED: gl.constexpr):
    """The state of a consumer after its steps [first, end), of which those with the mask come first. `step` takes the
    state, the step's number, head and q block, the next q block with the mask, and whether it has the mask, or lies
    BEYOND."""
    if MASKED or block.BEYOND:
        masked = first + block.edges(group)
        blocks = block.edges(1)
        h = block.share * group
        i = gl.to_tensor(0)
        for n in tl.range(first, masked, disable_licm=True):
            tile = h, block.edge(i)
            h, i = next_step(h, i, blocks)
            state = consumer.step(state, n, *tile, block.edge(i), MASKED, False)
        blocks = block.steps(1) - blocks
        h = block.share * group
        i = gl.to_tensor(0)
        for n in tl.range(masked, end, disable_licm=True):
            state = consumer.step(state, n, h, block.inner(i), 0, False, block.BEYOND)
            h, i = next_step(h, i, blocks)
    else:
        for n in tl.range(first, end, disable_licm=True):
            h, q_block = block.step_at(n - first, group)
            state = consumer.step(state, n, h, q_block, 0, False, False)
    return state


@aggregate
class KVBlocks:
    """What decides which q blocks see a kv block: the same for all of a call."""

    mask: Value
    span_q: Value
    span_k: Value
    s_q: gl.tensor
    s_k: gl.tensor
    q_blocks: gl.tensor
    BLOCK_Q: gl.constexpr
    BLOCK_K: gl.constexpr
    score: Value
    """where blocks beyond the reach of its tables have steps of their own; else None"""
    OWN_EDGES: gl.constexpr
    """see KVBlock"""

    @gluon.jit
    def at(self, b, h_k, share, start, number):
        """The KVBlock of the keys from `start` on of batch row or sequence b; packed, it is kv block `number` of all.

        After the last key, where programs without a tile have theirs, a packed one has no rows and no keys, and the
        last q block of all, which is no sequence's.
        """
        if is_packed(self.span_k):
            _, first_row, _, rows = extent(self.span_q, b, self.s_q)
            _, first_key, there, keys = extent(self.span_k, b, self.s_k)
            first_block = blocks_before(self.span_q, b, first_row, self.BLOCK_Q)
            if start >= self.s_k:
                rows = rows * 0
                keys = rows
                there = rows
                first_block = self.q_blocks - 1
            b = numbered(self.span_k, b)
            packed = PackedPlace(first_row, first_key, first_block, there)
            own_number = number
        else:
            rows = used_length(self.span_q, b, self.s_q)
            keys = used_length(self.span_k, b, self.s_k)
            packed = None
            own_number = None
            number = start // self.BLOCK_K
        if self.mask.block_sparse:
            own_number = block_list_number(self.mask.block_lists, b, share, number)
            block_list, some, tiles = load_block_list(self.mask.block_lists, own_number)
            none = (tiles == 0).to(gl.int32)  # no row sees these keys: one block, all masked
            end = tiles + none
            return KVBlock(
                b, h_k, share, start, rows, keys, end * 0, some + none, end, end, packed, block_list, own_number,
                False, False,
            )  # fmt: skip
        else:
            first, core, core_end, end = self.visit_range(b, start, rows, keys)
            BEYOND: gl.constexpr = self.score is not None
            if BEYOND:
                core, core_end = self.in_reach(b, share, start, first, core, core_end, end)
            return KVBlock(
                b, h_k, share, start, rows, keys, first, core, core_end, end, packed, None, own_number,
                self.OWN_EDGES, BEYOND,
            )  # fmt: skip

    @gluon.jit
    def in_reach(self, b, h, start, first, core, core_end, end):
        """Which q blocks are in reach of the tables of head h's score, or need the mask: one interval."""
        low, high = self.score.reach(self.score.data, b, h)
        BLOCK_Q: gl.constexpr = self.BLOCK_Q
        # See `KVBlock.side`. Shifts round down, as negative numbers do not by division.
        near = (start - high + 1) >> log2(BLOCK_Q)
        near_end = (start + self.BLOCK_K - 1 - low + BLOCK_Q - 1) >> log2(BLOCK_Q)
        near = gl.minimum(gl.maximum(near, first), end)
        near_end = gl.minimum(gl.maximum(near_end, near), end)
        near = gl.where(core > first, first, gl.minimum(near, core_end))
        near_end = gl.where(core_end < end, end, gl.maximum(near_end, core))
        return near, near_end

    @gluon.jit
    def visit_range(self, b, start, rows, keys):
        """Which q blocks see some of these keys, [first, end), and which of them all, [core, core_end)."""
        BLOCK_Q: gl.constexpr = self.BLOCK_Q
        # [BLOCK_K]
        kv_idx = start + gl.arange(0, self.BLOCK_K, gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
        lo, hi, core_lo, core_hi = self.mask.rows_of(self.mask.data, b, kv_idx, keys - rows)
        # Rows that are not in use need no mask: their -lse is -inf.
        whole = gl.cdiv(rows, BLOCK_Q) * BLOCK_Q
        core_hi = gl.where(core_hi >= rows, whole, core_hi)
        hi = gl.minimum(hi, rows)
        first, core, core_end, end = tile_range(lo, hi, core_lo, core_hi, kv_idx < keys, whole, BLOCK_Q)
        if start + self.BLOCK_K > keys:  # some keys are not in use, and only the mask masks them
            core = end
            core_end = end
        if end <= first:  # no row sees these keys: one block, all masked, so that no loop is empty
            first = first * 0
            core = first + BLOCK_Q
            core_end = core
            end = core
        return first // BLOCK_Q, core // BLOCK_Q, core_end // BLOCK_Q, end // BLOCK_Q
