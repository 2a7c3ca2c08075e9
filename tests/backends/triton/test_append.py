"""The kernel that writes new rows into a cache against the PyTorch operations that do."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from saccade.backends import Append, Rotary
from saccade.backends.cpu import append as operations
from saccade.backends.triton import append
from saccade.backends.triton import append as launches
from saccade.call.descale import Factors
from saccade.layouts import CacheSlots, Paged


@pytest.mark.parametrize(
    ("interleaved", "dtype"), [(False, torch.float64), (False, torch.float32), (True, torch.float32)]
)
@pytest.mark.parametrize("offsets", [None, [0, 0, 5, 9]], ids=str)
def test_against_operations(offsets, interleaved, dtype):
    table = torch.tensor([[3, 0, 7], [5, -1, 1 << 30], [1, 2, 6]], dtype=torch.int32)
    layout = Paged(table, torch.tensor([3, 2, 11]), None if offsets is None else torch.tensor(offsets))
    caches = torch.randn(9, 4, 3, 20, dtype=dtype).split([12, 8], dim=-1)
    copies = [x.clone() for x in caches]
    shape = (3, 4) if offsets is None else (10,)
    new = torch.randn(*shape, 3, 12, dtype=dtype), torch.randn(*shape, 3, 8, dtype=dtype)
    angles = torch.randn(9, 4, dtype=dtype)
    rotary = Rotary(angles.cos(), angles.sin(), interleaved)
    q = torch.randn(*shape, 6, 12, dtype=dtype)
    found = operations.append(Append(*caches, *new, layout, rotary, q))
    wanted = launches.append(Append(*copies, *new, layout, rotary, q))
    for one, other in ((found, wanted), *zip(caches, copies, strict=True)):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("shape", [(5,), (5, 1)], ids=str)
@pytest.mark.parametrize("rotates", [False, True])
def test_slots_against_operations(shape, rotates):
    """CacheSlots beyond the caches are omitted, and nothing else is written; positions out of range are clamped."""
    caches = torch.randn(3, 2, 4, 20).transpose(1, 2).split([12, 8], dim=-1)
    copies = [x.clone() for x in caches]
    new, q = (torch.randn(*shape, 2, 12), torch.randn(*shape, 2, 8)), torch.randn(*shape, 6, 12)
    angles = torch.randn(9, 4)
    rotary = Rotary(angles.cos(), angles.sin(), False) if rotates else None
    q = q if rotates else None
    inside, broken = torch.tensor([11, -1, 0, -1, 6]), torch.tensor([11, 12, 0, -(1 << 40), 6])
    positions = torch.tensor([3, 0, 8, 1, 0])
    below = torch.where(positions == 0, -5, positions)
    given = [CacheSlots(x.view(shape), y.view(shape)) for x, y in ((inside, positions), (broken, below))]
    found = operations.append(Append(*caches, *new, given[0], rotary, q))
    wanted = launches.append(Append(*copies, *new, given[1], rotary, q))
    for one, other in zip(caches, copies, strict=True):
        torch.testing.assert_close(one, other)
    if rotates:
        torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize(
    ("used", "offsets"),
    [
        ([-1, 2, -(1 << 31)], None),
        ([3, 12, 99], None),
        ([3, 2, 1], [1, 3, 4, 6]),
        ([3, 2, 1], [-2, 3, 4, 6]),
        ([3, 2, 1], [0, 5, 3, 6]),
        ([3, 2, 1], [0, 1 << 33, 3, 6]),
        ([(1 << 40) + 1, 2, 1], [0, 2, 4, 99]),
    ],
    ids=str,
)
def test_broken_numbers_are_left_out(used, offsets):
    """A row is written where lengths and offsets place it, and nowhere else; where they decrease, some are not."""
    size, width = 4, 3
    table = torch.arange(9, dtype=torch.int32).view(3, width)
    layout = Paged(table, torch.tensor(used), None if offsets is None else torch.tensor(offsets))
    shape = (3, 2) if offsets is None else (6,)
    new = torch.arange(1, 7).float().view(*shape, 1, 1)
    caches = torch.zeros(9, size, 1, 1), torch.zeros(9, size, 1, 1)
    launches.append(Append(*caches, new, new, layout, None))
    wanted = torch.zeros(9, size)
    for token in range(6):
        if offsets is None:
            b, i = divmod(token, 2)
        else:
            owners = [b for b in range(3) if 0 <= offsets[b] <= token < offsets[b + 1]]
            if not owners:
                continue
            b = owners[0]
            i = token - offsets[b]
        if used[b] >= 0 and used[b] + i < width * size:
            position = used[b] + i
            wanted[table[b, position // size], position % size] = token + 1
    for cache in caches:
        found = cache[:, :, 0, 0]
        if offsets is not None and sorted(offsets) != offsets:
            wanted = torch.where(found == 0, 0, wanted)
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("kind", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_8_bit_rows_are_copied_as_they_are(kind):
    """Every byte, NaN too."""
    caches = [torch.randint(0, 256, (9, 4, 3, 16), dtype=torch.uint8).view(kind) for _ in range(2)]
    copies = [x.clone() for x in caches]
    new = [torch.randint(0, 256, (3, 4, 3, 16), dtype=torch.uint8).view(kind) for _ in range(2)]
    table = torch.tensor([[3, 0, 7], [5, -1, 1 << 30], [1, 2, 6]], dtype=torch.int32)
    layout = Paged(table, torch.tensor([3, 2, 11]))
    operations.append(Append(*caches, *new, layout, None))
    launches.append(Append(*copies, *new, layout, None))
    for one, other in zip(caches, copies, strict=True):
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))
    assert torch.equal(caches[0][3, 3].view(torch.uint8), new[0][0, 0].view(torch.uint8))


def spread(*shape, dtype=torch.float32):
    """Rows of every size, down to numbers that become zero and up to those that are cut off, with NaN, infinities and
    both zeros."""
    x = torch.randn(*shape) * 2.0 ** torch.randint(-24, 20, shape)
    flat = x.view(-1)
    flat[:6] = torch.tensor([torch.nan, torch.inf, -torch.inf, -0.0, 0.0, -torch.nan])
    return x.to(dtype)


def quantizing(kind, dtype, offsets, blocks, turns=True):
    """A call whose rows become 8 bits: caches are halves of one tensor, sequences have factors of their own."""
    caches = torch.randint(0, 256, (9, 4, 3, 20), dtype=torch.uint8).view(kind).split([12, 8], dim=-1)
    shape = (3, 4) if offsets is None else (10,)
    if offsets == "slots":
        layout = CacheSlots(torch.tensor([5, -1, 35, 0, 17, -1, 18, 2, 3, 30]), torch.arange(10))
        factors = [torch.rand(3).expand(1, 3)[..., None] for _ in range(2)]
    else:
        table = torch.tensor([[3, 0, 7], [5, -1, 1 << 30], [1, 2, 6]], dtype=torch.int32)
        layout = Paged(table, torch.tensor([3, 2, 11]), None if offsets is None else torch.tensor(offsets))
        factors = [torch.randn(3, 3, blocks), torch.rand(()).expand(3, 3)[..., None]]
    new = spread(*shape, 3, 12, dtype=dtype), spread(*shape, 3, 8, dtype=dtype)
    angles = torch.randn(9, 4)
    rotary = Rotary(angles.cos(), angles.sin(), False) if turns else None
    q = torch.randn(*shape, 6, 12).to(dtype) if turns else None
    return Append(*caches, *new, layout, rotary, q, Factors(None, *factors))


def assert_same(call, other):
    found, wanted = operations.append(call), launches.append(other)
    for x, y in zip(call[:2], other[:2], strict=True):
        assert torch.equal(x.view(torch.uint8), y.view(torch.uint8))
    if found is not None:
        torch.testing.assert_close(found, wanted)


def with_copies(call):
    return call._replace(k_cache=call.k_cache.clone(), v_cache=call.v_cache.clone())


@pytest.mark.sample
@pytest.mark.parametrize("turns", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("offsets", [None, [0, 0, 5, 9], "slots"], ids=str)
@pytest.mark.parametrize("kind", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_quantized_rows_are_the_same_bytes(kind, offsets, dtype, turns):
    call = quantizing(kind, dtype, offsets, 1, turns)
    assert_same(call, with_copies(call))


@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
@pytest.mark.parametrize("factor", [0.0, -2.0, 1e-41, 1e-38, 3e38, torch.inf, torch.nan])
def test_bytes_of_any_factor(factor):
    """Products with a reciprocal would be none of the bytes that a division gives."""
    call = quantizing(torch.float8_e4m3fn, torch.float32, None, 1, False)
    call = call._replace(descale=Factors(None, torch.full((3, 3, 1), factor), None))
    assert_same(call, with_copies(call))


def test_factors_of_blocks():
    """Keys before and after 128 of a sequence lie in two of its blocks."""
    call = quantizing(torch.float8_e4m3fn, torch.float32, None, 2)
    layout = Paged(torch.arange(99, dtype=torch.int32).view(3, 33), torch.tensor([126, 127, 0]))
    caches = torch.zeros(99, 4, 3, 20).to(torch.float8_e4m3fn).split([12, 8], dim=-1)
    call = call._replace(k_cache=caches[0], v_cache=caches[1])
    assert_same(call._replace(layout=layout), with_copies(call)._replace(layout=layout))


@triton.jit
def _cut_short(x, factor, shape):
    return append.encoded(tl.div_rn(x.to(tl.float32) * 0.99, factor + tl.zeros_like(x)), shape)


@triton.jit
def _of_first_head(factor, at, h, h_k):
    return append.factor_at(factor, at.sequence, h * 0, at.position)[:, None]


@pytest.mark.parametrize(("name", "wrong"), [("_bytes", _cut_short), ("_factors", _of_first_head)])
def test_wrong_kernels_are_rejected(name, wrong, monkeypatch):
    call = quantizing(torch.float8_e4m3fn, torch.float32, None, 1)
    monkeypatch.setattr(append, name, wrong)
    with pytest.raises(AssertionError):
        assert_same(call, with_copies(call))
