"""Which reads of captured tensors are by distance."""

from __future__ import annotations

import pytest
import torch

from saccade.scores import bind

TABLE, IDS = torch.randn(19), torch.randint(0, 7, (40,))

READS = {
    "distance": (lambda b, h, q, k: (k - q).clamp(-9, 9) + 9, True),
    "other sign": (lambda b, h, q, k: (q - k) % 19, True),
    "of a head": (lambda b, h, q, k: (h + k - q + b) % 19, True),
    "sums": (lambda b, h, q, k: (k + k - q - q) % 19, True),
    "a function of it": (lambda b, h, q, k: ((k - q).abs().float() * 0.3 + 0.1).sqrt().long() % 19, True),
    "of another table": (lambda b, h, q, k: IDS[(k - q).abs() % 40], True),
    "twice the key": (lambda b, h, q, k: (q - 2 * k) % 19, False),
    "a product": (lambda b, h, q, k: ((k - q) * q) % 19, False),
    "a sum": (lambda b, h, q, k: (k + q) % 19, False),
    "of a row's table": (lambda b, h, q, k: (IDS[q] + k - q) % 19, False),
    "of a row": (lambda b, h, q, k: q % 19, False),
    # Each is rounded in its own way.
    "of floats": (lambda b, h, q, k: ((k + 0.1) - (q + 0.1)).long() % 19, False),
    "of large floats": (lambda b, h, q, k: ((k + 3e7) - (q + 3e7)).long() % 19, False),
}


@pytest.mark.sample
@pytest.mark.parametrize("name", READS)
def test_reads_by_distance(name: str) -> None:
    place, wanted = READS[name]

    def score_mod(score, b, h, q_idx, kv_idx):
        return score + TABLE[place(b, h, q_idx, kv_idx)]

    found = bind(score_mod, torch.zeros(1)).program.distance_reads
    assert bool(found) == wanted
    if wanted:  # the places that torch computes are the same along diagonals
        at = place(torch.tensor(1), torch.tensor(2), torch.arange(12)[:, None], torch.arange(15)[None])
        assert torch.equal(at[1:, 1:], at[:-1, :-1])
