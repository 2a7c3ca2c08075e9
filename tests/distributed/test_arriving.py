"""Which keys come with which step."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from saccade import causal
from saccade.distributed import plan
from saccade.distributed.arriving import COPY_BYTES, MOST_COPIES, ArrivingRows


def exchange_of(lengths: list[int], ranks: int, rank: int) -> ArrivingRows:
    found = plan(lengths, ranks, rank=rank, mask=causal(), method="pull").arriving
    assert found is not None
    return found


@given(
    st.lists(st.integers(0, 60_000), min_size=1, max_size=9),
    st.integers(2, 5),
    st.sampled_from([1, 2, 8, 16, 64]),
    st.sampled_from([4, 512, 2048]),
    st.data(),
)
def test_steps(lengths, ranks, heads, head_bytes, data):
    """Each head of a piece whose keys come is in one step, which kernels wait for; and copies are few, and large."""
    found = exchange_of(lengths, ranks, data.draw(st.integers(0, ranks - 1)))
    steps, needed = found.steps(heads, head_bytes, torch.device("cpu"))
    waited = torch.zeros_like(needed)
    for number, (piece, first, stop) in enumerate(steps, 1):
        waited[piece, first:stop] += number
    assert torch.equal(waited, needed)
    of_others = [bool(of) for of in found.of_piece]
    assert [bool((row > 0).all()) for row in needed[:-1]] == of_others
    assert not needed[-1].any()
    segments = sum(map(len, found.of_piece))
    copies = sum(len(found.of_piece[step.piece]) for step in steps)
    assert copies <= MOST_COPIES + segments
    for piece, first, stop in steps:
        size = sum(segment.rows for _, segment in found.of_piece[piece]) * head_bytes
        assert stop == heads or size * (stop - first) >= COPY_BYTES * len(found.of_piece[piece])


def test_a_step_of_16k_rows():
    """One of 8 heads brings 2 MB a copy to the last of two ranks; of 16 heads of 4 ranks, two come at once."""
    two = exchange_of([16384], 2, 1).steps(8, 512, torch.device("cpu")).steps
    assert {stop - first for _, first, stop in two} == {1}
    four = exchange_of([16384], 4, 0).steps(16, 512, torch.device("cpu")).steps
    assert {stop - first for _, first, stop in four} == {2}
