"""The kernels over 8-bit keys and values against the oracle, and wrong kernels.

Triton's interpreter converts some bytes wrongly: NaN to large numbers, and subnormals of e5m2, which are zero here; and
it carries nothing when it rounds to e4m3. Tests on a GPU have all three."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from saccade import Dense, Descale, Packed, alibi, attention, causal, relative_bias, window
from saccade.backends.device import descale as eight_bits
from saccade.backends.triton import paged_kernel, paged_tiles
from saccade.testing import Case, check, paged
from saccade.util import hardware
from tests.support import draws

E4M3, E5M2 = KINDS = torch.float8_e4m3fn, torch.float8_e5m2
CASES = {case.name: case for case in paged.named()}


def positive(*shape: int) -> Tensor:
    return torch.rand(shape) + 0.5


def rounded(x: Tensor, kind: torch.dtype) -> Tensor:
    return x.masked_fill(x.abs() < 2**-14, 0).to(kind)


def in_bytes(name: str, kind: torch.dtype, **changes: Any) -> tuple[Tensor, Tensor, Tensor, dict[str, Any]]:
    """The call of a named case with its cache in 8 bits, and its keywords."""
    given = CASES[name].replace(**changes).inputs()
    k, v = (paged.spaced(rounded(x, kind)) for x in (given.k, given.v))
    return given.q, k, v, given.keywords


@pytest.mark.sample
@pytest.mark.parametrize(("dtype", "kind"), [("bf16", E4M3), ("fp16", E5M2), ("fp32", E4M3)], ids=str)
@pytest.mark.parametrize("name", ["decode-window", "mixed", "decode-fixed", "mixed-pages"])
def test_pages(name: str, dtype: str, kind: torch.dtype):
    q, k, v, keywords = in_bytes(name, kind, dtype=dtype)
    b, h_k, keys = keywords["layout"].sequences, k.shape[2], keywords["layout"].block_table.shape[1] * k.shape[1]
    scales = Descale(k=positive(b, h_k), v=positive(h_k))
    check(q, k, v, descale=scales, backend="triton", **keywords).assert_ok()
    blocks = Descale(k=positive(b, h_k, keys), v=positive(b, h_k, keys))
    check(q, k, v, descale=blocks, backend="triton", **keywords).assert_ok()


def drawn_factor(dice: random.Random, b: int, h_k: int, n: int) -> Tensor | float | None:
    """In any form that a Descale takes, of any strides."""
    forms = {
        "none": lambda: None,
        "number": lambda: dice.choice([0.25, 1.7]),
        "()": lambda: positive(1)[0],
        "(h_k,)": lambda: positive(h_k),
        "(b, h_k)": lambda: positive(b, h_k),
        "blocks": lambda: positive(b, h_k, n),
        "turned": lambda: positive(n, h_k, b).permute(2, 1, 0),
        "expanded": lambda: positive(1, h_k, 1).expand(b, h_k, n),
    }
    return forms[dice.choice(list(forms))]()


def of_used_blocks(factor: Tensor | float | None, used: Tensor) -> Tensor | float | None:
    """Its copy with NaN for the blocks and sequences that are not in use."""
    if not isinstance(factor, Tensor) or factor.ndim < 2:
        return factor
    blocks = -(-used[:, None, None] // 128)
    unused = torch.arange(factor.shape[2]) >= blocks if factor.ndim == 3 else (blocks == 0)[..., 0]
    return factor.masked_fill(unused, torch.nan)


def decoding(dice: random.Random, seed: int) -> Case:
    """Up to 16 rows for a head of keys: what reads bytes in words."""
    rows = dice.randint(1, 16)
    group = dice.choice([n for n in range(1, rows + 1) if rows % n == 0])
    d = dice.choice([16, 32, 48, 64, 80, 96, 128, 256])
    case = draws.paged(seed, dice.choice(["bf16", "fp16", "fp32"]))
    h_k = min(case.h_k, 2)
    return case.replace(
        b=min(case.b, 2),
        h_q=group * h_k,
        h_k=h_k,
        s_q=rows // group,
        s_k=dice.choice([1, 15, 17, 63, 64, 65, 127, 128, 129, 260]),
        d=d,
        d_v=dice.choice([d, dice.choice([16, 32, 64, 96, 128, 256])]),
        page_size=dice.choice([1, 2, 7, 8, 16, 32, 48, 64, 128, 256]),
        splits=dice.choice([0, 0, 1, 2, 7]),
        cache=dice.choice(["apart", "rows", "heads", "pages"]),
    )


@pytest.mark.parametrize("first", range(12, 24, 3))
def test_drawn_decoding(first: int, request: pytest.FixtureRequest):
    """A dozen calls by default, many with `--everything`."""
    for i in range(60 if request.config.getoption("--everything") else 3):
        seed = first + i % 3 + 1000 * (i // 3)
        torch.manual_seed(seed)
        dice = random.Random(seed)
        case = decoding(dice, seed)
        given, kind = case.inputs(seed=seed), dice.choice(KINDS)
        k, v = paged.stored(case.cache, *(rounded(x, kind) for x in (given.k, given.v)))
        table, used = given.keywords["layout"].block_table, given.keywords["layout"].seqused_k
        shape = case.b, case.h_k, -(-table.shape[1] * case.page_size // 128)
        factors = [drawn_factor(dice, *shape) for _ in "kv"]
        poisoned = Descale(None, *(of_used_blocks(x, used) for x in factors))

        def call(*operands: Tensor, poisoned: Descale = poisoned, **keywords: Any) -> Any:
            return attention(*operands, **keywords | {"descale": poisoned})

        keywords = given.keywords | {"descale": Descale(None, *factors), "backend": "triton"}
        report = check(given.q, k, v, function=call, return_max_scores=True, **keywords)
        assert report.ratio <= 1, f"seed {seed}: {case.describe()}, {kind}, {factors}: {report}"


@pytest.mark.parametrize("d_v", [16, 64, 128, 256])
def test_words_of_values(d_v: int):
    """Bytes read in pairs, in fours, and one by one."""
    q, k, v, keywords = in_bytes("decode", E4M3, dtype="fp16", d=16, d_v=d_v, b=2, s_k=70)
    check(q, k, v, descale=Descale(v=3.0), backend="triton", **keywords).assert_ok()


PAIRS = [(torch.bfloat16, E4M3), (torch.float16, E5M2), (torch.float32, E4M3), (E5M2, E5M2)]
OTHERS = [(torch.bfloat16, E5M2), (torch.float16, E4M3), (torch.float32, E5M2)]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Queries of each dtype beside one kind of bytes, and beside both by `--everything`."""
    if metafunc.function is test_dense_padded_and_packed:
        pairs = PAIRS + OTHERS if metafunc.config.getoption("--everything") else PAIRS
        metafunc.parametrize(("dtype", "kind"), pairs, ids=str)


def test_dense_padded_and_packed(dtype: torch.dtype, kind: torch.dtype, monkeypatch: pytest.MonkeyPatch):
    """8-bit queries as where there are no products of bytes: the interpreter does not round probabilities."""
    monkeypatch.setattr(eight_bits, "products", lambda problem: False)
    b, h_q, h_k, s, d = 2, 4, 2, 150, 40
    q, k, v = rounded(torch.randn(b, h_q, s, d), dtype), *(rounded(torch.randn(b, h_k, s, n), kind) for n in (d, 24))
    for shape in ((h_k,), (b, h_k, 2)):
        of_q = positive(*shape) if dtype == kind else None
        keywords: dict[str, Any] = {"descale": Descale(of_q, positive(*shape), positive(*shape)), "backend": "triton"}
        check(q, k, v, mask=causal(), sink=torch.randn(h_q), **keywords).assert_ok()
        check(q, k, v, layout=Dense(seqused_k=torch.tensor([150, 20])), **keywords).assert_ok()
        flat = [x.transpose(1, 2).flatten(0, 1) for x in (q, k, v)]
        ends = torch.tensor([0, 100, 240])
        options = {"mask": window(40, 0), "score_mod": alibi(positive(h_q)), "layout": Packed(ends, ends, 150, 150)}
        check(*flat, **options, **keywords).assert_ok()


def test_beside_a_large_sink():
    """Probabilities are rounded to 8 bits, those of keys far below the sink too. That of one key is a power of two, as
    the interpreter rounds others wrongly."""
    q, k, v = (torch.randn(1, 2, n, 32).to(E4M3) for n in (20, 1, 1))
    check(q, k, v, sink=torch.tensor([14.0, 20.0]), backend="triton").assert_ok()


def test_dropout_of_a_row_with_one_large_score():
    """What is left of a row is smaller than float16 has it, which probabilities are rounded to beside 8-bit keys."""
    q, (k, v) = torch.randn(1, 2, 20, 32).bfloat16(), (rounded(torch.randn(1, 2, 20, 32), E5M2) for _ in "kv")
    check(q, k, v, scale=10.0, dropout_p=0.5, backend="triton").assert_ok()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_tiles_beyond_the_reach_of_a_table(dtype: torch.dtype):
    """Rows of bfloat16 queries have a scale each there, as those of a Descale by blocks have."""
    q, k, v = rounded(torch.randn(1, 2, 20, 16), dtype), *(rounded(torch.randn(1, 2, 300, 16), E4M3) for _ in "kv")
    blocks = Descale(k=positive(1, 2, 3), v=positive(1, 2, 3))
    for given in (None, blocks):
        keywords: dict[str, Any] = {"score_mod": relative_bias(torch.randn(2, 9)), "descale": given}
        check(q, k, v, backend="triton", **keywords).assert_ok()


def test_where_triton_has_no_e4m3(monkeypatch: pytest.MonkeyPatch):
    """Bytes become float16 by their bits, NaN too; 8-bit queries as well."""
    monkeypatch.setattr(hardware, "has_e4m3", lambda device: False)
    for name in ("decode", "mixed-fixed"):
        q, k, v, keywords = in_bytes(name, E4M3, dtype="bf16")
        found = attention(q, k, v, descale=Descale(k=0.7), backend="triton", **keywords)
        assert found.isfinite().all()
        check(q, k, v, descale=Descale(k=0.7), backend="triton", **keywords).assert_ok()
    q, k, v = (torch.randn(1, 2, 70, 64).to(E4M3) for _ in range(3))
    k[0, 1, 3, 0] = torch.nan
    out = attention(q, k, v, backend="triton")
    assert out[:, 1].isnan().all()
    assert out[:, 0].isfinite().all()
    check(q[:, :1], k[:, :1], v[:, :1], backend="triton").assert_ok()


def test_every_byte_is_converted(monkeypatch: pytest.MonkeyPatch):
    """One key for each byte, which a query picks out of all."""
    values = torch.arange(256, dtype=torch.uint8)
    for kind, native in ((E4M3, True), (E4M3, False), (E5M2, True)):
        monkeypatch.setattr(hardware, "has_e4m3", lambda device, native=native: native)
        wanted = values.view(kind).float()
        kept = wanted.isfinite() & ((wanted.abs() >= 2**-14) | torch.tensor(kind == E4M3))
        v = values.view(kind)[kept].view(1, 1, -1, 1).view(torch.uint8).expand(-1, -1, -1, 16).contiguous().view(kind)
        keys = torch.zeros(1, 1, int(kept.sum()), 16).to(kind)
        mask = window(0, 0)
        found = attention(torch.zeros(1, 1, keys.shape[2], 16), keys, v, mask=mask, backend="triton")
        assert torch.equal(found[0, 0, :, 0], wanted[kept])


def _forget(acc, descale, b, h):
    return acc


def _of_keys(acc, descale, b, h):
    return acc * eight_bits.factor_of_all(descale.k, b, h)


def _plain_queries(x, scale, descale, b, h, row):
    return eight_bits.wide_queries(x, scale)


def _of_first_block(x, b, h, row):
    return eight_bits.factor_at(x, b, h, row * 0)


def _first_slice(x):
    return tl.sum(tl.where(tl.arange(0, x.shape[2])[None, None, :] == 0, x, 0.0), 2)


def _bytes_swapped(words, number: tl.constexpr, dtype: tl.constexpr, CONVERTS: tl.constexpr):
    return eight_bits._byte_of(words, number + 1, dtype), eight_bits._byte_of(words, number, dtype)


@pytest.mark.parametrize(
    ("name", "wrong", "blocks"),
    [("_sum", _first_slice, 0), ("bytes_of", _bytes_swapped, 0),
     ("values", _forget, 0), ("values", _of_keys, 0), ("queries", _plain_queries, 0),
     ("factor_of_block", _of_first_block, 3), ("factor_at", _of_first_block, 3)],
    ids=["one slice", "bytes swapped", "no factor of v", "v by the factor of k", "no factor of k",
         "k by its first block", "v by its first block"],
)  # fmt: skip
def test_wrong_kernels_are_rejected(name: str, wrong: Any, blocks: int, monkeypatch: pytest.MonkeyPatch):
    module = paged_tiles if hasattr(paged_tiles, name) else paged_kernel
    monkeypatch.setattr(module, name, triton.jit(wrong))
    q, k, v, keywords = in_bytes("decode", E4M3, dtype="fp16", b=2, s_k=300)
    shape = (2, 2, keywords["layout"].block_table.shape[1]) if blocks else (2, 2)
    scales = Descale(k=positive(*shape), v=positive(*shape) + 1)
    assert check(q, k, v, descale=scales, backend="triton", **keywords).ratio > 1
