"""Forward and backward of the portable kernels against the oracle, wherever a GPU is missing."""

from __future__ import annotations

import pytest
import torch

from saccade import attention, bias, masks
from saccade.backends.device import masks as device_masks
from saccade.backends.device import records
from saccade.backends.device import scores as device_scores
from saccade.backends.triton import launch
from saccade.backends.triton.config import TileConfig
from saccade.call import Call
from saccade.masks import Mask
from saccade.scores import bind
from saccade.testing.accuracy import check
from saccade.testing.cases import NAMED, SMALL, Case
from tests.support import draws

# The interpreter's dot product reads bfloat16 as integers, and takes a second or two for each case.
FLOAT32 = [
    "plain", "window", "window-right-open", "prefixes", "prefix-or-window", "documents-causal", "documents-scattered",
    "documents-or-window", "union-in-window", "group3", "d1", "d111", "sink", "bshd", "everything", "ragged-sink",
    "few-queries", "few-keys-sink", "one-query", "one-key", "no-queries", "no-keys-sink", "no-batch",
    "dropout", "dropout-plain", "dropout-everything", "d512", "d320", "d64-384", "d512-192", "packed-d512",
]  # fmt: skip
FLOAT16 = ["causal", "documents-window", "softcap-sink", "d72", "ragged"]


@pytest.mark.sample
@pytest.mark.parametrize(
    "case",
    [NAMED[name].replace(dtype="fp32") for name in FLOAT32] + [NAMED[name].replace(dtype="fp16") for name in FLOAT16],
    ids=lambda case: f"{case.name}-{case.dtype}",
)
def test_named_case(case: Case) -> None:
    given = case.inputs()
    check(given.q, given.k, given.v, dout=given.dout, dlse=given.dlse, backend="triton", **given.keywords).assert_ok()


WIDE = Case("", dtype="fp32", b=1, s_q=20, s_k=40, d=8, d_v=300, mask="causal", sink=True, dropout_p=0.2, order="bshd")


@pytest.mark.parametrize("case", [WIDE, WIDE.replace(order="thd", b=2, ranges=True)], ids=["dense", "ranges"])
def test_programs_with_some_columns_of_values(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    def config(kernel: str, call: Call) -> TileConfig:
        return TileConfig(16, 16, 4, 1, columns=256 if kernel in ("forward", "dv") else 0)

    monkeypatch.setattr(launch, "_config", config)
    given = case.inputs()
    tensors, gradients = (given.q, given.k, given.v), {"dout": given.dout, "dlse": given.dlse}
    report = check(*tensors, **gradients, backend="triton", return_max_scores=True, **given.keywords)
    report.assert_ok()


@pytest.mark.parametrize(("rows", "warps"), [(16, 8), (128, 1), (32, 2)])
def test_tiles_of_any_rows_and_warps(rows: int, warps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row's shift and delta come in one load, which has them once for each thread; some rows see no key."""
    monkeypatch.setattr(launch, "_config", lambda kernel, call: TileConfig(rows, 32, warps, 1))
    given = Case("", dtype="fp32", b=1, s_q=140, s_k=70, d=16, mask="causal", sink=True).inputs()
    check(given.q, given.k, given.v, dout=given.dout, dlse=given.dlse, backend="triton", **given.keywords).assert_ok()


def test_limited_registers(monkeypatch: pytest.MonkeyPatch) -> None:
    """They come with sums of columns, in calls that were timed with both."""
    tile = TileConfig(16, 16, 4, 1, registers=128)
    monkeypatch.setattr(launch, "_config", lambda kernel, call: tile)
    q, k, v = (torch.randn(1, 1, s, 64, dtype=torch.float16) for s in (40, 50, 50))
    check(q, k, v, mask=masks.causal(), backend="triton").assert_ok()
    function = masks.mask_mod(lambda b, h, q_idx, kv_idx: (q_idx + kv_idx) % 3 > 0)
    for words, limit in (({}, 128), ({"mask": masks.causal()}, 128), ({"mask": function}, None)):
        made = launch.prepare("forward", Call(q, k, v, **words), tile)
        assert (made.registers, made.constants[-1].value) == (limit, limit is not None)


def test_negated_views() -> None:
    """Kernels read memory, where a lazily negated view has the other sign."""
    q, k, v, table = torch.randn(1, 2, 16, 16), torch.randn(1, 2, 16, 16), torch.randn(1, 2, 16, 16), torch.randn(16)
    given = [q, k, v, table]
    for i, x in enumerate(given):
        q, k, v, t = [*given[:i], torch._neg_view(-x), *given[i + 1 :]]
        plain = [y.resolve_neg() for y in (q, k, v)]
        found, right = (
            attention(*tensors, score_mod=bias(t), backend=backend)
            for tensors, backend in (((q, k, v), "triton"), (plain, "reference"))
        )
        torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("scale", [-0.5, 0.0])
def test_scales_that_are_not_positive(scale: float) -> None:
    """Of which the largest product is not the largest score. Whole tiles of keys, as others have a mask."""
    q, k, v = (10 * torch.randn(1, 1, rows, 16).half() for rows in (9, 140, 140))
    check(q, k, v, scale=scale, backend="triton", backward=False).assert_ok()


PACKED = Case("", dtype="fp32", b=3, h_q=2, h_k=1, s_q=40, s_k=40, d=16, order="thd", lengths=(40, 0, 7), tail=3)


@pytest.mark.parametrize(
    "case",
    [
        PACKED.replace(mask="window(9,0)", sink=True, used="k"),
        PACKED.replace(mask="prefixes", score="alibi", s_k=90, b=2, lengths=(20, 70)),
    ],
    ids=["used", "cross"],
)
def test_packed(case: Case) -> None:
    given = case.inputs(requires_grad=True)
    check(given.q, given.k, given.v, dout=given.dout, dlse=given.dlse, backend="triton", **given.keywords).assert_ok()


@pytest.mark.parametrize("seed", range(3))
def test_drawn_case(seed: int) -> None:
    case = draws.dense(1000 + seed, dtype="fp32").smaller(80)
    given = case.inputs()
    report = check(given.q, given.k, given.v, dout=given.dout, dlse=given.dlse, backend="triton", **given.keywords)
    assert report.ratio <= 1, f"{case.describe()}\n{report}"


def call_of(mask: Mask | None) -> Call:
    q = torch.zeros(1, 1, 8, 8)
    return Call(q, q, q, mask=mask)


def test_every_mask_and_score_has_a_device_form() -> None:
    made: list[Mask | None] = [case.inputs().keywords.get("mask") for case in SMALL if case.b]
    for mask in made:
        record = device_masks.device_args(call_of(mask))
        assert record.exact.value == (mask is None or mask.exact)
    for case in SMALL:
        score = case.inputs().keywords.get("score_mod")
        assert device_scores.unplaced(bind(score, torch.zeros(1))).identity.value == (score is None)


def test_an_unknown_mask_is_refused() -> None:
    class Other(masks.Mask):
        kind = "other"

    with pytest.raises(TypeError, match="no GPU code"):
        device_masks.device_args(call_of(Other()))


def test_wide_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Places inside one head in 64 bits, which only tensors need that do not fit here: the limit moves instead."""
    given = NAMED["causal"].replace(dtype="fp32", s_q=40, s_k=40, b=1, h_q=1, h_k=1, d=16).inputs()
    assert records.TensorArgs.of(given.q).wide is records.NARROW
    monkeypatch.setattr(records, "NARROW_LIMIT", 0)
    assert records.TensorArgs.of(given.q).wide is records.WIDE
    check(given.q, given.k, given.v, dout=given.dout, backend="triton", **given.keywords).assert_ok()
