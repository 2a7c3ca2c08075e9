"""The Spec and its one text form."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from saccade import Dense, Spec, causal, documents, explain, softcap, window
from saccade.call.spec import DTYPES, FLAGS
from saccade.testing.cases import SMALL


def plan(*call: Any, **keywords: Any) -> Any:
    """Which backend runs it, or the error that says why none does."""
    return explain(*call, **keywords).plan


MASKS = ["none", "causal", "window", "prefix", "prefixes", "documents", "documents&causal", "prefix|window"]
MASKS += ["documents&(prefix|window)&causal", "documents|window"]

specs = st.builds(
    Spec,
    dtype=st.sampled_from(sorted(DTYPES.values())),
    d=st.integers(1, 512),
    d_v=st.integers(0, 512),
    group=st.integers(1, 128),
    layout=st.sampled_from(["dense", "padded"]),
    mask=st.sampled_from(MASKS),
    score=st.sampled_from(["none", "softcap"]),
    device=st.sampled_from(["cpu", "sm80", "sm90", "sm120", "gfx942", "mps", "meta"]),
    **{flag: st.booleans() for flag in FLAGS},
)


@given(specs)
def test_round_trip(spec):
    assert Spec.parse(str(spec)) == spec
    assert hash(Spec.parse(str(spec))) == hash(spec)


@given(specs, st.randoms())
def test_words_in_any_order(spec, dice):
    words = str(spec).split()
    dice.shuffle(words)
    assert Spec.parse(" ".join(words)) == spec


@given(specs, specs)
def test_texts_are_as_different_as_specs(one, two):
    assert (str(one) == str(two)) == (one == two)


@pytest.mark.parametrize("case", SMALL, ids=str)
def test_of_a_call(case):
    made = case.inputs()
    spec = plan(made.q, made.k, made.v, **made.keywords).spec
    assert Spec.parse(str(spec)) == spec
    assert (spec.dtype, spec.d, spec.d_v, spec.device) == (case.dtype, case.d, case.d_v, "cpu")
    assert spec.group == (case.h_q // case.h_k if case.h_k else 1)
    dense = "dense" if case.used == "all" else "padded"
    assert spec.layout == ("packed" if case.order == "thd" else dense)
    assert spec.sink == case.sink
    assert (spec.score == "none") == (case.score == "none")


def test_runtime_values_are_not_in_it():
    def of(s, mask, cap, scale):
        q, k, v = torch.randn(3, 1, 2, s, 16)
        return plan(q, k, v, mask=mask, score_mod=softcap(cap), scale=scale).spec

    assert of(4, window(3, 0), 2.0, None) == of(9, window(1, 1), 3.0, 0.5)
    assert of(4, causal(), 2.0, None) == of(4, window(None, 0), 2.0, None)


def test_static_values_are():
    q, k, v = torch.randn(3, 1, 2, 8, 16)
    ids = torch.zeros(1, 8, dtype=torch.int64)
    variants = [
        plan(q, k, v),
        plan(q, k[:, :1], v[:, :1]),
        plan(q.half(), k.half(), v.half()),
        plan(q, k, v[..., :8].contiguous()),
        plan(q[..., 1:9], k[..., :8], v),  # rows that start 4 bytes behind a multiple of 16
        plan(q, k, v, mask=causal()),
        plan(q, k, v, mask=documents(ids)),
        plan(q, k, v, mask=documents(ids) & causal()),
        plan(q, k, v, score_mod=softcap(1.0)),
        plan(q, k, v, sink=torch.zeros(2)),
        plan(q, k, v, layout=Dense(seqused_q=torch.ones(1, dtype=torch.int32))),
        plan(q, k, v, deterministic=True),
    ]
    assert len({made.spec for made in variants}) == len(variants)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "lacks dtype and d"),
        ("bf16", "lacks d"),
        ("d64 causal", "lacks dtype"),
        ("bf16 d64 diagonal", "unknown word 'diagonal'"),
        ("bf16 d64 causal&", "unknown word 'causal&'"),
        ("bf16 d64 groupX", "unknown word 'groupX'"),
        ("bf16 d64/ cpu", "unknown word 'd64/'"),
        ("bf17 d64", "unknown word 'bf17'"),
        ("bf16 fp16 d64", "says dtype twice: 'bf16' and 'fp16'"),
        ("bf16 d64 d128", "says d twice: 'd64' and 'd128'"),
        ("bf16 d64 cpu sm90", "says device twice: 'cpu' and 'sm90'"),
        ("bf16 d64 group2 group2", "says group twice"),
        ("bf16 d64 sink sink", "says sink twice"),
        ("bf16 d64 dense paged", "says layout twice"),
        ("bf16 d64 kv_fp8_e4m3 kv_fp8_e5m2", "says kv twice"),
        ("bf16 d64 alibi softcap", "says score twice"),
        ("bf16 d64 causal documents", "masks combine in one word: 'causal&documents'"),
    ],
)
def test_errors(text, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        Spec.parse(text)
