"""Masks: what they show, their intervals, their algebra, their texts and pictures."""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Callable
from typing import NamedTuple

import matplotlib as mpl
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from saccade import Mask, causal, documents, interval, masks, prefix, window
from saccade.masks import UNBOUNDED, Extent

mpl.use("Agg")

S = 9
"""Queries and keys of the made-up masks."""
BATCH = 2


class Rule(NamedTuple):
    """A mask, and its definition said once more, one pair at a time."""

    mask: Mask
    sees: Callable[[int, int, int, int], bool]
    """(b, i, j, off) -> visible"""


def window_rule(left: int | None, right: int | None) -> Rule:
    def sees(b: int, i: int, j: int, off: int) -> bool:
        return (left is None or j >= i + off - left) and (right is None or j <= i + off + right)

    return Rule(window(left, right), sees)


def prefix_rule(n: int | list[int]) -> Rule:
    def sees(b: int, i: int, j: int, off: int) -> bool:
        return j < (n[b] if isinstance(n, list) else n) or j <= i + off

    return Rule(prefix(torch.tensor(n) if isinstance(n, list) else n), sees)


def documents_rule(ids: list[list[int]]) -> Rule:
    return Rule(documents(torch.tensor(ids)), lambda b, i, j, off: ids[b % len(ids)][i] == ids[b % len(ids)][j])


CAUSAL = Rule(causal(), lambda b, i, j, off: j <= i + off)


def both(rules: tuple[Rule, Rule]) -> Rule:
    one, two = rules
    return Rule(one.mask & two.mask, lambda *at: one.sees(*at) and two.sees(*at))


def either(rules: tuple[Rule, Rule]) -> Rule:
    one, two = rules
    return Rule(one.mask | two.mask, lambda *at: one.sees(*at) or two.sees(*at))


_bounds = st.none() | st.integers(0, S)
_ids = st.lists(st.integers(-1, 2), min_size=S, max_size=S)
rules = st.recursive(
    st.one_of(
        st.just(CAUSAL),
        st.builds(window_rule, _bounds, _bounds),
        st.builds(prefix_rule, st.integers(0, S + 2) | st.lists(st.integers(0, S), min_size=BATCH, max_size=BATCH)),
        st.builds(documents_rule, st.lists(_ids, min_size=BATCH, max_size=BATCH) | _ids.map(lambda row: [row])),
    ),
    lambda inner: st.tuples(inner, inner).flatmap(lambda two: st.sampled_from([both(two), either(two)])),
    max_leaves=5,
)
_lengths = st.none() | st.lists(st.integers(0, S), min_size=BATCH, max_size=BATCH)


def test_bounds_beyond_every_length():
    assert window(1 << 40, 1 << 70) == window(None, None)
    assert bool(prefix(1 << 40).visible(5, 7).all())


def test_a_mask_is_neither_true_nor_false():
    """`a and b` is b, `a or b` is a: each would drop the other."""
    for wrong in (
        lambda: causal() and window(3, 0),
        lambda: window(3, 0) or causal(),
        lambda: not causal(),
        lambda: bool(causal() & prefix(3)),
    ):
        with pytest.raises(TypeError, match=re.escape("combine masks with &, | and ~")):
            wrong()


def extent(rows: list[int] | None = None, keys: list[int] | None = None, s_q: int = S, s_k: int = S) -> Extent:
    used = (None if n is None else torch.tensor(n) for n in (rows, keys))
    return Extent.of(s_q, s_k, *used, torch.device("cpu"))


def seen(mask: Mask, at: Extent) -> torch.Tensor:
    """(b, s_q, s_k), pairs that are in use alone."""
    b, q_idx, kv_idx = torch.arange(BATCH)[:, None, None], at.q_idx()[..., None], torch.arange(at.s_k)
    used = (q_idx < at.rows[..., None]) & (kv_idx < at.keys[..., None])
    return (mask.sees(at, b, b * 0, q_idx, kv_idx) & used).expand(BATCH, at.s_q, at.s_k)


def inside(interval: masks.Interval, at: Extent) -> torch.Tensor:
    lo, hi = (edge[..., None] for edge in interval.clipped(at))
    kv_idx = torch.arange(at.s_k)
    return ((kv_idx >= lo) & (kv_idx < hi)).expand(BATCH, at.s_q, at.s_k)


@settings(max_examples=300)
@given(rules, _lengths, _lengths)
def test_a_mask_is_its_definition(rule, rows, keys):
    at = extent(rows, keys)
    wanted = torch.zeros(BATCH, S, S, dtype=torch.bool)
    for b in range(BATCH):
        n_q, n_k = S if rows is None else rows[b], S if keys is None else keys[b]
        for i in range(n_q):
            for j in range(n_k):
                wanted[b, i, j] = rule.sees(b, i, j, n_k - n_q)
    found = seen(rule.mask, at)
    assert torch.equal(found, wanted), rule.mask
    hull, core = inside(rule.mask.hull(at), at), inside(rule.mask.core(at), at)
    assert not (found & ~hull).any(), "something is visible outside of the hull"
    assert not (core & ~found).any(), "something is hidden inside the core"
    if rule.mask.exact:
        assert torch.equal(found, hull)
    if not rule.mask.has_lower_bound:
        for interval in (rule.mask.hull(at), rule.mask.core(at)):
            assert (interval.lo <= 0).all(), "a row does not see the first keys"


@given(rules)
def test_text_and_records_are_the_whole_mask(rule):
    ints, tensors = list(rule.mask.ints), list(rule.mask.tensors)
    again = masks.from_tensors(rule.mask.kind, ints, tensors)
    assert again == rule.mask
    assert hash(again) == hash(rule.mask)
    assert repr(again) == repr(rule.mask)
    assert ints == []
    assert tensors == []
    assert masks.is_kind(rule.mask.kind)


@pytest.mark.parametrize("s_q", [1, 2, 63, 64, 65])
@pytest.mark.parametrize("right", [0, 1])
@pytest.mark.parametrize("left", [0, 1, 31, 32, 33, 63])
def test_a_window_has_its_width(left, right, s_q):
    counts = window(left, right).visible(s_q, 200).sum(-1)[0]
    wanted = [len(range(max(0, i - left), min(199, i + right) + 1)) for i in range(200 - s_q, 200)]
    assert counts.tolist() == wanted


@pytest.mark.parametrize(
    ("combined", "one_spelling"),
    [
        (causal() & window(5, None), window(5, 0)),
        (window(5, None) & causal(), window(5, 0)),
        (window(5, 9) & window(7, 2), window(5, 2)),
        (window(5, 9) | window(7, 2), window(7, 9)),
        (causal() & causal(), causal()),
        (causal() | causal(), causal()),
        (causal() | window(3, 0), causal()),
        (window(None, 0), causal()),
        (prefix(4) | causal(), prefix(4)),
        (window(UNBOUNDED + 5, 2), window(None, 2)),
    ],
    ids=repr,
)
def test_one_spelling(combined, one_spelling):
    assert combined == one_spelling
    assert combined.kind == one_spelling.kind
    assert repr(combined) == repr(one_spelling)


def test_order_of_parts_does_not_matter():
    packed, ends = documents(torch.tensor([[0, 0, 1]])), prefix(2)
    kinds = {
        (a & b & c).kind for a, b, c in [(packed, ends, causal()), (causal(), ends, packed), (ends, causal(), packed)]
    }
    assert kinds == {"documents&prefix&causal"}
    assert (causal() & packed) == (packed & causal())


def test_parentheses_where_they_are_needed():
    packed = documents(torch.tensor([[0, 0, 1]]))
    mask = packed & (prefix(1) | window(0, 1))
    assert mask.kind == "documents&(prefix|window)"
    assert repr(mask) == "documents&(prefix(1)|window(0,1))"
    assert (packed | window(0, 1)).kind == "documents|window"


def test_equality_is_of_values_and_of_the_same_tensors():
    ids = torch.tensor([[0, 0, 1]])
    packed = documents(ids)
    assert window(1, 2) == window(1, 2)
    assert window(1, 2) != window(1, 3)
    assert packed & causal() == packed & causal()
    assert packed != documents(ids)
    assert causal() != "causal"
    assert len({causal(), causal(), window(1, 0)}) == 2


def test_masks_and_tensors():
    seen = torch.rand(6, 6) > 0.5
    diagonal = causal().visible(6, 6)[0]
    for mask, right in (
        (causal() & seen, diagonal & seen), (seen & causal(), diagonal & seen),
        (causal() | seen, diagonal | seen), (seen | causal(), diagonal | seen),
        (~(seen & causal()), ~(diagonal & seen)),
    ):  # fmt: skip
        assert torch.equal(mask.visible(6, 6)[0], right)
    for wrong in (torch.ones(6, 6), lambda b, h, q_idx, kv_idx: q_idx > kv_idx):
        with pytest.raises(TypeError, match=r"a mask tensor must be bool|mask_mod"):
            causal() & wrong


@pytest.mark.parametrize("number", [1, 1.0, "causal", None])
def test_a_mask_combines_with_masks_alone(number):
    with pytest.raises(TypeError):
        causal() & number
    with pytest.raises(TypeError):
        causal() | number


@pytest.mark.parametrize(
    ("mask", "picture"),
    [
        (causal(), "causal\n■ ■ ·\n■ ■ ■"),
        (window(0, 0), "window(0,0)\n· ■ ·\n· · ■"),
        (window(None, None), "window(None,None)\n■ ■ ■\n■ ■ ■"),
        (prefix(0), "prefix(0)\n■ ■ ·\n■ ■ ■"),
        (prefix(3), "prefix(3)\n■ ■ ■\n■ ■ ■"),
        (prefix(1) & window(0, 0), "prefix(1)&window(0,0)\n· ■ ·\n· · ■"),
    ],
    ids=lambda value: repr(value) if isinstance(value, Mask) else "",
)
def test_draw(mask, picture):
    assert mask.draw(2, 3) == picture


@pytest.mark.parametrize("shape", [(1, 0), (0, 3), (0, 1)])
def test_pictures_of_empty_tensors(shape):
    ids = torch.zeros(shape, dtype=torch.int64)
    for mask in (documents(ids), interval(ids, None), prefix(ids[0, :0] if shape[0] else ids[:, 0])):
        assert str(mask).startswith(repr(mask))
        assert mask.visible(0, 0).shape == (1, 0, 0)
        assert mask.draw(0) == repr(mask)


def test_integers_of_other_libraries():
    class Three:
        def __index__(self) -> int:
            return 3

        def __lt__(self, other: int) -> bool:
            return other > 3

    assert (window(Three(), 0), prefix(Three())) == (window(3, 0), prefix(3))


def test_print():
    packed = documents(torch.tensor([[4, 4, 2], [0, 1, 1]])) & causal()
    assert str(packed) == packed.draw(3, 3) == "documents&causal\n■ · ·\n■ ■ ·\n· · ■"
    assert packed.draw(batch=1) == "documents&causal\n■ · ·\n· ■ ·\n· ■ ■"
    assert str(causal()).count("\n") == 8
    assert str(documents(torch.zeros(1, 65, dtype=torch.int64))) == "documents"


def test_plot():
    mask = documents(torch.tensor([[0, 0, 1], [0, 1, 1]])) & causal()
    axes = mask.plot(batch=1)
    assert axes.get_title() == "documents&causal"
    assert torch.equal(torch.from_numpy(axes.images[0].get_array().data), mask.visible(3, 3, 2)[1])
    assert causal().plot(4, 6, ax=axes) is axes
    assert axes.images[-1].get_array().shape == (4, 6)


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda mask: pickle.loads(pickle.dumps(mask))], ids=["copy", "pickle"]
)
@given(rule=rules)
def test_copies(rule, copied):
    again = copied(rule.mask)
    assert repr(again) == repr(rule.mask)
    assert torch.equal(again.visible(S, S, BATCH), rule.mask.visible(S, S, BATCH))


@given(st.lists(st.lists(st.integers(-3, 3), min_size=S, max_size=S), min_size=1, max_size=3))
def test_documents_know_their_extent(ids):
    """first and stop hold a document; solid says that they hold nothing else."""
    mask = documents(torch.tensor(ids))
    for b, row in enumerate(ids):
        for i, this in enumerate(row):
            places = [j for j, other in enumerate(row) if other == this]
            assert mask.first[b, i] == places[0]
            assert mask.stop[b, i] == places[-1] + 1
            assert mask.solid[b, i] == (len(places) == places[-1] + 1 - places[0])


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool])
def test_ids_of_any_integer_dtype(dtype):
    ids = torch.tensor([[1, 1, 0, 1]])
    assert torch.equal(documents(ids.to(dtype)).visible(4, 4), documents(ids).visible(4, 4))


def test_ids_of_any_size():
    huge = torch.tensor([[2**62, 2**62, -(2**62), 2**62 + 1]])
    assert documents(huge).visible(4, 4)[0].int().tolist() == [[1, 1, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]]


@pytest.mark.parametrize(
    ("made", "error", "words"),
    [
        (lambda: window(-1, 0), ValueError, "left must not be negative, got -1"),
        (lambda: window(0, -2), ValueError, "right must not be negative, got -2"),
        (lambda: window(1.0, 0), TypeError, "left must be an integer or None, got 1.0"),
        (lambda: window(True, 0), TypeError, "left must be an integer or None, got True"),
        (lambda: prefix(-1), ValueError, "n must not be negative, got -1"),
        (lambda: prefix(None), TypeError, "prefix"),
        (lambda: prefix("3"), TypeError, "'3'"),
        (lambda: prefix(torch.ones(2)), ValueError, "torch.float32 (2,)"),
        (lambda: prefix(torch.ones(2, 2, dtype=torch.int64)), ValueError, "torch.int64 (2, 2)"),
        (lambda: documents(torch.ones(2, 3)), ValueError, "torch.float32 (2, 3)"),
        (lambda: documents(torch.ones(3, dtype=torch.int64)), ValueError, "torch.int64 (3,)"),
        (lambda: documents([[0, 1]]), TypeError, "[[0, 1]]"),
        (lambda: prefix(torch.tensor([1, 2])).draw(3, batch=9), ValueError, "(b, s_q, s_k) = (10, 3, 3)"),
        (lambda: documents(torch.zeros(1, 3).long()).visible(5, 5), ValueError, "(b, s_q, s_k) = (1, 5, 5)"),
        (lambda: causal().draw(-1), ValueError, "s_q must be an integer from 0 on, got -1"),
        (lambda: causal().draw(3, batch=-1), ValueError, "batch must be an integer from 0 on, got -1"),
        (lambda: causal().visible(3.0, 3), TypeError, "s_q must be an integer, got 3.0"),
        (lambda: masks.from_tensors("causal&", [], []), ValueError, "causal&"),
        (lambda: masks.from_tensors("diagonal", [], []), ValueError, "'diagonal'"),
        (lambda: masks.from_tensors("(causal", [], []), ValueError, "(causal"),
        (lambda: masks.from_tensors("causal causal", [], []), ValueError, "causal causal"),
    ],
)
def test_errors(made, error, words):
    with pytest.raises(error, match=re.escape(words)):
        made()
