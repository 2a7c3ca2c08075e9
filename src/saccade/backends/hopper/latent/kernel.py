"""Latent attention on Hopper: 64 query rows of one key head, two consumers with half of out's columns each.

A tile of 64 keys is read once and is in shared memory as keys [64, 576], of which the first 512 columns are the values.
64 rows of out are half of a multiprocessor's registers, so there is no second tile of rows whose products could run
under a softmax. Instead the consumers take turns at the tiles, and each one's weights go through shared memory to the
other: the seesaw of FlashMLA (https://github.com/deepseek-ai/FlashMLA, docs/20250422-new-kernel-deep-dive.md). Here
tiles are added up in their order, so that no weight is rounded twice.
"""

# No `from __future__ import annotations` here: an aggregate reads its fields' types.
# pyright: reportArgumentType=false, reportCallIssue=false

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from saccade.backends.hopper.latent.load import NUMBERS, gathers, load
from saccade.backends.hopper.latent.mma import consume
from saccade.backends.hopper.latent.pipeline import HALF, Seesaw
from saccade.backends.hopper.pipeline import Slots, new_barriers
from saccade.backends.hopper.shim import Value, aggregate

RECORD = gl.constexpr(NUMBERS)


class LatentShape(NamedTuple):
    """How the latent kernel is cut: constants of a compiled kernel."""

    ROWS: Any
    """of the 64 rows those of one head"""
    REGISTERS: Any
    LOADER_REGISTERS: Any


@aggregate
class LatentArgs:
    """What the kernel is called with."""

    q_desc: Value
    k_desc: Value
    cache: Value
    """TensorArgs of the cache, where rows are gathered; else None"""
    out: Value
    lse: Value
    parts: Value
    part_lse: Value
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
    q_desc, k_desc, cache, out, lse, parts, part_lse, sink, used_q, used_k, pages, schedule, rules, tiles, blocks, h_k,
    group, s_q, s_k, scale, shape,
):  # fmt: skip
    """out = softmax(q k^T) k[:, :512] and lse, or None, of sequences that a line has whole; of others those of each
    part, without the sink: parts float32 (parts, tiles, 64, 512), part_lse (parts, tiles, 64).

    q_desc: (b, h_k, group, s_q, 576) in tiles of 64 rows, which are ROWS rows of 64 / ROWS heads; k_desc: (pages, h_k,
    page_size, 576) in boxes; cache: the same as TensorArgs where rows are gathered. rules: the mask and the score. A
    program for each tile of rows and each line.
    """
    DTYPE: gl.constexpr = k_desc.dtype
    ROWS: gl.constexpr = shape.ROWS
    args = LatentArgs(
        q_desc, k_desc, cache, out, lse, parts, part_lse, used_q, used_k, pages, schedule, rules[0], rules[1], sink,
        tiles, blocks, h_k, group, s_q, s_k, scale, shape,
    )  # fmt: skip
    GATHERS: gl.constexpr = gathers(pages.size)
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
        new_barriers(4, 128) if GATHERS else new_barriers(5, 1),
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
