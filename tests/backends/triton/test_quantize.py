"""The kernels that make 8-bit numbers against the PyTorch operations that do."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from saccade.backends import Quantization
from saccade.backends.cpu import quantize as operations
from saccade.backends.triton import quantize as launches
from saccade.backends.triton import quantize_kernel

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def numbers(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return (torch.randn(shape) * torch.exp2(torch.randint(-12, 4, shape))).to(dtype)


def calls(heads: int, given: torch.dtype, packed: bool, **options) -> Quantization:
    """Two key heads; used lengths and numbers that are none."""
    d = 24
    if packed:
        x, starts, used = numbers(1, heads, 300, d, dtype=given), [0, 0, 130, 290], [0, 120, 160]
        options["starts"] = torch.tensor(starts)
    else:
        x, used = numbers(2, heads, 200, d, dtype=given), [150, 0]
    x[0, 0, 3, 1], x[0, 1, 140, 2], x[0, 0, 125, 0] = torch.nan, torch.inf, 1e4
    return Quantization(x, 2, used=torch.tensor(used), blocks=2, **options)


def assert_same(found, wanted):
    """Bytes, factors and their memory order."""
    assert found[0].stride() == wanted[0].stride()
    assert torch.equal(found[1], wanted[1])
    assert torch.equal(found[0].view(torch.uint8), wanted[0].view(torch.uint8))


@pytest.mark.sample
@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("per", ["tensor", "head", "block"])
@pytest.mark.parametrize("heads", [2, 6])
def test_against_operations(heads, per, packed):
    """Keys are smoothed, queries have a shift."""
    for dtype, options in (
        (torch.bfloat16, {"dtype": E4M3}),
        (torch.float16, {"dtype": E5M2, "keys_first": True}),
        (torch.float32, {"dtype": E5M2}),
    ):
        call = calls(heads, dtype, packed, per=per, **options)
        assert_same(launches.quantize(call), operations.quantize(call))
        keys = call.sequences, 2, call.x.shape[3]
        call = calls(heads, dtype, packed, per=per, mean=torch.randn(keys), subtracts=heads == 2, **options)
        found, wanted = launches.quantize(call), operations.quantize(call)
        assert_same(found, wanted)
        if heads != 2:
            torch.testing.assert_close(found[2], wanted[2], equal_nan=True, rtol=1e-4, atol=1e-2)


@pytest.mark.parametrize("per", ["tensor", "head", "block"])
def test_empty_sequences(per):
    """Rows behind sequences without any are in no block, and there is none."""
    call = Quantization(
        numbers(1, 2, 7, 24, dtype=torch.float16), 2, torch.tensor([0, 0, 0]), None, per=per, dtype=E4M3, blocks=0
    )
    assert_same(launches.quantize(call), operations.quantize(call))


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("heads", [2, 6])
def test_rotation_and_means(heads, packed):
    """Sums round; bytes differ where they do, by one code."""
    for dtype, per in ((torch.float16, "block"), (torch.float32, "head")):
        call = calls(heads, dtype, packed, per=per, rotate=True)
        found, wanted = launches.quantize(call), operations.quantize(call)
        torch.testing.assert_close(found[1], wanted[1])
        codes, right = (x[0].view(torch.uint8).int() for x in (found, wanted))
        assert ((codes - right).abs() <= 1).all()
        assert (codes != right).float().mean() < 0.01
        if heads == 2:
            for rotate in (False, True):
                keys = call._replace(rotate=rotate)
                torch.testing.assert_close(launches.mean(keys), operations.mean(keys), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("d", [80, 96, 128, 192, 256, 512])
def test_rotation_of_wide_heads(d):
    """Chunks of 64 columns that meet, all, some or none; what is no number is all of its row."""
    x = torch.randn(1, 4, 130, d).to(torch.float16)
    x[0, 1, 3, d - 1] = torch.nan
    call = Quantization(x, 2, per="block", blocks=2, rotate=True)
    found, wanted = launches.quantize(call), operations.quantize(call)
    torch.testing.assert_close(found[1], wanted[1])
    codes, right = (x[0].view(torch.uint8).int() for x in (found, wanted))
    assert ((codes - right).abs() <= 1).all()
    assert (codes != right).float().mean() < 0.01
    mean = torch.randn(1, 2, d)
    for options in ({"mean": mean}, {"mean": mean, "subtracts": True}):
        moved = call._replace(**options)
        found, wanted = launches.quantize(moved), operations.quantize(moved)
        torch.testing.assert_close(found[1], wanted[1])
        if not moved.subtracts:
            torch.testing.assert_close(found[2], wanted[2], equal_nan=True, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("per", ["head", "block"])
def test_small_tiles(per, monkeypatch):
    """Programs with a part of a block each share its factor."""
    monkeypatch.setattr(launches, "tile_of", lambda name, call: launches.ProgramTile(32, 4))
    for heads, packed in ((2, False), (6, True)):
        call = calls(heads, torch.bfloat16, packed, per=per)
        assert_same(launches.quantize(call), operations.quantize(call))


@pytest.mark.parametrize("per", ["head", "block"])
def test_programs_with_several_tiles(per, monkeypatch):
    """Five tiles, or more, of three programs."""
    chosen = launches.tile_of
    monkeypatch.setattr(launches, "tile_of", lambda *given: chosen(*given)._replace(each=1, stages=3))
    monkeypatch.setattr(launches, "multiprocessors", lambda device: 3)
    monkeypatch.setattr(launches, "_launches", type(launches._launches)(8))
    for packed in (False, True):
        call = calls(2, torch.bfloat16, packed, per=per)
        assert_same(launches.quantize(call), operations.quantize(call))


@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
def test_every_number(dtype):
    """All codes, the middles between neighbours, and what is beside them."""
    codes = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    codes = codes[codes.isfinite()].sort().values.unique()
    middles = (codes[1:] + codes[:-1]) / 2
    x = torch.cat(
        [codes, middles, middles.nextafter(torch.tensor(torch.inf)), middles.nextafter(torch.tensor(-torch.inf))]
    )
    x = torch.cat([x, -x, torch.tensor([torch.nan, torch.inf, -torch.inf])])[None, None, :, None]
    call = Quantization(x, 1, dtype=dtype)
    found, wanted = launches.quantize(call), operations.quantize(call)
    assert float(found[1]) == 1
    # Of zeros the sign is not compared.
    assert torch.equal(found[0].float().nan_to_num(1e9), wanted[0].float().nan_to_num(1e9))
    assert torch.equal(wanted[0].float().nan_to_num(1e9), x.to(dtype).float().nan_to_num(1e9).where(x.isfinite(), 1e9))


@triton.jit
def _of_first_row(x):
    return tl.max(tl.where((tl.arange(0, 128) == 0)[:, None], tl.abs(x), 0.0))


@triton.jit
def _truncated(x, factor):
    return x / factor * 0.9999


@triton.jit
def _of_one(largest, maxima, at, shape):
    return largest, 0


def test_wrong_kernels_are_rejected(monkeypatch):
    """The maximum of some rows, or of one head, and a quotient that is a bit too small."""
    call = calls(6, torch.bfloat16, False, per="block")
    wanted = operations.quantize(call)
    for name, wrong in (("_largest", _of_first_row), ("_quotient", _truncated), ("_of_all", _of_one)):
        with monkeypatch.context() as faulty:
            faulty.setattr(quantize_kernel, name, wrong)
            with pytest.raises(AssertionError):
                assert_same(launches.quantize(call), wanted)
    assert_same(launches.quantize(call), wanted)
