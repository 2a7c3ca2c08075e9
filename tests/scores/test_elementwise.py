"""Random calls against a second, elementwise float64 attention, whose masks and scores are written down here."""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch

from saccade import Dense, attention, causal, documents, mask_mod, prefix, window
from saccade.testing import check
from saccade.util import hardware

IDS = torch.tensor([[0, 0, 1, 2, 2, 1, 0, 3, 3, 3, 1, 1], [0, 1, 0, 1, 0, 1, 4, 4, 4, 4, 4, 0]])
MASKS = {
    "causal": (causal(), lambda b, i, j, off: j <= i + off),
    "window": (window(2, 1), lambda b, i, j, off: i + off - 2 <= j <= i + off + 1),
    "prefix": (prefix(3), lambda b, i, j, off: j < 3 or j <= i + off),
    "documents": (documents(IDS), lambda b, i, j, off: bool(IDS[b, i] == IDS[b, j])),
    "mask_mod": (mask_mod(lambda b, h, i, j: (3 * i + j + b) % 4 != 0), lambda b, i, j, off: (3 * i + j + b) % 4 != 0),
}
HIDDEN = -1e9


def near(score, b, h, q_idx, kv_idx):
    """Hides by distance with a number, under which a row that sees nothing else has equal weights."""
    return torch.where((q_idx >= kv_idx) & (q_idx - kv_idx < 4), score, HIDDEN)


def combined(chance: random.Random):
    """A mask, and the same as a function of one row and one key."""
    mask, sees = MASKS[chance.choice(sorted(MASKS))]
    for _ in range(chance.randrange(3)):
        other, also = MASKS[chance.choice(sorted(MASKS))]
        match chance.randrange(3):
            case 0:
                mask, sees = mask & other, lambda *at, a=sees, c=also: a(*at) and c(*at)
            case 1:
                mask, sees = mask | other, lambda *at, a=sees, c=also: a(*at) or c(*at)
            case _:
                mask, sees = ~mask, lambda *at, a=sees: not a(*at)
    return mask, sees


def elementwise(sees, used_q, used_k, hides):
    """Scores, one by one; shapes (2, 2, 12, 8) on (2, 1, 12, 8)."""

    def call(q, k, v, **_):
        rows = []
        for b, h, i in itertools.product(range(2), range(2), range(12)):
            keys = [j for j in range(used_k[b]) if i < used_q[b] and sees(b, i, j, used_k[b] - used_q[b])]
            scores = (q[b, h, i] * k[b, 0]).sum(-1) / math.sqrt(8)
            if hides:
                scores = torch.stack([scores[j] if 0 <= i - j < 4 else scores[j] * 0 + HIDDEN for j in range(12)])
            rows.append(
                scores[keys].softmax(0) @ v[b, 0, keys] if keys else v.new_zeros(8) + 0 * (q.sum() + k.sum() + v.sum())
            )
        return torch.stack(rows).view(2, 2, 12, 8)

    return call


@pytest.mark.parametrize("seed", range(40))
def test_masks_and_hiding_scores_one_by_one(seed):
    chance = random.Random(seed)
    torch.manual_seed(seed)
    mask, sees = combined(chance)
    hides, padded = chance.random() < 0.6, chance.random() < 0.3
    used = [chance.randint(1, 12) for _ in range(2)] if padded else [12, 12]
    lengths = torch.tensor(used)
    layout = Dense("bhsd", lengths, lengths) if padded else Dense("bhsd")
    q, k, v = (torch.randn(2, h, 12, 8, dtype=torch.float64, requires_grad=True) for h in (2, 1, 1))
    found = attention(q, k, v, mask=mask, score_mod=near if hides else None, layout=layout)
    expected = elementwise(sees, used, used, hides)(q, k, v)
    torch.testing.assert_close(found, expected)
    dout = torch.randn_like(expected)
    gradients = (torch.autograd.grad(out, (q, k, v), dout) for out in (found, expected))
    for x, y in zip(*gradients, strict=True):
        torch.testing.assert_close(x, y)


@pytest.mark.parametrize("processor", ["amx", "avx512_bf16", "none"])
def test_every_processor(processor, monkeypatch):
    monkeypatch.setattr(hardware, "cpu_bf16", lambda: processor)
    for seed, (name, (mask, _)) in enumerate(MASKS.items()):
        torch.manual_seed(seed)
        q, k, v = (torch.randn(2, h, 12, 8, dtype=torch.bfloat16) for h in (4, 2, 2))
        for score_mod in (None, near):
            report = check(q, k, v, mask=~mask, score_mod=score_mod, scale=0.0 if name == "causal" else None)
            report.assert_ok()
