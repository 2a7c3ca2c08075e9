"""Whatever changes between calls that were replayed is seen: each argument in turn, forward and backward, against the
reference. The base is replayed before and after."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from saccade import Dense, Descale, Packed, Paged, attention, causal, documents, interval, mask_mod, prefix, window
from saccade.testing.accuracy import check

Call = tuple[list[Tensor], dict[str, Any]]
"""Operands and keywords"""


CAUSAL = causal()


def i32(*x: int) -> Tensor:
    return torch.tensor(x, dtype=torch.int32)


def rows(b: int = 2, s: int = 8, h: int = 2, d: int = 16) -> list[Tensor]:
    return [torch.randn(b, h, s, d).bfloat16() for _ in range(3)]


def end_to_end(t: int = 10, h: int = 2) -> list[Tensor]:
    return [torch.randn(t, n, 16).bfloat16() for n in (2, h, h)]


def pages() -> list[Tensor]:
    return [torch.randn(2, 1, 4, 16).bfloat16(), *(torch.randn(6, 4, 2, 16).bfloat16() for _ in range(2))]


TABLE = i32(3, 0, 1, 5).view(2, 2)
SEEN = torch.rand(8, 8) < 0.6
SEEN[:, 0] = True
IDS = torch.tensor([[0, 0, 1, 1, 1, 2, 2, 2]])


def dense(**keywords: Any) -> Callable[[], Call]:
    return lambda: (rows(), keywords)


def packed(*fields: Any, mask: Any = CAUSAL, h: int = 2, **named: Any) -> Callable[[], Call]:
    return lambda: (end_to_end(h=h), {"mask": mask, "layout": Packed(*fields, **named)})


def paged(*fields: Any, mask: Any = CAUSAL, **named: Any) -> Callable[[], Call]:
    return lambda: (pages(), {"mask": mask, "layout": Paged(*fields, **named)})


def shared_pages_and_values() -> Call:
    q, k, _ = pages()
    return [q, k, k], {"mask": causal(), "layout": Paged(TABLE, i32(5, 8))}


def with_threshold(t: Tensor) -> Any:
    return mask_mod(lambda b, h, q_idx, kv_idx: t[q_idx] >= kv_idx)


CU = i32(0, 4, 10)
KINDS: dict[str, list[Callable[[], Call]]] = {
    "packed": [
        packed(CU, CU, 6, 6),
        packed(i32(0, 6, 10), i32(0, 6, 10), 6, 6),
        packed(CU, i32(0, 4, 10), 6, 6),
        packed(CU, i32(0, 6, 10), 6, 6),
        packed(CU.long(), CU.long(), 6, 6),
        packed(i32(0, 1, 4, 10)),
        packed(CU, CU, 6, 6, mask=None),
        packed(CU, CU, 6, 6, mask=window(1, 0)),
        packed(CU, h=1),
        packed(CU, CU, 6, 6, mask=window(2, 0)),
        packed(CU, CU, seqused_q=i32(2, 6)),
        packed(CU, seqused_k=i32(2, 6)),
        packed(CU, CU, seqused_q=i32(2, 6), seqused_k=i32(3, 5)),
        packed(CU, q_offset=1),
        packed(CU, q_offset=2),
        packed(CU, q_offset=i32(0, 2)),
        packed(CU, q_offset=i32(*range(10))),
        packed(CU, k_offset=-1),
        packed(CU, starts_k=i32(0, 3), seqused_k=i32(5, 6)),
        packed(CU, starts_k=i32(1, 3), seqused_k=i32(5, 6)),
        packed(CU, mask=interval(i32(1, 2)[:, None], None)),
        packed(CU, mask=interval(None, i32(*range(1, 11)))),
    ],
    "padded": [
        dense(layout=Dense(seqused_k=i32(3, 8))),
        dense(layout=Dense(seqused_k=i32(8, 2))),
        dense(layout=Dense(seqused_q=i32(3, 8))),
        dense(layout=Dense("bhsd", i32(5, 5), i32(5, 5))),
        dense(layout=Dense(seqused_k=torch.tensor([3, 8]))),
        dense(layout=Dense(seqused_k=i32(3, 0, 8, 0)[::2])),
        dense(layout=Dense(seqused_k=i32(3, 8)), mask=causal()),
        dense(layout=Dense(seqused_k=i32(9, 3, 8)[1:])),
        dense(layout=Dense("bshd", seqused_k=i32(1, 2))),
        dense(layout=Dense("sbhd", seqused_k=i32(*range(1, 3)) * 0 + 1)),
    ],
    "positions": [
        dense(mask=causal(), layout=Dense(q_offset=1)),
        dense(mask=causal(), layout=Dense(q_offset=2)),
        dense(mask=causal(), layout=Dense(q_offset=i32(1, 3))),
        dense(mask=causal(), layout=Dense(q_offset=i32(3, 1))),
        dense(mask=causal(), layout=Dense(q_offset=i32(*range(8))[None])),
        dense(mask=causal(), layout=Dense(k_offset=1)),
        dense(mask=causal(), layout=Dense(q_offset=1, k_offset=1)),
        dense(mask=causal(), layout=Dense(k_offset=i32(0, 2))),
    ],
    "masks": [
        dense(mask=causal() & interval(i32(1, 2)[:, None], None)),
        dense(mask=causal() & interval(i32(2, 0)[:, None], None)),
        dense(mask=causal() & interval(i32(1, 2)[:1, None], None)),
        dense(mask=causal() & interval(None, i32(5, 7)[:, None])),
        dense(mask=interval(i32(1, 2)[:, None], None)),
        dense(mask=interval(1, 5)),
        dense(mask=interval(1, 6)),
        dense(mask=interval(i32(*range(8))[None], None)),
        dense(mask=prefix(3)),
        dense(mask=prefix(4)),
        dense(mask=prefix(i32(3, 5))),
        dense(mask=prefix(i32(5, 3))),
        dense(mask=causal() | prefix(i32(5, 3))),
        dense(mask=documents(IDS)),
        dense(mask=causal() & documents(IDS)),
        dense(mask=documents(IDS.flip(1))),
        dense(mask=SEEN),
        dense(mask=SEEN[None, None]),
        dense(mask=SEEN.mT | SEEN),
        dense(mask=SEEN.mT.contiguous().mT),
        dense(mask=~SEEN | SEEN[:, :1]),
        dense(mask=SEEN[:1]),
        dense(mask=torch.stack([SEEN, SEEN | SEEN.mT])[:, None]),
        dense(mask=torch.stack([SEEN, SEEN | SEEN.mT])[None]),
        dense(mask=causal() | SEEN),
        dense(mask=~causal() & SEEN),
        dense(mask=with_threshold(torch.arange(8))),
        dense(mask=with_threshold(torch.arange(8).flip(0))),
        dense(mask=with_threshold(torch.arange(8).int())),
    ],
    "pages": [
        paged(TABLE, i32(5, 8)),
        paged(TABLE, i32(8, 1)),
        paged(TABLE.flip(0), i32(5, 8)),
        paged(TABLE.long(), i32(5, 8)),
        paged(TABLE, i32(5, 8), num_splits=1),
        paged(TABLE, i32(5, 8), num_splits=2),
        paged(TABLE, i32(5, 8), mask=None),
        paged(TABLE.mT.contiguous().mT, i32(5, 8)),
        paged(TABLE, i32(5, 8), q_offset=3),
        paged(TABLE, i32(5, 8), q_offset=2),
        paged(TABLE, i32(5, 8), mask=window(2, 0)),
        paged(TABLE, i32(5, 8), q_offset=i32(2, 3)),
        shared_pages_and_values,
    ],
    "numbers": [
        dense(scale=0.5),
        dense(scale=0.25),
        dense(scale=-0.5),
        dense(dropout_p=0.5),
        dense(dropout_p=0.25),
        dense(dropout_p=0.5, mask=causal()),
        dense(deterministic=True),
        dense(sink=torch.tensor([0.5, -0.5])),
        dense(sink=torch.tensor([2.0, 1.0]).double()),
    ],
}


def right(made: Callable[[], Call]) -> None:
    """One call against the reference, with gradients where there are any; dropout's bits are those of the seed."""
    given, keywords = made()
    torch.manual_seed(1)
    check(*given, backward="layout" not in keywords or not keywords["layout"].has_pages, **keywords).assert_ok()


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "i"), [(kind, i) for kind, calls in KINDS.items() for i in range(len(calls))])
def test_what_changes_is_seen(kind: str, i: int, done: list[str]) -> None:
    base, changed = KINDS[kind][0], KINDS[kind][i]
    for made in (base, changed):
        for _ in range(4):
            right(made)
    done.clear()
    for made in (base, changed, base, changed):
        right(made)
    assert done.count("forward") >= 4


def test_lengths_that_are_written_in_place(done: list[str]) -> None:
    used, cu, seen = i32(3, 8), i32(0, 4, 10), SEEN.clone()
    for made in (dense(layout=Dense(seqused_k=used)), packed(cu, cu), dense(mask=seen)):
        for turn in range(6):
            used.copy_(i32(1 + turn, 8 - turn)), cu.copy_(i32(0, 1 + turn, 10)), seen.bitwise_xor_(SEEN.roll(turn, 0))
            seen[:, 0] = True
            done.clear()
            right(made)
        assert "forward" in done


def test_results_in_the_memory_of_the_caller(done: list[str]) -> None:
    """`out` may lie as it likes, but in no operand; which operands share memory with it is in the key."""
    (q, k, v), both = rows(), torch.zeros(2, 2, 2, 8, 16).bfloat16()
    want = attention(q, k, v)
    for lies in (torch.empty_like(q), torch.empty(2, 8, 2, 16).bfloat16().transpose(1, 2), both[0], both[1]):
        for _ in range(4):
            lies.zero_()
            assert attention(q, k, v, out=lies) is lies
            torch.testing.assert_close(lies, want, rtol=0.02, atol=0.02)
    assert "forward" in done
    both[0].copy_(q)
    for _ in range(4):
        torch.testing.assert_close(attention(both[0], k, v, out=both[1]), want, rtol=0.02, atol=0.02)
        for shared in (both[0], both.flatten()[16 : 16 + q.numel()].view_as(q)):
            with pytest.raises(ValueError, match="must not share memory"):
                attention(both[0], k, v, out=shared)
        with pytest.raises(ValueError, match="must not share memory"):  # by another storage
            attention(both[0], k, v, out=torch.from_dlpack(both[0]))
        both[0].copy_(q)
    with pytest.raises(ValueError, match="gradients"):
        attention(q.requires_grad_(), k, v, out=torch.empty_like(want))


def test_the_precision_of_products(done: list[str]) -> None:
    """torch refuses to read `allow_tf32` where its successor was set."""
    given = [x.float() for x in rows()]
    for _ in range(4):
        check(*given).assert_ok()
    done.clear()
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        check(*given).assert_ok()
    finally:
        torch.backends.cuda.matmul.fp32_precision = "none"
    assert not done
    check(*given).assert_ok()
    assert done


def test_factors_of_eight_bits(done: list[str]) -> None:
    q, k, v = (x.to(torch.float8_e4m3fn) for x in rows())
    for factor in (
        torch.tensor(0.5),
        torch.tensor(2.0),
        torch.tensor([0.5, 2.0]),
        torch.rand(2, 2) + 0.5,
        0.5,
        2.0,
        None,
    ):
        for _ in range(4):
            check(q, k, v, backward=False, descale=Descale(k=factor)).assert_ok()
            check(q, k, v, backward=False, descale=Descale(v=factor)).assert_ok()
    assert "forward" in done


def test_which_operands_are_one(done: list[str]) -> None:
    """Keys that are the values, or offsets that are one tensor, and then are not."""
    for _ in range(5):
        (q, k, v), cu = rows(), i32(0, 4, 10)
        for given in ((q, k, k), (q, q, q), (q, k, v)):
            check(*given, backward=False).assert_ok()
        x, y, z = end_to_end()
        for other in (cu, cu.clone(), i32(0, 6, 10)):
            check(x, y, z, backward=False, layout=Packed(cu, other)).assert_ok()
    assert "forward" in done
