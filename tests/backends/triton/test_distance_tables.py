"""Tensors that are read by distance: tables of all distances."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from saccade import Dense, Packed, attention, causal, relative_bias, t5_bias, window
from saccade.backends import Launches
from saccade.backends.device import bias_sums, distance_tables
from saccade.backends.device.bias_sums import BiasSums
from saccade.call import Call
from saccade.masks import Mask
from saccade.ops import dispatch
from saccade.scores import bind
from saccade.testing.accuracy import Report, check

FAR, LOW = 1 << 30, torch.tensor([-1e9, 0.5, 0.25])
MASKS: dict[str, Mask | None] = {"full": None, "causal": causal(), "window": window(40, 9)}


def learned(kind: str) -> Any:
    """A score function of two heads with parameters."""
    near, far, rows = (torch.randn(2, 257, requires_grad=True) for _ in range(3))
    match kind:
        case "t5":
            return t5_bias(torch.randn(32, 2, requires_grad=True))
        case "relative":
            return relative_bias(near)
        case "short":
            return relative_bias(near[:, :9])
        case "one":
            return relative_bias(near[:, :1])
        case "shared":
            return relative_bias(near[:1, :3])
        case "constants":  # no read by distance, though each score reads
            return lambda s, b, h, i, j: s * far[h, (i * j).clamp(0, 0)] + near[0, (j - i).clamp(3, 3)]
        case "difference":
            return lambda s, b, h, i, j: s - near[0, (j - i).clamp(-9, 2) + 9] + far[h, (i - j).clamp(-1, 3) + 1]
        case "product":
            return lambda s, b, h, i, j: s * far[h, (j - i).clamp(-20, 20) + 20] + near[h, (j - i).abs()]
    return lambda s, b, h, i, j: s + near[b, (i - j) % 257] * rows[h, i]


def report(kind: str, s_q: int, s_k: int, mask: str) -> Report:
    """With a sink: else what is added to all scores of a row has no gradient."""
    q, k, v = (torch.randn(2, h, s, 16) for h, s in ((2, s_q), (1, s_k), (1, s_k)))
    return check(q, k, v, mask=MASKS[mask], score_mod=learned(kind), sink=torch.randn(2), backend="triton")


CALLS = [
    ("relative", 45, 55, "window"),
    ("t5", 50, 35, "causal"),
    ("product", 32, 32, "full"),
    ("rows", 40, 41, "full"),
    # Of some tiles all distances lie beyond the reach.
    ("short", 150, 170, "full"),
    ("short", 170, 140, "causal"),
    ("short", 140, 150, "window"),
    ("difference", 140, 150, "full"),
]


@pytest.mark.sample
@pytest.mark.parametrize(("kind", "s_q", "s_k", "mask"), CALLS)
def test_against_the_oracle(kind: str, s_q: int, s_k: int, mask: str) -> None:
    """Forward and backward, with remainders of rows and keys; by head, by batch row, and beside another read."""
    report(kind, s_q, s_k, mask).assert_ok()


@pytest.mark.parametrize(
    ("kind", "s_q", "s_k"), [("one", 100, 170), ("one", 20, 9), ("shared", 9, 20), ("constants", 20, 30)]
)
def test_few_distances(kind: str, s_q: int, s_k: int) -> None:
    """Of one distance every tile lies beyond the reach on both sides, and counts once."""
    report(kind, s_q, s_k, "full").assert_ok()


def test_a_wrong_table_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    fill = distance_tables.tables

    def moved(call: Call, launches: Launches, fast: bool = False) -> tuple[Any, ...]:
        found = fill(call, launches, fast)
        return (*found[:3], found[3] + 2) if found else ()

    assert report("relative", 30, 30, "causal").ratios["out"] <= 1
    monkeypatch.setattr(distance_tables, "tables", moved)
    assert report("relative", 30, 30, "causal").ratios["out"] > 1


@pytest.mark.parametrize("ends", [(1.0, 0.0), (0.0, -1.0)], ids=["low", "high"])
def test_a_wrong_reach_is_rejected(ends: tuple[float, float], monkeypatch: pytest.MonkeyPatch) -> None:
    """By 70 distances: tiles that hold some in reach are taken for others."""
    fill = distance_tables.tables

    def nearer(call: Call, launches: Launches, fast: bool = False) -> tuple[Any, ...]:
        found = fill(call, launches, fast)
        if found:
            found[0][..., :2] += 70 * torch.tensor(ends)
        return found

    monkeypatch.setattr(distance_tables, "tables", nearer)
    ratios = report("short", 150, 170, "full").ratios
    assert ratios["out"] > 1
    assert ratios["dq"] > 1
    assert ratios["dk"] > 1


@pytest.mark.parametrize(
    ("score_mod", "reach"),
    [
        (relative_bias(torch.randn(2, 9)), [[-4, 4], [-4, 4]]),
        (relative_bias(torch.randn(1, 5)), [[-2, 2]]),
        (t5_bias(torch.randn(8, 2), max_distance=11), [[-11, 11], [-11, 11]]),
        (lambda s, b, h, i, j: s + torch.ones(3)[(j - i).clamp(0, 0)], [[FAR, -FAR]]),
        # Numbers that mask keys are added one by one.
        (lambda s, b, h, i, j: s + LOW[(j - i).clamp(-1, 1) + 1], [[-FAR, 1]]),
    ],
    ids=["relative", "shared", "t5", "one place", "large"],
)
def test_reach(score_mod: Any, reach: list[list[int]]) -> None:
    q = torch.randn(1, 2, 20, 16)
    call = Call(q, q, q, score=bind(score_mod, q))
    table = distance_tables.tables(call, {})[0]
    assert torch.equal(table[0, :, :2], torch.tensor(reach, dtype=torch.float32))


def test_a_table_is_of_what_a_tensor_holds_now() -> None:
    q, table = torch.randn(1, 2, 30, 16), torch.randn(2, 9)
    score_mod = relative_bias(table)
    before = attention(q, q, q, score_mod=score_mod, backend="triton")
    table.add_(torch.randn(2, 9))
    after = attention(q, q, q, score_mod=score_mod, backend="triton")
    assert not torch.equal(before, after)
    assert torch.equal(after, attention(q, q, q, score_mod=relative_bias(table.clone()), backend="triton"))


OFFSETS = torch.tensor([0, 5, 20])


@pytest.mark.parametrize(
    ("layout", "count"),
    [(Dense(), 1), (Dense(seqused_k=torch.tensor([7])), 1), (Dense(q_offset=3), 0), (Packed(OFFSETS, OFFSETS), 0)],
    ids=["dense", "used", "offset", "packed"],
)
def test_calls_that_have_tables(layout: Any, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of whose distances the host knows the largest, unless a table would be too long."""
    q = torch.randn(1, 2, 20, 16)
    call = Call(q, q, q, score=bind(relative_bias(torch.randn(2, 9)), q), layout=layout)
    assert len(distance_tables.empty(call)) == count * distance_tables.FIELDS
    monkeypatch.setattr(distance_tables, "MOST", 100)
    assert distance_tables.empty(call) == ()


@pytest.mark.parametrize("mask", ["full", "causal"])
def test_sums_beyond_the_reach(mask: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The table's gradient has two parts: without the second it is wrong, and with a part counted twice."""
    q, k, v = (torch.randn(1, 2, s, 16) for s in (150, 170, 170))
    table, dout = torch.randn(2, 9, requires_grad=True), torch.randn(1, 2, 150, 16)
    keywords = {"mask": MASKS[mask], "score_mod": relative_bias(table)}

    def gradient(backend: str) -> Tensor:
        out = attention(q, k, v, backend=backend, **keywords)
        return torch.autograd.grad(out, table, dout)[0]

    def error() -> float:
        return float((gradient("triton") - exact).abs().max())

    exact = gradient("reference")
    assert error() < 1e-3
    of = BiasSums.of

    def counted(*arguments: Any) -> BiasSums | None:
        """Every tile is in reach, and what lies beyond counts once more."""
        biases = of(*arguments)
        assert biases is not None
        return biases._replace(block_q=1 << 20, block_k=1 << 20)

    with monkeypatch.context() as patch:
        patch.setattr(BiasSums, "of", counted)
        assert error() > 0.1
    dispatch.forget()
    monkeypatch.setattr(bias_sums, "launch", lambda *arguments: lambda *arguments: None)
    assert error() > 0.1
