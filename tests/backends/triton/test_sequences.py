"""Blocks of rows of packed sequences, as the device numbers them, against plain Python."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
import torch
import triton
import triton.language as tl

from saccade import Packed
from saccade.backends.device import positions
from saccade.backends.hopper.forward import work_item
from saccade.call import Call

BLOCK = 16


@triton.jit
def blocks_kernel(found, span, s, BLOCK: tl.constexpr):
    number = tl.program_id(0)
    batch, h, first, row, there, rows = positions.block_of_rows(span, 5, number, 7, s, BLOCK)
    place = found + number * 8
    tl.store(place, batch)
    tl.store(place + 1, h)
    tl.store(place + 2, first)
    tl.store(place + 3, row)
    tl.store(place + 4, there)
    tl.store(place + 5, rows)


@triton.jit
def places_kernel(found, span, heads, s, BLOCK: tl.constexpr, LAST_FIRST: tl.constexpr):
    b, h, _, start = positions.tile_of(span, heads, s, BLOCK, LAST_FIRST)
    place = found + tl.program_id(0) * 4
    tl.store(place, b)
    tl.store(place + 1, h)
    tl.store(place + 2, start)
    tl.store(place + 3, positions.table_index(span, tl.program_id(0), heads, start, BLOCK))


class Work(NamedTuple):
    """What an order of work items knows."""

    heads: Any
    section: Any
    packs: Any


@triton.jit
def items_kernel(found, span_q, span_k, heads, section, packs, s_q, s_k, BLOCK: tl.constexpr, BY_BLOCKS: tl.constexpr):
    item, work = tl.program_id(0), Work(heads, section, packs)
    b, h_k, in_group, row = work_item.locate_packed(work, item, span_q, s_q, span_k, s_k, BLOCK, 1, BY_BLOCKS)
    _, _, there, _ = positions.extent(span_q, b, s_q)
    place = found + item * 4
    tl.store(place, b)
    tl.store(place + 1, h_k * packs + in_group)
    tl.store(place + 2, row)
    tl.store(place + 3, work_item.packed_list(work, item, span_q, row, there, BLOCK))


def found_by_kernel(offsets: list[int], t: int, used: list[int] | None) -> tuple[Any, Call]:
    x = torch.zeros(1, 1, t, 16)
    held = None if used is None else torch.tensor(used)
    cu = torch.tensor(offsets, dtype=torch.int32)
    call = Call.of_views(x, x, x, Packed(cu, cu, t, t, held, held))
    many = positions.slots(call, 0, BLOCK) + 1
    found = torch.full((many, 8), -1, dtype=torch.int32)
    blocks_kernel[(many,)](found, positions.spans(call)[0], t, BLOCK)
    return found.tolist(), call


@pytest.mark.parametrize("seed", range(6))
def test_blocks_of_rows(seed: int) -> None:
    dice = random.Random(seed)
    lengths = [dice.choice([0, 0, 1, BLOCK, dice.randint(2, 3 * BLOCK)]) for _ in range(dice.choice([1, 2, 7, 20]))]
    offsets = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    used = [dice.randint(0, n) for n in lengths] if seed % 2 else None
    t = offsets[-1] + dice.choice([0, 0, 1, 50])
    found, _ = found_by_kernel(offsets, t, used)
    left = {number: rest for number, rest in enumerate(found) if rest[3] < rest[4]}
    for b, (first, stop) in enumerate(pairwise([*offsets, t])):
        for row in range(0, stop - first, BLOCK):
            rows = 0 if b == len(lengths) else (used or lengths)[b]
            assert left.pop(first // BLOCK + b + row // BLOCK)[:6] == [0, 5, first, row, stop - first, rows]
    assert not left, "blocks that are no sequence's"


LENGTHS = [40, 0, 16, 100, 1]


def packed(t: int) -> tuple[Call, torch.Tensor]:
    """Sequences of LENGTHS, and how many blocks each has; the last one's are behind them."""
    x, offsets = torch.zeros(1, 1, t, 16), torch.tensor([0, *LENGTHS]).cumsum(0)
    ends = torch.tensor([*LENGTHS, t - sum(LENGTHS)])
    return Call.of_views(x, x, x, Packed(offsets, offsets, t, t)), (ends + BLOCK - 1) // BLOCK


@pytest.mark.parametrize("last_first", [False, True])
def test_places_of_programs(last_first: bool) -> None:
    """Each program's tile is where the table has it, whichever rows come first; who has none is behind all."""
    heads, (call, blocks) = 3, packed(180)
    table = positions.table(call, {}, 1, BLOCK)
    many, total = positions.slots(call, 1, BLOCK) + 1, int(blocks.sum())
    found = torch.full((many * heads, 4), -1, dtype=torch.int32)
    span = positions.spans(call, table)[1]
    places_kernel[(many * heads,)](found, span, heads, 180, BLOCK, last_first)
    assert total == table[0, 0]
    for program, (b, h, start, place) in enumerate(found.tolist()):
        assert h == program % heads
        if program // heads < total:
            assert [b, place - start // BLOCK] == table[1 + place].tolist()
        else:
            assert (start, place) == (180, program // heads)
    assert len({(h, place) for _, h, _, place in found.tolist()}) == many * heads


@pytest.mark.parametrize("section", [0, 6, 100, 10_000])
@pytest.mark.parametrize("by_blocks", [False, True])
def test_lists_of_work_items(section: int, by_blocks: bool) -> None:
    """The Hopper forward's items: each block of each head once, as many heads in turns as a section has, and its list
    where `tile_of`, the last rows first, has that block."""
    heads, packs, (call, blocks) = 6, 3, packed(180)
    spans = positions.spans(call, positions.table(call, {}, 0, BLOCK))
    total = int(blocks.sum())
    tiles, items = torch.full((2, total * heads, 4), -1, dtype=torch.int32)
    places_kernel[(total * heads,)](tiles, spans[0], heads, 180, BLOCK, True)
    items_kernel[(total * heads,)](items, *spans, heads, section, packs, 180, 180, BLOCK, by_blocks)
    for b, n in enumerate(blocks.tolist()):
        turns = [h for sequence, h, *_ in items.tolist() if sequence == b]
        at_once = min(heads, packs * max(1, section // max(1, n if by_blocks else [*LENGTHS, 0][b])))
        assert turns[: n * at_once] == [*range(at_once)] * n
    wanted = {(b, h, start, n // heads) for n, (b, h, start, _) in enumerate(tiles.tolist())}
    assert {tuple(item) for item in items.tolist()} == wanted
    assert len(wanted) == total * heads


def test_broken_offsets_stay_inside() -> None:
    for offsets in ([5, 100, 40], [0, 300, 10], [0, -7, 99], [90, 90, 90]):
        for _, _, first, row, there, rows, *_ in found_by_kernel(offsets, 100, None)[0]:
            assert 0 <= first <= first + there <= 100
            assert rows <= there
            assert first + row >= 0


@pytest.mark.parametrize("last_first", [False, True])
@pytest.mark.parametrize("offsets", [[180, 180, 180], [0, 100, 40], [0, 300, 10], [0, -7, 99], [90, 90, 90]], ids=str)
def test_places_of_broken_offsets(offsets: list[int], last_first: bool) -> None:
    """No program has a tile before its sequence, nor a place that no table has."""
    heads, x, cu = 2, torch.zeros(1, 1, 180, 16), torch.tensor(offsets, dtype=torch.int32)
    call = Call.of_views(x, x, x, Packed(cu, cu, 180, 180))
    many = positions.slots(call, 1, BLOCK) + 1
    found = torch.full((many * heads, 4), -1, dtype=torch.int32)
    span = positions.spans(call, positions.table(call, {}, 1, BLOCK))[1]
    places_kernel[(many * heads,)](found, span, heads, 180, BLOCK, last_first)
    for b, _, start, place in found.tolist():
        assert 0 <= b <= 2
        assert 0 <= start <= 180
        assert 0 <= place < many
    spans = positions.spans(call, positions.table(call, {}, 0, BLOCK))
    total = int(spans[0].tiles[0, 0])
    items = torch.full((total * heads, 4), -1, dtype=torch.int32)
    items_kernel[(total * heads,)](items, *spans, heads, 0, 1, 180, 180, BLOCK, False)
    for b, _, row, place in items.tolist():
        assert 0 <= b <= 2
        assert 0 <= row <= 180
        assert 0 <= place < total


def test_what_the_hopper_backward_prepares() -> None:
    """delta and start in whole blocks of rows for each sequence, with what makes unused rows count for nothing."""
    from saccade.backends.device.records import TensorArgs
    from saccade.backends.hopper.backward.dq import preprocess_kernel

    offsets, used, t, h_q, d_v = [0, 21, 21, 60], [21, 0, 30], 71, 2, 16
    dout, out = (torch.randn(1, h_q, t, d_v) for _ in range(2))
    lse, dlse = torch.randn(1, h_q, t), torch.randn(1, h_q, t)
    lse[:, :, 5] = -torch.inf
    out[:, :, 51:] = torch.nan  # beyond the rows in use
    layout = Packed(torch.tensor(offsets), torch.tensor(offsets), t, t, torch.tensor(used), torch.tensor(used))
    call = Call.of_views(dout, dout, dout, layout)
    blocks = positions.slots(call, 0, BLOCK) + 1
    delta, start = torch.full((2, h_q, blocks, BLOCK), torch.nan)
    plain_delta = torch.full_like(lse, torch.nan)
    dq_accum = torch.full((h_q * blocks * BLOCK * 64,), torch.nan)
    parts = 2
    preprocess_kernel[(h_q * blocks * parts,)](
        TensorArgs.of(dout), TensorArgs.of(out), dlse, lse, delta, start, plain_delta, dq_accum,
        positions.spans(call)[0], h_q, t, blocks * parts, 2.0,
        D_V=d_v, ROWS=BLOCK // parts, BLOCK_Q=BLOCK, BLOCK_D=64, BLOCK_DV=16, CHAINED=False,
    )  # fmt: skip
    assert not dq_accum.any()
    wanted_delta, wanted_start = torch.zeros_like(delta), torch.full_like(start, -torch.inf)
    rows = dlse - (dout * out).sum(-1)
    for b, (first, held) in enumerate(zip(offsets, used, strict=False)):
        for i in range(held):
            place = first // BLOCK + b + i // BLOCK, i % BLOCK
            wanted_delta[:, *place] = rows[0, :, first + i]
            wanted_start[:, *place] = 2.0 * lse[0, :, first + i]
    torch.testing.assert_close(delta, wanted_delta)
    torch.testing.assert_close(start, wanted_start)
    in_use = [*range(21), *range(21, 51)]
    torch.testing.assert_close(plain_delta[:, :, in_use], -rows[:, :, in_use])
    assert not plain_delta.isnan().any()
