"""The measuring bench, on a CPU with small cases and providers that are made to fail."""

from __future__ import annotations

import json
import math
import sys
import types
from dataclasses import replace
from fractions import Fraction

import pytest
import torch

from benchmarks.harness import cost, first_call, grids, quantizing, rows, timing
from benchmarks.harness import run as runs
from benchmarks.harness.grids import GRIDS, MODES, Cell, named
from benchmarks.harness.inputs import inputs_of
from benchmarks.harness.machine import Run
from benchmarks.harness.providers import CEILINGS, PROVIDERS, PeerInputs, Prepared, Provider, matching, prepared
from benchmarks.harness.providers.flex import predicate
from benchmarks.harness.providers.saccade import FORMS, CausalInterval, LeftPadded
from benchmarks.harness.providers.sdpa import options
from benchmarks.harness.rows import BenchRow
from benchmarks.harness.run import Bench
from benchmarks.harness.verify import BytesVerifier, Verifier, sampled
from saccade import Dense, Packed, Paged, attention, causal, quantize, window
from saccade.compat import torch_varlen
from saccade.masks import Extent, of_batch_row
from saccade.testing.cases import NAMED, SMALL, Case
from saccade.testing.sdpa import visible_mask
from saccade.testing.timing import Clock, HostStopwatch

CPU = torch.device("cpu")
QUICK = Clock(rounds=2, sample=0.0)
TINY = named(Case("", dtype="fp32", b=1, h_q=4, h_k=2, s_q=24, s_k=24, d=8, mask="causal"))
FULL = [case for case in SMALL if case.order != "thd" and min(case.b, case.h_q, case.s_q, case.s_k)]
FORWARD = Cell(TINY, "forward")
REQUIRED = [
    *("run", "date", "commit", "gpu", "torch", "triton", "provider", "mode", "dtype", "layout", "mask", "score"),
    *("b", "h_q", "h_k", "s_q", "s_k", "d", "d_v", "deterministic", "page_size", "lengths"),
    *("ms", "ms_q1", "ms_q3", "tflops", "gbps", "error_ratio", "case"),
]


def bench(*providers: Provider | str, ceilings: tuple[Provider, ...] = ()) -> Bench:
    found = [PROVIDERS[one] if isinstance(one, str) else one for one in providers]
    return Bench(Run.now(CPU, "abc"), CPU, found, QUICK, ceilings)


def measured(*providers: Provider | str, cell: Cell = FORWARD, **given) -> dict[str, BenchRow]:
    (made,) = runs.run(bench(*providers, **given), [cell])
    return {row.provider: row for row in made}


class Named(Provider):
    """The naive provider under another name."""

    def __init__(self, name: str) -> None:
        self.name = name

    def prepare(self, cell, inputs):
        return PROVIDERS["naive"].prepare(cell, inputs)


class Wrong(Named):
    """Some element of the last result is wrong."""

    def __init__(self, name: str, by: float) -> None:
        super().__init__(name)
        self.by = by

    def prepare(self, cell, inputs):
        right = super().prepare(cell, inputs)

        def call():
            *results, last = right.call()
            last = last.clone()
            last.view(-1)[-1] += self.by
            return (*results, last)

        return Prepared(call, order=right.order)


class Raising(Named):
    """Raises in its `turn`-th call; in `prepare` at turn 0."""

    def __init__(self, name: str, turn: int) -> None:
        super().__init__(name)
        self.turn = turn

    def prepare(self, cell, inputs):
        right, calls = super().prepare(cell, inputs), []

        def call():
            calls.append(None)
            if len(calls) >= self.turn:
                raise RuntimeError("launch failed\nand much more")
            return right.call()

        return Prepared(call, order=right.order) if self.turn else call()


# Who is measured


def test_a_provider_for_every_backend_and_peer():
    names = "saccade-gluon saccade-triton saccade-cpu fa3 fa4 sdpa sdpa-flash sdpa-cudnn sdpa-padded flex naive"
    assert set(names.split()) <= set(PROVIDERS)
    assert [one.name for one in matching(["saccade-cpu", "sdpa-p*"])] == ["saccade-cpu", "sdpa-padded"]
    with pytest.raises(ValueError, match="fa9"):
        matching(["fa9"])
    for grid in GRIDS.values():
        assert matching(grid.providers)


def test_what_a_cpu_has_not_is_said_in_one_line():
    for name in ("fa3", "fa4", "torch-varlen", "sdpa-cudnn", "saccade-triton", "saccade-gluon"):
        assert "\n" not in (PROVIDERS[name].available(CPU) or "\n")


@pytest.mark.parametrize(
    "name", ["saccade-cpu", "flash-attn-face", "transformers", "sdpa", "sdpa-flash", "sdpa-padded", "naive"]
)
@pytest.mark.parametrize("mode", MODES)
def test_providers_are_right(name: str, mode: str):
    row = measured(name, cell=Cell(TINY, mode))[name]
    assert row.reason is None
    assert row.error_ratio <= 1
    assert row.ms > 0
    assert row.tflops > 0
    assert row.gbps > 0


@pytest.mark.parametrize("mode", ["forward+host", "backward+host"])
def test_calls_of_models_with_the_host(mode: str):
    """Through autograd, with views of one projection."""
    names = "saccade-cpu", "flash-attn-face", "sdpa", "naive"
    found = measured(*names, cell=Cell(named(TINY.replace(order="bshd")), mode))
    for name in names:
        assert found[name].reason is None
        assert found[name].error_ratio <= 1
        assert found[name].tflops > 0


@pytest.mark.parametrize("s_k", [5, 3])
def test_operands_of_models_are_views_of_a_projection(s_k: int):
    case = named(Case("", dtype="fp32", b=2, h_q=4, h_k=2, s_q=5, s_k=s_k, d=8, d_v=16, order="bshd"))
    drawn, made = case.inputs(), inputs_of(case, CPU)
    call = PeerInputs.of(made, "bhsd")
    for name in ("q", "k", "v", "dout"):
        x = getattr(made, name)
        assert x.shape == getattr(drawn, name).shape
        assert abs(x.std() - 1) < 0.3
        assert torch.equal(x, getattr(inputs_of(case, CPU), name))
        assert getattr(call, name).data_ptr() == x.data_ptr()
    assert made.k.untyped_storage().data_ptr() == made.v.untyped_storage().data_ptr()
    assert (made.q.untyped_storage().data_ptr() == made.k.untyped_storage().data_ptr()) == (s_k == 5)


@pytest.mark.parametrize("case", ["ragged", "bshd", "documents-scattered", "prefix-or-window"])
def test_a_mask_tensor_is_every_mask(case: str):
    assert measured("sdpa-padded", cell=Cell(NAMED[case], "backward"))["sdpa-padded"].error_ratio <= 1


@pytest.mark.parametrize("case", [case for case in FULL if case.mask != "none" and case.used == "all"], ids=str)
def test_flex_predicates_are_the_masks(case: Case):
    inputs = case.inputs()
    call = PeerInputs.of(inputs, "bhsd")
    seen = predicate(call.mask, case.s_k - case.s_q)
    rows_, keys = torch.arange(case.s_q)[:, None], torch.arange(case.s_k)
    for b in range(case.b):
        expected = visible_mask(inputs, case.b)[:, 0].expand(case.b, -1, -1)[b]
        assert torch.equal(seen(torch.tensor(b), torch.tensor(0), rows_, keys), expected)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("form", FORMS)
def test_causal_masks_are_intervals(form: str, mode: str):
    cell = Cell(TINY, mode)
    given = CausalInterval(form, "cpu")
    drawn = given.mask(cell, CPU).draw(TINY.s_q, TINY.s_k).splitlines()[1:]
    assert drawn == causal().draw(TINY.s_q, TINY.s_k).splitlines()[1:]
    assert measured(given, cell=cell)[given.name].error_ratio <= 1
    assert measured(given, cell=Cell(TINY.replace(mask="none"), mode))[given.name].ms is None


PACKED = named(TINY.replace(b=3, h_k=4, s_q=9, s_k=9, order="thd", lengths=(4, 9, 1)))


@pytest.mark.parametrize("mode", MODES)
def test_packed_sequences_padded_at_the_left(mode: str):
    found = measured("saccade-cpu", LeftPadded("cpu", "left-padded"), cell=Cell(PACKED, mode))
    assert found["left-padded"].error_ratio <= 1
    assert found["left-padded"].ms > 0
    assert measured(LeftPadded("cpu", "left-padded"), cell=Cell(TINY, mode))["left-padded"].ms is None


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", [PACKED, named(NAMED["packed-cross"].replace(dtype="fp32", d=8, d_v=8))], ids=str)
def test_packed_sequences(case: Case, mode: str):
    """Those that know them, and SDPA on the padded batch."""
    faces = "auto", "flash-attn-face", "transformers"
    found = measured(*faces, "sdpa-padded", "sdpa", "flex", "naive", cell=Cell(case, mode))
    for name in (*faces, "sdpa-padded", "naive"):
        assert found[name].reason is None
        assert found[name].error_ratio <= 1
        assert found[name].ms > 0
    assert found["sdpa"].ms is found["flex"].ms is None
    assert found["naive"].layout == "packed"


def test_the_yardstick_of_packed_sequences_looks_at_the_longest():
    cell, inputs = Cell(PACKED, "backward"), PACKED.inputs()
    results = PROVIDERS["naive"].prepare(cell, inputs).call()
    yardstick = Verifier(cell, inputs)
    assert yardstick.error_ratio(results, "thd") <= 1
    for place in (12, 13):  # the longest sequence's last row, and the shortest
        broken = [x.clone() for x in results]
        broken[1][place] += 1
        assert yardstick.error_ratio(broken, "thd") > 1


@pytest.mark.parametrize("mask", ["none", "causal"])
def test_the_oracle_takes_some_rows_of_a_long_sequence_at_a_time(mask: str, monkeypatch):
    cell = Cell(PACKED.replace(mask=mask), "backward")
    inputs = cell.case.inputs()
    whole = Verifier(cell, inputs)
    monkeypatch.setattr("benchmarks.harness.verify._PAIRS", 30)
    sliced = Verifier(cell, inputs)
    exact = {(answer.name, str(answer.at)): answer.ways[0] for answer in whole.answers}
    for answer in sliced.answers:
        if answer.name != "dq":
            torch.testing.assert_close(answer.ways[0], exact[answer.name, str(answer.at)])
    results = PROVIDERS["naive"].prepare(cell, inputs).call()
    assert sliced.error_ratio(results, "thd") <= 1
    results[1][4, 0, 0] += results[1].abs().max()  # a key that rows of every slice see
    assert sliced.error_ratio(results, "thd") > 1


def flash_functions(q, k, v, **given):
    """out and lse as FlashAttention's varlen functions give them."""
    offsets = [given[name] for name in ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")]
    layout = Packed(*offsets)
    return tuple(attention(q, k, v, mask=causal() if given["causal"] else None, layout=layout, return_lse=True))


@pytest.mark.parametrize("mode", MODES)
def test_the_calls_of_other_varlen_functions(mode: str, monkeypatch):
    """Their names and forms, filled in by saccade, as no such GPU is here."""
    cell = Cell(PACKED.replace(dtype="fp16"), mode)
    schema = (
        "(Tensor q, Tensor k, Tensor v, *, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, int? max_seqlen_q, "
        "int? max_seqlen_k, float? softmax_scale, bool is_causal, int num_splits) -> (Tensor, Tensor, Tensor, Tensor)"
    )
    back = schema.replace("(Tensor q", "(Tensor dout, Tensor q").replace("Tensor v,", "Tensor v, Tensor out, Tensor l,")
    operators = torch.library.Library("flash_attn_3", "DEF")
    operators.define(f"fwd{schema}")
    operators.define(f"bwd{back.replace('num_splits', 'deterministic')}".replace("int deter", "bool deter"))

    def fwd(q, k, v, is_causal, num_splits, softmax_scale, **given):
        out, lse = flash_functions(q, k, v, causal=is_causal, **given)
        return out, lse, q.new_empty(0), q.new_empty(0)

    def bwd(dout, q, k, v, out, lse, is_causal, deterministic, softmax_scale, **given):
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        with torch.enable_grad():
            again = flash_functions(*leaves, causal=is_causal, **given)[0]
        return *torch.autograd.grad(again, leaves, dout), lse

    operators.impl("fwd", fwd, "CPU")
    operators.impl("bwd", bwd, "CPU")
    module = types.SimpleNamespace(
        flash_attn_varlen_func=lambda q, k, v, deterministic, **given: flash_functions(q, k, v, **given)
    )
    monkeypatch.setitem(sys.modules, "flash_attn.cute", module)
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", torch_varlen.varlen_attn)
    try:
        found = measured("fa3", "fa4", "torch-varlen", cell=cell)
    finally:
        operators._destroy()
    for row in found.values():
        assert row.reason is None
        assert row.error_ratio <= 1


def test_causal_is_spelled_as_this_version_of_varlen_attn_has_it():
    def first(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, is_causal=False, return_aux=None): ...

    def newest(query, key, value, *lengths, window_size=(-1, -1), enable_gqa=False): ...

    call = PeerInputs.of(PACKED.inputs(), "bshd")
    assert options(first, call) == {"is_causal": True}
    assert options(newest, replace(call, group=4)) == {"window_size": (-1, 0), "enable_gqa": True}
    with pytest.raises(NotImplementedError, match="window"):
        options(first, replace(call, mask=window(3, 0)))


def test_refusals_are_rows_without_a_time():
    found = measured("sdpa", "sdpa-padded", cell=Cell(named(TINY.replace(mask="window(3,0)")), "forward"))
    assert found["sdpa"].ms is None
    assert "sdpa-padded" in found["sdpa"].reason
    assert found["sdpa-padded"].ms


def test_a_graph_that_cannot_be_kept_is_made_anew_outside_of_the_clock():
    inputs, count = TINY.inputs(), []

    def function(q, k, v):
        count.append(None)
        return q * 2 + k.repeat_interleave(2, 1) + v.repeat_interleave(2, 1)

    call = PeerInputs.of(inputs, "bhsd")
    one = prepared(function, Cell(TINY, "backward"), call, retains=False)
    HostStopwatch().sample(one, 3, 0.0)
    assert len(count) == 3
    kept = prepared(function, Cell(TINY, "backward"), call)
    count.clear()
    HostStopwatch().sample(kept, 3, 0.0)
    assert not count


# Checking and timing


@pytest.mark.parametrize("turn", [0, 1, 2, 3, 5])
def test_a_provider_that_raises_has_a_reason_and_no_time(turn: int):
    found = measured("naive", Raising("broken", turn), Named("other"))
    assert found["broken"].ms is None
    assert found["broken"].tflops is None
    assert found["broken"].ratio is None
    assert found["broken"].reason == "RuntimeError: launch failed"
    assert found["naive"].ms
    assert found["other"].ms


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("by", [1.0, math.nan, math.inf])
def test_a_wrong_result_has_an_error_and_no_time(mode: str, by: float):
    found = measured("naive", Wrong("wrong", by), cell=Cell(TINY, mode))
    assert found["wrong"].ms is None
    assert not found["wrong"].error_ratio <= 1
    assert "of the tolerance" in found["wrong"].reason
    json.loads(found["wrong"].json(), parse_constant=pytest.fail)
    assert found["naive"].ms


def test_without_an_oracle_nothing_is_timed(monkeypatch):
    def no_memory(*_):
        raise MemoryError("too large")

    monkeypatch.setattr(runs, "Verifier", no_memory)
    row = measured("naive")["naive"]
    assert row.ms is None
    assert "too large" in row.reason


def test_the_yardstick_looks_at_first_and_last_heads_and_at_all_that_is_not_finite():
    case = named(TINY.replace(b=3, h_q=10, h_k=5, dtype="fp32"))
    cell, inputs = Cell(case, "forward"), case.inputs()
    places = list(sampled(cell, "cpu"))
    assert places[0] == (2, 4)
    assert places[-1] == (0, 0)
    assert len(set(places)) == len(places) < case.b * case.h_k
    yardstick = Verifier(cell, inputs)
    (out,) = PROVIDERS["naive"].prepare(cell, inputs).call()
    assert yardstick.error_ratio((out,), "bhsd") <= 1
    assert yardstick.error_ratio((torch.zeros_like(out),), "bhsd") > 1
    hidden = next((b, h) for b in range(3) for h in range(10) if (b, h // 2) not in places)
    out[hidden][3, 3] = math.nan
    assert yardstick.error_ratio((out,), "bhsd") == math.inf
    with pytest.raises(ValueError, match="shape"):
        yardstick.error_ratio((out[:, :, :5],), "bhsd")


def test_without_inputs_the_run_goes_on(monkeypatch):
    def no_memory(*_):
        raise MemoryError("too large")

    monkeypatch.setattr(runs, "inputs_of", no_memory)
    first, second = runs.run(bench("naive"), [FORWARD, Cell(TINY, "backward")])
    assert "too large" in first[0].reason
    assert second[0].mode == "backward"


def test_a_lost_device_leaves_the_rows_of_its_cell(monkeypatch):
    def lost(*_):
        raise runs.DeviceLost("illegal memory access")

    monkeypatch.setattr(runs, "measure", lost)
    with pytest.raises(runs.DeviceLost) as found:
        list(runs.run(bench("naive"), [Cell(TINY, "forward")]))
    assert [row.provider for row in found.value.rows] == ["naive"]


def test_ceilings_are_timed_beside_the_rest():
    found = measured("naive", ceilings=CEILINGS)
    assert found["matmul"].tflops
    assert found["copy"].gbps
    assert found["copy"].tflops is None
    assert found["matmul"].ratio is None
    assert found["naive"].ratio is None
    assert found["naive"].of_matmul == pytest.approx(found["naive"].tflops / found["matmul"].tflops)
    assert found["naive"].of_copy == pytest.approx(found["naive"].gbps / found["copy"].gbps)


def test_host_time(monkeypatch):
    monkeypatch.setattr(timing, "HOST_CALLS", 3)
    found = measured("saccade-cpu", "sdpa", Wrong("wrong", 1.0), cell=FORWARD.on_host(), ceilings=CEILINGS)
    assert found["saccade-cpu"].mode == "host"
    assert found["saccade-cpu"].ms
    assert found["saccade-cpu"].tflops is None
    assert found["saccade-cpu"].ratio_to == "sdpa"
    assert found["wrong"].ms is None
    assert "matmul" not in found


@pytest.mark.rare
def test_first_call_runs_in_a_process_of_its_own():
    found = measured("saccade-cpu", "naive", "sdpa-padded", cell=Cell(TINY, "backward").first())
    assert found["saccade-cpu"].mode == "first backward"
    assert found["saccade-cpu"].ms
    assert found["saccade-cpu"].ratio_to in ("naive", "sdpa-padded")
    assert found["saccade-cpu"].tflops is None
    assert found["sdpa-padded"].ms or found["sdpa-padded"].reason


def test_first_call_says_why_a_child_failed(monkeypatch):
    monkeypatch.setattr(first_call, "SECONDS", 1e-3)
    row = measured("saccade-cpu", cell=FORWARD.first())["saccade-cpu"]
    assert row.ms is None
    assert "TimeoutExpired" in row.reason


def paged(**changes) -> Case:
    case = Case("", dtype="fp32", b=3, h_q=8, h_k=2, s_q=1, s_k=40, d=16, order="paged", page_size=16)
    return named(case.replace(**changes))


@pytest.mark.parametrize(
    "cell",
    [
        Cell(paged(), "decode"),
        Cell(paged(used="k", page_size=1, s_k=120, score="alibi"), "decode"),
        Cell(paged(s_q=7, s_k=90, used="k", mask="causal"), "forward"),
        Cell(paged(h_k=1, d=24, d_v=16, cache="latent"), "decode"),
    ],
    ids=str,
)
def test_paged_caches(cell: Cell):
    found = measured("auto", "saccade-cpu", "sdpa", "flex", cell=cell, ceilings=CEILINGS)
    for name in ("auto", "saccade-cpu"):
        assert found[name].error_ratio <= 1
        assert found[name].gbps > 0
        assert found[name].of_copy > 0
    assert found["sdpa"].ms is found["flex"].ms is None
    assert (found["auto"].layout, found["auto"].page_size) == ("paged", cell.case.page_size)


def test_shared_prefixes():
    found = measured("auto", "shared-prefix", cell=Cell(paged(used="shared32", s_k=43), "decode"))
    assert found["auto"].error_ratio <= 1
    assert found["shared-prefix"].error_ratio <= 1
    found = measured("auto", "shared-prefix", cell=Cell(paged(), "decode"))
    assert found["shared-prefix"].reason == "the sequences share no pages"


def test_a_wrong_result_over_pages_is_found():
    cell = Cell(paged(s_k=33, used="k"), "decode")
    inputs = runs.inputs_of(cell.case, CPU)
    verifier = Verifier(cell, inputs)
    (out,) = PROVIDERS["saccade-cpu"].prepare(cell, inputs).call()
    assert verifier.error_ratio((out,), "paged") <= 1
    assert verifier.error_ratio((out.flip(0),), "paged") > 1


@pytest.mark.parametrize(
    "case", [paged(s_q=3, mask="causal"), paged(s_q=2, h_k=1, d=24, d_v=16, cache="latent")], ids=str
)
def test_paged_operands_of_flash_attention(case: Case, monkeypatch):
    cell = Cell(case.replace(dtype="bf16"), "forward")

    def fwd(q, k, v, seqused_k, page_table, num_splits, softmax_scale, is_causal, q_v=None):
        mask = causal() if is_causal else None
        if q_v is not None:
            q, k = torch.cat([q_v, q], dim=-1), torch.cat([v, k], dim=-1)
        return attention(q, k, v, mask=mask, layout=Paged(page_table, seqused_k), scale=softmax_scale, return_lse=True)

    monkeypatch.setattr(torch.ops, "flash_attn_3", types.SimpleNamespace(fwd=fwd))
    found = measured("fa3", cell=cell)["fa3"]
    assert found.reason is None
    assert found.error_ratio <= 1


def test_bytes_and_pairs_of_a_cache_are_of_the_keys_in_use():
    case = paged(s_q=3, s_k=100, used="k", mask="causal")
    inputs = runs.inputs_of(case, CPU)
    keys = inputs.keywords["layout"].seqused_k
    assert cost.visible_pairs(case, inputs) == 3 * int(keys.sum()) - 3 * case.b
    rows_ = 2 * 3 * 3 * 8 * 16  # q and out
    assert cost.Cost.of(case, inputs, "forward").bytes == 4 * (rows_ + int(keys.sum()) * 2 * 2 * 16)
    case = case.replace(cache="latent")  # values are keys
    assert cost.Cost.of(case, runs.inputs_of(case, CPU), "forward").bytes == 4 * (rows_ + int(keys.sum()) * 2 * 16)


def test_block_masks():
    cell = Cell(named(Case("", b=1, h_q=1, h_k=1, s_q=300, s_k=300, d=8, mask="documents&causal")), "block mask")
    found = measured("block-mask", "flex-block-mask", "auto", "sdpa", cell=cell, ceilings=CEILINGS)
    assert found["block-mask"].ratio_to == "flex-block-mask"
    assert found["block-mask"].ms
    assert found["block-mask"].gbps is found["block-mask"].error_ratio is None
    assert found["auto"].ms is found["sdpa"].ms is None
    assert "matmul" not in found


SHARED = named(Case("", dtype="fp32", b=2, h_q=4, h_k=2, s_q=150, s_k=140, d=16))


@pytest.mark.parametrize("words", ["tensor", "head rotate", "block smooth", "block smooth rotate keys"])
def test_bytes_of_quantize(words):
    found = measured("quantize", "copy-of-bytes", "auto", cell=Cell(SHARED, f"quantize {words}"), ceilings=CEILINGS)
    assert found["quantize"].error_ratio <= 1
    assert found["quantize"].gbps == pytest.approx(found["copy-of-bytes"].gbps * found["quantize"].ratio)
    assert found["copy-of-bytes"].error_ratio is found["auto"].ms is None


@pytest.mark.parametrize("wrong", ["q", "k", "v", "shift", "factor"])
def test_wrong_bytes_are_seen(wrong):
    mode, inputs = "quantize block smooth rotate", SHARED.inputs()
    made = quantize(inputs.q, inputs.k, inputs.v, **quantizing.options(mode))
    verifier = BytesVerifier(mode, inputs)
    assert verifier.error_ratio(made) <= 1
    if wrong == "factor":
        made.descale.k[-1, -1, -1] *= 1 + 2.0**-12
    elif wrong == "shift":
        made.shift[-1, -1, -1] += 2.0**-10
    else:
        getattr(made, wrong).view(torch.uint8)[-1, -1, -1, -1] ^= 2
    assert not verifier.error_ratio(made) <= 1


def test_what_quantize_must_move():
    inputs = SHARED.inputs()
    numbers = [x.numel() for x in (inputs.q, inputs.k, inputs.v)]
    assert quantizing.cost(inputs, "quantize block").bytes == 5 * sum(numbers)
    assert quantizing.cost(inputs, "quantize head smooth").bytes == 9 * sum(numbers) + 4 * numbers[1]
    with pytest.raises(ValueError, match="quantize row"):
        quantizing.options("quantize row")


# How much work


@pytest.mark.parametrize("case", FULL, ids=str)
def test_visible_pairs_are_counted_exactly(case: Case, monkeypatch):
    monkeypatch.setattr(cost, "_AT_ONCE", 1000)
    inputs = case.inputs()
    layout, mask = inputs.keywords["layout"], inputs.keywords.get("mask")
    count = 0
    for b in range(case.b):
        s_q = case.s_q if layout.seqused_q is None else int(layout.seqused_q[b])
        s_k = case.s_k if layout.seqused_k is None else int(layout.seqused_k[b])
        if mask is None:
            count += s_q * s_k
        else:
            extent = Extent.of(s_q, s_k, None, None, CPU)
            at = torch.tensor(b)[None, None], torch.zeros(1, 1).long(), torch.arange(s_q)[:, None], torch.arange(s_k)
            count += int(mask.sees(extent, *at).expand(s_q, s_k).sum())
    if case.mask == "causal" and case.s_q == case.s_k and case.used == "all":
        count -= case.b * case.s_q / 2  # published figures leave half of the diagonal out
    assert cost.visible_pairs(case, inputs) == count


@pytest.mark.parametrize("name", ["packed", "packed-cross", "packed-used", "packed-prefixes", "packed-union"])
def test_pairs_of_packed_sequences_are_those_of_each(name: str):
    case = NAMED[name]
    inputs = case.inputs()
    layout, mask = inputs.keywords["layout"], inputs.keywords.get("mask")
    count = Fraction(0)
    for b in range(layout.sequences):
        s_q, s_k = (int(x[b + 1] - x[b]) for x in (layout.cu_seqlens_q, layout.cu_seqlens_k))
        used = (None if x is None else x[b : b + 1] for x in (layout.seqused_q, layout.seqused_k))
        keywords = {"mask": None if mask is None else of_batch_row(mask, b), "layout": Dense("bhsd", *used)}
        one = case.replace(b=1, s_q=s_q, s_k=s_k, order="bhsd")
        count += cost.visible_pairs(one, replace(inputs, keywords=keywords))
    assert cost.visible_pairs(case, inputs) == count


def test_flops_and_bytes():
    case = named(Case("", dtype="bf16", b=2, h_q=4, h_k=2, s_q=8, s_k=16, d=32, d_v=64))
    inputs = case.inputs()
    assert cost.Cost.of(case, inputs, "forward").flops == 4 * 2 * 4 * 8 * 16 * (32 + 64) / 2
    assert cost.Cost.of(case, inputs, "backward").flops == 2.5 * cost.Cost.of(case, inputs, "forward").flops
    q, k, v, out, lse = 2 * 2 * 4 * 8 * 32, 2 * 2 * 2 * 16 * 32, 2 * 2 * 2 * 16 * 64, 2 * 2 * 4 * 8 * 64, 4 * 2 * 4 * 8
    assert cost.Cost.of(case, inputs, "forward").bytes == q + k + v + out
    assert cost.Cost.of(case, inputs, "backward").bytes == 2 * (q + k + v + out) + lse
    llama = Case("", b=1, h_q=16, h_k=16, s_q=8192, s_k=8192, d=128, mask="causal")
    assert 2 * llama.h_q * 256 * llama.s_q**2 / 2 == 4 * 16 * 8192**2 * 128 / 2


def test_grids():
    tokens = [cell.case for cell in GRIDS["h200"].cells]
    assert len(tokens) == 60
    assert all(case.b * case.s_q == 16384 and case.h_q * case.d == 2048 and case.dtype == "bf16" for case in tokens)
    halves = {*GRIDS["grid-forward"].cells, *GRIDS["grid-backward"].cells}
    assert halves == set(GRIDS["h200"].cells)
    assert len(GRIDS["flex-bar"].cells) == 16
    assert set(GRIDS["flex-bar"].cells) <= halves
    for grid in GRIDS.values():
        assert len({str(cell) for cell in grid.cells}) == len(grid.cells)
        for cell in grid.cells:
            assert cell.call in (*MODES, "block mask", "quantize")
            assert cell.case.name.endswith(named(cell.case).name)
    assert len(list(grids.cells(["flex-bar", "grid-forward"]))) == 16 + 30 - 8
    with pytest.raises(ValueError, match="grid-fwd"):
        list(grids.cells(["grid-fwd"]))


def test_rows_have_what_readers_rely_on(tmp_path):
    row = measured("saccade-cpu")["saccade-cpu"]
    found = json.loads(row.json())
    assert set(REQUIRED) <= set(found)
    assert found["commit"] == "abc"
    assert found["case"] == TINY.name
    assert found["mask"] == "causal"
    assert "\n" not in row.json()
    path = tmp_path / "gpu" / "a.jsonl"
    rows.append(path, [row])
    rows.append(path, [replace(row, provider="other")])
    assert [one.provider for one in rows.read(tmp_path)] == ["saccade-cpu", "other"]
    assert json.loads(rows.read(path)[0].json()) == found


# The command


@pytest.fixture
def command(monkeypatch):
    typer = pytest.importorskip("typer", reason="the extra [cli]")
    from typer.testing import CliRunner

    from benchmarks.harness.cli import bench as command

    monkeypatch.setitem(
        GRIDS, "tiny", grids.BenchGrid((Cell(TINY, "forward"), Cell(TINY, "backward")), ("naive",), "two")
    )
    app = typer.Typer()
    app.command()(command)
    return lambda *words: CliRunner().invoke(app, ["--device", "cpu", *words], env={"COLUMNS": "200"})


def test_the_command_writes_prints_and_compares(command, tmp_path):
    out = tmp_path / "results"
    found = command(
        "--cases", "tiny", "--providers", "saccade-cpu,naive,fa3", "--rounds", "2", "--json", "--out", str(out)
    )
    assert found.exit_code == 0, found.output
    assert "fa3" in found.stderr
    assert "runs on sm90" in found.stderr
    (file,) = (out / "cpu").iterdir()
    assert file.name.endswith(".jsonl")
    assert "-tiny-" in file.name
    lines = found.stdout.splitlines()
    assert lines == file.read_text().splitlines()
    assert len(lines) == 8
    again = command("--against", str(file), "--compare", str(file))
    assert again.exit_code == 0, again.output
    assert "geometric means:" in again.stdout
    assert "1.000" in again.stdout
    assert "| naive |" in again.stdout


def test_the_command_stops_in_time_and_says_what_is_left(command):
    found = command("--cases", "tiny", "--minutes", "0")
    assert found.exit_code == 0
    assert "no time left for 2 cells" in found.stderr


def test_the_command_knows_its_names(command):
    listed = command("--list")
    assert listed.exit_code == 0
    assert all(name in listed.stdout for name in GRIDS)
    unknown = {"--cases": "nothing", "--providers": "nobody", "--match": "nothing", "--against": "nofile.jsonl"}
    for words in [*unknown.items(), ("--match", "(")]:
        assert command(*words).exit_code == 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="where it runs, it is timed")
def test_providers_that_cannot_run_are_told(command):
    found = command("--device", "cpu", "--cases", "mla", "--providers", "saccade-gluon")
    assert found.exit_code == 2
    assert "saccade-gluon" in found.output
