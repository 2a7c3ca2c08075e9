"""How the forward walks over a list of tiles: from its end to its beginning, as over an interval of them."""

# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from saccade.backends.device.block_lists_kernel import block_list_number, load_block_list
from saccade.backends.device.sequences import is_packed
from saccade.backends.gluon.tile_scheduler import BLOCK


@gluon.jit
def list_of_item(mask, pipe, at, b, h, row, used_q):
    """The number of the list of the work item that holds `row` of query head h; items with lists have one head. Packed,
    its record `at` knows which it is."""
    if is_packed(used_q):
        return block_list_number(mask.lists, b, h, pipe.slots.get(at, BLOCK))
    else:
        return block_list_number(mask.lists, b, h, row // (pipe.shape.ROWS * pipe.shape.CONSUMERS))


@gluon.jit
def work_list(mask, pipe, at, b, h, row, used_q):
    """Where the list of a work item begins, if it has one."""
    if mask.listed:
        listing, _, _ = load_block_list(mask.lists, list_of_item(mask, pipe, at, b, h, row, used_q))
        return listing
    else:
        return 0


@gluon.jit
def listed_tile(mask, listing, hi, tile):
    """The tile at a place of [lo, hi): itself, or what the list has there."""
    if mask.listed:
        return gl.load(listing + (hi - 1 - tile))
    else:
        return tile
