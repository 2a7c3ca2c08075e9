"""The gradient of sinks: the kernel, and wrong ones."""

from __future__ import annotations

import math

import pytest
import torch

from saccade.backends import Saved
from saccade.backends.device import gradients
from saccade.backends.device.gradients import sink_gradient, sink_kernel
from saccade.call import Call


def problem(b, s_q, heads=3):
    """A call with a sink, its LSE, some of it of rows that are not in use or of a sink without end, and delta."""
    q = torch.zeros(b, heads, s_q, 4)
    sink = torch.randn(2, heads)[0]
    lse, delta = sink[:, None] + torch.rand(b, heads, s_q), torch.randn(b, heads, s_q)
    lse[:, 0, ::3], lse[:, 1, 1::5] = -math.inf, math.inf
    delta[:, 0, ::3] = math.nan
    return Call(q, q, q, sink=sink), lse, delta


def right(call, lse, delta):
    """By PyTorch."""
    share = torch.exp(call.sink[:, None] - lse)
    return -torch.where(lse.isinf(), 0, share * delta).sum((0, 2))


@pytest.mark.parametrize(("b", "s_q"), [(1, 1), (2, 50), (3, 700)])
def test_sums(b, s_q, monkeypatch):
    monkeypatch.setattr(gradients, "SINK_ROWS", 256)
    call, lse, delta = problem(b, s_q)
    found = sink_gradient(call, {}, Saved(call.q, None, call.q, lse), delta.mT.contiguous().mT)
    torch.testing.assert_close(found, right(call, lse, delta))
    without_end = call.replace(sink=torch.full((3,), math.inf))
    assert not sink_gradient(without_end, {}, Saved(call.q, None, call.q, torch.full_like(lse, math.inf)), delta).any()


def test_every_second_number_is_read_in_place(monkeypatch):
    """A copy would be torch's, and calls in which torch computes are not replayed."""
    call, lse, delta = problem(2, 50)
    pairs, read = torch.stack([torch.full_like(delta, math.nan), delta], 3), []
    launch = gradients.sink_launch
    monkeypatch.setattr(gradients, "sink_launch", lambda *given: read.append(given[3]) or launch(*given))
    found = sink_gradient(call, {}, Saved(call.q, None, call.q, lse), pairs[..., 1])
    torch.testing.assert_close(found, right(call, lse, delta))
    assert read[0].data_ptr() == pairs[..., 1].data_ptr()


def test_without_keys_the_lse_alone_has_a_gradient():
    call, lse, dlse = problem(2, 9)
    found = sink_gradient(call, {}, Saved(call.q, dlse, call.q, lse))
    torch.testing.assert_close(found, right(call, lse, -dlse))
    assert not sink_gradient(call, {}, Saved(call.q, None, call.q, lse)).any()
    none, lse, dlse = problem(2, 0)
    assert not sink_gradient(none, {}, Saved(none.q, dlse, none.q, lse)).any()


@pytest.mark.parametrize("wrong", ["heads", "batch rows", "sign", "steps"])
def test_others_fail(wrong):
    call, lse, delta = problem(2, 40)
    lse, delta = torch.rand_like(lse), torch.randn_like(delta)
    found, pitch, (b, h_q, s_q) = torch.empty(3), call.sink.stride(0), delta.shape
    given = delta.transpose(0, 1).contiguous() if wrong == "heads" else delta
    if wrong == "steps":
        given = torch.cat([delta.flatten(), torch.randn(delta.numel())])
    count = s_q if wrong == "batch rows" else b * s_q
    sign = 1.0 if wrong == "sign" else -1.0
    numbers = (2 * x + 3 for x in (pitch, h_q, s_q, count, 2 if wrong == "steps" else 1))
    sink_kernel[(h_q,)](call.sink, lse, given, found, *numbers, sign, BLOCK=64)
    assert not torch.allclose(found, right(call, lse, delta), rtol=1e-3)
