"""Lists of tiles: their kernels, and the portable kernels that go through them."""

from __future__ import annotations

import pytest
import torch

from saccade import Packed, alibi, causal, mask_mod, window
from saccade.backends import block_sparsity
from saccade.backends.device import block_lists, positions
from saccade.call import Call
from saccade.masks import EMPTY, FULL, TILE, as_mask
from saccade.testing.accuracy import check

S = 90
IDS = torch.tensor([0] * 40 + [1] * 27 + [2] * 23)
STEPS = torch.tensor([30, 1])


def by_head(b, h, q_idx, kv_idx):
    return (q_idx - kv_idx) // STEPS[h] % 2 == 0


MASKS = {
    "ids": ~mask_mod(lambda b, h, q_idx, kv_idx: IDS[q_idx] == IDS[kv_idx]) & causal(),
    "heads": mask_mod(by_head),
    "tensor": torch.rand(1, 2, S, S) > 0.5,
    "everything": mask_mod(lambda b, h, q_idx, kv_idx: b.new_ones((), dtype=torch.bool)) | window(3, 3),
    "nothing": mask_mod(lambda b, h, q_idx, kv_idx: q_idx < 0),
}


@pytest.mark.parametrize("by_keys", [False, True], ids=["rows", "keys"])
@pytest.mark.parametrize("tile", [(64, 64), (128, 64), (32, 16), (192, 128)], ids=str)
def test_lists(tile, by_keys):
    """Every visible pair is in a listed tile, full tiles are full, and partial ones come first, all in order."""
    s_q, s_k = 420, 330
    table = torch.rand(7, 6) > 0.5
    mask = causal() & mask_mod(lambda b, h, q_idx, kv_idx: table[q_idx // 64, kv_idx // 64])
    q, k = torch.empty(1, 2, s_q, 1), torch.empty(1, 2, s_k, 1)
    call = Call(q, k, k, mask=mask)
    held = block_sparsity.compute_states(call)
    made = block_lists.build(call, {}, *tile, by_keys)
    whole = torch.zeros(1, s_q + 192, s_k + 128, dtype=torch.bool)
    whole[:, :s_q, :s_k] = mask.visible(s_q, s_k)
    if by_keys:
        whole, held, tile = whole.mT, held.mT, tile[::-1]
    for i in range(made.index.shape[2]):
        some, count = made.count[0, 0, i].tolist()
        tiles = made.index[0, 0, i, :count].tolist()
        assert tiles[:some] == sorted(set(tiles[:some]))
        assert tiles[some:] == sorted(set(tiles[some:]))
        for j in range(made.index.shape[3]):
            rows, keys = (slice(n * size, (n + 1) * size) for n, size in zip((i, j), tile, strict=True))
            seen = whole[0, rows, keys]
            parents = held[0, 0, rows.start // TILE : -(-rows.stop // TILE), keys.start // TILE : -(-keys.stop // TILE)]
            assert (j in tiles) == bool((parents != EMPTY).any())
            assert not seen.any() or j in tiles
            if j in tiles[some:]:
                assert seen.all()
                assert (parents == FULL).all()


def test_ranks():
    """How many later blocks of keys visit a block of rows; who sees nothing visits block 0."""
    table = torch.tensor([[True, False, True], [False, False, True], [True, False, True]])
    mask = mask_mod(lambda b, h, q_idx, kv_idx: table[q_idx // 64, kv_idx // 64])
    q = torch.empty(1, 1, 192, 1)
    call = Call(q, q, q, mask=mask)
    made = block_lists.build(call, {}, 64, 64, by_keys=True)
    assert block_lists.ranks({}, made, 3)[0, 0].tolist() == [[2, 1, 1], [1, 1, 1], [0, 0, 0]]


LAYOUT = Packed(
    torch.tensor([0, 100, 100, 300]), torch.tensor([0, 140, 170, 250]), 200, 140, torch.tensor([90, 0, 200])
)
"""Other lengths of queries and keys, no queries, fewer keys than queries; 20 more rows than the sequences have."""


def of_sequence(b, h, q_idx, kv_idx):
    return (q_idx // 64 - kv_idx // (64 - 60 * (b == 2))) % 2 == h


@pytest.mark.parametrize("by_keys", [False, True], ids=["rows", "keys"])
def test_packed_lists(by_keys):
    """The list of each block is that of its sequence alone."""
    q, k = torch.empty(1, 2, 320, 1), torch.empty(1, 2, 250, 1)
    call = Call.of_views(q, k, k, LAYOUT, mask=mask_mod(of_sequence) & causal())
    made = block_lists.build(call, {}, 64, 32, by_keys)
    entries = iter(positions.table(call, {}, by_keys, 32 if by_keys else 64).tolist())
    (total, _), seen = next(entries), set()
    ones = [
        part.call.replace(mask=mask_mod(lambda b, h, i, j, n=n: of_sequence(n, h, i, j)) & causal())
        for n, part in enumerate(call.sequences())
    ]
    for number, (b, start) in zip(range(total), entries, strict=False):
        if b == len(ones):  # behind the last sequence
            assert made.count[0, :, number].tolist() == [[0, 0]] * 2
            continue
        alone = block_lists.build(ones[b], {}, 64, 32, by_keys)
        block = number - start if by_keys else alone.count.shape[2] - 1 - (number - start)  # the last rows first
        seen.add((b, block))
        for h in range(2):
            counts = made.count[0, h, number].tolist()
            assert counts == alone.count[0, h, block].tolist()
            assert torch.equal(made.index[0, h, number, : counts[1]], alone.index[0, h, block, : counts[1]])
    assert len(seen) == sum(block_lists.build(one, {}, 64, 32, by_keys).count.shape[2] for one in ones)
    assert not made.count[:, :, total:].any()


def test_packed_ranks():
    """Those of each sequence alone; programs without a block come one after the other."""
    q, k = torch.empty(1, 2, 320, 1), torch.empty(1, 2, 250, 1)
    call = Call.of_views(q, k, k, LAYOUT, mask=mask_mod(of_sequence))
    table, made = positions.table(call, {}, 1, 32), block_lists.build(call, {}, 64, 32, by_keys=True)
    (total, _), *entries = table.tolist()
    found = block_lists.ranks({}, made, 9, table)
    assert found.shape == (1, 2, positions.slots(call, 1, 32) + 1, 9)
    visits = [
        [set(made.index[0, h, n, : max(made.count[0, h, n, 1], 1)].tolist()) for n in range(found.shape[2])]
        for h in range(2)
    ]
    for number in range(total):
        later = [n for n in range(number + 1, total) if entries[n] == entries[number]]
        for h in range(2):
            for i in visits[h][number]:
                assert found[0, h, number, i] == sum(i in visits[h][n] for n in later)
    for h in range(2):
        assert visits[h][total:] == [{0}] * (found.shape[2] - total)
        assert found[0, h, total:, 0].tolist() == list(range(found.shape[2] - total))


def test_packed_sequences():
    x = [torch.randn(t, h, 16) for t, h in ((75, 2), (60, 1), (60, 1))]
    offsets = torch.tensor([0, 70, 70]), torch.tensor([0, 45, 60])
    check(
        *x,
        mask=mask_mod(of_sequence) & causal(),
        score_mod=alibi(torch.randn(2).requires_grad_()),
        layout=Packed(*offsets, 70, 45, None, torch.tensor([40, 15])),
        dlse=torch.randn(2, 75),
        backend="triton",
    ).assert_ok()


@pytest.mark.parametrize("name", MASKS)
def test_states(name):
    q = torch.empty(1, 2, S, 1)
    call = Call(q, q, q, mask=as_mask(MASKS[name]))
    assert torch.equal(block_lists.states(call, {}), block_sparsity.compute_states(call))
