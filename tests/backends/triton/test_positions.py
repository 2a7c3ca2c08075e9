"""Positions that the caller gives, in the portable kernels."""

from __future__ import annotations

import pytest
import torch

from saccade import Dense, Packed, Paged, alibi, causal, interval, mask_mod, prefix, window
from saccade.backends.device import positions
from saccade.testing.accuracy import check

B, H_Q, H_K, S_Q, S_K, D = 2, 2, 1, 40, 70, 16

OFFSETS = {
    "number": lambda: {"q_offset": 20, "k_offset": -7},
    "sequence": lambda: {"q_offset": torch.tensor([13, 60]), "k_offset": torch.tensor([-5, 9])},
    "row": lambda: {"q_offset": torch.randint(-9, 130, (B, S_Q)), "k_offset": torch.tensor([3, 0])},
}
MASKS = {
    "none": lambda: None,
    "causal": causal,
    "window": lambda: window(30, 4),
    "prefix": lambda: prefix(40),
    "interval": lambda: interval(None, torch.randint(0, S_K, (B, S_Q))) & window(50, 0),
    "predicate": lambda: causal() & mask_mod(lambda b, h, q_idx, kv_idx: (q_idx - 2 * kv_idx) % 3 > 0),
    "complement": lambda: ~causal(),
}


@pytest.mark.sample
@pytest.mark.parametrize("offsets", OFFSETS)
@pytest.mark.parametrize("name", MASKS)
def test_masks(name, offsets):
    torch.manual_seed(0)
    q, k, v = torch.randn(B, H_Q, S_Q, D), *torch.randn(2, B, H_K, S_K, D)
    dlse = torch.randn(B, H_Q, S_Q)
    layout = Dense(**OFFSETS[offsets]())
    check(q, k, v, mask=MASKS[name](), layout=layout, dlse=dlse, backend="triton").assert_ok()


def test_a_prefix_is_seen_by_tiles_of_rows_before_it():
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 1, s, D) for s in (140, 20, 20))
    check(q, k, v, mask=prefix(9), layout=Dense(q_offset=-150), backend="triton").assert_ok()


@pytest.mark.parametrize("offsets", OFFSETS)
def test_scores_and_dropout(offsets):
    torch.manual_seed(0)
    q, k, v = torch.randn(B, H_Q, S_Q, D), *torch.randn(2, B, H_K, S_K, D)
    table = torch.randn(H_Q, 401, requires_grad=True)

    def relative(score, b, h, q_idx, kv_idx):
        return score + table[h, (kv_idx - q_idx).clamp(-200, 200) + 200]

    layout = Dense(**OFFSETS[offsets]())
    check(q, k, v, mask=causal(), score_mod=relative, layout=layout, dropout_p=0.3, backend="triton").assert_ok()
    check(q, k, v, mask=window(40, 5), score_mod=alibi(torch.rand(2)), layout=layout, backend="triton").assert_ok()


@pytest.mark.parametrize("offsets", ["number", "sequence", "row"])
def test_packed(offsets):
    torch.manual_seed(0)
    ends = torch.tensor([0, 40, 40, 77]), torch.tensor([0, 70, 75, 130])
    q, k, v = torch.randn(80, H_Q, D), *torch.randn(2, 131, H_K, D)
    given = {
        "number": {"q_offset": 30},
        "sequence": {"q_offset": torch.tensor([30, 0, 18]), "k_offset": torch.tensor([0, 4, 7])},
        "row": {"q_offset": torch.randint(0, 80, (80,))},
    }[offsets]
    mask = causal() & mask_mod(lambda b, h, q_idx, kv_idx: (q_idx + kv_idx) % 5 != b)
    for m in (mask, causal()):
        layout = Packed(*ends, 40, 70, **given)
        check(q, k, v, mask=m, score_mod=alibi(torch.rand(2)), layout=layout, backend="triton").assert_ok()


@pytest.mark.sample
@pytest.mark.parametrize("end_to_end", [False, True], ids=["batch", "end to end"])
@pytest.mark.parametrize("offsets", ["none", "number", "sequence", "row"])
def test_paged(offsets, end_to_end):
    torch.manual_seed(0)
    cache = torch.randn(2, 12, 16, H_K, D).unbind()
    table, used = torch.randperm(12).view(3, 4), torch.tensor([60, 7, 0])
    rows = (9,) if end_to_end else (3, 5)
    given = {
        "none": {},
        "number": {"q_offset": 11},
        "sequence": {"q_offset": torch.tensor([40, 3, 0])[:, None], "k_offset": torch.tensor([0, -4, 0])},
        "row": {"q_offset": torch.randint(0, 60, rows)},
    }[offsets]
    q = torch.randn(*rows, H_Q, D)
    layout = Paged(table, used, torch.tensor([0, 5, 6, 8]) if end_to_end else None, **given)
    mask = causal() & mask_mod(lambda b, h, q_idx, kv_idx: (q_idx - kv_idx) % 3 != 1)
    for m in (mask, window(20, 0), None):
        check(q, *cache, mask=m, score_mod=alibi(torch.rand(2)), layout=layout, backend="triton").assert_ok()


@pytest.mark.parametrize("given", ["mask", "score", "dropout"])
def test_positions_that_are_off_by_one_are_rejected(given, monkeypatch):
    torch.manual_seed(0)
    q, k, v = torch.randn(B, H_Q, S_Q, D), *torch.randn(2, B, H_K, S_K, D)
    keywords = {"mask": {"mask": causal()}, "score": {"score_mod": alibi(torch.ones(2))}, "dropout": {"dropout_p": 0.3}}
    layout = Dense(q_offset=torch.tensor([13, 20]))
    assert check(q, k, v, layout=layout, backend="triton", **keywords[given]).ratio <= 1
    right = positions.device_args

    def wrong(problem):
        return right(problem)._replace(k=positions.Offset.of(1, False, None))

    monkeypatch.setattr(positions, "device_args", wrong)
    assert check(q, k, v, layout=layout, backend="triton", **keywords[given]).ratio > 1
