"""8-bit q, k and v: their numbers and factors by hand in float64, and what attention makes of them."""

from __future__ import annotations

import math
import re

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from saccade import Dense, Descale, Packed, Paged, attention, causal, quantize, softcap
from saccade.backends import Quantization
from saccade.backends.cpu import quantize as operations

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FORMATS = {E4M3: (3, -6, 448.0), E5M2: (2, -14, 57344.0)}
"""Bits of the mantissa, the exponent of the least normal number, the largest number."""


def nearest(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x (float64) rounded to the nearest number of the format, ties to even, at most its largest; NaN of infinities."""
    mantissa, least, top = FORMATS[dtype]
    exponent = torch.frexp(x).exponent.double() - 1
    unit = torch.exp2(exponent.clamp(min=least) - mantissa)
    return torch.where(x.isfinite(), (x / unit).round() * unit, torch.nan).clamp(-top, top)


def factor_of(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x: the numbers that share a factor, as float32."""
    sizes = x[x.isfinite()].abs()
    largest = sizes.max() if sizes.numel() else torch.tensor(0.0)
    tiny = torch.finfo(torch.float32).tiny
    return (largest / FORMATS[dtype][2]).clamp(min=tiny) if largest > 0 else torch.tensor(1.0)


def by_hand(x: Tensor, h_k: int, lengths: list[int], per: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """What x (sequences, h, s, d), of which `lengths` rows are in use, becomes: values over factors, and factors."""
    b, h, s, _ = x.shape
    group, n = h // max(h_k, 1), max(-(-s // 128), 1)
    x = x.float()
    codes, factors = torch.zeros(x.shape, dtype=torch.float64), torch.ones(b, h_k, n)
    live = [x[i, :, : lengths[i]].flatten() for i in range(b)]
    for i in range(b):
        for j in range(h_k):
            heads = slice(j * group, (j + 1) * group)
            for block in range(n):
                rows = slice(128 * block, min(128 * (block + 1), lengths[i]))
                own = {"tensor": torch.cat(live), "head": x[i, heads, : lengths[i]], "block": x[i, heads, rows]}[per]
                factors[i, j, block] = factor_of(own, dtype)
                quotient = x[i, heads, rows].double() / factors[i, j, block].double()
                codes[i, heads, rows] = nearest(quotient.float().double(), dtype)
    return codes, factors[0, 0, 0] if per == "tensor" else factors[..., 0] if per == "head" else factors


def assert_same(found: Tensor, wanted: Tensor) -> None:
    assert torch.equal(found.isnan(), wanted.isnan())
    assert torch.equal(found.nan_to_num(), wanted.nan_to_num())


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Of all sizes, with ties: a factor that is a power of two meets the middle of two codes."""
    x = torch.randn(shape) * torch.exp2(torch.randint(-12, 4, shape))
    return torch.where(torch.rand(shape) < 0.3, torch.randint(-63, 64, shape) / 4, x).to(dtype)


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
@pytest.mark.parametrize("per", ["tensor", "head", "block"])
@pytest.mark.parametrize("given", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_numbers_and_factors(given, per, dtype, torch_device):
    used = [130, 0]
    operands = (
        numbers(2, 6, 150, 24, dtype=given),
        numbers(2, 2, 150, 24, dtype=given),
        numbers(2, 2, 150, 7, dtype=given),
    )
    operands[0][0, 3, 140] = 1e4  # not in use
    operands[1][0, 1, 128, 5] = torch.nan
    operands[2][0, 0, 3, 1] = torch.inf
    lengths = torch.tensor(used, device=torch_device)
    layout = Dense(seqused_q=lengths, seqused_k=lengths)
    made = quantize(*(x.to(torch_device) for x in operands), per=per, dtype=dtype, layout=layout)
    for name, x in zip("qkv", operands, strict=True):
        codes, factors = by_hand(x, 2, used, per, dtype)
        found = getattr(made, name)
        assert found.dtype == dtype
        assert_same(found.cpu().double(), codes)
        assert torch.equal(getattr(made.descale, name).cpu(), factors)


@pytest.mark.parametrize("per", ["tensor", "head", "block"])
def test_packed_sequences(per, torch_device):
    """Blocks count from the first row of each sequence; rows of none are zero, and count for nothing."""
    offsets, used = [0, 140, 140, 141, 300], [140, 0, 0, 150]
    x = numbers(310, 4, 16)
    x[305] = 1e6
    x[140] = 1e6  # not in use
    starts = torch.tensor(offsets, dtype=torch.int32, device=torch_device)
    layout = Packed(
        starts, seqused_q=torch.tensor(used, device=torch_device), seqused_k=torch.tensor(used, device=torch_device)
    )
    made = quantize(x.to(torch_device), x[:, :2].to(torch_device), x[:, 2:].to(torch_device), per=per, layout=layout)
    padded = torch.zeros(4, 4, 160, 16)
    for i, n in enumerate(used):
        padded[i, :, :n] = x[offsets[i] : offsets[i] + n].transpose(0, 1)
    for name, heads in (("q", slice(0, 4)), ("k", slice(0, 2)), ("v", slice(2, 4))):
        codes, factors = by_hand(padded[:, heads], 2, used, per, E4M3)
        found, given = getattr(made, name).cpu().double(), getattr(made.descale, name).cpu()
        for i, n in enumerate(used):
            rows = found[offsets[i] : offsets[i + 1]].transpose(0, 1)
            assert torch.equal(rows[:, :n], codes[i, :, :n])
            assert not rows[:, n:].any()
        assert not found[300:].any()
        assert torch.equal(given if per != "block" else given[:, :, :2], factors)


@pytest.mark.parametrize("smooth_k", [False, True])
@pytest.mark.parametrize("per", ["tensor", "head", "block"])
def test_rows_of_no_sequence(per, smooth_k, torch_device):
    none, rows = torch.zeros(1, dtype=torch.int32, device=torch_device), torch.randn(300, 2, 16, device=torch_device)
    used = none[:0]
    for layout in (Packed(none, none), Packed(none, none, seqused_q=used, seqused_k=used)):
        made = quantize(rows, rows, rows, per=per, smooth_k=smooth_k, layout=layout)
        assert not any(x.float().count_nonzero() for x in (made.q, made.k, made.v))


@hypothesis.given(data=st.data())
def test_any_shape(data):
    draw = data.draw
    b, h_k, group, s, d = (draw(st.integers(low, high)) for low, high in ((0, 2), (0, 2), (1, 3), (0, 260), (1, 20)))
    per, dtype = draw(st.sampled_from(["tensor", "head", "block"])), draw(st.sampled_from([E4M3, E5M2]))
    order = draw(st.sampled_from(["bhsd", "bshd", "sbhd"]))
    layout = Dense(order)
    q, k = numbers(b, h_k * group, s, d), numbers(b, h_k, s, d)
    v = numbers(b, h_k, s, d + 1)
    user = (layout.ordered(x) for x in (q, k, v))
    v_order = draw(st.sampled_from(["rows", "keys"]))
    made = quantize(*user, per=per, dtype=dtype, layout=layout, v_order=v_order)
    if v_order == "keys" and made.v.numel():
        assert layout.canonical(made.v).stride(2) == 1 or s == 1
    for name, x in (("q", q), ("k", k), ("v", v)):
        found = layout.canonical(getattr(made, name)).double()
        codes, factors = by_hand(x, h_k, [s] * b, per, dtype) if b and h_k else (x.double(), None)
        assert_same(found, codes)
        if factors is not None and s:
            assert torch.equal(
                getattr(made.descale, name), factors[:, :, : -(-s // 128)] if per == "block" else factors
            )


SIZES = {"all": 1.0, "none": 0.0, "tiny": 1e-40, "huge": 1e36}


@hypothesis.given(data=st.data())
def test_any_lengths(data):
    """Padded and packed sequences of queries and of keys; rows not in use are NaN, and become zero."""
    draw = data.draw
    torch.manual_seed(draw(st.integers(0, 9)))
    h_k, group, d, d_v, b = (draw(st.integers(1, n)) for n in (3, 3, 20, 20, 3))
    given = draw(st.sampled_from([torch.float16, torch.bfloat16, torch.float32]))
    per, dtype = draw(st.sampled_from(["tensor", "head", "block"])), draw(st.sampled_from([E4M3, E5M2]))
    some = st.lists(st.sampled_from([0, 1, 5, 127, 128, 129, 200]), min_size=b, max_size=b)
    lengths = {"q": draw(some), "k": draw(some)}
    lengths["v"] = lengths["k"]
    padded, size = {}, SIZES[draw(st.sampled_from([*SIZES]))]
    more = {"q": draw(st.integers(0, 2)), "k": draw(st.integers(0, 2))}
    more["v"] = more["k"]
    for name, h, width in (("q", h_k * group, d), ("k", h_k, d), ("v", h_k, d_v)):
        x = numbers(b, h, max(lengths[name]) + more[name], width).clamp(-300, 300).mul(size).to(given)
        if x.numel() and draw(st.booleans()):
            x.view(-1)[torch.randint(0, x.numel(), (2,))] = torch.tensor([torch.nan, -torch.inf], dtype=given)
        unused = torch.arange(x.shape[2]) >= torch.tensor(lengths[name])[:, None]
        padded[name] = x.masked_fill(unused[:, None, :, None], torch.nan)
    packed = draw(st.booleans())

    def by_rows(name: str, x: Tensor) -> Tensor:
        return torch.cat([x[i, :, :n].transpose(0, 1) for i, n in enumerate(lengths[name])]) if packed else x

    sides = [torch.tensor(lengths[name]) for name in "qk"]
    layout = Dense("bhsd", *sides)
    if packed:
        layout = Packed(*(torch.cat([torch.zeros(1), x.cumsum(0)]).int() for x in sides))
    keywords = {"per": per, "dtype": dtype, "layout": layout, "v_order": draw(st.sampled_from(["rows", "keys"]))}
    made = quantize(*(by_rows(name, x) for name, x in padded.items()), **keywords)
    for name, x in padded.items():
        codes, factors = by_hand(x, h_k, lengths[name], per, dtype)
        assert_same(getattr(made, name).double(), by_rows(name, codes))
        found = getattr(made.descale, name)
        if per == "block":
            found, factors = found[:, :, : factors.shape[2]], factors[:, :, : found.shape[2]]
        assert torch.equal(found, factors)


def hadamard(d: int) -> Tensor:
    """The orthogonal matrix of `rotate`, by its recursion."""
    size = math.gcd(d, 1 << 20)
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return torch.block_diag(*[matrix / math.sqrt(size)] * (d // size))


@pytest.mark.parametrize("d", [64, 96, 20, 7])
def test_rotation(d, torch_device):
    q, k, v = torch.randn(1, 4, 40, d), torch.randn(1, 2, 40, d), torch.randn(1, 2, 40, d)
    made = quantize(q.to(torch_device), k.to(torch_device), v.to(torch_device), rotate=True)
    for name, x in (("q", q), ("k", k)):
        wanted = x.double() @ hadamard(d)
        factor = getattr(made.descale, name).cpu().double().repeat_interleave(x.shape[1] // 2, 1)[..., None, None]
        found = getattr(made, name).cpu().double() * factor
        # A bit more than half of the last bit: sums round before.
        assert ((found - wanted).abs() <= wanted.abs() * 2**-4 * 1.001 + factor * 2**-10 * 1.001).all()
    assert torch.equal(made.v.cpu().double(), by_hand(v, 2, [40], "head", E4M3)[0])
    assert (d % 2 == 1) == torch.equal(hadamard(d), torch.eye(d, dtype=torch.float64))


def test_rotation_and_infinities(torch_device):
    """One NaN or infinity makes its row NaN, and no other."""
    q = torch.randn(1, 2, 30, 48, device=torch_device)
    q[0, 0, 3, 40], q[0, 1, 9, 0] = torch.inf, torch.nan
    made = quantize(q, q, q, rotate=True).q.float()
    wanted = torch.zeros(1, 2, 30, 48, dtype=torch.bool, device=torch_device)
    wanted[0, 0, 3] = wanted[0, 1, 9] = True
    assert torch.equal(made.isnan(), wanted)


@pytest.mark.parametrize("rotate", [False, True])
@pytest.mark.parametrize("per", ["tensor", "head", "block"])
def test_smoothing(per, rotate, torch_device):
    """Softmax does not see it; lse + shift is the LSE of the keys."""
    shared = 6 * torch.randn(2, 2, 1, 32)
    q, k, v = torch.randn(2, 4, 150, 32), torch.randn(2, 2, 150, 32) + shared, torch.randn(2, 2, 150, 32)
    wanted = attention(q.double(), k.double(), v.double(), mask=causal(), return_lse=True)
    errors = {}
    for smooth_k in (False, True):
        made = quantize(*(x.to(torch_device) for x in (q, k, v)), per=per, smooth_k=smooth_k, rotate=rotate)
        values = dequantized(made)
        found = attention(*(x.cpu().double() for x in values), mask=causal(), return_lse=True)
        lse = found.lse if made.shift is None else found.lse + made.shift.cpu() * 32**-0.5
        errors[smooth_k] = (found.out - wanted.out).square().mean().sqrt(), (lse - wanted.lse).square().mean().sqrt()
    assert errors[True][0] < errors[False][0]
    assert errors[True][1] < errors[False][1]
    assert errors[True][1] < 0.05


@pytest.mark.parametrize("scale", [0.05, 1.0])
def test_the_shift_is_of_every_scale(scale):
    q, v = torch.randn(1, 4, 80, 32), torch.randn(1, 2, 80, 32)
    k = torch.randn(1, 2, 80, 32) + 4 * torch.randn(1, 2, 1, 32)
    wanted = attention(q, k, v, scale=scale, return_lse=True).lse
    made = quantize(q, k, v, per="block", smooth_k=True, rotate=True)
    found = attention(*made[:3], descale=made.descale, scale=scale, return_lse=True).lse
    assert (found - wanted).abs().max() < (scale * made.shift).abs().max() / 10


def test_attention_adds_the_shift():
    """To the LSE and the largest scores, of dense and of packed calls; where it cannot, it refuses."""
    shared = 6 * torch.randn(1, 2, 1, 32)
    q, k, v = torch.randn(2, 4, 150, 32), torch.randn(2, 2, 150, 32) + shared, torch.randn(2, 2, 150, 32)
    wanted = attention(q, k, v, mask=causal(), return_lse=True, return_max_scores=True)
    made = quantize(q, k, v, per="block", smooth_k=True, rotate=True)
    assert made.shift is made.descale.shift
    options = {"descale": made.descale, "mask": causal(), "backend": "cpu"}
    found = attention(*made[:3], **options, return_lse=True, return_max_scores=True)
    assert (found.lse - wanted.lse).abs().max() < 0.2
    assert (found.max_scores - wanted.max_scores).abs().max() < 0.6
    for name, x in (("sink", torch.zeros(4)), ("score_mod", softcap(20.0))):
        with pytest.raises(ValueError, match=f"lack a term, and {name} needs exact scores"):
            attention(*made[:3], **options, **{name: x})
    with pytest.raises(ValueError, match=re.escape("the LSE's shape (1, 4, 150) on q's device cpu, got (2, 4, 150)")):
        attention(*(x[:1] for x in made[:3]), descale=Descale(shift=made.shift))
    rows = [x.transpose(1, 2).flatten(0, 1) for x in (q, k, v)]
    layout = Packed(torch.tensor([0, 150, 300]))
    packed = quantize(*rows, per="block", smooth_k=True, rotate=True, layout=layout)
    lse = attention(*packed[:3], descale=packed.descale, mask=causal(), layout=layout, return_lse=True).lse
    torch.testing.assert_close(lse.view(4, 2, 150).transpose(0, 1), found.lse, rtol=1e-4, atol=1e-3)


def dequantized(made, group: int = 2) -> list[Tensor]:
    """Values (b, h, s, d), in float64."""
    values = []
    for name in "qkv":
        x, factor = getattr(made, name), getattr(made.descale, name)
        if factor.dim() == 3:
            factor = factor.repeat_interleave(128, 2)[:, :, : x.shape[2], None]
        elif factor.dim() == 2:
            factor = factor[..., None, None]
        if name == "q" and factor.dim():
            factor = factor.repeat_interleave(group, 1)
        values.append(x.double() * factor.double())
    return values


def test_smoothing_of_packed_sequences(torch_device):
    """Each by its own mean, of the rows in use; those not in use have no shift."""
    offsets, used = torch.tensor([0, 70, 70, 130]), torch.tensor([60, 0, 60])
    q, k = torch.randn(140, 4, 16), torch.randn(140, 2, 16) + 5
    k[60:70] = 1e5
    k[3, 1, 7] = torch.inf  # a number that is none does not count
    layout = Packed(offsets.to(torch_device), seqused_q=used.to(torch_device), seqused_k=used.to(torch_device))
    made = quantize(q.to(torch_device), k.to(torch_device), k.to(torch_device), smooth_k=True, layout=layout)
    wanted = torch.zeros(4, 140)
    for start, n in ((0, 60), (70, 60)):
        rows = k[start : start + n].double()
        mean = torch.where(rows.isfinite(), rows, 0).mean(0).repeat_interleave(2, 0)
        wanted[:, start : start + n] = torch.einsum("shd,hd->hs", q[start : start + n].double(), mean)
    torch.testing.assert_close(made.shift.cpu(), wanted, rtol=1e-4, atol=1e-3)
    for i, (start, n) in enumerate(((0, 60), (70, 60))):
        rows = k[start : start + n].double()
        centred = rows - torch.where(rows.isfinite(), rows, 0).mean(0)
        factor = made.descale.k[2 * i].cpu().double()[:, None]
        found = made.k[start : start + n].cpu().double() * factor
        good = centred.isfinite()
        assert torch.equal(found.isnan(), ~good)
        assert ((found - centred)[good].abs() <= (centred.abs() * 2**-4 * 1.001 + factor * 2**-9)[good]).all()


def test_keys_alone(torch_device):
    k, v = numbers(1, 2, 140, 16).to(torch_device), numbers(1, 2, 140, 16).to(torch_device)
    whole, alone = quantize(k, k, v, per="block"), quantize(None, k, v, per="block")
    assert alone.q is alone.shift is alone.descale.q is None
    for name in "kv":
        assert torch.equal(getattr(whole, name).view(torch.uint8), getattr(alone, name).view(torch.uint8))
        assert torch.equal(getattr(whole.descale, name), getattr(alone.descale, name))


def test_extremes(torch_device):
    """Zeros, numbers whose factor would be subnormal, and the largest ones."""
    for size in (0.0, 1e-44, 1e-40, 1e-36, 3e38):
        x = torch.full((1, 1, 3, 8), size, device=torch_device)
        x[..., 0] = -size
        made = quantize(x, x, x)
        factor = float(made.descale.k)
        assert factor == (1 if size == 0 else max(float(x.max()) / 448, 2**-126)) or factor == pytest.approx(size / 448)
        assert torch.isfinite(made.k.float()).all()
        assert ((made.k.double() * factor - x.double()).abs() <= size * 2**-4 + factor * 2**-10).all()


def test_memory_order_and_strides(torch_device):
    """Bytes lie as the operands do; any strides are read."""
    x = numbers(2, 130, 3, 40).to(torch_device)
    q = x.transpose(1, 2)  # (b, h, s, d)
    made = quantize(q, q, q[..., ::2], per="block")
    assert made.q.transpose(1, 2).is_contiguous()
    plain = quantize(q.contiguous(), q.contiguous(), q[..., ::2].contiguous(), per="block")
    for name in "qkv":
        assert torch.equal(getattr(made, name).contiguous().view(torch.uint8), getattr(plain, name).view(torch.uint8))
    by_keys = quantize(q, q, q, per="block", v_order="keys").v
    assert by_keys.stride(2) == 1
    assert by_keys.stride(3) % 16 == 0
    assert torch.equal(by_keys.contiguous().view(torch.uint8), plain.k.view(torch.uint8))


def test_under_compile_and_in_the_operators():
    from torch.library import opcheck

    q, k, v = numbers(1, 4, 140, 16), numbers(1, 2, 140, 16), numbers(1, 2, 140, 16)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def compiled(q, k, v):
        return quantize(q, k, v, per="block", smooth_k=True, rotate=True, v_order="keys")

    found, wanted = compiled(q, k, v), quantize(q, k, v, per="block", smooth_k=True, rotate=True, v_order="keys")
    for name in "qkv":
        assert torch.equal(getattr(found, name).view(torch.uint8), getattr(wanted, name).view(torch.uint8))
        assert torch.equal(getattr(found.descale, name), getattr(wanted.descale, name))
    assert torch.equal(found.shift, wanted.shift)
    starts = torch.tensor([0, 3, 140])
    for mean, subtracts in ((None, False), (torch.randn(2, 2, 16), False), (torch.randn(2, 2, 16), True)):
        flat = q, 2, starts, None, mean, subtracts, "block", E5M2, 2, True, True, "q", False
        opcheck(torch.ops.saccade.quantize.default, flat)
    opcheck(torch.ops.saccade.mean_of_keys.default, (k, starts, None, True, False))


@pytest.mark.parametrize("per", ["tensor", "head", "block"])
@pytest.mark.parametrize("smooth_k", [False, True], ids=["plain", "smoothed"])
@pytest.mark.parametrize("lengths", [(0, 20), (20, 0), (0, 0)], ids=str)
def test_no_rows(lengths, smooth_k, per):
    """What quantize makes of nothing, attention takes; rows behind sequences without any are in no block."""
    q, k, v = (torch.randn(2, 2, s, 16) for s in (lengths[0], lengths[1], lengths[1]))
    made = quantize(q, k, v, per=per, smooth_k=smooth_k, rotate=True)
    assert attention(*made[:3], descale=made.descale).count_nonzero() == 0
    layout = Packed(*(torch.tensor([0, s, s]) for s in lengths))
    flat = [torch.nn.functional.pad(x[0].transpose(0, 1), (0, 0, 0, 0, 0, 3), value=torch.nan) for x in (q, k, v)]
    made = quantize(*flat, per=per, smooth_k=smooth_k, rotate=True, layout=layout)
    assert all(x[-3:].view(torch.uint8).count_nonzero() == 0 for x in made[:3])
    assert attention(*made[:3], descale=made.descale, layout=layout).count_nonzero() == 0


def test_first_use_is_compiled():
    """With sizes that are symbols, attention beside it."""

    def run(q, k, v):
        made = quantize(q, k, v, per="block", smooth_k=True, rotate=True)
        return attention(*made[:3], descale=made.descale, return_lse=True)

    compiled = torch.compile(run, fullgraph=True, dynamic=True, backend="eager")
    for b, s in ((2, 140), (3, 100), (2, 300)):
        q, k, v = torch.randn(b, 4, 7, 16), torch.randn(b, 2, s, 16), torch.randn(b, 2, s, 16)
        for found, wanted in zip(compiled(q, k, v), run(q, k, v), strict=True):
            assert torch.equal(found, wanted)


def given(**changes):
    return {"q": torch.randn(1, 4, 20, 16), "k": torch.randn(1, 2, 20, 16), "v": torch.randn(1, 2, 20, 16)} | changes


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"q": None, "smooth_k": True}, "smooth_k needs q, which the shift of the LSE depends on"),
        ({"per": "row"}, "per must be 'tensor' or 'head' or 'block', got 'row'"),
        ({"dtype": torch.int8}, "dtype must be torch.float8_e4m3fn or torch.float8_e5m2, got torch.int8"),
        ({"v_order": "d"}, "v_order must be 'rows' or 'keys', got 'd'"),
        ({"rotate": "yes"}, "rotate must be True or False, got 'yes'"),
        ({"k": torch.randn(1, 2, 20, 8)}, "q and k must have one head dim: q (1, 4, 20, 16), k (1, 2, 20, 8)"),
        ({"q": torch.randn(1, 4, 20, 16).double()}, "float16, bfloat16 and float32, got q torch.float64"),
        ({"q": torch.randn(1, 4, 20, 16, requires_grad=True)}, "quantize has no gradients: call it inside"),
        ({"q": 3}, "q must be a tensor, got 3"),
        ({"layout": "bhsd"}, "layout must be a Dense or a Packed layout, got 'bhsd'"),
        ({"layout": Paged(torch.zeros(1, 1).int(), torch.zeros(1).int())}, "quantize takes no pages, got Paged(1 seq"),
        ({"layout": Dense(seqused_k=torch.tensor([21]))}, "seqused_k must be between 0 and the rows of each sequence"),
        ({"layout": Dense(seqused_k=torch.tensor([2, 1]))}, "seqused_k must have shape (1,), got (2,): q (1, 4"),
        ({"layout": Packed(torch.tensor([0, 20]))}, "must have three dimensions, (t, h, d): q (1, 4"),
    ],
    ids=lambda x: x if isinstance(x, str) else "-".join(x),
)  # fmt: skip
def test_wrong_calls(changes, words):
    with pytest.raises((ValueError, TypeError), match=re.escape(words)):
        quantize(**given(**changes))


@pytest.mark.parametrize("offsets", [[0, 30], [1, 20], [0, 12, 4]], ids=str)
def test_broken_offsets(offsets):
    x = torch.randn(20, 2, 8)
    with pytest.raises(ValueError, match="cu_seqlens_q must begin at 0"):
        quantize(x, x, x, layout=Packed(torch.tensor(offsets)))
    ranges = Packed(torch.tensor([0, 20]), starts_k=torch.tensor([0]), seqused_k=torch.tensor([3]))
    with pytest.raises(ValueError, match="several sequences may share a row"):
        quantize(x, x, x, layout=ranges)


def test_a_sequence_longer_than_its_bound(torch_device):
    """Bytes without a factor are NaN."""
    x = torch.randn(300, 2, 16, device=torch_device)
    layout = Packed(torch.tensor([0, 300], device=torch_device), max_seqlen_q=130, max_seqlen_k=130)
    made = quantize(x, x, x, per="block", layout=layout)
    assert made.descale.k.shape == (1, 2, 2)
    assert made.k[:256].float().isfinite().all()
    assert made.k[256:].float().isnan().all()


# On a GPU


def gpu_assert_same(found, wanted):
    """Bytes, those of NaN too."""
    assert torch.equal(found.cpu().contiguous().view(torch.uint8), wanted.cpu().contiguous().view(torch.uint8))


@pytest.mark.gpu
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
            gpu_assert_same(getattr(found, name), getattr(wanted, name))
            assert torch.equal(getattr(found.descale, name).cpu(), getattr(wanted.descale, name))
            assert getattr(found, name).stride() == getattr(wanted, name).stride()


@pytest.mark.gpu
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
        gpu_assert_same(getattr(made, name).cpu(), layout.ordered(codes))


@pytest.mark.gpu
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
            gpu_assert_same(getattr(made, name), getattr(wanted, name))
        assert torch.equal(made.shift, wanted.shift)
        assert torch.equal(made.descale.q, wanted.descale.q)


@pytest.mark.gpu
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
    gpu_assert_same(found[0], codes)
    assert torch.equal(found[1], factors)


def ordered(codes):
    """Bytes as integers in the order of their numbers; both zeros are 0."""
    bits = codes.view(torch.uint8).int()
    return torch.where(bits >= 128, 128 - bits, bits)


@pytest.mark.gpu
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


@pytest.mark.gpu
@pytest.mark.parametrize("given", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("d", [64, 80, 128, 256])
def test_rotation_on_a_gpu(d, given):
    """The sums of the tensor cores, against float32 sums: bytes differ by one code, and seldom."""
    x = torch.randn(1, 4, 300, d, device="cuda").to(given)
    made = quantize(x, x[:, :2], x[:, :2], per="block", rotate=True)
    call = Quantization(x, 2, per="block", blocks=3, rotate=True)
    codes, factors, _ = operations.quantize(call)
    torch.testing.assert_close(made.descale.q, factors, rtol=1e-5, atol=0)
    apart = (ordered(made.q) - ordered(codes)).abs()
    assert apart.max() <= 1
    assert apart.float().mean() < 1e-2
