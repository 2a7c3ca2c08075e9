"""In how many parts gluon cuts the keys of pages, from shapes alone."""

from __future__ import annotations

import pytest
import torch

from saccade import Paged, causal
from saccade.backends import hopper as gluon
from saccade.backends.hopper.forward.config import LEAST_KEYS, key_splits
from saccade.call import Call

PROCESSORS = 132


def call(b: int, s_q: int, keys: int, num_splits: int | None = None) -> Call:
    """32 query heads on 8, pages of 64."""
    q = torch.empty(b, 32, s_q, 128, dtype=torch.bfloat16, device="meta")
    cache = torch.empty(b * keys // 64, 8, 64, 128, dtype=torch.bfloat16, device="meta")
    layout = Paged(torch.zeros(b, keys // 64, dtype=torch.int32), torch.zeros(b, dtype=torch.int32), None, num_splits)
    return Call.of_views(q, cache, cache, layout, mask=causal())


@pytest.mark.parametrize(
    ("b", "s_q", "keys", "splits"),
    [(8, 32, 8192, 2), (8, 16, 8192, 2), (1, 32, 65536, 16), (64, 32, 4096, 1), (8, 32, 512, 1), (2, 32, 1024, 2)],
)
def test_parts_fill_the_multiprocessors(b, s_q, keys, splits):
    found = key_splits(call(b, s_q, keys), PROCESSORS)
    assert found == splits
    assert keys // found >= LEAST_KEYS


def test_a_call_without_enough_to_do_is_refused():
    """A sequence whose keys are too few for parts; with more of them it is taken."""
    assert gluon.refusals(call(8, 32, 8192), False) == []
    assert gluon.refusals(call(1, 32, 65536), False) == []
    (reason,) = gluon.refusals(call(1, 32, 512), False)
    assert "blocks of 128 rows times parts of 512 keys are at least 64, not 8" in reason
    (reason,) = gluon.refusals(call(8, 32, 8192, 3), False)
    assert "not with num_splits=3" in reason
