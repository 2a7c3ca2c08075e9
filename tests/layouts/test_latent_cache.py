"""Caches of FP8 records: their bytes, by an independent reading, and calls over them."""

from __future__ import annotations

import struct

import pytest
import torch

from saccade import LatentCache, Paged, Unsupported, append_kv, attention, causal, explain, selected
from saccade.compat.flash_mla import flash_mla_with_kvcache
from saccade.testing import check

SIZES = {"v3.2": (656, 576), "v4": (584, 512)}
PAGES, SIZE = 5, 8


def empty(form, pages=PAGES, fill=0xFF, padding=0):
    """Bytes that are NaN as numbers of any part; `padding` bytes after each page."""
    n = SIZE * SIZES[form][0]
    flat = torch.full((pages, n + padding), fill, dtype=torch.uint8)
    return LatentCache(flat.as_strided((pages, SIZE, SIZES[form][0]), (n + padding, SIZES[form][0], 1)), form)


def read(cache, slot):
    """A row, number by number, by the formats' definitions."""
    page, row = divmod(slot, SIZE)
    data = bytes(cache.bytes[page].flatten().tolist())
    if cache.format == "v3.2":
        data = data[row * 656 : row * 656 + 656]
        scales, columns, rest = struct.unpack("<4f", data[512:528]), 128, data[528:]
    else:
        exponents = data[SIZE * 576 + row * 8 :][:7]
        data = data[row * 576 : row * 576 + 576]
        scales, columns, rest = [2.0 ** (x - 127) for x in exponents], 64, data[448:]
    numbers = []
    for i in range(len(scales) * columns):
        sign, exponent, fraction = data[i] >> 7, data[i] >> 3 & 15, data[i] & 7
        x = (1 + fraction / 8) * 2.0 ** (exponent - 7) if exponent else fraction / 8 * 2.0**-6
        numbers.append((-x if sign else x) * scales[i // columns])
    wide = [struct.unpack("<f", b"\0\0" + rest[i : i + 2])[0] for i in range(0, len(rest), 2)]
    return torch.tensor([*numbers, *wide], dtype=torch.float64)


def filled(form, rows, padding=0):
    cache = empty(form, padding=padding)
    assert append_kv(cache, cache, None, rows, None, slot_mapping=torch.arange(len(rows)) + 2) is None
    return cache


@pytest.mark.parametrize("padding", [0, 64])
@pytest.mark.parametrize("form", SIZES)
def test_bytes(form, padding):
    """Each number is within half a step of e4m3 of what was written, in its group; the others' bytes stay."""
    d = SIZES[form][1]
    rows = (torch.randn(11, 1, d) * torch.logspace(-3, 3, 11)[:, None, None]).bfloat16()
    rows[3] = 0
    cache = filled(form, rows, padding)
    for i in range(11):
        found, wanted = read(cache, i + 2), rows[i, 0].double()
        columns, quantized = (128, 512) if form == "v3.2" else (64, 448)
        top = wanted[:quantized].unflatten(0, (-1, columns)).abs().amax(-1, keepdim=True).expand(-1, columns).flatten()
        error = (found - wanted)[:quantized].abs()
        assert bool((error <= torch.maximum(wanted[:quantized].abs() / 16, top / 2**14)).all())
        assert torch.equal(found[quantized:], wanted[quantized:])
        torch.testing.assert_close(cache.rows(torch.tensor([i + 2]), torch.float64)[0], found)
    assert bool((cache.bytes[-1] == 0xFF).all())
    assert torch.equal(cache.rows(None, torch.float32)[2:13], cache.rows(torch.arange(11) + 2, torch.float32))


@pytest.mark.parametrize("form", SIZES)
@pytest.mark.parametrize("wanted", ["slots", "many slots", "pages", "selected"])
def test_attention(wanted, form):
    """The same as over the rows that the bytes stand for; what no slot names is NaN."""
    d, pages = SIZES[form][1], torch.tensor([[4, 0, 2], [1, 3, 2]])
    cache = filled(form, torch.randn(PAGES * SIZE - 4, 1, d))
    rows = cache.rows(None, torch.float32).view(PAGES, SIZE, 1, d)
    q, mask = torch.randn(2, 3, 5, d), None
    if "slots" in wanted:
        n = 30 if "many" in wanted else 6
        slots = torch.rand(2, 3, PAGES * SIZE - 4).argsort(-1)[..., :n] + 2
        slots = torch.where(
            torch.rand(slots.shape) < 0.2, torch.tensor([-1, -9, 40, 1 << 20, 77, -5])[:n].repeat(n)[:n], slots
        )
        layout = Paged(slots=slots, seqused_k=torch.tensor([[n, 0, 2], [1, n, n]]))
    else:
        cache, mask = filled(form, torch.randn(PAGES * SIZE - 2, 1, d)), causal()
        append_kv(cache, cache, None, torch.randn(2, 1, d), None, slot_mapping=torch.arange(2))
        rows, layout = cache.rows(None, torch.float32).view(PAGES, SIZE, 1, d), Paged(pages, torch.tensor([20, 9]))
        mask = mask if wanted == "pages" else mask & selected(torch.rand(2, 1, 3, 24).argsort(-1)[..., :9])

    def over_records(q, k, v, **keywords):
        return attention(q, cache, cache, **keywords)

    check(q, rows, rows[..., :512], layout=layout, mask=mask, function=over_records, backward=False).assert_ok()
    assert explain(q, cache, cache, layout=layout, mask=mask).backend == "cpu"


@pytest.mark.parametrize("flat", [False, True])
def test_append_by_length(flat):
    """As rows of a 16-bit cache go where their sequences are; broken slots are omitted."""
    cache, plain = empty("v4", fill=0), torch.zeros(PAGES, SIZE, 1, 512)
    table, used = torch.tensor([[4, 0], [1, -1]]), torch.tensor([6, 7])
    new = torch.randn(6, 1, 512) if flat else torch.randn(2, 3, 1, 512)
    layout = Paged(table, used, torch.tensor([0, 2, 5]) if flat else None)
    append_kv(cache, cache, layout, new, None)
    append_kv(plain, torch.zeros(PAGES, SIZE, 1, 8), layout, new, new[..., :8])
    named = plain.flatten(0, 1).abs().sum((1, 2)) > 0
    rows = cache.rows(None, torch.float32)
    assert torch.equal(rows.abs().sum(1) > 0, named)
    torch.testing.assert_close(rows, plain.flatten(0, 2), rtol=1 / 16, atol=1e-3)


@pytest.mark.parametrize("low", [torch.float16, torch.bfloat16])
def test_autocast(low):
    """Rows have the dtype that queries are cast to."""
    cache, q = filled("v3.2", torch.randn(30, 1, 576)), torch.randn(2, 1, 4, 576).bfloat16()
    layout = Paged(slots=torch.arange(2, 12).view(2, 1, 5), seqused_k=torch.full((2, 1), 5))
    with torch.autocast("cpu", dtype=low):
        out = attention(q, cache, cache, layout=layout)
    assert torch.equal(out, attention(q.to(low), cache, cache, layout=layout))


def test_nothing_to_write():
    cache = empty("v3.2")
    append_kv(cache, cache, None, torch.randn(2, 1, 576), None, slot_mapping=torch.tensor([-1, -1]))
    assert bool((cache.bytes == 0xFF).all())


@pytest.mark.parametrize("form", SIZES)
def test_flash_mla(form):
    cache, extra = (filled(form, torch.randn(30, 1, SIZES[form][1])) for _ in range(2))
    q, slots, more = (
        torch.randn(2, 1, 4, SIZES[form][1]),
        torch.arange(2, 12).view(2, 1, 5),
        torch.tensor([[[7]], [[-1]]]),
    )
    found = flash_mla_with_kvcache(
        q, cache.bytes[:, :, None], None, None, 512, is_fp8_kvcache=True, indices=slots,
        extra_k_cache=extra.bytes[:, :, None], extra_indices_in_kvcache=more,
    )  # fmt: skip
    rows = torch.cat([x.rows(None, torch.float32) for x in (cache, extra)])[None, :, None]
    layout = Paged(slots=torch.cat([slots, torch.where(more < 0, -1, more + 40)], -1), seqused_k=torch.full((2, 1), 6))
    wanted = attention(q, rows, rows[..., :512], layout=layout, return_lse=True)
    for x, y in zip(found, wanted, strict=True):
        torch.testing.assert_close(x, y)


def test_wrong_calls():
    x = torch.zeros(2, 4, 656, dtype=torch.uint8)
    with pytest.raises(Unsupported, match=r"no format 'v4.1'; there are \"v3.2\" \(656 bytes of d 576\)"):
        LatentCache(x, "v4.1")
    with pytest.raises(ValueError, match=r"an 8-bit tensor \(pages, page_size, 584\).* got torch.uint8 \(2, 4, 656\)"):
        LatentCache(x, "v4")
    with pytest.raises(ValueError, match="a page's bytes contiguous"):
        LatentCache(x.transpose(0, 1), "v3.2")
    cache, layout = LatentCache(x, "v3.2"), Paged(slots=torch.zeros(3, 2).int(), seqused_k=torch.ones(3).int())
    q = torch.randn(3, 4, 576)
    with pytest.raises(TypeError, match="pass the same object as k and as v"):
        attention(q, cache, torch.randn(2, 4, 1, 512), layout=layout)
    with pytest.raises(ValueError, match="one head dim"):
        attention(q[..., :512], cache, cache, layout=layout)
    with pytest.raises(TypeError, match="read through Paged"):
        attention(q, cache, cache)
    new, slots = torch.randn(2, 1, 576), torch.tensor([0, 9])
    with pytest.raises(ValueError, match=r"slots must be in \[0, 8\)"):
        append_kv(cache, cache, None, new, None, slot_mapping=slots)
    with pytest.raises(
        ValueError, match=r"\(t, 1, 576\), of float16, bfloat16 or float32, got torch.float32 \(2, 1, 575\)"
    ):
        append_kv(cache, cache, None, new[..., :575], None, slot_mapping=slots)
    with pytest.raises(TypeError, match="v_new=None"):
        append_kv(cache, cache, None, new, new, slot_mapping=slots)
    with pytest.raises(Unsupported, match="omit rotary"):
        append_kv(cache, cache, None, new, None, slot_mapping=slots, rotary=(q, q))
    records = torch.zeros(2, 4, 1, 528, dtype=torch.uint8)
    with pytest.raises(Unsupported, match="records of 656 and 584 bytes are supported, not 528"):
        flash_mla_with_kvcache(q[None], records, None, None, 512, is_fp8_kvcache=True, indices=layout.slots[None])
    with pytest.raises(ValueError, match=r"goes with q \(…, 576\) and head_dim_v 512, got"):
        flash_mla_with_kvcache(q[None], x[:, :, None], None, None, 256, is_fp8_kvcache=True, indices=layout.slots[None])
