"""8-bit numbers from a GPU's own conversions."""

from __future__ import annotations

import pytest
import torch

from saccade import Dense, Packed, quantize
from saccade.backends import Quantization
from saccade.backends.cpu import quantize as operations

pytestmark = pytest.mark.gpu


def assert_same(found, wanted):
    """Bytes, those of NaN too."""
    assert torch.equal(found.cpu().contiguous().view(torch.uint8), wanted.cpu().contiguous().view(torch.uint8))


@pytest.mark.parametrize("v_order", ["rows", "keys"])
@pytest.mark.parametrize("per", ["tensor", "head", "block"])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_every_number(dtype, per, v_order):
    """All numbers of 16 bits, among them all that meet the middle of two bytes, as a CPU converts them."""
    bits = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
    for given in (torch.bfloat16, torch.float16):
        x = bits[torch.randperm(1 << 16)].view(given).view(1, 2, 256, 128)
        wanted = quantize(x, x, x, per=per, dtype=dtype, v_order=v_order)
        found = quantize(*[x.cuda()] * 3, per=per, dtype=dtype, v_order=v_order)
        for name in "qkv":
            assert_same(getattr(found, name), getattr(wanted, name))
            assert torch.equal(getattr(found.descale, name).cpu(), getattr(wanted.descale, name))
            assert getattr(found, name).stride() == getattr(wanted, name).stride()


@pytest.mark.parametrize("d", [64, 72, 128, 256])
@pytest.mark.parametrize("per", ["tensor", "head", "block"])
def test_large(per, d):
    """Many sequences, whose lengths only the device reads, in views of one tensor, against PyTorch's operations."""
    lengths = torch.randint(0, 900, (33,))
    offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).cuda()
    t = int(offsets[-1]) + 17
    x = torch.randn(t, 12, d, device="cuda", dtype=torch.bfloat16)
    q, k, v = (x * torch.exp2(torch.randint(-4, 5, (t, 1, 1), device="cuda"))).to(x.dtype).split([8, 2, 2], dim=1)
    used = (lengths * 0.9).long().cuda()
    layout = Packed(offsets, seqused_q=used, seqused_k=used)
    made = quantize(q, k, v, per=per, layout=layout)
    blocks = made.descale.k.shape[-1] if per == "block" else 1
    for name, rows in (("q", q), ("k", k), ("v", v)):
        # On a CPU: PyTorch divides by a number there, and multiplies by its inverse on a GPU.
        call = Quantization(layout.canonical(rows).cpu(), 2, offsets.cpu(), used.cpu(), per=per, blocks=blocks)
        codes, factors, _ = operations.quantize(call)
        assert torch.equal(getattr(made.descale, name).cpu(), factors)
        assert_same(getattr(made, name).cpu(), layout.ordered(codes))


@pytest.mark.parametrize("per", ["tensor", "head", "block"])
def test_graphs_with_other_lengths(per):
    """A graph that was captured with some offsets gives what a call gives with others."""
    x = torch.randn(700, 4, 64, device="cuda", dtype=torch.bfloat16)
    offsets = torch.tensor([0, 100, 100, 690], device="cuda")

    def call():
        return quantize(x, x[:, :2], x[:, 2:], per=per, smooth_k=True, rotate=True, layout=Packed(offsets))

    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = call()
    for ends in ([0, 3, 500, 700], [0, 0, 0, 0]):
        offsets.copy_(torch.tensor(ends))
        x.normal_()
        graph.replay()
        wanted = call()
        for name in "qkv":
            assert_same(getattr(made, name), getattr(wanted, name))
        assert torch.equal(made.shift, wanted.shift)
        assert torch.equal(made.descale.q, wanted.descale.q)


@pytest.mark.parametrize("polls", [0, 1])
def test_programs_that_come_late(polls, monkeypatch):
    """Where programs do not wait for the maxima of others, they find them themselves, and give the same bytes."""
    from saccade.backends.triton import quantize as launches

    sizes = torch.exp2(torch.randint(-4, 5, (1, 16, 3000, 1), device="cuda"))
    x = (torch.randn(2, 16, 3000, 128, device="cuda") * sizes).to(torch.bfloat16)
    call = Quantization(x, 2, per="block", blocks=24)
    codes, factors, _ = launches.quantize(call)
    monkeypatch.setattr(launches, "POLLS", polls)
    monkeypatch.setattr(launches, "_launches", type(launches._launches)(8))
    found = launches.quantize(call)
    assert_same(found[0], codes)
    assert torch.equal(found[1], factors)


def ordered(codes):
    """Bytes as integers in the order of their numbers; both zeros are 0."""
    bits = codes.view(torch.uint8).int()
    return torch.where(bits >= 128, 128 - bits, bits)


@pytest.mark.parametrize("per", ["head", "block"])
@pytest.mark.parametrize(("d", "rotate"), [(128, True), (256, False), (256, True)])
def test_programs_with_several_tiles(d, rotate, per):
    """More tiles than programs at a time, of padded rows, some with numbers that are none."""
    x = torch.randn(3, 16, 2900, d, device="cuda").to(torch.bfloat16)
    x *= torch.exp2(torch.randint(-4, 5, (3, 16, 2900, 1), device="cuda"))
    x[1, 3, 700, 5], x[2, 15, 2000, 1] = torch.inf, torch.nan
    used = torch.tensor([2900, 1555, 2001], device="cuda")
    call = Quantization(x, 16, None, used, per=per, blocks=23, rotate=rotate)
    made, factors = quantize(x, x, x, per=per, rotate=rotate, layout=Dense(seqused_q=used, seqused_k=used))[:4:3]
    codes, wanted, _ = operations.quantize(call._replace(x=x.cpu(), used=used.cpu()))
    apart = (ordered(made) - ordered(codes.cuda())).abs()
    if rotate:
        torch.testing.assert_close(factors.q.cpu(), wanted, rtol=1e-5, atol=0)
        assert apart.max() <= 1
        assert apart.float().mean() < 1e-2
    else:
        assert torch.equal(factors.q.cpu(), wanted)
        assert not apart.any()


@pytest.mark.parametrize("given", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("d", [64, 80, 128, 256])
def test_rotation(d, given):
    """The sums of the tensor cores, against float32 sums: bytes differ by one code, and seldom."""
    x = torch.randn(1, 4, 300, d, device="cuda").to(given)
    made = quantize(x, x[:, :2], x[:, :2], per="block", rotate=True)
    call = Quantization(x, 2, per="block", blocks=3, rotate=True)
    codes, factors, _ = operations.quantize(call)
    torch.testing.assert_close(made.descale.q, factors, rtol=1e-5, atol=0)
    apart = (ordered(made.q) - ordered(codes)).abs()
    assert apart.max() <= 1
    assert apart.float().mean() < 1e-2
