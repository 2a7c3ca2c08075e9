"""Captured tensors that are read at a key's number itself: many keys by one load, and gradients that are stored."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor

from saccade import Dense, attention, causal, mask_mod, scores, window
from saccade.scores import Traced, bind
from saccade.scores.codegen import source
from saccade.scores.codegen.emitter import EmitOptions
from saccade.testing import check

S_Q, S_K = 90, 112
MASKS = {"none": None, "causal": causal(), "window": window(30, 9)}


def operands(b: int, keys: int = S_K, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [torch.randn(b, h, s, 16, dtype=dtype) for h, s in ((2, S_Q), (1, keys), (1, keys))]


def learned(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape).to(dtype).requires_grad_()


def read_plainly(t: Tensor) -> scores.ScoreMod:
    return scores.ScoreMod(lambda score, b, h, q_idx, kv_idx, t: score + score * t[b, h, q_idx, kv_idx], t)


CALLS = {
    "own": lambda: (2, scores.bias(learned(2, 2, S_Q, S_K))),
    "slope": lambda: (2, read_plainly(learned(2, 2, S_Q, S_K))),
    "one row": lambda: (1, scores.bias(learned(2, S_Q, S_K))),
    "shared by rows": lambda: (2, scores.bias(learned(1, 2, S_Q, S_K))),
    "shared by heads": lambda: (2, scores.bias(learned(2, 1, S_Q, S_K))),
    "matrix": lambda: (2, scores.bias(learned(S_Q, S_K))),
    "keys": lambda: (2, scores.bias(learned(2, 1, 1, S_K))),
    "odd": lambda: (1, scores.bias(learned(1, 2, S_Q, S_K - 1))),
    "larger": lambda: (1, read_plainly(learned(1, 2, S_Q + 9, S_K + 16))),
    "larger by less": lambda: (1, read_plainly(learned(1, 2, S_Q + 9, S_K + 5))),
    "half": lambda: (1, scores.bias(learned(1, 2, S_Q, S_K, dtype=torch.bfloat16))),
    "by keys first": lambda: (
        1,
        scores.ScoreMod(
            lambda score, b, h, q_idx, kv_idx, t: score + t[h, kv_idx, q_idx], learned(2, S_K, S_Q + 2)
        ),
    ),
    "both ways": lambda: (
        1,
        scores.ScoreMod(
            lambda score, b, h, q_idx, kv_idx, t: score + t[h, q_idx, kv_idx] * t[h, kv_idx, q_idx],
            learned(2, S_K, S_K),
        ),
    ),
    "ids": lambda: (
        1,
        scores.ScoreMod(
            lambda score, b, h, q_idx, kv_idx, i: torch.where(i[q_idx] == i[kv_idx], score, -score),
            (torch.arange(S_K) // 30).int(),
        ),
    ),
    "two": lambda: (1, scores.compose(scores.bias(learned(1, 2, S_Q, S_K)), scores.bias(learned(S_K)))),
    "view": lambda: (1, scores.bias(learned(1, 2, S_Q, S_K + 3)[..., 3:])),
    "strides": lambda: (1, scores.bias(learned(S_Q, 2, S_K).transpose(0, 1))),
    "expanded": lambda: (2, read_plainly(learned(1, 1, S_Q, S_K).expand(2, 2, -1, -1))),
}  # fmt: skip


def pytest_generate_tests(metafunc: Any) -> None:
    """Each call with one of the masks; with `--everything` with all."""
    if metafunc.function is test_against_the_oracle:
        every = metafunc.config.getoption("--everything")
        pairs = [(x, y) for i, x in enumerate(CALLS) for j, y in enumerate(MASKS) if every or i % len(MASKS) == j]
        metafunc.parametrize(("name", "mask"), pairs)


@pytest.mark.sample
def test_against_the_oracle(name, mask):
    b, score_mod = CALLS[name]()
    keys = {"odd": S_K - 1}.get(name, S_K)
    check(*operands(b, keys), mask=MASKS[mask], score_mod=score_mod, backend="triton").assert_ok()


@pytest.mark.parametrize("name", ["own", "shared by rows", "two"])
def test_repeatable(name):
    b, score_mod = CALLS[name]()
    check(*operands(b), score_mod=score_mod, backend="triton", deterministic=True, dropout_p=0.2).assert_ok()


def test_lengths_and_what_lies_behind_them():
    """NaN where no row or key is in use stays out of everything, and gradients there are 0."""
    t = torch.randn(2, 2, S_Q, S_K)
    t[0, :, 70:], t[0, :, :, 80:], t[1, :, 50:] = torch.nan, torch.nan, torch.nan
    t.requires_grad_()
    given = [x.requires_grad_() for x in operands(2)]
    layout = Dense("bhsd", *torch.tensor([[70, 50], [80, S_K]]))
    found = {}
    for backend in ("triton", "cpu"):
        out = attention(*given, layout=layout, score_mod=scores.bias(t), backend=backend)
        found[backend] = out, *torch.autograd.grad(out[0, :, :70].sum() + out[1, :, :50].square().sum(), [*given, t])
    for x, y in zip(found["triton"], found["cpu"], strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-4)
        assert x.isfinite().all()


def test_alignment_may_change_between_calls():
    q, k, v = operands(1)
    memory = torch.randn(2 * S_Q * S_K + 1)
    for start in (0, 1, 0):
        t = memory[start : start + 2 * S_Q * S_K].view(1, 2, S_Q, S_K)
        expected = torch.nn.functional.scaled_dot_product_attention(
            q, k.expand(-1, 2, -1, -1), v.expand(-1, 2, -1, -1), t
        )
        torch.testing.assert_close(attention(q, k, v, score_mod=scores.bias(t), backend="triton"), expected)


@pytest.mark.parametrize("keys", [112, 110])
def test_masks_in_memory(keys):
    seen = torch.rand(2, S_Q, keys) < 0.6
    listed = mask_mod(lambda b, h, q_idx, kv_idx: seen[b, q_idx, kv_idx])
    check(*operands(2, keys), mask=listed, backend="triton").assert_ok()


def bound(shape: tuple[int, ...], dtype: torch.dtype = torch.float32, first: int = 0) -> Traced:
    t = torch.zeros(64 + first + torch.Size(shape).numel(), dtype=dtype)[first:]
    return bind(scores.bias(t[: torch.Size(shape).numel()].view(shape)), torch.zeros(1))  # pyright: ignore[reportReturnType]


@pytest.mark.parametrize(
    ("score", "unit"),
    [
        (lambda: bound((1, 2, 8, 16)), 4),
        (lambda: bound((1, 2, 8, 16), torch.bfloat16), 8),
        (lambda: bound((1, 2, 8, 12), torch.bfloat16), 1),
        (lambda: bound((1, 2, 8, 16), torch.bfloat16, first=1), 1),
        (lambda: bound((1, 2, 8, 1)), 1),
        (lambda: bind(scores.alibi(torch.zeros(8)), torch.zeros(1)), 1),
    ],
)
def test_units(score, unit):
    assert score().units == (unit,)


def test_source():
    """Whole units: no key's index is moved, and its stride is 1. Else each one is."""
    score = bound((1, 2, 8, 16))
    of_units, others = (
        source.value_source(score.program, EmitOptions((False,), units=units)) for units in (score.units, ())
    )
    assert "mask=(kv_idx < t0_n3)" in of_units
    assert "inside(kv_idx" not in of_units
    assert re.search(r"t0_n3 = plain_int\(data\[\d+\]\) // 4 \* 4", of_units)
    assert "inside(kv_idx, t0_n3) * t0_s3" in others
    assert "mask" not in others


@pytest.mark.parametrize(
    ("shape", "indices"),
    [
        ((2, 2, 8, 16), ("b", "h", "q_idx", "kv_idx")),
        ((1, 2, 8, 16), (None, "h", "q_idx", "kv_idx")),
        ((2, 8, 16), ("h", "q_idx", "kv_idx")),
        ((8, 16), ("q_idx", "kv_idx")),
        ((16,), None),
    ],
)
def test_own_elements(shape, indices):
    assert bound(shape).program.own_elements == ({} if indices is None else {0: indices})


@pytest.mark.parametrize(
    ("name", "added"), [("own", {0}), ("half", {0}), ("two", {0}), ("slope", set()), ("larger", set()), ("ids", set())]
)
def test_added(name, added):
    """Whose gradient is the score's own."""
    score: Any = bind(CALLS[name]()[1], torch.zeros(1))
    assert score.program.added == added


@pytest.mark.parametrize("name", ["both ways", "larger", "by keys first"])
def test_own_elements_of_other_reads(name):
    score: Any = bind(CALLS[name]()[1], torch.zeros(1))
    indices = ("h", "kv_idx", "q_idx") if name == "by keys first" else ("b", "h", "q_idx", "kv_idx")
    assert score.program.own_elements == ({} if name == "both ways" else {0: indices})
