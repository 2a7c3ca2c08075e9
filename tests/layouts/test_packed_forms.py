"""The short forms of Packed: one vector of offsets, lengths, and position ids that begin anew."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from saccade import Packed, attention, causal
from saccade.layouts import from_tensors

OFFSETS = torch.tensor([0, 3, 3, 10])
IDS = torch.tensor([0, 1, 2, 0, 1, 2, 3, 0, 0, 1])


def operands(t=10):
    return torch.randn(t, 4, 16), torch.randn(t, 2, 16), torch.randn(t, 2, 16)


def test_offsets_alone_are_those_of_keys_too():
    layout, x = Packed(OFFSETS), operands()
    assert layout.cu_seqlens_k is OFFSETS
    assert layout.common_offset(10, 10) == 0
    assert torch.equal(
        attention(*x, mask=causal(), layout=layout),
        attention(*x, mask=causal(), layout=Packed(OFFSETS, OFFSETS, 7, 7)),
    )
    tensors = [*layout.tensors]
    assert from_tensors(layout.text, tensors, [], 10, 10).cu_seqlens_k is OFFSETS


def test_bounds_may_be_left_out():
    q, _, _ = operands()
    keys = torch.tensor([0, 5, 6, 12])
    k, v = torch.randn(2, 12, 2, 16)
    layout = Packed(OFFSETS, keys, max_seqlen_k=6)
    assert torch.equal(attention(q, k, v, layout=layout), attention(q, k, v, layout=Packed(OFFSETS, keys, 7, 6)))
    sizes = Packed(OFFSETS, keys).sizes(q, k)
    assert (sizes.s_q, sizes.s_k) == (7, 6)  # of the longest sequences, which the host can read
    assert Packed(OFFSETS[:1]).sizes(q, k).s_q == 10
    meta = Packed(OFFSETS.to("meta")).sizes(q, k)
    assert (meta.s_q, meta.s_k) == (10, 12)
    seen = torch.rand(3, 1, 7, 6) > 0.3
    assert attention(q, k, v, mask=seen, layout=Packed(OFFSETS, keys)).shape == q.shape
    with pytest.raises(ValueError, match="at least"):
        attention(q, k, v, mask=seen[..., :5], layout=Packed(OFFSETS, keys))


@pytest.mark.parametrize("lengths", [[3, 0, 7], (3, 0, 7), torch.tensor([3, 0, 7]), torch.tensor([3, 0, 7]).int()])
def test_lengths(lengths):
    layout = Packed.from_lengths(lengths)
    wanted = torch.tensor([0, 3, 3, 10], dtype=getattr(lengths, "dtype", torch.int32))
    assert torch.equal(layout.cu_seqlens_q, wanted)
    assert layout.cu_seqlens_q.dtype == wanted.dtype
    assert layout.cu_seqlens_k is layout.cu_seqlens_q
    assert layout.max_seqlen_q == layout.max_seqlen_k == (None if isinstance(lengths, torch.Tensor) else 7)


def test_lengths_of_keys():
    layout = Packed.from_lengths([3, 0, 7], [1, 4, 2])
    assert layout.cu_seqlens_k.tolist() == [0, 1, 5, 7]
    assert (layout.max_seqlen_q, layout.max_seqlen_k) == (7, 4)
    assert Packed.from_lengths([]).cu_seqlens_q.tolist() == [0]
    assert Packed.from_lengths([1 << 30, 1 << 30]).cu_seqlens_q.dtype == torch.int64
    assert Packed.from_lengths([3], device="meta").cu_seqlens_q.device.type == "meta"
    assert Packed.from_lengths(torch.tensor([3]), device="meta").cu_seqlens_q.device.type == "meta"
    with torch.device("meta"):
        assert Packed.from_lengths([3]).cu_seqlens_q.device.type == "meta"


@pytest.mark.parametrize("lengths", [[3, -1], [3.0], [True], 3, "12", None, torch.tensor([1.0]), torch.tensor([[1]])])
def test_lengths_that_are_none(lengths):
    error = ValueError if isinstance(lengths, torch.Tensor) or lengths == [3, -1] else TypeError
    with pytest.raises(error, match="lengths_q must be"):
        Packed.from_lengths(lengths)
    if lengths is not None:
        with pytest.raises(error, match="lengths_k must be"):
            Packed.from_lengths([1, 1], lengths)


def test_lengths_of_different_numbers():
    with pytest.raises(ValueError, match=r"one shape \(b \+ 1,\), got \(3,\), \(4,\)"):
        Packed.from_lengths([1, 1], [1, 1, 1])
    x = torch.randn(4, 2, 8)
    with pytest.raises(ValueError, match="never decrease"):
        attention(x, x, x, layout=Packed.from_lengths(torch.tensor([5, -1])))


@pytest.mark.parametrize(
    ("ids", "wanted"),
    [
        (IDS, [0, 3, 7, 8, 10]),
        (IDS.int(), [0, 3, 7, 8, 10]),
        (IDS.view(2, 5), [0, 3, 5, 7, 8, 10]),  # what goes on in the next row is another sequence
        (torch.tensor([4, 5, 0, 1]), [0, 2, 4]),
        (torch.tensor([[7, 8], [9, 10]]), [0, 2, 4]),
        (torch.zeros(3, dtype=torch.long), [0, 1, 2, 3]),
        (torch.zeros(0, dtype=torch.long), [0]),
        (torch.zeros(3, 0, dtype=torch.long), [0]),
    ],
)
def test_position_ids(ids, wanted):
    offsets = Packed.from_position_ids(ids).cu_seqlens_q
    assert offsets.tolist() == wanted
    assert offsets.dtype == torch.int32
    t, b = ids.numel(), max(len(wanted) - 1, 1)
    for more in (0, 1, 5):
        offsets = Packed.from_position_ids(ids, max_sequences=b + more).cu_seqlens_q
        assert offsets.tolist() == wanted + [t] * (b + more + 1 - len(wanted))


def test_position_ids_attend_within_documents():
    x = operands()
    wanted = attention(*x, mask=causal(), layout=Packed(torch.tensor([0, 3, 7, 8, 10])))
    for layout in (Packed.from_position_ids(IDS), Packed.from_position_ids(IDS, max_sequences=9)):
        torch.testing.assert_close(attention(*x, mask=causal(), layout=layout), wanted)


def test_position_ids_that_do_not_fit():
    for ids in (IDS.float(), IDS.view(1, 2, 5), 3, torch.tensor(3)):
        error = ValueError if isinstance(ids, torch.Tensor) else TypeError
        with pytest.raises(error, match=r"ids must be an int32 or int64 tensor of shape \(t,\) or \(b, s\)"):
            Packed.from_position_ids(ids)
    for most in (0, -1, 2.0, True):
        whole = type(most) is int
        words = f"max_sequences must be an integer{' from 1 on' * whole}, or None, got {most}"
        with pytest.raises(ValueError if whole else TypeError, match=words):
            Packed.from_position_ids(IDS, most)
    with pytest.raises(ValueError, match=r"ids \(10,\) begin 4 sequences, and max_sequences is 3"):
        Packed.from_position_ids(IDS, max_sequences=3)


def test_ids_are_not_read_where_the_number_of_sequences_is_given():
    """What a GPU does: nothing waits for it, and sequences beyond the last are in none."""
    with torch.device("meta"):
        assert Packed.from_position_ids(IDS.to("meta"), max_sequences=3).cu_seqlens_q.shape == (4,)

    def offsets(ids):
        return Packed.from_position_ids(ids, max_sequences=3).cu_seqlens_q

    compiled = torch.compile(offsets, backend="eager", fullgraph=True)
    assert compiled(IDS).tolist() == [0, 3, 7, 8]


@pytest.mark.slow
@pytest.mark.parametrize("form", ["offsets", "lengths", "ids"])
def test_compiles_once(form):
    """Each form may be made in the compiled region."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")

    def call(q, k, v, given):
        match form:
            case "offsets":
                layout = Packed(given)
            case "lengths":
                layout = Packed.from_lengths(given)
            case _:
                layout = Packed.from_position_ids(given, max_sequences=8)
        return attention(q * 1, k, v, mask=causal(), layout=layout)

    compiled = torch.compile(call, backend=counter, fullgraph=True, dynamic=True)
    counts = []
    for lengths in (
        [3, 0, 7, 2, 9],
        [4, 9, 1, 7, 1, 2],
        [2, 2, 2, 3, 11, 1, 2],
    ):  # no size is that of another dimension
        x = operands(sum(lengths))
        given = {
            "offsets": torch.tensor([0, *lengths]).cumsum(0),
            "lengths": torch.tensor(lengths),
            "ids": torch.cat([torch.arange(n) for n in lengths]),
        }[form]
        assert torch.equal(compiled(*x, given), call(*x, given))
        counts.append(counter.frame_count)
    assert len(set(counts)) == 1
