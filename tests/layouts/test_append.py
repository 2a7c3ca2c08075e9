"""New keys and values in the pages of a cache."""

from __future__ import annotations

import random
import re
from itertools import accumulate

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from saccade import Dense, Descale, Packed, Paged, append_kv, attention, causal, quantize

PAGES, SIZE, H, D, D_V = 9, 4, 2, 12, 8
TABLE = torch.tensor([[3, 0, 7], [5, -1, 1 << 30], [1, 2, 6]], dtype=torch.int32)
USED = torch.tensor([3, 2, 11])


def turned(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """One row (d) by its angles (pairs), element by element."""
    made, pairs = x.clone(), len(cos)
    for i in range(pairs):
        one, two = (2 * i, 2 * i + 1) if interleaved else (i, pairs + i)
        made[one] = x[one] * cos[i] - x[two] * sin[i]
        made[two] = x[two] * cos[i] + x[one] * sin[i]
    return made


def turned_rows(x: Tensor, angles: Tensor, positions: Tensor, interleaved: bool) -> Tensor:
    """Rows (n, h, d) by their positions (n), one head after the other; later positions take the last angles."""
    made = x.clone()
    for i, position in enumerate(positions.tolist()):
        angle = angles[min(position, len(angles) - 1)]
        for h in range(x.shape[1]):
            made[i, h] = turned(x[i, h], angle.cos(), angle.sin(), interleaved)
    return made


ROTARY = {"plain": (None, False), "halves": (4, False), "interleaved": (6, True)}


@pytest.mark.parametrize("rotary", ROTARY)
@pytest.mark.parametrize("lengths", [None, (4, 3, 0), (0, 5, 4)], ids=str)
def test_rows_are_where_they_belong(lengths, rotary, torch_device):
    """Nothing else is touched: not the pages of others, not what is beyond the table or has no page."""
    both = torch.randn(PAGES, SIZE, H, D + D_V, device=torch_device)
    caches, wanted = both.split([D, D_V], dim=-1), both.clone().cpu().split([D, D_V], dim=-1)
    lengths = (4, 4, 4) if lengths is None else lengths
    offsets = torch.tensor([0, *lengths]).cumsum(0).int()
    rows = int(offsets[-1]) + 2
    packed = lengths != (4, 4, 4)
    layout = Paged(TABLE.to(torch_device), USED.to(torch_device), offsets.to(torch_device) if packed else None)
    new = [torch.randn(rows, H, d) for d in (D, D_V)] if packed else [torch.randn(3, 4, H, d) for d in (D, D_V)]
    pairs, interleaved = ROTARY[rotary]
    angles = torch.randn(12, pairs or 1)
    tables = None if pairs is None else (angles.cos().to(torch_device), angles.sin().to(torch_device))
    append_kv(*caches, layout, *(x.to(torch_device) for x in new), rotary=tables, interleaved=interleaved)
    for b, n in enumerate(lengths):
        for i in range(n):
            position = int(USED[b]) + i
            page = int(TABLE[b, position // SIZE]) if position < 3 * SIZE else -1
            if not 0 <= page < PAGES:
                continue
            for which, (cache, x) in enumerate(zip(wanted, new, strict=True)):
                row = x[offsets[b] + i] if packed else x[b, i]
                if which == 0 and pairs is not None:
                    angle = angles[min(position, 11)]
                    row = torch.stack([turned(part, angle.cos(), angle.sin(), interleaved) for part in row])
                cache[page, position % SIZE] = row
    for found, right in zip(caches, wanted, strict=True):
        torch.testing.assert_close(found.cpu(), right)


@pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("shape", [(7,), (1, 7), (7, 1)], ids=str)
@pytest.mark.parametrize("rotary", ROTARY)
def test_slots(rotary, shape, index, torch_device):
    """The caches are halves of one tensor, heads before rows, as vLLM has them."""
    both = torch.randn(PAGES, H, SIZE, D + D_V, device=torch_device).transpose(1, 2)
    caches, wanted = both.split([D, D_V], dim=-1), both.clone().cpu().split([D, D_V], dim=-1)
    slots = torch.tensor([5, -1, 35, 0, 17, -1, 18], dtype=index)
    positions = torch.tensor([0, 4, 11, 3, 99, 2, 1], dtype=index)
    new = [torch.randn(7, H, d) for d in (D, D_V)]
    pairs, interleaved = ROTARY[rotary]
    angles = torch.randn(12, pairs or 1)
    given = (
        {}
        if pairs is None
        else {"rotary": (angles.cos().to(torch_device), angles.sin().to(torch_device)), "q": torch.randn(7, 3 * H, D)}
    )
    for cache, x, rotates in zip(wanted, new, (pairs is not None, False), strict=True):
        rows = turned_rows(x, angles, positions, interleaved) if rotates else x
        for slot, row in zip(slots.tolist(), rows, strict=True):
            if slot >= 0:
                cache[slot // SIZE, slot % SIZE] = row
    rotated = append_kv(
        *caches,
        None,
        *(x.view(*shape, *x.shape[1:]).to(torch_device) for x in new),
        slot_mapping=slots.view(shape).to(torch_device),
        positions=positions.view(shape).to(torch_device) if pairs else None,
        **{"q": given["q"].view(*shape, 3 * H, D).to(torch_device), "rotary": given["rotary"]} if given else {},
        interleaved=interleaved,
    )
    for found, right in zip(caches, wanted, strict=True):
        torch.testing.assert_close(found.cpu(), right)
    assert (rotated is None) == (pairs is None)
    if rotated is not None:
        right = turned_rows(given["q"], angles, positions, interleaved)
        torch.testing.assert_close(rotated.cpu().view(right.shape), right)


@pytest.mark.parametrize("packed", [False, True])
def test_rotated_queries(packed, torch_device, poison):
    """By the positions of the new keys, on pages or not; rows of no sequence are zero."""
    offsets = torch.tensor([0, 4, 7, 7]).int()
    shape, lengths = ((9,), (4, 3, 0)) if packed else ((3, 3), (3, 3, 3))
    positions = torch.cat([used + torch.arange(n) for used, n in zip(USED, lengths, strict=True)])
    q = torch.randn(*shape, 6, D)
    qkv = torch.cat([q, *(torch.randn(*shape, H, D) for _ in range(2))], dim=-2).to(torch_device)
    views = qkv.split([6, H, H], dim=-2)
    caches = [torch.zeros(PAGES, SIZE, H, D, device=torch_device) for _ in range(2)]
    layout = Paged(TABLE.to(torch_device), USED.to(torch_device), offsets.to(torch_device) if packed else None)
    angles = torch.randn(9, 4)
    tables = angles.cos().to(torch_device), angles.sin().to(torch_device)
    rotated = append_kv(*caches, layout, *views[1:], q=views[0], rotary=tables)
    assert rotated.is_contiguous()
    assert torch.equal(views[0].cpu(), q)
    found, n = rotated.cpu().flatten(0, -3), len(positions)
    torch.testing.assert_close(found[:n], turned_rows(q.flatten(0, -3)[:n], angles, positions, False))
    assert not found[n:].any()


def test_slots_under_compile_and_in_the_operator():
    from torch.library import opcheck

    call = given()
    flat = {name: call[name].squeeze(1) for name in ("k_new", "v_new")}
    q, slots, positions = torch.randn(3, 4, D), torch.tensor([7, -1, 30]), torch.tensor([1, 2, 3])
    tables = [torch.randn(9, 2), torch.randn(9, 2)]
    caches = call["k_cache"], call["v_cache"]
    arguments = (*caches, *flat.values(), q, [slots, positions], "slots", tables, True)
    opcheck(torch.ops.saccade.append_kv.default, arguments, test_utils=("test_schema", "test_faketensor"))

    @torch.compile(backend="aot_eager", fullgraph=True)
    def compiled(k_cache, v_cache, k_new, v_new, q, slots, positions):
        return append_kv(k_cache, v_cache, None, k_new, v_new, slot_mapping=slots, positions=positions, q=q,
                         rotary=tables)  # fmt: skip

    copies = [x.clone() for x in caches]
    found = compiled(*copies, *flat.values(), q, slots, positions)
    wanted = append_kv(*caches, None, *flat.values(), slot_mapping=slots, positions=positions, q=q, rotary=tables)
    for one, other in ((found, wanted), *zip(copies, caches, strict=True)):
        assert torch.equal(one, other)


SLOTS = torch.tensor([3, -1, 5])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"slot_mapping": SLOTS}, "pass a layout or slot_mapping, not both: got Paged(3 sequences of up to 3 pages)"),
        ({"layout": None, "slot_mapping": SLOTS[:2]}, "one number for each new row, (3,), got (2,): k_cache (9, 4, 2"),
        ({"layout": None, "slot_mapping": SLOTS.float()}, "slot_mapping must be an int32 or int64 tensor"),
        ({"layout": None, "slot_mapping": [1, 2, 3]}, "got [1, 2, 3]"),
        ({"layout": None, "slot_mapping": SLOTS + 33}, "in [0, 36), the rows of 9 pages of 4, or -1 for a row that"),
        ({"layout": None, "slot_mapping": SLOTS - 2}, "got [1, -3, 3]"),
        (
            {"layout": None, "slot_mapping": SLOTS, "rotary": (torch.ones(9, 3),) * 2},
            "slots do not say the positions of rows",
        ),
        ({"layout": None, "slot_mapping": SLOTS, "positions": SLOTS}, "positions is used only with rotary=(cos, sin)"),
        (
            {"layout": None, "slot_mapping": SLOTS, "positions": SLOTS, "rotary": (torch.ones(9, 3),) * 2},
            "positions must be from 0 on, got [3, -1, 5]",
        ),
        (
            {"layout": None, "slot_mapping": SLOTS, "positions": SLOTS[None], "rotary": (torch.ones(9, 3),) * 2},
            "positions must have the shape of slot_mapping, got (1, 3) and (3,)",
        ),
        (
            {
                "layout": Paged(TABLE, USED, q_offset=0, k_offset=3),
                "k_new": torch.randn(3, 1, H, D),
                "rotary": (SLOTS, SLOTS),
            },
            "this layout has a k_offset: pass slot_mapping and positions=…",
        ),
        ({"positions": SLOTS, "k_new": torch.randn(3, 1, H, D)}, "positions go with slot_mapping"),
        ({"q": torch.randn(3, 1, H, D), "k_new": torch.randn(3, 1, H, D)}, "q is used only with rotary=(cos, sin)"),
        (
            {"layout": None, "slot_mapping": SLOTS, "q": torch.randn(4, H, D), "positions": SLOTS},
            "q and k_new must have the same rows and head dim: k_cache",
        ),
    ],
)
def test_errors_of_slots_and_queries(changes, words):
    rows = {"k_new": torch.randn(3, H, D), "v_new": torch.randn(3, H, D_V)} if "k_new" not in changes else {}
    call = given(**rows | changes)
    with pytest.raises(TypeError if words == "got [1, 2, 3]" else ValueError, match=re.escape(words)):
        append_kv(**call)
    assert not call["k_cache"].any()


def given(**changes):
    found = {
        "k_cache": torch.zeros(PAGES, SIZE, H, D),
        "v_cache": torch.zeros(PAGES, SIZE, H, D_V),
        "layout": Paged(TABLE, USED),
        "k_new": torch.randn(3, 1, H, D),
        "v_new": torch.randn(3, 1, H, D_V),
    }
    return found | changes


KINDS = torch.float8_e4m3fn, torch.float8_e5m2


def of_8_bits(kind=torch.float8_e4m3fn, dtype=torch.float32, **changes):
    """A call that quantizes: its caches, and rows that are wider."""
    rows = {"k_new": torch.randn(3, 1, H, D).to(dtype), "v_new": torch.randn(3, 1, H, D_V).to(dtype)}
    caches = {"k_cache": torch.zeros(PAGES, SIZE, H, D).to(kind), "v_cache": torch.zeros(PAGES, SIZE, H, D_V).to(kind)}
    return given(**caches | rows | changes)


def codes(x: Tensor) -> Tensor:
    return x.view(torch.uint8)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("per", ["tensor", "head", "block"])
def test_bytes_are_those_of_quantize(per, kind, dtype, torch_device):
    """A prompt end to end, appended with the factors that `quantize` finds; NaN, infinities and zeros of both signs."""
    offsets = torch.tensor([0, 130, 130, 141], device=torch_device)
    rows = [torch.randn(141, H, d).mul(9).to(dtype).to(torch_device) for d in (D, D_V)]
    for x in rows:
        x[3, 0, :5] = torch.tensor([torch.nan, torch.inf, -torch.inf, -0.0, 1e-7])
    made = quantize(None, *rows, per=per, dtype=kind, layout=Packed(offsets))
    table = torch.arange(3 * 36, dtype=torch.int32, device=torch_device).view(3, 36)
    caches = [torch.zeros(108, SIZE, H, d, device=torch_device).to(kind) for d in (D, D_V)]
    layout = Paged(table, torch.zeros(3, dtype=torch.int32, device=torch_device), offsets)
    append_kv(*caches, layout, *rows, descale=made.descale)
    for cache, wanted in zip(caches, made[1:3], strict=True):
        found = codes(cache).view(3, 36 * SIZE, *cache.shape[2:])
        assert torch.equal(torch.cat([found[0, :130], found[2, :11]]), codes(wanted))
        assert not found[0, 130:].any()
        assert not found[1].any()


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("form", ["number", "none", "()", "(h_k,)", "(b, h_k)", "slots"])
def test_quantized_rows(form, kind, torch_device):
    """Each number is the nearest of the 8-bit type's numbers, all of them tried, times the factor; numbers beyond the
    largest become that one."""
    number, heads, both = 0.37, torch.rand(H) + 0.1, torch.rand(3, H) + 0.1
    factor = {"number": number, "none": None, "()": torch.tensor(number), "(b, h_k)": both}.get(form, heads)
    call = of_8_bits(kind, k_new=torch.randn(3, 1, H, D) * 2.0 ** torch.randint(-20, 20, (3, 1, H, D)))
    by_row = torch.ones(3, H) if factor is None else torch.as_tensor(factor).expand(3, H)
    where = {"layout": Paged(*(x.to(torch_device) for x in (TABLE, USED)))}
    if form == "slots":
        where = {"layout": None, "slot_mapping": torch.tensor([15, 22, 27]).view(3, 1).to(torch_device)}
    moved = {name: x.to(torch_device) for name, x in call.items() if isinstance(x, Tensor)}
    factor = factor.to(torch_device) if isinstance(factor, Tensor) else factor
    append_kv(**moved | where, descale=Descale(k=factor, v=factor))
    every = torch.arange(256, dtype=torch.uint8).view(kind).double()
    every = every[every.isfinite()]
    # Rows 3, 2 and 11 of their sequences.
    for b, (page, row) in enumerate([(3, 3), (5, 2), (6, 3)]):
        for cache, new in (("k_cache", "k_new"), ("v_cache", "v_new")):
            found = moved[cache][page, row].cpu().double()
            quotient = (call[new][b, 0] / by_row[b, :, None]).double()
            least = (quotient.clamp(every.min(), every.max())[..., None] - every).abs().amin(-1)
            assert torch.equal((quotient.clamp(every.min(), every.max()) - found).abs(), least)


def nearest(x: Tensor, kind: torch.dtype) -> Tensor:
    """Of x (float64), ties to even, at most the largest number; NaN of infinities."""
    mantissa, least = (3, -6) if kind == torch.float8_e4m3fn else (2, -14)
    unit = torch.exp2((torch.frexp(x).exponent - 1).clamp(min=least).double() - mantissa)
    top = torch.finfo(kind).max
    return torch.where(x.isfinite(), (x / unit).round() * unit, torch.nan).clamp(-top, top)


def drawn_factor(dice: random.Random, b: int, h: int, blocks: int) -> Tensor | float | None:
    shape = dice.choice([None, 0.01, (), (h,), (b, h), (b, h, blocks), (b, h, blocks)])
    if not isinstance(shape, tuple):
        return shape
    factor = torch.rand(shape) / 20 + 0.002
    return factor[:1].expand(shape) if len(shape) > 1 and dice.random() < 0.3 else factor


@pytest.mark.parametrize("seed", range(16))
def test_drawn_8_bit_rows(seed, torch_device):
    """The byte at every slot, where rows cross pages and blocks of factors, and nothing is written elsewhere."""
    dice = random.Random(seed)
    kind, dtype = dice.choice(KINDS), dice.choice([torch.float16, torch.bfloat16, torch.float32])
    b, h, size = dice.choice([1, 2, 3]), dice.choice([1, 2, 3]), dice.choice([1, 2, 7, 16, 48, 128, 256])
    used = [dice.choice([0, 1, 15, 100, 127, 128, 129]) for _ in range(b)]
    packed, new = dice.random() < 0.5, [dice.choice([0, 1, 3, 17, 130]) for _ in range(b)]
    new = new if packed else [max(1, new[0])] * b
    width = -(-max(map(sum, zip(used, new, strict=True))) // size) + dice.randint(0, 1)
    pages, blocks = b * width + 1, -(-width * size // 128)
    table = torch.randperm(pages)[: b * width].view(b, width).int()
    d, d_v = dice.choice([8, 16, 24, 64]), dice.choice([8, 40, 128])
    both = torch.full((pages, size, h, d + d_v), 0.75).to(kind).to(torch_device)
    if dice.random() < 0.5:  # heads before rows, as vLLM has them
        both = codes(both).transpose(1, 2).contiguous().transpose(1, 2).view(kind)
    caches = both.split([d, d_v], dim=-1)
    rows = [torch.randn(sum(new), h, n).mul(dice.choice([1, 30])).to(dtype) for n in (d, d_v)]
    for x in rows:
        odd = torch.tensor([torch.nan, torch.inf, -torch.inf, 6e4, -0.0], dtype=dtype)
        if dice.random() < 0.5 and len(x):
            x.view(-1)[torch.randint(0, x.numel(), (5,))] = odd
    factors = [drawn_factor(dice, b, h, blocks) for _ in caches]
    offsets = torch.tensor([0, *accumulate(new)], dtype=torch.int32)
    layout = Paged(
        *(None if x is None else x.to(torch_device) for x in (table, torch.tensor(used), offsets if packed else None))
    )
    descale = Descale(None, *(x.to(torch_device) if isinstance(x, Tensor) else x for x in factors))
    given = (x if packed else x.unflatten(0, (b, -1)) for x in rows)
    append_kv(*caches, layout, *(x.to(torch_device) for x in given), descale=descale)

    whose = torch.arange(b).repeat_interleave(torch.tensor(new))
    position = torch.cat([n + torch.arange(m) for n, m in zip(used, new, strict=True)])
    at = table[whose, position // size].long(), position % size
    for cache, x, factor in zip(caches, rows, factors, strict=True):
        of_rows = torch.as_tensor(1.0 if factor is None else factor)
        of_rows = of_rows[..., None] if of_rows.ndim == 2 else of_rows[None, :, None] if of_rows.ndim == 1 else of_rows
        of_rows = of_rows.expand(b, h, blocks)[whose, :, position // 128]  # (rows, h)
        wanted = nearest((x.float() / of_rows[..., None]).double(), kind)
        found = cache.cpu()
        assert torch.equal(found[at].double().nan_to_num(nan=1e6), wanted.nan_to_num(nan=1e6))
        elsewhere = torch.ones(pages, size, dtype=torch.bool)
        elsewhere[at] = False
        assert (found[elsewhere].float() == 0.75).all()


def test_8_bit_keys_are_rotated_before(torch_device):
    """In float32, not rounded to the rows' dtype; the queries keep theirs."""
    call = of_8_bits(dtype=torch.bfloat16)
    angles, q = torch.randn(12, 4), torch.randn(3, 1, 4, D).bfloat16()
    tables = angles.cos().to(torch_device), angles.sin().to(torch_device)
    wide = given(k_new=call["k_new"].float(), v_new=call["v_new"].float())
    append_kv(**wide, rotary=(angles.cos(), angles.sin()))
    layout = Paged(TABLE.to(torch_device), USED.to(torch_device))
    moved = {name: x.to(torch_device) for name, x in call.items() if isinstance(x, Tensor)}
    rotated = append_kv(**moved, layout=layout, q=q.to(torch_device), rotary=tables, descale=Descale(k=0.3))
    assert rotated.dtype == torch.bfloat16
    found = moved["k_cache"].cpu().float()
    assert torch.equal(found, (wide["k_cache"] / 0.3).to(torch.float8_e4m3fn).float())


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_attention_to_what_was_appended(kind, torch_device):
    """One row after the other, with one record for both calls."""
    caches = [torch.full((4, 8, H, 16), torch.nan, device=torch_device).to(kind) for _ in range(2)]
    descale = Descale(k=torch.tensor([0.02, 0.03], device=torch_device), v=torch.tensor(0.05, device=torch_device))
    table, new = (
        torch.tensor([[2, 0]], device=torch_device).int(),
        torch.randn(2, 1, 11, H, 16, device=torch_device).bfloat16(),
    )
    q = torch.randn(1, 1, 4, 16, device=torch_device).bfloat16()
    for i in range(11):
        used = torch.tensor([i], device=torch_device)
        append_kv(*caches, Paged(table, used), *new[:, :, i : i + 1], descale=descale)
    out = attention(q, *caches, layout=Paged(table, used + 1), mask=causal(), descale=descale)
    wanted = attention(q.transpose(1, 2), *(x.transpose(1, 2) for x in new))
    assert (out - wanted.transpose(1, 2)).abs().max() < 0.2


def test_8_bit_rows_under_compile_and_in_the_operator():
    from torch.library import opcheck

    call, factor = of_8_bits(), torch.rand(3, H)[..., None]
    layout = call.pop("layout")
    arguments = (*call.values(), None, layout.tensors, layout.text, [], False, factor, None)
    opcheck(torch.ops.saccade.append_kv.default, arguments, test_utils="test_faketensor")

    @torch.compile(backend="aot_eager", fullgraph=True)
    def compiled(k_cache, v_cache, k_new, v_new, table, used, factor):
        append_kv(k_cache, v_cache, Paged(table, used), k_new, v_new, descale=Descale(k=factor, v=0.5))

    copies = {name: x.clone() for name, x in call.items()}
    compiled(**copies, table=TABLE, used=USED, factor=factor[..., 0])
    append_kv(**call, layout=layout, descale=Descale(k=factor[..., 0], v=0.5))
    assert codes(call["k_cache"]).any()
    for name in ("k_cache", "v_cache"):
        assert torch.equal(codes(copies[name]), codes(call[name]))


def eight(*shape):
    return torch.randn(*shape).to(torch.float8_e4m3fn)


SLOTTED = {"layout": None, "slot_mapping": torch.tensor([[3], [-1], [5]])}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"descale": Descale(k=torch.ones(3))}, "the descale of k must be (), (h_k,) = (2,), (b, h_k) = (3, 2), or"),
        ({"descale": Descale(v=torch.ones(2, 2))}, "the descale of v must be (), (h_k,) = (2,), (b, h_k) = (3, 2), or"),
        ({"descale": Descale(q=1.5)}, "append_kv takes Descale(k=…, v=…) without q"),
        ({"descale": Descale(shift=torch.ones(1))}, "without shift: it quantizes keys and values as they are"),
        (
            SLOTTED | {"descale": Descale(v=torch.ones(3, H))},
            "slots do not say to which sequence a row belongs, got (3, 2)",
        ),
        (SLOTTED | {"descale": Descale(k=torch.ones(3, H, 1))}, "with slot_mapping the descale of k must be a number"),
        (
            {"k_new": eight(3, 1, H, D), "v_new": eight(3, 1, H, D_V), "descale": Descale(k=2.0)},
            "got caches of torch.float8_e4m3fn and rows of torch.float8_e4m3fn, which are copied",
        ),
        (
            {"k_new": eight(3, 1, H, D), "v_new": eight(3, 1, H, D_V), "rotary": (torch.ones(9, 3),) * 2},
            "rotary takes rows of 16 bits or more, got torch.float8_e4m3fn",
        ),
        ({"v_cache": torch.zeros(PAGES, SIZE, H, D_V)}, "caches and new rows must share one dtype"),
        ({"k_new": torch.randn(3, 1, H, D).double(), "v_new": torch.randn(3, 1, H, D_V).double()}, "rows of float16,"),
        ({"v_new": torch.randn(3, 1, H, D_V).half()}, "got torch.float8_e4m3fn, torch.float8_e4m3fn, torch.float32"),
        ({"descale": Descale(k=torch.ones((), requires_grad=True))}, "append_kv has no gradients"),
    ],
)
def test_errors_of_8_bit_caches(changes, words):
    call = of_8_bits(**changes)
    with pytest.raises(ValueError, match=re.escape(words)):
        append_kv(**call)
    assert not codes(call["k_cache"]).any()


def test_a_descale_of_wider_caches_is_refused():
    with pytest.raises(ValueError, match=r"8-bit caches that take wider rows, got caches of torch\.float32"):
        append_kv(**given(descale=Descale(k=2.0)))
    with pytest.raises(TypeError, match=re.escape("must be a Descale(k=…, v=…), got")):
        append_kv(**of_8_bits(descale=2.0))


def test_the_operator():
    from torch.library import opcheck

    tensors = list(given().values())
    arguments = (
        *tensors[:2],
        *tensors[3:],
        torch.randn(3, 1, 2 * H, D).transpose(0, 1).contiguous().transpose(0, 1),
        tensors[2].tensors,
        tensors[2].text,
        [torch.ones(9, 2), torch.ones(9, 2)],
        True,
    )
    opcheck(torch.ops.saccade.append_kv.default, arguments, test_utils=("test_schema", "test_faketensor"))
    compiled, plain = given(), given()
    plain["k_new"], plain["v_new"] = compiled["k_new"], compiled["v_new"]

    @torch.compile(backend="aot_eager", fullgraph=True)
    def call(k_cache, v_cache, table, used, k_new, v_new):
        append_kv(k_cache, v_cache, Paged(table, used), k_new, v_new)
        return k_cache.sum()

    append_kv(**plain)
    total = call(compiled["k_cache"], compiled["v_cache"], TABLE, USED, compiled["k_new"], compiled["v_new"])
    assert torch.equal(compiled["k_cache"], plain["k_cache"])
    assert torch.equal(compiled["v_cache"], plain["v_cache"])
    assert torch.equal(total, plain["k_cache"].sum())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"k_new": torch.randn(2, 1, H, D)}, "k_new must have the batch size of block_table (3, 3)"),
        ({"k_new": torch.randn(3, H, D)}, "k_new must be (b, s, h, d)"),
        (
            {"k_new": torch.randn(3, 1, 4, D), "v_new": torch.randn(3, 1, 4, D_V)},
            "k_cache's heads and head dim: k_cache",
        ),
        (
            {"k_new": torch.randn(3, 1, 1, D), "v_new": torch.randn(3, 1, 1, D_V)},
            "k_cache's heads and head dim: k_cache",
        ),
        ({"k_new": torch.randn(3, 1, H, 4)}, "k_cache's heads and head dim: k_cache"),
        ({"v_new": torch.randn(3, 2, H, D_V)}, "the same rows and heads"),
        ({"k_new": torch.randn(3, 1, H, D).half()}, "share one dtype, got torch.float32, torch.float32, torch.float16"),
        ({"rotary": (torch.ones(9, 7), torch.ones(9, 7))}, "2 pairs <= 12, got cos (9, 7)"),
        ({"rotary": (torch.ones(9, 3), torch.ones(9, 3).half())}, "one float dtype"),
        ({"k_cache": torch.zeros(PAGES, SIZE, D, H).mT}, "contiguous, got strides"),
        ({"k_new": torch.randn(3, 1, H, D, requires_grad=True)}, "append_kv has no gradients"),
    ],
)
def test_errors(changes, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        append_kv(**given(**changes))


def test_another_layout_is_refused():
    with pytest.raises(TypeError, match="needs a Paged layout"):
        append_kv(**given(layout=Dense()))
    with pytest.raises(TypeError, match="or None with slot_mapping"):
        append_kv(**given(layout=None))


BROKEN = {
    "negative length": ({"layout": Paged(TABLE, USED - 4)}, "seqused_k must be in [0, 12], the rows of 3 pages of 4"),
    "length beyond the table": ({"layout": Paged(TABLE, USED + 4)}, "got [7, 6, 15]"),
    "offsets from 1 on": ({"layout": [1, 2, 3, 4]}, "cu_seqlens_q must begin at 0, never decrease"),
    "negative offset": ({"layout": [-1, 2, 3, 4]}, "got [-1, 2, 3, 4]"),
    "offsets that decrease": ({"layout": [0, 3, 2, 4]}, "got [0, 3, 2, 4]"),
    "offsets beyond the rows": ({"layout": [0, 2, 3, 5]}, "the tensor's 4 rows"),
    "expanded cache": (
        {"k_cache": torch.zeros(PAGES, SIZE, 1, D).expand(-1, -1, H, -1)},
        "k_cache is written to, and elements of it share memory",
    ),
    "expanded pages": ({"v_cache": torch.zeros(1, SIZE, H, D_V).expand(PAGES, -1, -1, -1)}, "may: (9, 4, 2, 8)"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_numbers_write_nothing(name):
    changes, words = BROKEN[name]
    if isinstance(changes.get("layout"), list):
        layout = Paged(TABLE, USED, torch.tensor(changes["layout"]))
        changes = {"layout": layout, "k_new": torch.ones(4, H, D), "v_new": torch.ones(4, H, D_V)}
    call = given(**changes)
    with pytest.raises(TypeError if words == "got [1, 2, 3]" else ValueError, match=re.escape(words)):
        append_kv(**call)
    assert not call["k_cache"].any()
    assert not call["v_cache"].any()


def test_caches_that_share_memory():
    """With each other or with what is written; slices of one tensor do not."""
    whole = torch.zeros(PAGES, SIZE, H, D)
    for changes, words in (
        ({"k_cache": whole, "v_cache": whole, "v_new": torch.ones(3, 1, H, D)}, "k_cache is written to, and must not"),
        ({"k_cache": whole, "k_new": whole[:3, :1]}, "share memory with k_new"),
    ):
        with pytest.raises(ValueError, match=words):
            append_kv(**given(**changes))
    both = torch.zeros(PAGES, SIZE, 2 * H, D)
    parts = both[:, :, :H], both[:, :, H:]
    append_kv(*parts, Paged(TABLE, USED), torch.ones(3, 1, H, D), 2 * torch.ones(3, 1, H, D))
    assert parts[0].sum() * 2 == parts[1].sum() == 2 * 3 * H * D


def test_caches_that_share_memory_under_compile():
    """Only what runs knows memory; what is traced has none."""
    with FakeTensorMode():
        wide = torch.zeros(PAGES, SIZE, H, D + D_V)
        rows = torch.zeros(3, 1, H, D), torch.zeros(3, 1, H, D_V)
        append_kv(wide[..., :D], wide[..., D:], Paged(torch.zeros(3, 3).int(), torch.zeros(3).int()), *rows)
    wide = torch.zeros(PAGES, SIZE, H, D + D_V)
    call = given(k_cache=wide[..., :D], v_cache=wide[..., D - 4 : -4])
    with pytest.raises(ValueError, match="k_cache is written to, and must not share memory with v_cache"):
        torch.compile(append_kv, backend="aot_eager", fullgraph=True)(**call)


@pytest.mark.gpu
@pytest.mark.parametrize("name", [name for name in BROKEN if "expanded" not in name])
def test_broken_numbers_stay_inside_on_a_gpu(name):
    """Nobody waits for what the device knows: rows without a place are left out, and others' are untouched."""
    changes, _ = BROKEN[name]
    layout, packed = changes["layout"], isinstance(changes["layout"], list)
    if packed:
        layout = Paged(TABLE, USED, torch.tensor(layout))
    layout = Paged(*(x.cuda() for x in layout.tensors))
    caches = [torch.zeros(PAGES, SIZE, H, d, device="cuda") for d in (D, D_V)]
    append_kv(*caches, layout, *(torch.ones(*((4,) if packed else (3, 1)), H, d, device="cuda") for d in (D, D_V)))
    for cache in caches:
        rows = cache.flatten(2).cpu()
        assert bool(((rows == 0).all(-1) | (rows == 1).all(-1)).all())
        owned = TABLE[(TABLE >= 0) & (TABLE < PAGES)].long()
        others = torch.ones(PAGES, dtype=torch.bool).index_fill(0, owned, False)
        assert not rows[others].any()


@pytest.mark.gpu
@pytest.mark.parametrize("factor", ["tensor", "number"])
def test_quantized_rows_in_a_graph(factor, captured):
    """Replayed with other rows, lengths and factors; nothing waits for the host."""
    caches, wanted = ([torch.zeros(PAGES, SIZE, H, d).to(KINDS[0]) for d in (D, D_V)] for _ in range(2))
    caches, table, used = [x.cuda() for x in caches], TABLE.cuda(), USED.cuda()
    rows, factors = [torch.ones(3, 1, H, d, device="cuda") for d in (D, D_V)], torch.ones(3, H, device="cuda")

    def step():
        append_kv(*caches, Paged(table, used), *rows, descale=Descale(k=factors if factor == "tensor" else 0.3, v=0.7))

    graph, _ = captured(step)
    new, scale = [torch.randn(3, 1, H, d) for d in (D, D_V)], torch.rand(3, H) + 0.1
    for x, y in zip((*rows, factors, used), (*new, scale, USED - 1), strict=True):
        x.copy_(y)
    for x in caches:
        codes(x).zero_()
    graph.replay()
    append_kv(*wanted, Paged(TABLE, USED - 1), *new, descale=Descale(k=scale if factor == "tensor" else 0.3, v=0.7))
    for found, right in zip(caches, wanted, strict=True):
        assert torch.equal(codes(found.cpu()), codes(right))


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary_of_float64(interleaved, torch_device):
    """To its rounding: rows, queries and angles."""
    caches = torch.zeros(2, PAGES, SIZE, H, D, dtype=torch.float64, device=torch_device)
    new, q = torch.randn(2, 1, 3, H, D, dtype=torch.float64), torch.randn(1, 3, H, D, dtype=torch.float64)
    angles = torch.randn(12, 4, dtype=torch.float64)
    layout = Paged(torch.tensor([[2, 1]], device=torch_device), torch.tensor([3], device=torch_device))
    tables = angles.cos().to(torch_device), angles.sin().to(torch_device)
    found = append_kv(
        *caches, layout, *new.to(torch_device), q=q.to(torch_device), rotary=tables, interleaved=interleaved
    )
    positions = torch.arange(3, 6)
    written = caches[0, [2, 1, 1], [3, 0, 1]].cpu()
    for x, y in ((written, new[0, 0]), (found[0].cpu(), q[0])):
        torch.testing.assert_close(x, turned_rows(y, angles, positions, interleaved), rtol=0, atol=1e-14)
