"""How the forward walks over a list of tiles: from its end to its beginning, as over an interval of them."""

# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from saccade.backends.device.lists_kernel import list_number, list_of


@gluon.jit
def list_of_item(mask, pipe, b, h, row):
    """The number of the list of the work item that holds `row` of query head h; items with lists have one head."""
    return list_number(mask.lists, b, h, row // (pipe.shape.ROWS * pipe.shape.CONSUMERS))


@gluon.jit
def work_list(mask, pipe, b, h, row):
    """Where the list of a work item begins, if it has one."""
    if mask.listed:
        listing, _, _ = list_of(mask.lists, list_of_item(mask, pipe, b, h, row))
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
