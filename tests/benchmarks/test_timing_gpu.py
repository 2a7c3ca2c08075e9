"""Timing on a GPU."""

from __future__ import annotations

import weakref

import pytest
import torch

from benchmarks.harness.providers.base import Prepared
from benchmarks.harness.timing import captured

pytestmark = pytest.mark.gpu


def test_a_graph_holds_what_it_reads():
    """The operands of a captured call may have no other owner."""
    x = torch.ones(1 << 20, device="cuda")
    prepared = Prepared(lambda x=x: (x.neg_(),))
    held, kept = weakref.ref(x), captured(prepared, x.device)
    del x, prepared
    torch.cuda.empty_cache()
    before = held()
    assert before is not None
    value = before[0].item()
    kept.call()
    assert before[0].item() == -value
