"""Work items: the numbers by which the producer tells the consumers what to do, and how a consumer reads them."""

# No `from __future__ import annotations` here: an aggregate reads its fields' types.
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from saccade.backends.device.block_lists_kernel import block_list_number, load_block_list
from saccade.backends.device.sequences import is_packed
from saccade.backends.hopper.shim import Value, aggregate

# Batch row (-1: no more work), key head, first head of its group, first row, the tiles of keys [LO, HI) that are
# loaded, and four numbers for each consumer from CONSUMER on.
BATCH, KEY_HEAD, IN_GROUP, ROW, LO, HI, CONSUMER = (gl.constexpr(i) for i in range(7))
# Packed sequences, whose lengths are not where the batch row says, also have the first row, how many rows there are,
# how many of them are in use, and how many keys.
FIRST_ROW, THERE, USED, KEYS = (gl.constexpr(18 + i) for i in range(4))
# With block lists they also have which of a head's lists is the item's; where keys are cut, which part it has.
BLOCK, PART = gl.constexpr(22), gl.constexpr(23)


@gluon.constexpr_function
def numbers_of_item(packed, listed, split):
    """How many numbers a work item has."""
    if split:
        return 24
    if not packed:
        return 18
    return 23 if listed else 22


@aggregate
class WorkTile:
    """A consumer's part of a work item. Its rows see the tiles of keys [first, end) of those that are loaded, [lo, hi),
    and need the mask in [first, core) and [core_end, end)."""

    part: gl.tensor
    """which of all consumers' parts of slots has its q"""
    h_k: gl.tensor
    in_group: gl.tensor
    row: gl.tensor
    lo: gl.tensor
    hi: gl.tensor
    first: gl.tensor
    core: gl.tensor
    core_end: gl.tensor
    end: gl.tensor
    block_list: Value


@gluon.jit
def put_tiles(slots, at, c, first, core, core_end, end):
    """Writes consumer c's numbers."""
    slots.put(at, CONSUMER + 4 * c, first)
    slots.put(at, CONSUMER + 4 * c + 1, core)
    slots.put(at, CONSUMER + 4 * c + 2, core_end)
    slots.put(at, CONSUMER + 4 * c + 3, end)


@gluon.jit
def work_tile(c: gl.constexpr, args, pipe, slot, at, b):
    """Consumer c's WorkTile, from record `at`."""
    in_group = pipe.slots.get(at, IN_GROUP)
    h_k = pipe.slots.get(at, KEY_HEAD)
    lo = pipe.slots.get(at, LO)
    hi = pipe.slots.get(at, HI)
    first = pipe.slots.get(at, CONSUMER + 4 * c)
    core = pipe.slots.get(at, CONSUMER + 4 * c + 1)
    core_end = pipe.slots.get(at, CONSUMER + 4 * c + 2)
    end = pipe.slots.get(at, CONSUMER + 4 * c + 3)
    if args.parts is not None:
        first = gl.maximum(first, lo)
        end = gl.minimum(end, hi)
        core = gl.minimum(gl.maximum(core, first), end)
        core_end = gl.minimum(gl.maximum(core_end, first), end)
    if end <= first:  # all tiles are masked: takes the last one that is loaded
        first, core, core_end, end = hi - 1, hi, hi, hi
    if not args.mask.lower:  # one run of tiles with the mask, from core on, and one without
        core = gl.where(core < core_end, core_end, first)
        core_end = core
    row = pipe.slots.get(at, ROW) + c * pipe.shape.ROWS
    block_list, _, _ = block_list_of(args, pipe, at, b, h_k * args.group + in_group, row)
    part = slot * pipe.shape.CONSUMERS + c
    return WorkTile(part, h_k, in_group, row, lo, hi, first, core, core_end, end, block_list)


@gluon.jit
def block_list_of(args, pipe, at, b, h, row):
    """Where the block list of the work item that holds `row` of query head h begins, how many of its tiles are partial,
    and how many there are. Items with lists have one head. Packed, record `at` knows which list it is."""
    if args.mask.block_sparse:
        block = row // (pipe.shape.ROWS * pipe.shape.CONSUMERS)
        if is_packed(args.used_q):
            block = pipe.slots.get(at, BLOCK)
        return load_block_list(args.mask.block_lists, block_list_number(args.mask.block_lists, b, h, block))
    else:
        return 0, 0, 0


@gluon.jit
def tile_at(mask, block_list, hi, place):
    """The tile of keys at a place of [lo, hi): itself, or what the block list has there, counted from its end."""
    if mask.block_sparse:
        return gl.load(block_list + (hi - 1 - place))
    else:
        return place
