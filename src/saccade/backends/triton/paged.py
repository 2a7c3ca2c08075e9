"""Paged caches: how the work is cut, and the launches.

Nothing here reads a length: the device computes all that depends on lengths, so that a CUDA graph may be
replayed with others. The table's width bounds them.
"""

# pyright: reportCallIssue=false

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from saccade.backends import Launches, Outputs, Part
from saccade.backends.device import block_d, descale, masks, positions, scores
from saccade.backends.device.arguments import TileShape, precision
from saccade.backends.device.launch import Launch, cached_launch, multiprocessors, nothing_seen, on_device, per_row
from saccade.backends.device.merge_kernel import FEW_PARTS, merge_launch
from saccade.backends.device.records import FLAGS, UNITS, TensorArgs, runtime_int
from saccade.backends.triton import launch
from saccade.backends.triton.config import WIDE, TileConfig, formula
from saccade.backends.triton.paged_kernel import SplitArgs, paged_kernel
from saccade.backends.triton.paged_tiles import PageTable
from saccade.call import Call
from saccade.call.descale import EIGHT_BITS
from saccade.layouts import Layout, Paged
from saccade.util.memory_layout import ALIGNMENT

MAX_SPLITS = 128
LEAST_TILES = 2
"""Tiles of keys that a part has at least: fewer are not worth their own merge."""
PROGRAMS = 2
"""Programs that a multiprocessor runs at a time, by their shared memory."""
FEW_ROWS = 16
"""Flat rows of a tile for decoding."""
LEAST_ROWS = 8
"""Flat rows of a tile against 8-bit pages, on NVIDIA's tensor cores."""
LEAST_SLICED = 64
"""Keys of a tile at least, four slices of 16."""
FULL = 256
"""Programs that fill a GPU, about."""
FIXED_ROWS = 64
"""Flat rows of a tile with `num_splits=1`, whatever the number of queries: another tile has other bits."""
LATENT_TILE = TileConfig(FEW_ROWS, 32, 4, 3)
"""The tile of values that are read with keys: its 36 KB leave room for two programs. With `num_splits=1` for all
keys of this width."""
LONG, FEW = 2048, 2048
"""Keys from which, and sequences below which, it is worth its while to put these in order."""


@dataclass(frozen=True)
class SplitKV:
    """How a call is cut into programs."""

    config: TileConfig
    tiles: int
    """of query rows, of all sequences; an upper bound where sequences are end to end"""
    splits: int
    slots: int
    """programs that run at a time"""
    fair: bool
    """Sequences have parts by their lengths, up to `splits`."""
    edges: bool
    """Tiles inside of the mask's core are plain ones: where products take time, or the mask's function does."""
    bits: int
    """of lengths, by which sequences are put in order, or 0"""
    word: int
    """bytes of 8-bit values that are read at once"""
    slices: int
    """of a tile's keys, each a warp's own, or 1"""


def columns(d: int, dtype: torch.dtype) -> tuple[int, int]:
    """The columns of k in a first tile, and in one of the rest: powers of two, as padding more than 256 costs too much.
    8-bit tiles are one: their queries are scaled as a whole.

    >>> columns(192, torch.float16), columns(512, torch.float16), columns(576, torch.float16)
    ((256, 0), (512, 0), (512, 64))
    """
    first = 1 << d.bit_length() - 1
    return (first, block_d(d - first)) if WIDE < d != first and dtype not in EIGHT_BITS else (block_d(d), 0)


def reads_once(call: Call) -> bool:
    """Whether the kernel takes values from its tile of keys."""
    first, _ = columns(call.k.shape[3], call.k.dtype)
    return call.latent and call.k.dtype not in EIGHT_BITS and first == block_d(call.v.shape[3])


def split_kv(call: Call, processors: int) -> SplitKV:
    """The split of the keys, from shapes alone."""
    layout, h_k = call.layout, call.k.shape[1]
    b, _, s_q, _ = call.q.shape
    flat, sequences_ = s_q * call.group, layout.sequences
    packed = layout.cu_seqlens_q is not None
    tile = config(call, -(-flat // sequences_) if packed else flat)
    if packed:
        tiles = flat // tile.block_q + sequences_ + 1
        least = max(flat // tile.block_q, sequences_)
    else:
        tiles = least = b * -(-flat // tile.block_q)
    # With room for rounding, where it was measured: four parts of each of 64 sequences, not five.
    slots = processors * PROGRAMS * (15 if call.k.shape[3] > 2 * WIDE else 16) // 16
    room = layout.capacity(call.k.shape[2])
    if layout.num_splits is None:
        programs = slots if sequences_ == 1 else 2 * slots  # as lengths may differ
        most = min(programs // (least * h_k), room // (tile.block_k * LEAST_TILES), MAX_SPLITS)
        splits = max(1, most)
    else:
        splits = min(layout.num_splits, MAX_SPLITS)
    edges = layout.num_splits != 1 and (tile.block_q > FIXED_ROWS or asks(call))
    # The longest first, where programs come one after the other, and may be long.
    ordered = not packed and splits == 1 and tiles * h_k >= 2 * slots and room >= LONG and sequences_ < FEW
    bits = -(-room.bit_length() // 4) * 4 if ordered else 0
    return SplitKV(tile, tiles, splits, slots, layout.num_splits is None, edges, bits, word(call), slices(call, tile))


def config(call: Call, rows: int) -> TileConfig:
    """Tiles for about so many flat rows of a sequence: 32 KB of keys and values, three times, so that two programs have
    room in a multiprocessor."""
    spec, layout = call.spec, call.layout
    if spec.dtype == "fp32":
        return formula("forward", spec)
    wide, eight = max(block_d(spec.d), block_d(spec.d_v)), call.k.dtype in EIGHT_BITS
    block_k = 128 if wide <= 64 else 64 if wide <= 128 else 16 if wide == 2 * WIDE else 32  # above, v is part of k
    # Converted tiles need registers.
    most = FIXED_ROWS // 2 if eight and wide > WIDE else FIXED_ROWS
    fixed = TileConfig(most, block_k, 8 if wide > (128 if eight else WIDE) else 4, 3)
    if layout.num_splits == 1:
        return fixed if wide <= 2 * WIDE else LATENT_TILE
    if wide > WIDE and reads_once(call):
        return LATENT_TILE if rows <= FEW_ROWS else TileConfig(FIXED_ROWS, 64, 8, 2)
    if wide > WIDE:
        few = TileConfig(FEW_ROWS, 32, 8, 4) if eight else TileConfig(FEW_ROWS, 16, 4, 4)
        return few if rows <= FEW_ROWS else fixed
    if rows <= FEW_ROWS:
        return _sliced(call, rows, min(2 * block_k, 128)) if eight else TileConfig(FEW_ROWS, block_k, 4, 4)
    if rows > FIXED_ROWS and wide <= 128:
        return TileConfig(128, block_k, 8, 3)
    # What a predicate's answers pass through leaves no room in shared memory for a second program beside three stages.
    return replace(fixed, stages=2) if 64 < wide <= 128 and not eight and asks(call) else fixed


def asks(call: Call) -> bool:
    """Whether tiles on the mask's edge ask its function: more than a comparison, where the hull is not the core."""
    return call.mask is not None and not call.mask.exact


def _sliced(call: Call, rows: int, block_k: int) -> TileConfig:
    """Tiles of few rows against 8-bit pages: as many bytes as of 16 bits, which blocks of a Descale hold whole, or half
    of them where even these are too few for all multiprocessors."""
    block_q = FEW_ROWS if rows > LEAST_ROWS or not descale.converts(call.q.device) else LEAST_ROWS
    half = block_k // 2
    programs = call.layout.sequences * call.k.shape[1] * (
        call.layout.capacity(call.k.shape[2]) // (half * LEAST_TILES)
    )  # fmt: skip
    if half >= LEAST_SLICED and programs < FULL:
        return TileConfig(block_q, half, 4, 4)
    return TileConfig(block_q, block_k, 4, 3)


def forward(call: Call, parts: Sequence[Part], lse: bool = True) -> Outputs:
    """out (b, h_q, s_q, d_v) and, if asked for, lse and max_scores (b, h_q, s_q); queries end to end are one row of
    t_q.

    parts: the call itself, or several over disjoint keys whose sum it is, with the same rows in the same order:
    (b, h_q, s_q) or (1, h_q, b s_q). What they find goes into one memory, and is added up once.
    """
    q, layout = call.q, call.layout
    out = call.empty_out()
    row_lse, top = per_row(call, lse), per_row(call, call.max_scores)
    if not layout.sequences:
        return out if call.keeps_tail else out.zero_(), nothing_seen(row_lse), nothing_seen(top)
    if not out.numel():
        return out, row_lse, top
    with on_device(q):
        if len(parts) > 1 or (split := _split(*parts[0])).splits > 1:
            _merged(parts, call, (out, row_lse, top))
        else:
            ((_, launches),) = parts
            target = launch.operand(call, launches, "out", out)
            tensors = *_operands(call, launches), target, row_lse, top, *arguments(call, split)
            _launch("whole", parts[0], split, (row_lse is None, target.unit.value), tensors)
    return out, row_lse, top


def _merged(parts: Sequence[Part], whole: Call, outputs: Outputs) -> None:
    """Runs calls over disjoint keys and writes what they are together."""
    (out, row_lse, row_top), splits = outputs, [_split(*part) for part in parts]
    q, count = whole.q, sum(split.splits for split in splits)
    rows = count, q.shape[0], q.shape[2], q.shape[1]
    found = torch.empty(*rows, whole.v.shape[3], dtype=torch.float32, device=q.device)
    lses = torch.empty(rows, dtype=torch.float32, device=q.device)
    tops = None if row_top is None else torch.empty_like(lses)
    first = 0
    for part, split in zip(parts, splits, strict=True):
        at = slice(first, first + split.splits)
        targets = [x if x is None or len(parts) == 1 else x[at] for x in (found, lses, tops)]
        form = [x is None or x.data_ptr() % ALIGNMENT for x in targets]
        tensors = *_operands(*part), *targets, *arguments(part[0], split, parted=True)
        _launch("part", part, split, form, tensors)
        first += split.splits
    end, target = whole.layout.cu_seqlens_q[-1:] if whole.keeps_tail else None, TensorArgs.of(out)
    form = row_lse is None, end is None, target.unit.value, target.wide.value, out.dtype, out.data_ptr() % ALIGNMENT
    tensors = found, lses, tops, target, row_lse, row_top, end, lses[0].numel(), count, *q.shape[1:3]
    _launch("merge" if count <= FEW_PARTS else "merge many", parts[0], splits[0], form, tensors)


def _split(call: Call, launches: Launches) -> SplitKV:
    split = launches.get("split_kv")
    if split is None:
        split = launches["split_kv"] = split_kv(call, multiprocessors(call.q.device))
    return split


def _operands(call: Call, launches: Launches) -> tuple[TensorArgs | None, ...]:
    """q, k and v, which is None where the kernel takes it from k."""
    v = None if reads_once(call) else launch.operand(call, launches, "v", call.v)
    return launch.operand(call, launches, "q"), launch.operand(call, launches, "k", call.k), v


def arguments(call: Call, split: SplitKV, parted: bool = False) -> tuple[Any, ...]:
    """The kernel's arguments after its results; `parted`: the results are merged with others."""
    q, k, layout = call.q, call.k, call.layout
    assert isinstance(layout, Paged)
    rows = q.shape[0] * q.shape[1] * q.shape[2]
    flags = FLAGS[call.keeps_tail and not parted], FLAGS[split.fair], UNITS[split.word]
    flags = *flags, FLAGS[descale.converts(q.device)], UNITS[split.slices]
    numbers = SplitArgs(*map(runtime_int, (split.tiles, split.splits, rows, split.slots)), *flags)
    records = page_table(layout, k), numbers, masks.device_args(call), scores.device_args(call)
    records = *records, descale.device_args(call)
    sink = None if call.sink is None else call.sink.contiguous()
    return sink, *positions.spans(call), *records, q.shape[1], q.shape[2], call.scale


def page_table(layout: Paged, cache: Tensor) -> PageTable:
    """The device form of the block table; cache is (pages, h, page_size, d)."""
    table = layout.block_table if layout.block_table.stride(1) == 1 else layout.block_table.contiguous()
    numbers = table.stride(0), layout.sequences, layout.capacity(cache.shape[2]), cache.shape[0]
    return PageTable(table, *map(runtime_int, numbers))


def prepare(name: str, call: Call, split: SplitKV) -> Launch:
    q, layout, tile = call.q, call.layout, split.config
    assert isinstance(layout, Paged)
    if name.startswith("merge"):
        return merge_launch(call, FEW_PARTS + (name == "merge many"), 2 * MAX_SPLITS)
    first, rest = map(tl.constexpr, columns(q.shape[3], call.k.dtype))
    shape = TileShape.of(call, tile.block_q, tile.block_k)
    if rest.value:
        shape = shape._replace(BLOCK_D=first, REST=rest)
    features = name == "part", LEAST_TILES, split.edges, many(layout), split.bits
    grid = split.tiles * split.splits * call.k.shape[1], 1, 1
    return Launch(paged_kernel, grid, (shape, call.k.shape[2], *features), tile.warps, tile.stages, 1)


def slices(call: Call, tile: TileConfig) -> int:
    """A tile's slices, one for each warp, where few rows read 8-bit pages; else 1."""
    plain = call.k.element_size() > 1 or call.q.dtype == torch.float32
    wide = max(call.k.shape[3], call.v.shape[3]) > WIDE
    return 1 if plain or wide or tile.block_q > FEW_ROWS else tile.warps


def word(call: Call) -> int:
    """Bytes of 8-bit values that few rows read at once: as many as leave 16 columns."""
    d_v = call.v.shape[3]
    return next(n for n in (4, 2, 1) if d_v % n == 0 and (n == 1 or block_d(d_v) >= 16 * n))


def many(layout: Layout) -> int:
    """Offsets of sequences that a program reads at once: few different numbers, as each compiles anew."""
    return next(n for n in (32, 256, 2048, 1 << 14, 1 << 17) if n > layout.sequences)


def _launch(name: str, part: Part, split: SplitKV, form: Iterable[Any], tensors: tuple[Any, ...]) -> None:
    """form: what Triton specialises for and the Call's key does not hold."""
    call, launches = part
    launch = cached_launch(launches, (name, precision(), *form), lambda: prepare(name, call, split))
    launch(call.q.device.index, tensors)
