"""Lists of keys in the portable kernels: tables of bits, and the tiles that follow from them."""

from __future__ import annotations

import pytest
import torch

from saccade import (
    Dense,
    Packed,
    Paged,
    alibi,
    attention,
    causal,
    explain,
    mask_mod,
    selected,
    selected_blocks,
    softcap,
    window,
)
from saccade.backends import block_sparsity
from saccade.backends.device import block_lists
from saccade.backends.device.key_lists import tabulated
from saccade.backends.device.records import runtime_int
from saccade.backends.triton import listed_launch
from saccade.call import Call
from saccade.masks import EMPTY, FULL, And, Selected
from saccade.testing.accuracy import check
from tests.masks.test_selected import Unchecked, lists

B, H_Q, H_K, S_Q, S_K, D = 2, 2, 1, 66, 70, 16


def operands(s_q=S_Q, s_k=S_K, b=B):
    shapes = (b, H_Q, s_q, D), (b, H_K, s_k, D), (b, H_K, s_k, 24)
    return [torch.randn(shape) for shape in shapes]


@pytest.mark.parametrize("end_to_end", [False, True], ids=["batch", "end to end"])
@pytest.mark.parametrize("rows", [1, 2])
def test_paged(rows, end_to_end):
    size, table = 16, torch.tensor([[4, 0, 6], [7, 2, 1], [3, 5, 8]])
    used, cache = torch.tensor([40, 13, 48]), [torch.randn(9, size, H_K, D) for _ in range(2)]
    starts = torch.tensor([0, 3, 4, 8]) if end_to_end else None
    q = torch.randn(8, H_Q, D) if end_to_end else torch.randn(3, 4, H_Q, D)
    shape = (H_K, 8, 20) if end_to_end and rows == 1 else (3, H_K, -(-4 // rows), 20)
    mask = selected(lists(*shape, blocks=48), rows=rows)
    layout = Paged(table, used, starts)
    check(q, *cache, mask=mask & causal(), layout=layout, backend="triton").assert_ok()


SPARSE = {
    "tiles": lambda n: selected_blocks(lists(1, 2, 4, n, blocks=5), rows=64),
    "wide tiles": lambda n: selected_blocks(lists(1, 1, 3, n, blocks=4), 96, rows=80),
    "blocks": lambda n: selected_blocks(lists(1, 1, 200, n, blocks=5), rows=1),
    "rows": lambda n: selected(lists(1, 1, 2, 64 * n, blocks=300), rows=128),
    "keys": lambda n: selected(lists(1, 1, 200, 64 * n, blocks=300)),
    "two": lambda n: And((selected_blocks(lists(1, 1, 4, n, blocks=5), rows=64), selected(lists(1, 1, 200, 299)))),
}
BESIDE = {
    "alone": None,
    "causal": causal(),
    "predicate": mask_mod(lambda b, h, q_idx, kv_idx: (q_idx + kv_idx) % 2 == 0),
}


@pytest.mark.parametrize("beside", BESIDE)
@pytest.mark.parametrize("name", SPARSE)
@pytest.mark.parametrize("n", [0, 2])
def test_states(n, name, beside):
    """A tile without a visible key may be partial where another mask hides all that lists name; nothing else is off."""
    mask = SPARSE[name](n) if BESIDE[beside] is None else SPARSE[name](n) & BESIDE[beside]
    q, k = torch.empty(1, 2, 200, 1), torch.empty(1, 2, 300, 1)
    call = Call(q, k, k, mask=mask)
    found, exact = block_lists.states(tabulated(call, {}), {}), block_sparsity.compute_states(call)
    assert (found == FULL).equal((exact == FULL) & (found == FULL))
    assert bool((found != EMPTY)[exact != EMPTY].all())
    if beside != "predicate":
        assert found.equal(exact) if beside == "alone" else (found == FULL).equal(exact == FULL)


def test_states_of_packed_sequences():
    layout = Packed.from_lengths((150, 0, 66), (200, 40, 70))
    q, k = torch.empty(216, 2, 1), torch.empty(310, 2, 1)
    mask = selected_blocks(lists(3, 2, 3, 2, blocks=4), rows=64)
    found = block_lists.states(tabulated(Call(q, k, k, mask=mask, layout=layout), {}), {})
    for number, place in enumerate(layout.sequence_slices(q, k)):
        rows, keys = place.rows.stop - place.rows.start, place.keys.stop - place.keys.start
        one = Call(torch.empty(1, 2, rows, 1), *[torch.empty(1, 2, keys, 1)] * 2, mask=mask.of_batch_row(number))
        exact = block_sparsity.compute_states(one)
        first = place.rows.start // 64 + number
        assert found[:, :, first : first + exact.shape[2], : exact.shape[3]].equal(exact)


def test_a_table_has_the_bits_of_what_lists_name():
    mask = selected(lists(B, H_K, 5, 30, blocks=70), torch.randint(0, 31, (B, H_K, 5)), rows=15)
    assert isinstance(mask, Selected)
    call = tabulated(Call(*operands(), mask=mask), {})
    _, bits = call.mask.table
    wanted = mask.visible(S_Q, S_K, B)[:, ::15]  # of head 0
    found = (bits.view(B, 5, -1, 1) >> torch.arange(32)) & 1
    assert (found.flatten(2)[..., :S_K] != 0).equal(wanted)
    assert not found.flatten(2)[..., S_K:].any()


FEW = {
    "keys": lambda: selected(lists(B, 2, 9, 20), torch.randint(0, 21, (B, 2, 9))),
    "shared by heads": lambda: selected(lists(1, 1, 9, 20, dtype=torch.int32), torch.tensor([20, 3])) & window(50, 0),
    "of query heads": lambda: selected(lists(B, 6, 3, 20), rows=3),
    "blocks": lambda: selected_blocks(lists(B, 2, 9, 3, blocks=9), 8) & causal(),
    "long blocks": lambda: selected_blocks(lists(1, 2, 9, 2, blocks=4), 23, rows=1),
    "predicate": lambda: selected(lists(B, 1, 9, 20)) & mask_mod(lambda b, h, i, j: (i + j + h) % 3 > 0),
}


@pytest.mark.parametrize("name", FEW)
def test_gathered_keys(name):
    """What few rows share a list for; a key head has three query heads."""
    q, k, v = (torch.randn(B, h, s, d) for h, s, d in ((6, 9, D), (2, S_K, D), (2, S_K, 24)))
    told = explain(q, k, v, mask=FEW[name](), backend="triton")
    assert told.lists.startswith("lists of keys: a program gathers")
    keywords = {"sink": torch.randn(6), "score_mod": alibi(torch.rand(6)), "return_max_scores": True}
    layout = Dense("bhsd", torch.tensor([9, 4]), torch.tensor([S_K, 33]))
    check(q, k, v, mask=FEW[name](), backend="triton", backward=False, **keywords).assert_ok()
    check(q, k, v, mask=FEW[name](), backend="triton", backward=False, layout=layout).assert_ok()


BLOCKS = {
    "short": lambda: selected_blocks(lists(B, 2, 9, 3, blocks=7), 16),
    "of 20 keys": lambda: selected_blocks(lists(B, 2, 9, 2, blocks=6), 20, torch.randint(0, 3, (B, 2, 9))) & causal(),
    "shared by heads": lambda: selected_blocks(lists(1, 1, 9, 3, blocks=7), 16, torch.tensor([3, 2])) & window(50, 0),
    "of query heads": lambda: selected_blocks(lists(B, 6, 3, 2, blocks=4), 32, rows=3),
    "alone": lambda: selected_blocks(lists(B, 2, 5, 1, blocks=2), 64, rows=2),
    "none": lambda: selected_blocks(torch.full((B, 2, 9, 3), -1), 16),
    "hot": lambda: selected_blocks(torch.tensor([3, -1, 9], dtype=torch.int32).expand(B, 1, 9, 3), 16),
    "predicate": lambda: (
        selected_blocks(lists(B, 1, 9, 3, blocks=7), 16) & mask_mod(lambda b, h, i, j: (i + j) % 3 > 0)
    ),
}


@pytest.mark.parametrize("name", BLOCKS)
def test_gathered_blocks(name):
    """Forward and gradients, from unions of rows' lists, and from inverted lists; a key head has three query heads."""
    given = [torch.randn(B, h, s, d) for h, s, d in ((6, 9, D), (2, 110, D), (2, 110, 24))]
    mask = BLOCKS[name]()
    dlse, sink = torch.randn(B, 6, 9), torch.randn(6)
    check(*given, mask=mask, dlse=dlse, sink=sink, score_mod=softcap(3.0), backend="triton").assert_ok()
    layout = Dense("bhsd", torch.tensor([9, 4]), torch.tensor([110, 33]))
    check(*given, mask=mask, layout=layout, deterministic=True, backend="triton").assert_ok()


@pytest.mark.parametrize("rows", [1, 3])
def test_gathered_blocks_of_packed_sequences(rows):
    layout = Packed.from_lengths((5, 0, 21, 3), (20, 90, 95, 0))
    q, k, v = (torch.randn(n, h, D) for n, h in ((29, 4), (205, H_K), (205, H_K)))
    shape = (H_K, 29, 2) if rows == 1 else (4, H_K, 7, 2)
    mask = selected_blocks(lists(*shape, blocks=6), 20, torch.tensor([2, 1, 2, 0]), rows=rows)
    check(q, k, v, mask=mask & causal(), layout=layout, backend="triton").assert_ok()


@pytest.mark.parametrize("end_to_end", [False, True], ids=["batch", "end to end"])
def test_gathered_blocks_of_pages(end_to_end):
    """Pages are shorter than a block, and numbers beyond those of the cache are in places that no sequence uses."""
    table = torch.tensor([[4, 0, 6, 5], [7, -9, 99, 1], [3, 5, 8, 99]])
    used, cache = torch.tensor([60, 13, 48]), [torch.randn(9, 16, 2, d) for d in (D, 24)]
    starts = torch.tensor([0, 3, 4, 8]) if end_to_end else None
    q = torch.randn(9, 4, D) if end_to_end else torch.randn(3, 4, 4, D)
    mask = selected_blocks(lists(*((2, 9, 2) if end_to_end else (3, 2, 4, 2)), blocks=3), 24)
    assert "gathers" in str(explain(q, *cache, mask=mask, layout=Paged(table, used, starts), backend="triton").lists)
    for also in (causal(), window(40, 3)):
        check(q, *cache, mask=mask & also, layout=Paged(table, used, starts), backend="triton").assert_ok()


def test_inverted_lists():
    """Each block has the lists that name it, in their order; hot ones and empty ones too."""
    entries = lists(B, 2, 9, 3, blocks=7)
    entries[0, 1, :, 0] = torch.where((entries[0, 1] == 4).any(-1), entries[0, 1, :, 0], 4)
    mask, q, k = selected_blocks(entries, 16), torch.empty(B, 6, 9, D), torch.empty(B, 2, 110, D)
    found = listed_launch.inverted(listed_launch.Work.of(Call(q, k, k, mask=mask), {}))
    numbers, first = found.lists.tolist(), found.first.tolist()
    for block in range(B * 2 * 7):
        of_head = entries.flatten(0, 1)[block // 7]
        wanted = [g for g in range(9) if block % 7 in of_head[g].tolist()]
        assert numbers[first[block] : first[block + 1]] == wanted


def test_a_block_that_is_listed_twice_counts_once():
    """In unions, and in inverted lists; a list of one row counts each."""
    q, k, v = (torch.randn(1, h, s, D).requires_grad_() for h, s in ((2, 9), (1, 110), (1, 110)))
    once = lists(1, 1, 9, 3, blocks=7)
    results = []
    for entries in (once, torch.cat([once, once.flip(-1)], -1)):
        mask = Unchecked(entries, None, 1, 16)
        out = attention(q, k, v, mask=mask, backend="triton")
        results.append((out, *torch.autograd.grad(out.square().sum(), (q, k, v))))
    for x, y in zip(*results, strict=True):
        torch.testing.assert_close(x, y)


def _wrong_unions(change):
    def by_rows(work):
        lists_of, unions, *common = BY_ROWS(work)
        change(unions)
        return lists_of, unions, *common

    return {"Work.by_rows": by_rows}


def _wrong_inverse(change):
    return {"inverted": lambda work: change(INVERTED(work))}


BY_ROWS, INVERTED = listed_launch.Work.by_rows, listed_launch.inverted
WRONG = {
    "all rows of a tile have its union": lambda: _wrong_unions(lambda x: x.bits.fill_(-1)),
    "rows have the list of the next one": lambda: _wrong_unions(lambda x: x.bits.mul_(2)),
    "the last entry of a union is left out": lambda: _wrong_unions(lambda x: x.count.sub_(1).clamp_(min=0)),
    "the first entry for all": lambda: _wrong_unions(lambda x: x.entries.copy_(x.entries[:, :1].clone())),
    "one row of a block is left out": lambda: _wrong_inverse(lambda x: x._replace(first=x.first - x.first.gt(0).int())),
    "rows of the neighbour": lambda: _wrong_inverse(lambda x: x._replace(lists=(x.lists + 1) % 9)),
    "blocks of head 0 for all": lambda: _wrong_inverse(lambda x: x._replace(stride_h=runtime_int(0))),
    "blocks of batch row 0 for all": lambda: _wrong_inverse(lambda x: x._replace(stride_b=runtime_int(0))),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_kernels_of_blocks_are_rejected(name, monkeypatch):
    given = [torch.randn(B, h, s, D) for h, s in ((4, 9), (2, 110), (2, 110))]
    for place, wrong in WRONG[name]().items():
        monkeypatch.setattr(f"saccade.backends.triton.listed_launch.{place}", wrong)
    with pytest.raises(AssertionError):
        check(*given, mask=BLOCKS["short"](), backend="triton").assert_ok()
