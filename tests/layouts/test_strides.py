"""Any strides: views give what contiguous copies of them give: on a GPU to the bit; on a CPU, whose matrix products add
up in an order that depends on the strides, within the tolerance."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from torch import Tensor

from saccade import attention, causal, explain, window
from saccade.call.spec import TORCH_DTYPES
from saccade.testing import check
from tests.support import draws

pytestmark = pytest.mark.usefixtures("poison")

B, H, S, D = 2, 4, 37, 24


def _normal(place, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(
        place.device, TORCH_DTYPES[place.dtype]
    )


# Each makes a (B, H, S, D) view of memory in another form.
VIEWS = {
    "transposed": lambda place: _normal(place, B, S, H, D).transpose(1, 2),
    "sequence-first": lambda place: _normal(place, S, B, H, D).permute(1, 2, 0, 3),
    "sliced": lambda place: _normal(place, B, H, S + 9, D)[:, :, 4 : S + 4],
    "every-other-row": lambda place: _normal(place, B, H, 2 * S, D)[:, :, ::2],
    "every-other-head": lambda place: _normal(place, B, 2 * H, S, D)[:, 1::2],
    "one-of-three": lambda place: _normal(place, B, S, H, 3, D)[..., 1, :].transpose(1, 2),
    "columns": lambda place: _normal(place, B, H, S, D + 8)[..., 3 : D + 3],
    "offset": lambda place: _normal(place, B * H * S * D + 1)[1:].view(B, H, S, D),
    "last-dim-strided": lambda place: _normal(place, B, H, S, 2 * D)[..., ::2],
    "last-dim-slowest": lambda place: _normal(place, D, B, H, S).permute(1, 2, 3, 0),
    "one-batch-row": lambda place: _normal(place, 1, H, S, D).expand(B, H, S, D),
    "one-head": lambda place: _normal(place, B, 1, S, D).expand(B, H, S, D),
    "one-number": lambda place: _normal(place, 1, 1, 1, 1).expand(B, H, S, D),
}
MASKS = {"none": None, "causal": causal(), "window": window(9, 3)}


def results(backend: str, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, mask) -> tuple[Tensor, ...]:
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out, lse = attention(*leaves, mask=mask, backend=backend, return_lse=True)
    alone = attention(q, k, v, mask=mask, backend=backend)
    return out.detach(), lse.detach(), alone, *torch.autograd.grad(out, leaves, dout)


def assert_same(place, view: list[Tensor], mask):
    q, k, v, dout = view
    check(q, k, v, dout=dout, mask=mask, backend=place.backend).assert_ok()
    if place.device == "cpu":
        return
    # "auto" may take another backend for rows that do not lie at multiples of 16 bytes, which rounds elsewhere.
    backend = explain(*view[:3], mask=mask, backend=place.backend).backend
    found = results(backend, *view, mask)
    wanted = results(backend, *(x.contiguous() for x in view), mask)
    for name, x, y in zip(("out", "lse", "alone", "dq", "dk", "dv"), found, wanted, strict=True):
        assert torch.equal(x, y), name


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
# Of one number alone all roundings are the same one, and do not add up as independent ones.
@pytest.mark.sample
@pytest.mark.parametrize("view", [name for name in VIEWS if name != "one-number"])
def test_all(view, mask, place):
    assert_same(place, [VIEWS[view](place) for _ in range(4)], mask)


@pytest.mark.sample
@pytest.mark.parametrize("which", range(4), ids=["q", "k", "v", "dout"])
@pytest.mark.parametrize("view", VIEWS)
def test_one_alone(view, which, place):
    tensors = [_normal(place, B, H, S, D) for _ in range(4)]
    tensors[which] = VIEWS[view](place)
    assert_same(place, tensors, causal())


@pytest.mark.sample
@pytest.mark.parametrize(
    "order", [*itertools.permutations(range(4))], ids=lambda order: "".join("bhsd"[i] for i in order)
)
@pytest.mark.parametrize("step", [1, 2])
def test_out_has_the_memory_order_of_q(order, step, torch_device):
    """With rows of contiguous elements: of q's order without its last dimension."""
    sizes = 2, 3, 5, 8 * step
    memory = torch.randn([sizes[dim] for dim in order], device=torch_device)
    q = memory.permute([order.index(dim) for dim in range(4)])[..., ::step]
    k = torch.randn(2, 3, 7, 8, device=torch_device)
    compiled = torch.compile(attention, backend="eager")
    reference = attention(q, k, k, backend="reference")
    for out in (attention(q, k, k), attention(q.detach().requires_grad_(), k, k), compiled(q, k, k), reference):
        found = sorted(range(4), key=lambda dim: -out.stride(dim))
        assert found == [*(dim for dim in order if dim != 3), 3]
        assert out.permute(found).is_contiguous()


@pytest.mark.parametrize("length", [33, 65])
def test_broadcast_keys(length, place):
    """Lengths at which stride-0 keys have been read wrongly elsewhere: one more than a tile."""
    q, dout = _normal(place, B, H, length, D), _normal(place, B, H, length, D)
    k, v = (_normal(place, B, 1, length, D).expand(B, H, length, D) for _ in range(2))
    assert_same(place, [q, k, v, dout], None)


@pytest.mark.parametrize("which", range(4), ids=["q", "k", "v", "dout"])
def test_one_row_for_all(which, place):
    """Matrix products that meet a row stride of 0 may add up in another order, so not to the bit."""
    tensors = [_normal(place, B, H, S, D) for _ in range(4)]
    tensors[which] = _normal(place, B, H, 1, D).expand(B, H, S, D)
    *tensors, dout = tensors
    check(*tensors, dout=dout, mask=causal(), backend=place.backend).assert_ok()


def test_gradient_of_a_sum(place):
    """`out.sum().backward()` brings a dout of stride 0."""
    q, k, v = (_normal(place, B, H, S, D) for _ in range(3))
    check(q, k, v, dout=torch.ones_like(q[:1, :1, :1, :1]).expand_as(q), backend=place.backend).assert_ok()


def test_strided_tensors(place):
    """Sinks, lengths and gradients of the LSE may be views too."""
    q, k, v = (_normal(place, B, H, S, D) for _ in range(3))
    sink = _normal(place, 2 * H)[::2]
    dlse = torch.randn(S, B, H, device=place.device).permute(1, 2, 0)
    dlse = dlse.double() if place.dtype == "fp64" else dlse
    check(q, k, v, sink=sink, dlse=dlse, mask=causal(), backend=place.backend).assert_ok()


def _random_view(x: Tensor, dice: random.Random) -> Tensor:
    """The same numbers in memory of a random order, within a larger block, sometimes every other element of it."""
    order = dice.sample(range(4), 4)
    starts = [dice.choice([0, 0, 1, 5]) for _ in range(4)]
    steps = [dice.choice([1, 1, 1, 2]) for _ in range(4)]
    room = [start + step * n + dice.choice([0, 3]) for start, step, n in zip(starts, steps, x.shape, strict=True)]
    memory = torch.full([room[dim] for dim in order], torch.nan, dtype=x.dtype, device=x.device)
    view = memory.permute([order.index(dim) for dim in range(4)])
    view = view[tuple(slice(a, a + step * n, step) for a, step, n in zip(starts, steps, x.shape, strict=True))]
    view.copy_(x)
    return view


@pytest.mark.sample
@pytest.mark.parametrize("seed", range(40))
def test_draw(seed, torch_device):
    dice = random.Random(seed)
    case = draws.dense(1000 + seed, dice.choice(["fp16", "bf16", "fp32"]))
    print(case.describe())  # shown when the test fails
    made = case.inputs(torch_device)
    q, k, v, dout = (_random_view(x, dice) for x in (made.q, made.k, made.v, made.dout))
    check(q, k, v, dout=dout, dlse=made.dlse, **made.keywords).assert_ok()
