"""A bias of every score in the Hopper backward: its tiles come by bulk copies, and its gradient leaves by them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from saccade import Dense, attention, bias, causal, documents, window
from saccade.backends.hopper.captured_tile import BackwardCapture
from saccade.masks import Mask
from saccade.testing.accuracy import check

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU (sm_90)")]

BACKEND = "gluon"
REPEATS = 50
MASKS = {"full": None, "causal": causal(), "window": window(200, 30)}

dims = pytest.mark.parametrize("d", [64, 128])
masks = pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)


@pytest.fixture(autouse=True)
def stored(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of each backward whether its kernel stored the gradient."""
    found: list[bool] = []
    of = BackwardCapture.of

    def noted(*given: Any) -> BackwardCapture | None:
        capture = of(*given)
        found.append(capture is not None and capture.gradient is not None)
        return capture

    monkeypatch.setattr(BackwardCapture, "of", staticmethod(noted))
    return found


def operands(b: int, heads: tuple[int, int], lengths: tuple[int, int], d: int, dtype: torch.dtype) -> list[Tensor]:
    shapes = zip((heads[0], heads[1], heads[1]), (lengths[0], lengths[1], lengths[1]), strict=True)
    return [torch.randn(b, h, s, d, device="cuda", dtype=dtype) for h, s in shapes]


def learned(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, device="cuda").to(dtype).requires_grad_()


def right(
    t: Tensor, b: int, heads: tuple[int, int], lengths: tuple[int, int], d: int, dtype: torch.dtype = torch.bfloat16,
    **keywords: Any,
) -> None:  # fmt: skip
    """Twice: the second call takes what the first one kept."""
    given = operands(b, heads, lengths, d, dtype)
    for _ in range(2):
        check(*given, backend=BACKEND, **{"score_mod": bias(t), **keywords}).assert_ok()


@dims
@masks
@pytest.mark.parametrize("lengths", [(640, 768), (577, 712), (65, 1000), (1000, 72), (1, 8)], ids=str)
def test_lengths(lengths: tuple[int, int], mask: Mask | None, d: int, stored: list[bool]) -> None:
    right(learned(1, 4, *lengths), 1, (4, 2), lengths, d, mask=mask)
    # One row of a bias is one for all rows: no tiles, and a sum.
    assert all(x == (lengths[0] > 1) for x in stored)


@dims
@masks
@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (8, 1)], ids=str)
def test_batches_and_groups(heads: tuple[int, int], mask: Mask | None, d: int, stored: list[bool]) -> None:
    right(learned(2, heads[0], 300, 456), 2, heads, (300, 456), d, mask=mask)
    assert all(stored)


@pytest.mark.parametrize("d", [40, 72, 96, 112])
def test_head_dims(d: int) -> None:
    right(learned(1, 4, 300, 456), 1, (4, 2), (300, 456), d, mask=causal())


@dims
def test_float16(d: int, stored: list[bool]) -> None:
    """A bias of another dtype has a gradient of another."""
    for dtype in (torch.float16, torch.bfloat16):
        right(learned(1, 4, 300, 456, dtype=dtype), 1, (4, 2), (300, 456), d, torch.float16, mask=causal())
    assert stored == [True, True, False, False]


@dims
def test_lengths_in_use(d: int) -> None:
    """What lies behind them is NaN, and has gradients of 0."""
    t = torch.randn(2, 4, 577, 712, device="cuda")
    t[0, :, 300:], t[0, :, :, 450:], t[1, :, :, 700:] = torch.nan, torch.nan, torch.nan
    t = t.bfloat16().requires_grad_()
    layout = Dense("bhsd", *torch.tensor([[300, 577], [450, 700]], device="cuda"))
    q, k, v = (x.requires_grad_() for x in operands(2, (4, 2), (577, 712), d, torch.bfloat16))
    out = attention(q, k, v, mask=causal(), layout=layout, score_mod=bias(t), backend=BACKEND)
    loss = out[0, :, :300].float().square().sum() + out[1].float().square().sum()
    found = torch.autograd.grad(loss, [q, k, v, t])
    assert all(x.isfinite().all() for x in found)
    assert not found[3][0, :, 300:].any()
    assert not found[3][0, :, :, 450:].any()
    assert not found[3][1, :, :, 700:].any()
    given = learned(2, 4, 577, 712)
    right(given, 2, (4, 2), (577, 712), d, mask=causal(), layout=layout)


@dims
def test_lists_and_dropout(d: int) -> None:
    ids = torch.randint(0, 5, (2, 600), device="cuda")
    right(learned(2, 4, 600, 600), 2, (4, 2), (600, 600), d, mask=documents(ids) & causal())
    right(learned(2, 4, 600, 600), 2, (4, 2), (600, 600), d, dropout_p=0.2)


@dims
def test_minus_infinity_hides_keys(d: int) -> None:
    t = torch.randn(1, 4, 600, 712, device="cuda")
    t[t > 0.8] = -torch.inf
    t[..., 300:310], t[:, :, 5], t[:, 1, 64:192] = -torch.inf, -torch.inf, -torch.inf
    right(t.bfloat16().requires_grad_(), 1, (4, 2), (600, 712), d)


@dims
@pytest.mark.parametrize("name", ["larger", "expanded", "view", "slope", "shared"])
def test_other_reads(name: str, d: int, stored: list[bool]) -> None:
    tables: dict[str, Callable[[], Tensor]] = {
        "larger": lambda: learned(2, 4, 610, 720),
        "expanded": lambda: learned(1, 1, 600, 712).detach().expand(2, 4, -1, -1).requires_grad_(),
        "view": lambda: learned(2, 600, 4, 712).detach().transpose(1, 2).requires_grad_(),
        "slope": lambda: learned(2, 4, 600, 712),
        "shared": lambda: learned(1, 4, 600, 712),
    }
    t = tables[name]()

    def mod(score, b, h, q_idx, kv_idx):
        there = t[b if name != "shared" else b * 0, h, q_idx, kv_idx]
        return score + score * there if name == "slope" else score + there

    right(t, 2, (4, 2), (600, 712), d, score_mod=mod)
    assert all(x == (name not in ("slope", "shared")) for x in stored)


@dims
@pytest.mark.parametrize("deterministic", [False, True])
def test_repeats(d: int, deterministic: bool) -> None:
    """More blocks of keys than multiprocessors, and what is not summed by atomics has the same bits each time."""
    q, k, v = (x.requires_grad_() for x in operands(2, (16, 16), (1100, 1160), d, torch.bfloat16))
    t = learned(2, 16, 1100, 1160)
    out = attention(q, k, v, mask=causal(), score_mod=bias(t), deterministic=deterministic, backend=BACKEND)
    leaves, dout = [k, v, t, q] if deterministic else [k, v, t], torch.randn_like(out)
    first = torch.autograd.grad(out, leaves, dout, retain_graph=True)
    for _ in range(REPEATS):
        again = torch.autograd.grad(out, leaves, dout, retain_graph=True)
        assert all(map(torch.equal, first, again))
    assert not first[2].triu(1160 - 1100 + 1).any()
