"""Lists of keys in the portable kernels: tables of bits, and the tiles that follow from them."""

from __future__ import annotations

import pytest
import torch

from saccade import Dense, Packed, Paged, alibi, causal, mask_mod, selected, selected_blocks, window
from saccade.testing.accuracy import check
from tests.masks.test_selected import lists

B, H_Q, H_K, S_Q, S_K, D = 2, 4, 2, 70, 90, 16


def operands(s_q=S_Q, s_k=S_K, b=B):
    shapes = (b, H_Q, s_q, D), (b, H_K, s_k, D), (b, H_K, s_k, 24)
    return [torch.randn(shape) for shape in shapes]


MASKS = {
    "keys": lambda: selected(lists(B, H_K, S_Q, 30)),
    "shared": lambda: selected(lists(1, 1, S_Q, 30, dtype=torch.int32), torch.randint(0, 31, (1, 1, S_Q))),
    "by batch row": lambda: selected(lists(1, H_Q, S_Q, 30), torch.tensor([30, 4], dtype=torch.int32)),
    "rows": lambda: selected(lists(B, H_Q, 10, 30), rows=7),
    "blocks": lambda: selected_blocks(lists(B, H_K, S_Q, 5, blocks=12), 8),
    "tiles": lambda: selected_blocks(lists(B, H_Q, 2, 2, blocks=2), rows=64),
    "causal": lambda: selected(lists(B, 1, S_Q, 40)) & causal(),
    "tiles and window": lambda: selected_blocks(lists(B, H_K, 2, 2, blocks=2), rows=64) & window(30, 9),
    "predicate": lambda: selected(lists(B, 1, S_Q, 40)) & mask_mod(lambda b, h, i, j: (i + j + h) % 3 > 0),
    "or": lambda: selected_blocks(lists(B, H_K, S_Q, 2, blocks=23), 4) | window(5, 0),
    "not": lambda: ~selected(lists(B, H_K, S_Q, 40)) & causal(),
    "none": lambda: selected(torch.empty(1, 1, S_Q, 0, dtype=torch.int32)),
    "strides": lambda: selected(lists(B, S_Q, H_K, 60).transpose(1, 2)[..., ::2]),
}


@pytest.mark.parametrize("name", MASKS)
def test_masks(name):
    q, k, v = operands()
    check(q, k, v, mask=MASKS[name](), sink=torch.randn(H_Q), dlse=torch.randn(B, H_Q, S_Q), backend="triton").assert_ok()


def test_padded():
    layout = Dense("bhsd", torch.tensor([50, S_Q]), torch.tensor([S_K, 33]))
    check(*operands(), mask=selected(lists(B, H_K, S_Q, 40)), layout=layout, backend="triton").assert_ok()
    mask = selected_blocks(lists(B, H_K, 2, 2, blocks=2), rows=64)
    check(*operands(), mask=mask, score_mod=alibi(torch.rand(H_Q)), layout=layout, backend="triton").assert_ok()


def test_positions():
    layout = Dense(q_offset=torch.tensor([30, 70]), k_offset=5)
    check(*operands(), mask=selected(lists(B, 1, S_Q, 50)) & causal(), layout=layout, backend="triton").assert_ok()


@pytest.mark.parametrize("rows", [1, 8, 64])
def test_packed(rows):
    lengths_q, lengths_k = (20, 0, 70, 3), (40, 9, 65, 0)
    layout = Packed.from_lengths(lengths_q, lengths_k)
    q, k, v = (torch.randn(n, h, D) for n, h in ((93, H_Q), (114, H_K), (114, H_K)))
    shape = (H_K, 93, 30) if rows == 1 else (4, H_K, -(-70 // rows), 30)
    mask = selected(lists(*shape, blocks=65), torch.tensor([30, 3, 25, 9]), rows=rows)
    check(q, k, v, mask=mask, layout=layout, backend="triton").assert_ok()


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
    check(q, *cache, mask=mask, layout=layout, backend="triton").assert_ok()
    check(q, *cache, mask=mask & causal(), layout=layout, backend="triton").assert_ok()
