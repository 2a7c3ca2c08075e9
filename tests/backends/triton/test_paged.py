"""The kernels over pages against the oracle, with as many parts of the keys as the tables have room for."""

from __future__ import annotations

import pytest
import torch

from saccade import Paged, attention, causal, explain, interval, mask_mod
from saccade.backends.device import merge_kernel
from saccade.backends.triton import paged as launches
from saccade.ops import dispatch
from saccade.testing import paged
from saccade.testing.accuracy import check

CASES = {case.name: case for case in paged.named()}
LATENT = [name for name in CASES if name.startswith("latent")]


@pytest.mark.sample
@pytest.mark.parametrize(
    "name", ["decode-alibi", "mixed", "mixed-fixed", "gpt-oss", "one-head-alibi", "mixed-pages", "no-keys", *LATENT]
)
def test_named_case(name):
    given = CASES[name].replace(dtype="fp16").inputs()
    check(given.q, given.k, given.v, backend="triton", **given.keywords).assert_ok()


@pytest.mark.parametrize("lengths", [(), (1, 2, 1)], ids=["batch", "end-to-end"])
def test_short_sequences_have_fewer_parts(lengths, monkeypatch):
    """As many parts as there is room for; rows and heads fill no tile, and pages are larger than one."""
    monkeypatch.setattr(launches, "LEAST_TILES", 1)
    monkeypatch.setattr(launches, "multiprocessors", lambda device: 7)
    case = CASES["decode-window"].replace(dtype="fp32", b=3, h_q=3, h_k=1, s_k=150, d=16, d_v=8, lengths=lengths)
    given = case.inputs(seed=2)
    check(given.q, given.k, given.v, backend="triton", **given.keywords).assert_ok()


@pytest.mark.parametrize("name", ["drafts", "mixed-union", "decode-alibi"])
def test_many_rows_are_merged_together(name, monkeypatch):
    """Rows that fill no program's last turn; the largest scores, and rows after the last sequence."""
    monkeypatch.setattr(merge_kernel, "MANY_ROWS", 1)
    given = CASES[name].replace(dtype="fp16", h_q=6, sink=True).inputs(seed=3)
    check(given.q, given.k, given.v, backend="triton", return_max_scores=True, **given.keywords).assert_ok()


def test_a_wrong_merge_is_rejected(monkeypatch):
    """Of rows that are merged together, all but the last ones."""
    monkeypatch.setattr(merge_kernel, "MANY_ROWS", 1)
    make = launches.merge_launch
    given = CASES["drafts"].replace(dtype="fp16").inputs()
    for less in (0, 1):

        def short(*given, less=less):
            launch = make(*given)
            launch.grid = (launch.grid[0] - less, 1, 1)
            return launch

        monkeypatch.setattr(launches, "merge_launch", short)
        dispatch._plans.clear()
        out = torch.full_like(given.q, torch.nan)
        attention(given.q, given.k, given.v, backend="triton", out=out, **given.keywords)
        assert bool(out.isnan().any()) == bool(less)


def test_a_predicate_for_several_queries():
    given = CASES["drafts-predicate"].replace(dtype="fp16", b=2, s_q=3, s_k=60).inputs()
    check(given.q, given.k, given.v, backend="triton", **given.keywords).assert_ok()


@pytest.mark.parametrize("n", [3, 20])
def test_a_tree_is_asked_for_behind_the_context_alone(n, monkeypatch):
    """Tiles of the context are inside of the mask's core, and those behind it are not."""
    monkeypatch.setattr(launches, "multiprocessors", lambda device: 1)
    context, table = 300, torch.randperm(24, dtype=torch.int32).view(1, 24)
    k, v = torch.randn(2, 24, 16, 1, 16).half()
    q, drafted = torch.randn(1, n, 2, 16).half(), torch.rand(n, n).tril() + torch.eye(n) > 0.4
    layout = Paged(table, torch.tensor([context + n]))

    def sees(b, h, q_idx, kv_idx):
        return drafted[(q_idx - context).clamp(0, n - 1), (kv_idx - context).clamp(0, n - 1)]

    tree = causal() & (interval(None, context) | mask_mod(sees))
    check(q, k, v, layout=layout, mask=tree, backend="triton").assert_ok()
    plain = attention(q, k, v, layout=layout, mask=causal(), backend="triton")
    assert not torch.equal(attention(q, k, v, layout=layout, mask=tree, backend="triton")[:, 1:], plain[:, 1:])


def test_the_longest_sequence_starts_first(monkeypatch):
    """Every sequence has its place in the order, those of equal length too."""
    monkeypatch.setattr(launches, "LONG", 1)
    monkeypatch.setattr(launches, "multiprocessors", lambda device: 1)
    lengths = torch.tensor([3, 200, 0, 128, 200, 64, 128])
    q, cache = torch.randn(7, 1, 2, 16), torch.randn(12, 64, 1, 16)
    layout = Paged(torch.randint(12, (7, 4), dtype=torch.int32), lengths.int(), num_splits=1)
    check(q, cache, cache, layout=layout, backend="triton").assert_ok()


@pytest.mark.sample
@pytest.mark.parametrize("name", ["decode-window", "chunk", "mixed-fixed"])
@pytest.mark.parametrize(("d", "d_v"), [(59, 59), (111, 59), (59, 111)])
def test_partial_rows(name, d, d_v):
    """Head dims that no 16 bytes divide, in caches whose rows start at multiples of them, with NaN between."""
    case = CASES[name].replace(
        dtype="fp16", d=d, d_v=d_v, s_q=min(CASES[name].s_q, 20), b=min(CASES[name].b, 3), s_k=90
    )
    case = case.replace(lengths=case.lengths and (1, 20, 5))
    given = case.inputs()
    q, k, v = given.q, *(paged.spaced(x) for x in (given.k, given.v))
    assert explain(q, k, v, backend="triton", **given.keywords).spec.aligned
    check(q, k, v, backend="triton", **given.keywords).assert_ok()


@pytest.mark.parametrize("splits", [1, 3])
def test_rows_of_no_sequence_stay_in_out(splits):
    given = CASES["mixed"].replace(dtype="fp16", splits=splits, lengths=(1, 9, 0, 7, 1), s_k=90).inputs()
    plain = attention(given.q, given.k, given.v, backend="triton", **given.keywords)
    out = torch.full_like(plain, 7.0)
    attention(given.q, given.k, given.v, backend="triton", out=out, **given.keywords)
    assert torch.equal(out[:18], plain[:18])
    assert (out[18:] == 7).all()
    assert not plain[18:].any()


def test_values_are_taken_from_keys_where_they_are_their_view(monkeypatch):
    """Calls that differ in nothing but whose memory the values have; and a kernel that takes them from the keys."""
    q, cache, other = torch.randn(2, 1, 16, 48).half(), torch.randn(8, 16, 1, 48).half(), torch.randn(8, 16, 1, 48)
    layout = Paged(torch.arange(8, dtype=torch.int32).view(2, 4), torch.tensor([60, 9]))
    seen, reads_once = [], launches.reads_once
    monkeypatch.setattr(launches, "reads_once", lambda problem: seen.append(reads_once(problem)) or seen[-1])
    for v in (cache[..., :40], other.half()[..., :40], cache.clone()[..., :40], cache[..., 8:]) * 2:
        check(q, cache, v, layout=layout, backend="triton").assert_ok()
        assert set(seen) == {v.data_ptr() == cache.data_ptr()}
        seen.clear()
    monkeypatch.setattr(launches, "reads_once", lambda problem: True)
    assert check(q, cache, other.half()[..., :40], layout=layout, backend="triton").ratio > 1


def test_wide_keys_of_8_bits_are_one_tile():
    """Their queries are scaled by the largest number of a row, wherever it stands."""
    q = torch.randn(1, 1, 4, 320).bfloat16()
    q[..., 300] *= 1e6
    q[..., 0] *= 1e-3
    k, v = (torch.randn(4, 16, 1, n).to(torch.float8_e4m3fn) for n in (320, 320))
    layout = Paged(torch.arange(4, dtype=torch.int32)[None], torch.tensor([50]))
    check(q, k, v, layout=layout, backend="triton", scale=1e-6).assert_ok()
