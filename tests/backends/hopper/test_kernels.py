"""The kernels of `gluon` in the emulator: results, gradients, and what may not depend on who runs when."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from saccade import (
    Dense,
    Descale,
    LatentCache,
    Mask,
    Packed,
    Paged,
    Unsupported,
    append_kv,
    attention,
    bias,
    causal,
    documents,
    explain,
    mask_mod,
    prefix,
    relative_bias,
    selected,
    selected_blocks,
    window,
)
from saccade.backends import hopper as gluon
from saccade.backends.device import slot_lists
from saccade.backends.hopper import captured_tile
from saccade.backends.hopper.backward import plan
from saccade.backends.hopper.forward import config, work_item
from saccade.backends.hopper.latent import launch, limits
from saccade.backends.hopper.latent.launch import empty_schedule
from saccade.testing import check
from saccade.testing.cases import SMALL, Case
from tests.emulator import emulated
from tests.support.non_finite import assert_endless_sink, operands

SAMPLE = (
    "causal", "window", "documents-scattered", "group3", "d72", "d192-128", "d256", "softcap-sink", "t5-bias",
    "dropout-everything", "ragged-keys", "packed-used", "packed-alibi", "few-keys-sink",
)  # fmt: skip
LARGEST = 6_000_000
"""Scores of a problem."""
LATENT = Case("latent", b=2, h_q=64, h_k=1, s_q=1, s_k=200, d=576, d_v=512, order="paged", page_size=64, cache="latent")
GATHERED = LATENT.replace(name="latent-gathered", h_q=100, s_q=2, mask="causal", page_size=1)
PAGED = Case("paged", b=2, h_q=4, h_k=2, s_q=20, s_k=300, d=64, order="paged", page_size=32, mask="causal", sink=True)


def right(case: Case, seed: int, **more: Any) -> None:
    """Results, and gradients where there are some, are within the tolerance."""
    with emulated(seed):
        given = case.replace(dtype="bf16").inputs("cpu", seed=seed)
        check(given.q, given.k, given.v, backend="gluon", **given.keywords, **more).assert_ok()


def pytest_generate_tests(metafunc: Any) -> None:
    everything = metafunc.config.getoption("--everything")
    if "problem" in metafunc.fixturenames:
        cases = [x for x in SMALL if (x.name in SAMPLE or everything) and x.b * x.h_q * x.s_q * x.s_k <= LARGEST]
        metafunc.parametrize("problem", cases, ids=lambda x: x.name)
    if "seed" in metafunc.fixturenames:
        metafunc.parametrize("seed", range(20 if everything else 2))


@pytest.mark.sample
def test_problems(problem: Case) -> None:
    with emulated():
        given = problem.replace(dtype="bf16").inputs("cpu")
        if explain(given.q, given.k, given.v, **given.keywords).reasons.get("gluon"):
            pytest.skip("not for gluon")
    right(problem, 1)


@pytest.mark.parametrize("name", ["plain", "group3"])
def test_seeds(name: str, seed: int) -> None:
    right(next(x for x in SMALL if x.name == name).replace(d=128), seed)


@pytest.mark.parametrize("late", [0, 1, 2])
@pytest.mark.parametrize(("d", "h_q"), [(64, 3), (128, 6), (256, 3)])
def test_blocks_that_come_last(late: int, d: int, h_q: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each block is worked on once, by few programs that draw many, however many come last of all heads together."""
    monkeypatch.setattr(work_item, "L2_BYTES", 1)
    monkeypatch.setattr(work_item, "late_rows", lambda blocks, *_: min(late, blocks - 1))
    monkeypatch.setattr(plan, "late_blocks", lambda blocks, _: min(late, blocks - 1))
    with emulated(late, processors=3):
        given = Case("", b=2, h_q=h_q, h_k=3, s_q=270, s_k=300, d=d, mask="causal", dtype="bf16").inputs("cpu")
        check(given.q, given.k, given.v, backend="gluon", **given.keywords).assert_ok()


@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize(
    ("mask", "h_q", "s_q", "s_k"),
    [
        (causal(), 6, 300, 492), (causal(), 2, 330, 200), (causal(), 2, 320, 384), (window(64, 0), 4, 500, 300),
        (window(130, 3), 2, 300, 400), (window(None, 5), 2, 70, 320), (None, 4, 192, 192),
    ],
    ids=repr,
)  # fmt: skip
def test_steps_at_the_edges(mask: Any, h_q: int, s_q: int, s_k: int, d: int) -> None:
    """Rows that see none of a consumer's keys, or all of them, where others of the kv block have the mask; the last of
    keys that are no multiple of 128 belong to one consumer alone, or to both."""
    torch.manual_seed(0)
    q = torch.randn(1, h_q, s_q, d, dtype=torch.bfloat16)
    k, v = torch.randn(2, 1, 2, s_k, d, dtype=torch.bfloat16).unbind()
    with emulated(h_q, processors=1):
        check(q, k, v, mask=mask, backend="gluon").assert_ok()


@pytest.fixture
def no_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that would add dq up fails."""
    monkeypatch.setattr(plan, "postprocess_kernel", None)


@pytest.mark.parametrize(
    ("keys", "d", "d_v", "h_q"),
    [
        (77, 40, 40, 2), (64, 64, 64, 4), (1, 8, 8, 2), (128, 64, 24, 2), (65, 96, 96, 2), (77, 40, 128, 4),
        (63, 104, 64, 2), (77, 72, 88, 2), (128, 128, 128, 6),
    ],
)  # fmt: skip
def test_one_block_of_keys(keys: int, d: int, d_v: int, h_q: int, no_sums: None) -> None:
    """dq is stored, not added up."""
    right(Case("text", b=2, h_q=h_q, h_k=2, s_q=133, s_k=keys, d=d, d_v=d_v), 0)


@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize(
    "more",
    [
        {"score": "softcap(5)"}, {"score": "alibi"}, {"score": "relative_bias(8)"}, {"sink": True}, {"dropout_p": 0.3},
        {"score": "temperature", "sink": True}, {"mask": "causal"}, {"mask": "causal", "s_q": 77, "dropout_p": 0.3},
    ],
    ids=str,
)  # fmt: skip
def test_features_beside_one_block_of_keys(more: dict[str, Any], d: int, no_sums: None) -> None:
    right(Case("text", b=2, h_q=4, h_k=2, s_k=77, d=d, **{"s_q": 70, **more}), 0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("form", ["projection", "expanded", "deterministic"])
def test_forms_of_one_block_of_keys(form: str, dtype: torch.dtype, no_sums: None) -> None:
    """dq has q's memory order, and whole rows of its own."""
    torch.manual_seed(0)
    x, more = torch.randn(2, 77, 4, 3 * 72, dtype=dtype), {"deterministic": form == "deterministic"}
    q, k, v = x.split(72, -1)
    if form == "expanded":
        q = q[:1, :, :1].expand(2, 77, 4, 72)
    with emulated():
        check(q, k, v, layout=Dense("bshd"), backend="gluon", **more).assert_ok()


def test_calls_that_add_dq_up() -> None:
    """More keys than one block has, or rows that do not see all of it."""
    q, k, v = torch.randn(3, 1, 2, 129, 64, dtype=torch.bfloat16)
    few = k[:, :, :77], v[:, :, :77]
    used = Dense(seqused_k=torch.tensor([50]))
    with emulated():
        check(q, k, v, backend="gluon").assert_ok()
        for more in ({"mask": causal()}, {"layout": used}, {"mask": window(9, 9)}):
            check(q, *few, backend="gluon", **more).assert_ok()
        check(q[:, :, :70], *few, mask=causal(), layout=Dense(q_offset=-40), backend="gluon").assert_ok()


@pytest.mark.parametrize("case", [LATENT, GATHERED], ids=lambda x: x.name)
def test_latent(case: Case) -> None:
    right(case, 0)


@pytest.mark.parametrize(
    ("processors", "tiles", "wanted"),
    [
        (11, [3, 3, 3, 3, 3], [0, 2, 4, 6, 8, 10]),  # two lines each
        (8, [5, 1, 2, 4], [0, 3, 4, 5, 7]),  # one line or two, of three tiles and more
        (2, [3, 3, 2, 3], [0, 0.5, 1, 1.5, 2]),  # two in each line
        (3, [1, 9, 1, 1], [0, 0.25, 2.5, 2.75, 3]),  # as they come
    ],
    ids=str,
)
def test_lines_end_with_latent_sequences(
    processors: int, tiles: list[int], wanted: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`wanted`: the line, and the place in it, where each sequence begins."""
    made = []
    monkeypatch.setattr(launch, "empty_schedule", lambda *given: made.append(empty_schedule(*given)) or made[-1])
    q, pages = torch.randn(len(tiles), 1, 17, 576).bfloat16(), torch.randn(sum(tiles), 64, 1, 576).bfloat16()
    table = torch.full((len(tiles), max(tiles)), -1)
    table[torch.arange(max(tiles)) < torch.tensor(tiles)[:, None]] = torch.randperm(sum(tiles))
    layout = Paged(table.int(), (torch.tensor(tiles) * 64 - torch.arange(len(tiles))).int())
    with emulated(processors=processors):
        check(q, pages, pages[..., :512], backend="gluon", layout=layout).assert_ok()
    schedule = made[0]
    assert schedule.tiles.tolist() == tiles
    assert (schedule.starts / schedule.lines_first[-1]).tolist() == wanted


def test_lists_of_latent_keys() -> None:
    with emulated():
        given = LATENT.replace(s_q=2, dtype="bf16").inputs("cpu", seed=0)
        mask = selected(torch.rand(2, 1, 2, 210).argsort(-1)[..., :70] - 5)
        check(given.q, given.k, given.v, backend="gluon", mask=mask & causal(), **given.keywords).assert_ok()


@pytest.mark.parametrize("form", ["causal", "padded", "end"])
def test_lists_of_latent_rows(form: str) -> None:
    """Each row gathers the keys of its list; more rows than programs, whose parts end inside of rows."""
    torch.manual_seed(0)
    b, s_q, s_k = 2, 5, 190
    q, kv = torch.randn(b, s_q, 3, 576, dtype=torch.bfloat16), torch.randn(b, s_k, 1, 576, dtype=torch.bfloat16)
    lists = torch.rand(b if form == "padded" else 1, 1, s_q, s_k + 20).argsort(-1)[..., :150] - 10
    mask, layout = selected(lists, torch.randint(0, 151, lists.shape[:-1])), Dense("bshd")
    if form == "causal":
        mask = mask & causal()
    elif form == "padded":
        layout = Dense("bshd", torch.tensor([5, 3]), torch.tensor([190, 77]))
    else:
        mask = selected_blocks(torch.rand(1, 1, s_q, 13).argsort(-1)[..., :6], 16)
    with emulated():
        given = {"mask": mask, "layout": layout, "sink": torch.randn(3), "return_max_scores": True}
        check(q, kv, kv[..., :512], backend="gluon", backward=False, **given).assert_ok()


@pytest.mark.parametrize("form", ["slots", "causal", "batch"])
def test_shared_latent_lists(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four rows of 16 heads share a tile, the last group has fewer; of slots, NaN is in those that no row lists."""
    monkeypatch.setattr(slot_lists, "LEAST_ROWS", 1)
    monkeypatch.setattr(limits, "LEAST_LISTS", 1)
    torch.manual_seed(0)
    b, s_q, s_k = 2 if form == "batch" else 1, 7, 150
    q, kv = torch.randn(b, s_q, 16, 576, dtype=torch.bfloat16), torch.randn(b, s_k, 1, 576, dtype=torch.bfloat16)
    lists = torch.rand(b, 1, s_q, s_k + 20).argsort(-1)[..., :70] - 10
    used = torch.randint(0, 71, lists.shape[:-1])
    given = {"mask": selected(lists, used), "layout": Dense("bshd")}
    if form == "causal":
        given["mask"] = given["mask"] & causal()
    elif form == "slots":
        kv[:, :9], lists = torch.nan, torch.where(lists < 9, -1, lists)
        q, given = q[0], {"layout": Paged(slots=lists[0, 0], seqused_k=used[0, 0])}
    with emulated():
        found = check(q, kv, kv[..., :512], backend="gluon", backward=False, return_max_scores=True, **given)
        found.assert_ok()


def test_latent_lists_have_no_gradients() -> None:
    q, kv = torch.randn(1, 2, 4, 576, dtype=torch.bfloat16), torch.randn(1, 1, 9, 576, dtype=torch.bfloat16)
    mask = selected(torch.arange(8).view(1, 1, 4, 2))
    with emulated():
        assert str(explain(q, kv, kv[..., :512], mask=mask).lists).endswith("a program gathers those of a row")
        with pytest.raises(Unsupported, match="gluon: has no gradients of latent attention with head dims 576/512"):
            attention(q.requires_grad_(), kv, kv[..., :512], mask=mask).sum().backward()


def test_slots_of_latent_keys() -> None:
    """Numbers that are no slots in any place; rows that no slot names, the first one among them, are NaN."""
    torch.manual_seed(0)
    q, cache = torch.randn(2, 3, 17, 576, dtype=torch.bfloat16), torch.randn(9, 16, 1, 576, dtype=torch.bfloat16)
    slots = torch.rand(2, 3, 140).argsort(-1)[..., :90] + 4
    slots = torch.where(torch.rand(slots.shape) < 0.2, -1, slots).int()
    cache.view(-1, 576)[:4] = torch.nan
    layout = Paged(slots=slots, seqused_k=torch.tensor([[90, 0, 64], [1, 65, 33]]))
    with emulated():
        check(q, cache, cache[..., :512], layout=layout, return_max_scores=True, backend="gluon").assert_ok()


@pytest.mark.parametrize("form", ["slots", "shared", "pages"])
def test_records_of_latent_keys(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As over the rows that the bytes stand for. What is unlisted is NaN, and so are bytes between pages."""
    if form == "shared":
        monkeypatch.setattr(slot_lists, "LEAST_ROWS", 1)
        monkeypatch.setattr(limits, "LEAST_LISTS", 1)
    torch.manual_seed(0)
    step = 16 * 656 + (48 if form == "pages" else 656)
    flat = torch.full((9, step), 0xFF, dtype=torch.uint8)
    cache = LatentCache(flat.as_strided((9, 16, 656), (step, 656, 1)), "v3.2")
    rows = torch.randn(128, 1, 576) * torch.logspace(-2, 1, 128)[:, None, None]
    append_kv(cache, cache, None, rows, None, slot_mapping=torch.arange(16, 144))
    wide = cache.rows(None, torch.bfloat16).view(9, 16, 1, 576)
    heads, s_q = (9, 7) if form == "shared" else (70, 2)
    q, given = torch.randn(2, s_q, heads, 576, dtype=torch.bfloat16), {}
    if form == "pages":
        layout = Paged(torch.randint(1, 9, (2, 9)), torch.tensor([140, 33]))
        given = {"mask": causal(), "sink": torch.randn(heads)}
    else:
        slots = torch.rand(2, s_q, 128).argsort(-1)[..., :90] + 16
        slots[..., ::7] = torch.tensor([-1, 144, 1 << 30])[torch.arange(13) % 3]
        layout = Paged(slots=slots.int(), seqused_k=torch.randint(0, 91, (2, s_q)))

    def over_records(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **keywords: Any) -> Any:
        return attention(q, cache, cache, **keywords)

    with emulated():
        assert explain(q, cache, cache, layout=layout).spec.kv == "records"
        found = check(
            q, wide, wide[..., :512], layout=layout, backend="gluon", return_max_scores=True, function=over_records,
            **given,
        )  # fmt: skip
        found.assert_ok()


def test_numbers_of_records() -> None:
    """Each byte of e4m3, times factors of all sizes, in the values of a row that sees one key."""
    cache = LatentCache(torch.zeros(1, 8, 656, dtype=torch.uint8), "v3.2")
    finite = torch.tensor([x for x in range(256) if x & 0x7F != 0x7F], dtype=torch.uint8)
    cache.bytes[..., :512] = finite[torch.arange(4096) % 254].view(8, 512)
    factors = torch.tensor([2.0**-120, 1e-9, 1 / 448, 0.37, 1.0, 3.1, 777.7, 1e30])
    cache.bytes[0, :, 512:528] = factors[:, None].expand(8, 4).contiguous().view(torch.uint8)
    layout = Paged(slots=torch.arange(8).view(8, 1, 1), seqused_k=torch.ones(8, 1, dtype=torch.int32))
    with emulated():
        q = torch.zeros(8, 1, 17, 576, dtype=torch.bfloat16)
        out = attention(q, cache, cache, layout=layout, backend="gluon")
    wanted = cache.rows(None, torch.bfloat16)[:, None, None, :512].expand_as(out)
    torch.testing.assert_close(out, wanted, rtol=2**-7, atol=0)


@pytest.mark.parametrize("score", ["t5_bias", "relative_bias(128)"])
def test_tables_end_with_the_last_head(score: str) -> None:
    """Three heads in tiles of four, of which the last has no table; the emulator knows where each tensor ends."""
    case = Case("", b=1, h_q=3, h_k=1, s_q=40, s_k=40, d=128, score=score)
    for seed in range(3):
        right(case, seed)


@pytest.mark.parametrize("radius", [0, 1, 2])
@pytest.mark.parametrize(("s_q", "s_k", "heads"), [(40, 50, 1), (300, 200, 2)])
def test_short_tables(radius: int, s_q: int, s_k: int, heads: int) -> None:
    """Of one distance no tile is in reach. With a sink its gradient is not zero."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, h, s, 64, dtype=torch.bfloat16) for h, s in ((2, s_q), (1, s_k), (1, s_k)))
    table = torch.randn(heads, 2 * radius + 1, requires_grad=True)
    with emulated():
        check(q, k, v, backend="gluon", score_mod=relative_bias(table), sink=torch.randn(2)).assert_ok()


def test_captured_tensors_of_no_sequence() -> None:
    none, table = torch.zeros(1, dtype=torch.int32), torch.randn(1100, requires_grad=True)
    x = torch.randn(3, 1, 64, dtype=torch.bfloat16, requires_grad=True)
    with emulated():
        score_mod = lambda s, b, h, i, j: s + table[i]  # noqa: E731
        out = attention(x, x, x, score_mod=score_mod, layout=Packed(none, none, 0, 0), backend="gluon")
        assert all(not grad.count_nonzero() for grad in torch.autograd.grad(out.sum(), (x, table)))


@pytest.mark.parametrize("eight_bits", [False, True])
def test_empty_captured_tensors(eight_bits: bool) -> None:
    """A consumer visits a tile where no row sees anything too, and reads no tensor that has no element."""
    none, shape = torch.zeros(3, dtype=torch.int32), (2, 0, 0)
    x = torch.randn(1, 2, 64, dtype=torch.bfloat16)
    given: dict[str, Any] = {"mask": torch.zeros(shape, dtype=torch.bool), "score_mod": bias(torch.zeros(shape))}
    with emulated():
        if eight_bits:
            x = x.to(torch.float8_e5m2)
        for keywords in ({"mask": given["mask"]}, {"score_mod": given["score_mod"]}, given):
            layout = Packed(none, none, 0, 0)
            check(x, x, x, layout=layout, backend="gluon", backward=not eight_bits, **keywords).assert_ok()


@pytest.mark.parametrize("d", [64, 128])
def test_less_room_for_tiles(d: int, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The backward beside so many captured tensors that values, and long keys, have one place."""
    monkeypatch.setattr(plan, "HANDED", 3000)
    case = Case("", b=3, h_q=3, h_k=3, s_q=70, s_k=300, d=d, order="thd", score="temperature")
    right(case, seed)


def test_parts_of_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LEAST_ITEMS", "LEAST_ROWS"):
        monkeypatch.setattr(gluon, name, 1)
    monkeypatch.setattr(config, "LEAST_KEYS", 128)
    right(PAGED, 0)


@pytest.mark.parametrize("name", ["dense", "parts", "latent"])
def test_a_sink_without_end(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for limit in ("LEAST_ITEMS", "LEAST_ROWS"):
        monkeypatch.setattr(gluon, limit, 1)
    monkeypatch.setattr(config, "LEAST_KEYS", 128)
    if name == "dense":
        given = operands(torch.bfloat16, rows=40, keys=30, d=64)
        with emulated():
            assert_endless_sink(given, "gluon", mask=causal())
        return
    case = (PAGED if name == "parts" else LATENT).replace(dtype="bf16")
    given = case.inputs("cpu")
    given.keywords["sink"] = torch.tensor([torch.inf, *torch.randn(case.h_q - 1)])
    with emulated():
        found = attention(given.q, given.k, given.v, backend="gluon", return_lse=True, **given.keywords)
    right = attention(given.q, given.k, given.v, backend="reference", return_lse=True, **given.keywords)
    for x, y in zip(found, right, strict=True):
        torch.testing.assert_close(x, y, rtol=0.02, atol=0.02)
    assert not found.out.select(found.out.dim() - 2, 0).any()


@pytest.mark.parametrize("shape", [(2, 2, 90, 112), (90, 112), (1, 2, 90, 111)], ids=str)
def test_a_bias_of_every_score(shape: tuple[int, ...]) -> None:
    """Two keys at a time where rows are whole units, and one where they are not."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, h, s, 64, dtype=torch.bfloat16) for h, s in ((2, 90), (1, shape[-1]), (1, shape[-1])))
    table = torch.randn(shape).bfloat16().requires_grad_()
    with emulated():
        check(q, k, v, backend="gluon", mask=window(40, 5), score_mod=bias(table)).assert_ok()


@pytest.mark.sample
@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize(
    "name", ["plain", "group", "window", "used", "larger", "expanded", "slope", "ordered", "listed", "-inf"]
)
def test_gradients_of_a_bias(name: str, d: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stored by the main kernel, every element, but for `slope`, whose derivative is no constant."""

    def unwritten(shape: Any, **how: Any) -> Tensor:
        return torch.full(shape, torch.nan, **how)

    monkeypatch.setattr(captured_tile, "torch", SimpleNamespace(empty=unwritten, zeros=torch.zeros))
    torch.manual_seed(0)
    b, h = (2, 4) if name in ("group", "used") else (1, 2)
    shape = (b, h, 150, 280) if name == "larger" else (b, 1, 130, 264) if name == "expanded" else (b, h, 130, 264)
    q, k, v = (torch.randn(b, n, s, d, dtype=torch.bfloat16) for n, s in ((h, 130), (2, 264), (2, 264)))
    t = torch.randn(shape)
    if name == "-inf":
        t[t > 1], t[..., 70], t[:, :, 40] = -torch.inf, -torch.inf, -torch.inf
    t = t.bfloat16().expand(b, h, -1, -1).requires_grad_()
    mask = None if name in ("plain", "larger", "-inf") else window(40, 90) if name == "window" else causal()
    if name == "listed":
        mask = causal() & mask_mod(lambda b, h, q_idx, kv_idx: (q_idx ^ kv_idx) & 64 == 0)
    layout = Dense("bhsd", torch.tensor([130, 70]), torch.tensor([200, 264])) if name == "used" else Dense()

    def mod(score, b, h, q_idx, kv_idx):
        there = t[b, h, q_idx, kv_idx]
        return score + score * there if name == "slope" else score + there

    with emulated(1):
        check(
            q, k, v, backend="gluon", mask=mask, score_mod=mod, layout=layout, deterministic=name == "ordered"
        ).assert_ok()


@pytest.mark.parametrize("d", [64, 256])
@pytest.mark.parametrize("n", [50, torch.tensor([50, 0])], ids=["number", "tensor"])
def test_a_prefix_is_seen_by_rows_before_it(n: int | Tensor, d: int) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, h, s, d, dtype=torch.bfloat16) for h, s in ((2, 3), (1, 70), (1, 70)))
    layout = Dense(q_offset=torch.tensor([-5, -1]))
    with emulated():
        check(q, k, v, backend="gluon", mask=prefix(n), layout=layout).assert_ok()


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_eight_bits(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, h, s, 64).to(dtype) for h, s in ((4, 100), (2, 300), (2, 300)))
    with emulated():
        check(q, k, v, backend="gluon", backward=False, mask=causal(), descale=Descale(0.5, 2.0, 0.25)).assert_ok()


@pytest.mark.parametrize("d", [64, 128, 256])
def test_the_order_of_additions(d: int) -> None:
    """Deterministic gradients have the same bits, whoever runs when."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, h, 300, d, dtype=torch.bfloat16) for h in (2, 1, 1))

    def gradients(seed: int) -> tuple[Tensor, ...]:
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        with emulated(seed):
            out = attention(*leaves, mask=causal(), deterministic=True, backend="gluon")
            return torch.autograd.grad(out.float().square().sum(), leaves)

    first, second = gradients(1), gradients(2)
    assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))


@pytest.mark.sample
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("rows", [1, 300])
def test_sections_of_packed_heads(monkeypatch: pytest.MonkeyPatch, rows: int, deterministic: bool) -> None:
    """A section has one key head of some sequences, and two of three of others; or one of all."""
    plan = importlib.import_module("saccade.backends.hopper.backward.plan")
    monkeypatch.setattr(plan, "L2_BYTES", rows * 2 * (128 * 2 + 64 * 4))
    torch.manual_seed(0)
    q, k, v = (torch.randn(530, h, 64, dtype=torch.bfloat16) for h in (6, 3, 3))
    layout = Packed(torch.tensor([0, 290, 290, 420, 520]))
    with emulated():
        check(q, k, v, backend="gluon", mask=causal(), layout=layout, deterministic=deterministic).assert_ok()


@pytest.mark.sample
@pytest.mark.parametrize("heads", [1, 3, 4, 6, 7, 9, 11, 12, 13, 20])
@pytest.mark.parametrize("d", [64, 128])
def test_each_item_has_a_program(d: int, heads: int) -> None:
    """Whoever draws it."""
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, heads, 50, d, dtype=torch.bfloat16).unbind()
    with emulated(heads):
        for mask in (None, causal()):
            check(q, k, v, backend="gluon", mask=mask, backward=False).assert_ok()


@pytest.mark.parametrize(("d", "d_v"), [(64, 64), (128, 128), (192, 128), (256, 256)])
def test_a_program_with_many_short_items(d: int, d_v: int, seed: int) -> None:
    """One or two slots for queries, and items of one tile and of more."""
    torch.manual_seed(seed)
    q, k, v = (torch.randn(1, 3, 300, width, dtype=torch.bfloat16) for width in (d, d, d_v))
    with emulated(seed, processors=1):
        check(q, k, v, backend="gluon", mask=causal(), backward=False).assert_ok()


@pytest.mark.parametrize("more", [None, causal(), window(100, 30)], ids=["all", "causal", "window"])
@pytest.mark.parametrize("ids", [(100, 150, 100, 150), (60, 20, 300, 120)])
def test_tiles_of_documents_in_pieces(more: Mask | None, ids: tuple[int, ...]) -> None:
    """Later rows see earlier keys: the bounds of a first and a last row do not say which tiles an item has."""
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 1, 500, 64, dtype=torch.bfloat16).unbind()
    mask = documents(torch.tensor([0, 1, 0, 2]).repeat_interleave(torch.tensor(ids))[None])
    with emulated(processors=1):
        check(q, k, v, backend="gluon", mask=mask if more is None else mask & more, backward=False).assert_ok()
