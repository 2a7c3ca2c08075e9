"""Lists of tiles: their kernels, and the portable kernels that go through them."""

from __future__ import annotations

import pytest
import torch

from saccade import Dense, alibi, blocks, causal, mask_mod, window
from saccade.backends.device import lists
from saccade.masks import EMPTY, FULL, TILE, as_mask
from saccade.problem import Problem
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


@pytest.mark.parametrize("name", MASKS)
def test_against_the_oracle(name):
    q, k, v = (torch.randn(1, h, S, 16) for h in (2, 1, 1))
    check(q, k, v, mask=MASKS[name], dlse=torch.randn(1, 2, S), backend="triton").assert_ok()


def test_everything_at_once():
    q, k, v = (torch.randn(1, h, S, 16) for h in (2, 1, 1))
    check(
        q, k, v,
        mask=mask_mod(by_head) & causal(),
        score_mod=alibi(torch.randn(2).requires_grad_()),
        sink=torch.randn(2),
        layout=Dense("bhsd", torch.tensor([75]), torch.tensor([33])),
        backend="triton",
    ).assert_ok()  # fmt: skip


@pytest.mark.parametrize("by_keys", [False, True], ids=["rows", "keys"])
@pytest.mark.parametrize("tile", [(64, 64), (128, 64), (32, 16), (192, 128)], ids=str)
def test_lists(tile, by_keys):
    """Every visible pair is in a listed tile, full tiles are full, and partial ones come first, all in order."""
    s_q, s_k = 420, 330
    table = torch.rand(7, 6) > 0.5
    mask = causal() & mask_mod(lambda b, h, q_idx, kv_idx: table[q_idx // 64, kv_idx // 64])
    q, k = torch.empty(1, 2, s_q, 1), torch.empty(1, 2, s_k, 1)
    problem = Problem(q, k, k, None, mask, None, Dense(), 1.0)
    held = blocks.states(problem)
    made = lists.lists(problem, *tile, by_keys)
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
    made = lists.lists(Problem(q, q, q, None, mask, None, Dense(), 1.0), 64, 64, by_keys=True)
    assert lists.ranks(made)[0, 0].tolist() == [[2, 1, 1], [1, 1, 1], [0, 0, 0]]


@pytest.mark.parametrize("name", MASKS)
def test_states(name):
    q = torch.empty(1, 2, S, 1)
    problem = Problem(q, q, q, None, as_mask(MASKS[name]), None, Dense(), 1.0)
    assert torch.equal(lists.states(problem), blocks.states(problem))
