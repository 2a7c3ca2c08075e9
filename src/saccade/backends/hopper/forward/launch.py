"""Launches the forward of a Call: TMA descriptors, the order of work, outputs."""

# pyright: reportCallIssue=false

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from saccade.backends import Launches, Outputs, configs
from saccade.backends.device import block_lists, descale, distance_tables, dropout, masks, positions, scores
from saccade.backends.device.gradients import padded
from saccade.backends.device.launch import cached_launch, multiprocessors, on_device, per_row, without_scores
from saccade.backends.device.merge_kernel import merge_launch
from saccade.backends.device.records import PackedRowsArgs, TensorArgs
from saccade.backends.device.replay import empty_strided
from saccade.backends.hopper.captured_tile import CapturedTile, captured_tile
from saccade.backends.hopper.forward import load, transpose, work_item
from saccade.backends.hopper.forward.config import (
    CAPTURED_CONSUMERS,
    MAX_SPLITS,
    THREE_CONSUMERS,
    TWO_CONSUMERS,
    ForwardConfig,
    block_dv,
    chunk,
    chunks,
    formula,
    forward_config,
    key_splits,
    last_chunk,
    parts_of_out,
)
from saccade.backends.hopper.forward.epilogue import UnseeingRowsArgs
from saccade.backends.hopper.forward.kernel import ForwardShape, forward_kernel
from saccade.backends.hopper.tma_launch import OPTIONS, TMALaunch, counter, shape_of
from saccade.call import Call, aligned
from saccade.call.call import Arrivals
from saccade.layouts import Packed, Paged, empty_like_rows

STRIPE_BYTES = 128
"""Bytes of adjacent columns in a swizzled tile of shared memory."""
PACK_GQA_GAIN = 1.1
"""Heads share a tile if the number of tiles falls by this factor."""
PACKED_GAIN = 1.02
"""The same for packed sequences of unknown lengths; half of a tile is empty in the mean."""
SHORT_GAIN = 1.1
"""Another number of consumers works on short rows if the scores of a program fall by this factor (notes/gluon.md)."""


def forward(
    call: Call, launches: Launches, lse: bool, tile: ForwardConfig | None = None, arrivals: Arrivals | None = None
) -> Outputs:
    """out (b, h_q, s_q, d_v) and, if asked for, lse and max_scores (b, h_q, s_q)."""
    out = _destination(call)
    if not aligned(call.q):  # which the Spec of a cache leaves open
        call = call.replace(q=padded(launches, call.q))
    q, k, v = call.q, call.k, call.v
    row_lse, top = per_row(call, lse), per_row(call, call.max_scores)
    if not out.numel():
        return out, row_lse, top
    packed = packed_sequences(call)
    if not k.shape[2] or packed == 0:
        return without_scores(call, out, row_lse, top)
    with on_device(q):
        parts = empty_parts(call, launches)
        distances = distance_tables.tables(call, launches, fast=True)
        captured = captured_rows(call)
        score = score_args(call, distances, captured)
        # What is compiled for, and the Call's key does not hold.
        key = (
            "forward", lse, score.identity.value, score.linear.value, score.large_scores.value,
            score.constant_beyond.value,
        )  # fmt: skip
        key = *key, captured and captured.key, arrivals is None
        cached = launches.get(key) if tile is None else None
        if cached is None:
            config = tile or config_of(call, score, captured)
            cached = prepare(call, out, config, multiprocessors(q.device), captured, arrivals is not None), config
            if tile is None:
                launches[key] = cached
        launch, config = cached
        rows = rows_of_a_consumer(call, config.consumers) * config.consumers
        table = None if packed is None else positions.table(call, launches, 0, rows)
        mask = mask_args(call, launches, config)
        found, rows_found = (None, (row_lse, top)) if parts is None else (load.Parts.of(parts[0]), parts[1:])
        given = arguments(call, out, *rows_found, counter(q.device), table, mask, score, found, captured, arrivals)
        if call.descale is not None and not config.transposer_registers:
            v = transpose.transposed(call, launches)
        launch(q.device.index, operands(q, k, v, out, captured), given, call.scale)
        if parts is not None:
            _merge(call, launches, parts, (out, row_lse, top))
    return out, row_lse, top


def captured_rows(call: Call) -> CapturedTile | None:
    """The captured tensor of which score functions take tiles, or None. A consumer's rows must be one head's, and
    operands 16-bit."""
    if call.descale is not None or rows_of_a_consumer(call, CAPTURED_CONSUMERS) != 64:
        return None
    return captured_tile(call)


def config_of(call: Call, score: scores.DeviceScore, captured: CapturedTile | None) -> ForwardConfig:
    """The ForwardConfig of a call."""
    weight = scores.weight(call, score) if captured is None else "tile"
    config = forward_config(call.spec, configs.gpu_of(call.q.device), weight)
    return for_rows(call, config, multiprocessors(call.q.device))


def operands(q: Tensor, k: Tensor, v: Tensor, out: Tensor, captured: CapturedTile | None) -> tuple[Tensor, ...]:
    """The tensors of the TMA descriptors."""
    return (q, k, v, out) if captured is None else (q, k, v, out, captured.x)


PartTensors = tuple[Tensor, Tensor, Tensor | None]
"""Float32 out (splits, b, s_q, h_q, d_v), LSE and largest scores (splits, b, s_q, h_q)."""


def empty_parts(call: Call, launches: Launches) -> PartTensors | None:
    """Memory for the results of parts, or None if keys are not split."""
    splits = launches.get("splits")
    if splits is None:
        splits = launches["splits"] = key_splits(call, multiprocessors(call.q.device))
    if splits == 1:
        return None
    b, h_q, s_q, _ = call.q.shape
    make = {"dtype": torch.float32, "device": call.q.device}
    found, lses = torch.empty(splits, b, s_q, h_q, call.v.shape[3], **make), torch.empty(splits, b, s_q, h_q, **make)
    return found, lses, torch.empty_like(lses) if call.max_scores else None


def _merge(call: Call, launches: Launches, parts: PartTensors, outputs: Outputs) -> None:
    """Merges the parts into the outputs."""
    found, lses, tops = parts
    out, row_lse, row_top = outputs
    end = call.layout.cu_seqlens_q[-1:] if call.keeps_tail and out is call.out else None
    target = TensorArgs.of(out)
    # What is compiled for, and the Call's key does not hold.
    key = "merge", row_lse is None, end is None, target.unit.value, target.wide.value, out.dtype
    launch = cached_launch(launches, key, lambda: merge_launch(call, lses.shape[0], MAX_SPLITS))
    numbers = lses[0].numel(), lses.shape[0], *call.q.shape[1:3]
    launch(out.device.index, (found, lses, tops, target, row_lse, row_top, end, *numbers))


def arguments(
    call: Call, out: Tensor, lse: Tensor | None, max_scores: Tensor | None, drawn: Tensor, table: Tensor | None,
    mask: masks.DeviceMask, score: scores.DeviceScore, parts: load.Parts | None = None,
    captured: CapturedTile | None = None, arrivals: Arrivals | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    """The kernel's arguments between the descriptors and the numbers. Packed queries have a table of their tiles. `lse`
    and `max_scores` are those of parts, if there are some."""
    sink = None if call.sink is None else call.sink.contiguous()
    keeps_tail = call.keeps_tail and out is call.out
    unseeing = UnseeingRowsArgs.of(out) if parts is None and _hides_rows(call) else None
    rows = unseeing if table is None else PackedRowsArgs.of(out, keeps_tail)
    tensors = rows, lse, max_scores, sink, drawn
    no_descriptor = () if captured else (None,)
    captured_args, arrival_args = captured and captured.args, arrivals and arrivals.args
    records = load.device_args(call, parts), mask, score, captured_args, arrival_args, dropout.device_args(call)
    return *no_descriptor, *tensors, *positions.spans(call, table), *records, descale.device_args(call)


def _hides_rows(call: Call) -> bool:
    """Whether the scheduler passes over work items whose rows see no key. It does for masks with a lower bound per row,
    as left padding makes. Other masks hide few tiles. Kernels with sums of 256 columns have no registers for it."""
    mask = call.mask
    wide = max(call.q.shape[3], call.v.shape[3]) > 192
    return mask is not None and mask.has_lower_bound and not mask.block_sparse and call.bounds_per_row and not wide


def _destination(call: Call) -> Tensor:
    """Memory for the result: the caller's if TMA can write to it, else new."""
    if call.out is not None and call.out.dtype == call.out_dtype and aligned(call.out):
        return call.out
    return empty_like_rows(call.q, call.v.shape[3], call.out_dtype, empty_strided)


def mask_args(call: Call, launches: Launches, config: ForwardConfig) -> masks.DeviceMask:
    """The device form of the mask, with lists of the tiles of this ForwardConfig."""
    if call.layout.has_pages:  # whose tiles are tested one by one: lists of one call would cost more
        block_sparse = call.mask is not None and call.mask.block_sparse
        return masks.device_args(call)._replace(all_tiles=masks.FLAGS[block_sparse])
    return block_lists.device_args(call, launches, 64 * config.consumers, config.block_k)


def prepare(
    call: Call, out: Tensor, config: ForwardConfig, processors: int, captured: CapturedTile | None, arriving: bool
) -> TMALaunch:
    """The launch for all calls of the Call's key; arriving: for calls whose keys arrive while they run."""
    q, k, v = call.q, call.k, call.v
    b, _, s_q, d = q.shape
    h_k, (_, s_k), d_v = k.shape[1], positions.lengths(call), v.shape[3]
    packed = packed_sequences(call) is not None
    paged = call.layout.has_pages
    rows = rows_of_a_consumer(call, config.consumers)
    heads = 64 // rows
    columns = block_dv(d_v)
    # Of pages, in whose boxes one stripe of columns comes at a time.
    stripe = STRIPE_BYTES // q.element_size()
    box, width = (load.box_rows(k.shape[2], config.block_k), stripe) if paged else (config.block_k, 256)
    values = shape_of(v, (1, 1, box, min(columns, width)))
    if call.descale is not None and not config.transposer_registers:
        values = shape_of(transpose.empty(call, torch.device("meta")), (1, 1, columns, config.block_k))
    shapes = [
        shape_of(q, (1, 1, heads, rows, chunk(d)), call.group),
        shape_of(k, (1, 1, box, min(chunk(d), width))),
        values,
        shape_of(out, (1, 1, heads, rows, config.out_columns or columns), call.group),
    ]
    if captured is not None:
        shapes.append(shape_of(captured.x, (1, 1, 64, config.block_k)))
    blocks = -(-s_q // (rows * config.consumers))
    packs = -(-call.group // heads)
    section = work_item.section_size(b * h_k * packs, packs, s_k * (d + d_v) * q.element_size(), blocks, processors)
    if call.mask is None:
        section = packs
    if packed:
        blocks = positions.slots(call, 0, rows * config.consumers)
        section = work_item.L2_BYTES // ((d + d_v) * q.element_size()) if call.mask is not None else 0
        if arriving:  # few key heads in turns, as they come
            section = processors // packs
    items = blocks * b * h_k * packs
    causal = call.mask is not None and call.mask.kind == "causal" and not packed
    late = work_item.late_rows(blocks, b * h_k * packs, section, processors) if causal else 0
    numbers = blocks, b * h_k * packs, section, blocks - late, call.group, s_q, s_k
    dv_parts, dv_last = parts_of_out(d_v, config, q.element_size())
    sizes = {
        "D_CHUNK": chunk(d), "D_CHUNKS": chunks(d), "D_LAST": last_chunk(d, q.element_size()),
        "BLOCK_K": config.block_k, "BLOCK_DV": columns, "ROWS": rows, "CONSUMERS": config.consumers,
        "SLOTS": config.slots, "STAGES": config.stages, "TURNS": bool(config.turns), "REGISTERS": config.registers,
        "LOADER_REGISTERS": config.loader_registers, "OVERLAP": bool(config.overlap), "DV_PARTS": dv_parts,
        "TRANSPOSER_REGISTERS": config.transposer_registers, "DV_LAST": dv_last,
        "OUT_COLUMNS": config.out_columns,
    }  # fmt: skip
    constants = {"shape": _shape(**sizes)}
    grid = min(items * key_splits(call, processors), processors), 1, 1
    return TMALaunch(forward_kernel, grid, shapes, numbers, constants, OPTIONS)


@cache
def _shape(**sizes: Any) -> ForwardShape:
    return ForwardShape(**{name: tl.constexpr(value) for name, value in sizes.items()})


def packed_sequences(call: Call) -> int | None:
    """The number of packed query sequences; None for a batch."""
    match call.layout:
        case Packed() | Paged(cu_seqlens_q=Tensor()) as layout:
            return layout.sequences
    return None


def rows_of_a_consumer(call: Call, consumers: int) -> int:
    """The number of a consumer's 64 rows that belong to one head."""
    # A list is of one head; with dropout 16 rows that belong together are those of one.
    block_sparse = call.mask is not None and call.mask.block_sparse and not call.layout.has_pages
    if call.dropout is not None or block_sparse:
        return 64
    return rows_of_a_head(call.group, call.q.shape[2], consumers, packed_sequences(call))


def rows_of_a_head(group: int, s_q: int, consumers: int, packed: int | None = None) -> int:
    """The number of a consumer's 64 rows that belong to one head: all, or fewer if heads of a group share a tile. s_q:
    rows of a batch row, or of all `packed` sequences together."""
    heads = min(64, 1 << (group - 1).bit_length())
    rows = 64 // heads
    plain = group * tiles_of_rows(s_q, 64 * consumers, packed)
    pack_gqa = -(-group // heads) * tiles_of_rows(s_q, rows * consumers, packed)
    gain = PACK_GQA_GAIN if packed is None else PACKED_GAIN
    return rows if pack_gqa * gain <= plain else 64


def tiles_of_rows(s_q: int, rows: int, packed: int | None) -> float:
    """The number of tiles of `rows` rows; for packed sequences, of which only the mean length is known, its mean."""
    if packed is None:
        return -(-s_q // rows)
    return max(packed, (s_q + packed * (rows - 1) / 2) / rows)


def for_rows(call: Call, config: ForwardConfig, processors: int) -> ForwardConfig:
    """The config with two consumers instead of three, or, at d = 72 to 96 without a mask, with three and tiles of 64
    keys, if the busiest program then has fewer scores; else `config`."""
    if call.layout.has_pages or call.layout.ragged_keys:
        return config
    if _is_narrow(config):
        other = TWO_CONSUMERS
    elif max(call.q.shape[3], call.v.shape[3]) <= 96 and call.mask is None and config == formula(96, 96):
        other = THREE_CONSUMERS
    else:
        return config
    work = [busy_rows(call, x.consumers, processors) * -(-call.k.shape[2] // x.block_k) for x in (config, other)]
    return other if work[0] * config.block_k >= SHORT_GAIN * work[1] * other.block_k else config


@cache
def _is_narrow(config: ForwardConfig) -> bool:
    """Whether it is that of head dims up to 64, whatever spills."""
    return replace(config, spill=0) == formula(64, 64)


def busy_rows(call: Call, consumers: int, processors: int) -> float:
    """The rows of all tiles of the busiest program, as if each saw all keys."""
    b, _, s_q, _ = call.q.shape
    h_k, s_k = call.k.shape[1:3]
    own = rows_of_a_consumer(call, consumers)
    items = b * h_k * -(-s_q // (own * consumers)) * -(-call.group * own // 64)
    rounds = -(-items // processors)
    causal = call.mask is not None and call.mask.kind == "causal"
    if causal and call.descale is None and not call.layout.tensors and s_q == s_k:  # of the keys half are seen
        rounds = max(1.0, items / processors / 2)
    return rounds * consumers * 64


def score_args(call: Call, tables: Sequence[Any] = (), captured: CapturedTile | None = None) -> scores.DeviceScore:
    """The device form of the score. The kernel takes a row's largest product for its largest score, which only a
    positive scale allows, and divides by it what is added; others go the way of a modification: `scores.ordinary`."""
    score = scores.device_args(call, fast=True, tables=tables, tma_tile=captured and captured.number)
    return score if scores.ordinary(call) else scores.without_shortcuts(score)
