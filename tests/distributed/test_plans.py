"""Plans: every row has one rank, ranks have equal rows and scores, and few documents are cut. Nothing communicates."""

from __future__ import annotations

import math
import random
import time

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from saccade import Dense, Packed, causal, documents, mask_mod, prefix, window
from saccade.distributed import Piece, plan
from saccade.distributed.sharding import Reach, Sharding, balanced, reach_of, spans

REACHES = st.tuples(*[st.one_of(st.none(), st.integers(0, 300))] * 2).map(lambda bounds: Reach(*bounds))
LENGTHS = st.lists(st.one_of(st.integers(0, 9), st.integers(0, 700)), max_size=12).map(tuple)


def seen(reach, length, row):
    """The keys of one row."""
    left, right = (length if bound is None else bound for bound in reach)
    return range(max(0, row - left), min(length, row + right + 1))


@given(REACHES, st.integers(0, 60), st.integers(0, 60), st.integers(0, 60))
def test_reach_counts_scores_and_keys(reach, length, a, b):
    start, stop = sorted((min(a, length), min(b, length)))
    rows = [seen(reach, length, row) for row in range(start, stop)]
    assert reach.area(length, start, stop) == sum(map(len, rows))
    if rows:
        first, last = reach.keys(length, start, stop)
        assert all(first <= keys.start and keys.stop <= last for keys in rows if keys)


@given(LENGTHS, st.integers(1, 9), REACHES)
def test_every_row_has_one_rank(lengths, ranks, reach):
    found = balanced(lengths, ranks, reach)
    rows = [(i, row) for pieces in found for i, start, stop in pieces for row in range(start, stop)]
    assert sorted(rows) == [(i, row) for i, n in enumerate(lengths) for row in range(n)]
    counts = [sum(piece.rows for piece in pieces) for pieces in found]
    assert max(counts) - min(counts) <= 1
    for pieces in found:
        assert pieces == sorted(pieces)
        for span in spans(pieces, lengths, reach):
            mine = [piece for piece in pieces if piece.document == span.document]
            for piece in mine:
                keys = [seen(reach, lengths[span.document], row) for row in (piece.start, piece.stop - 1)]
                assert all(span.start <= x.start and x.stop <= span.stop for x in keys if x)


@given(LENGTHS, st.integers(1, 9))
def test_causal_pieces_see_rows_of_others_and_own_ones(lengths, ranks):
    sharding = Sharding(lengths, ranks, 1, Reach(None, 0))
    for pieces in sharding.by_part:
        held = {(i, row) for i, start, stop in pieces for row in range(start, stop)}
        rows = []
        for piece, before in zip(pieces, sharding.before(pieces), strict=True):
            others = [(i, row) for i, start, stop in before for row in range(start, stop)]
            assert others == [(piece.document, row) for row in range(piece.start) if (piece.document, row) not in held]
            own = [x for x in sorted(held) if x[0] == piece.document and x[1] < piece.stop]
            rows.append((others, own))
        needed = [(i, row) for i, start, stop in sharding.others_first(pieces) for row in range(start, stop)]
        assert needed == [x for others, own in rows for x in (*others, *own)]


def drawn(rows, seed):
    """Lengths as documents have them: most are short, few are long."""
    dice, lengths = random.Random(seed), []
    while sum(lengths) < rows:
        longest = dice.choice([100, 500, 500, 1000, 1000, 2000, 8000, rows // 4])
        lengths.append(min(dice.randint(1, longest), rows - sum(lengths)))
    return lengths


@pytest.mark.parametrize("ranks", [2, 3, 8, 64])
@pytest.mark.parametrize("mask", [causal(), window(512, 0), window(4096, 0), None], ids=repr)
@pytest.mark.parametrize("seed", range(3))
def test_scores_are_balanced(ranks, mask, seed):
    """From 8192 rows for each rank on: to 2 %, rows to one, and no rank has more than two documents cut."""
    lengths = drawn(8192 * ranks, seed)
    sharding = plan(lengths, ranks, mask=mask).sharding
    mean = sum(sharding.areas) / ranks
    assert max(sharding.areas) <= 1.02 * mean
    assert max(sharding.rows) - min(sharding.rows) <= 1
    cut = [sum(1 for piece in pieces if piece.rows < lengths[piece.document]) for pieces in sharding.by_rank]
    assert max(cut) <= 8  # two documents, of which either is what others left: two pieces at each of its ends


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [8, 64])
@pytest.mark.parametrize("left", [255, 511, 1023, 2047])
def test_documents_of_about_a_window(ranks, left):
    """Whose first rows see fewer keys than the others, and are too many to be left out."""
    for seed in range(8):
        dice, lengths = random.Random(seed), []
        while sum(lengths) < 8192 * ranks:
            lengths.append(min(dice.randrange(1, 4000), 8192 * ranks - sum(lengths)))
        for mask in (window(left, 0), window(0, left), window(left, left)):
            areas = plan(lengths, ranks, mask=mask).sharding.areas
            assert max(areas) * ranks <= 1.02 * sum(areas), (seed, mask)


@st.composite
def full_ranks(draw):
    """Lengths of any distribution that are 8192 rows for each rank, and the number of ranks."""
    ranks = draw(st.integers(2, 12))
    parts = draw(st.lists(st.one_of(st.integers(1, 9), st.integers(1, 400), st.integers(1, 20000)), min_size=1))
    lengths = [max(1, n * 8192 * ranks // sum(parts)) for n in parts]
    return (*lengths, max(0, 8192 * ranks - sum(lengths))), ranks


REACHES_OF_LONG = [
    Reach(None, 0), Reach(0, None), Reach(600, None), Reach(None, None), Reach(300, 0), Reach(5000, 40),
]  # fmt: skip


@given(full_ranks(), st.sampled_from(REACHES_OF_LONG))
def test_any_lengths_are_balanced_and_few_are_cut(given, reach):
    """Scores to 2 %, rows to one; a rank adds at most two cuts of documents to those of the ranks before it."""
    lengths, ranks = given
    sharding = Sharding(lengths, ranks, 1, reach)
    assert max(sharding.areas) * ranks <= 1.02 * sum(sharding.areas)
    assert max(sharding.rows) - min(sharding.rows) <= 1
    owners = [{piece.document for piece in pieces} for pieces in sharding.by_rank]
    cuts = sum(map(len, owners)) - sum(1 for n in lengths if n)
    long = sum(1 for n in lengths if n > sum(lengths) // (2 * ranks))  # which may have up to three parts of their own
    assert cuts <= 2 * ranks + 2 * long
    for mine, pulled in zip(owners, sharding.pulled, strict=True):
        shared = [i for i in mine if sum(i in others for others in owners) > 1]
        assert pulled <= sum(lengths[i] for i in shared)


def test_one_document_is_taken_from_both_ends():
    found = plan([80], 4, mask=causal()).sharding
    assert found.areas == [820] * 4 or max(found.areas) - min(found.areas) < 80
    assert [len(pieces) for pieces in found.by_rank] == [2, 2, 2, 1]
    later = plan([80], 4, mask=window(0, None)).sharding  # as many, from the other side
    assert max(later.areas) - min(later.areas) < 80
    whole = plan([80], 4).sharding  # rows that see as many keys: one cut is enough
    assert sorted(whole.by_rank) == [[Piece(0, at, at + 20)] for at in range(0, 80, 20)]
    near = plan([800], 4, mask=window(5, 0)).sharding
    assert sorted(near.by_rank) == [[Piece(0, at, at + 200)] for at in range(0, 800, 200)]
    assert sorted(near.pulled) == [0, 5, 5, 5]


def test_pairs():
    found = plan([8, 16], 2, rows="pairs", mask=causal()).sharding.by_rank
    assert found[0] == [Piece(0, 0, 2), Piece(0, 6, 8), Piece(1, 0, 4), Piece(1, 12, 16)]
    assert found[1] == [Piece(0, 2, 6), Piece(1, 4, 12)]


def test_whole_documents_need_nothing_from_elsewhere():
    found = plan([100] * 16, 4, mask=causal()).sharding
    assert found.pulled == [0] * 4


def test_same_arguments_same_plan():
    lengths = drawn(50000, 0)
    made = plan(lengths, 8, mask=causal())
    assert plan(list(lengths), 8, mask=causal()) is made
    assert plan(lengths, 8, mask=causal(), rank=1) is not made
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    assert plan(offsets, 8, mask=causal()) is made
    assert plan(lengths, 8, mask=causal(), rank=5).fingerprint == made.fingerprint
    assert plan(lengths, 8).fingerprint != made.fingerprint


def test_a_plan_is_of_values():
    """Not of objects, which may change, nor of numbers that are merely equal."""
    lengths, offsets = [5, 1, 9], torch.tensor([0, 5, 6, 15], dtype=torch.int32)
    made = plan(lengths, 2)
    lengths[1] = 4
    assert plan(lengths, 2).lengths == (5, 4, 9)
    assert plan([5, 1, 9], 2) is made
    assert plan(offsets, 2) is made
    offsets[1:].add_(3)
    assert plan(offsets, 2).lengths == (8, 1, 9)
    assert plan(offsets[:3], 2).lengths == (8, 1)
    assert plan(torch.stack([offsets, offsets], 1)[:, 0], 2).lengths == (8, 1, 9)
    assert plan((5, 9), 2).batch == 5
    for wrong in ([5, True, 9], [5, 1.0, 9], [5, torch.tensor(1), 9]):
        with pytest.raises(TypeError, match="a length must be an integer"):
            plan(wrong, 2)
    numpy = pytest.importorskip("numpy")
    assert plan(list(numpy.array([5, 1, 9])), 2) is made


def test_padding():
    made = plan([5, 2], 3, rank=1, rows="equal", mask=causal())
    assert (made.rows, made.used_rows, made.padding) == (3, 2, 1)
    assert made.shard(torch.arange(7), fill=-1)[-1] == -1
    assert made.position_ids[-1] == 0
    assert made.document_ids[-1] == -1
    assert [plan([5, 2], 3, rank=i, rows="equal").rows for i in range(3)] == [3, 3, 3]
    assert plan([6, 3], 3, rows="equal").padding == 0
    assert plan([5, 2], 3, rows=8).rows == 8


def test_planning_is_quick():
    """Of 1,000 documents over 8 ranks 10 ms, and 10 us again, are wanted of a processor that has nothing else to do;
    this one may have."""
    made, again = [], []
    for seed in range(5):
        lengths = [random.Random(seed).randint(1, 3000) for _ in range(1000)]
        start = time.process_time()
        plan(lengths, 8, mask=causal()).prepare()
        made.append(time.process_time() - start)
        start = time.process_time()
        plan(lengths, 8, mask=causal())
        again.append(time.process_time() - start)
    assert min(made) < 0.03
    assert min(again) < 100e-6


def test_reach_of_masks():
    tensor = torch.zeros(1, 4, dtype=torch.int64)
    assert reach_of(causal() & prefix(3)) == Reach(None, 0)
    assert reach_of(window(9, None) & window(None, 4)) == Reach(9, 4)
    for mask in (None, prefix(3), causal() | prefix(3), ~causal(), mask_mod(lambda b, h, i, j: i > j)):
        assert reach_of(mask) == Reach(None, None)
    assert reach_of(documents(tensor) & causal()) == Reach(None, 0)


def test_local_layouts():
    made = plan([8, 3], 2, rank=0, mask=causal())
    assert isinstance(made.local, Packed)
    assert made.local.q_offset.tolist() == [made.position_ids.tolist()]
    batch = plan((3, 8), 2, rank=0, mask=causal())
    assert isinstance(batch.local, Dense)
    assert batch.local.q_offset.tolist() == [[0, 1, 6, 7]]


def test_methods():
    heads = {"heads": (16, 16), "head_dim": 128, "mask": causal()}
    assert plan([100000], 8, **heads).method == "ulysses"
    assert plan([100000], 2, **heads | {"heads": (64, 8)}).method == "gather"
    assert plan([1000] * 64, 8, **heads).method == "gather"
    assert "power of two" in plan([100000], 2, **heads | {"heads": (6, 6)}).why
    assert "3 ranks can divide" in plan([100000], 3, **heads).why
    assert plan([100], 2).why.startswith("without heads")
    for made in (plan([100000], 8, **heads), plan([3000, 500], 4, **heads | {"heads": (64, 8)})):
        told = made.explain()
        assert made.method in told
        assert "of ideal" in told


def test_pictures(tmp_path):
    made = plan([7, 12, 3, 40], 2, rank=0, mask=causal())
    assert made.draw(20).splitlines()[1:] == [
        "     0 1111 7",
        "     1 000000 12",
        "     2 11 3",
        "     3 00000111111111110000 40",
    ]
    assert "and 60 shorter documents" in plan([5] * 100, 2).draw()
    pytest.importorskip("matplotlib")
    made.draw(path=tmp_path / "plan.png")
    assert (tmp_path / "plan.png").stat().st_size > 1000


@pytest.mark.parametrize(
    ("arguments", "keywords", "error", "words"),
    [
        (([3, -1], 2), {}, ValueError, "a length must be an integer from 0 on, got -1"),
        (([3, 2.5], 2), {}, TypeError, "a length must be an integer, got 2.5"),
        (((3, 4, 5), 2), {}, TypeError, r"a tuple is the shape \(b, s\) of a batch"),
        (("abc", 2), {}, TypeError, "documents must be a list of lengths"),
        ((torch.tensor([0.0, 3.0]), 2), {}, ValueError, r"offsets cu_seqlens, integers \(b \+ 1,\)"),
        ((torch.tensor([0, 5, 3]), 2), {}, ValueError, "cu_seqlens must begin at 0, never decrease"),
        ((torch.tensor([], dtype=torch.int64), 2), {}, ValueError, "offsets cu_seqlens"),
        (([3], 0), {}, ValueError, "a number of ranks must be an integer from 1 on, got 0"),
        (([3], 2), {"rank": 2}, ValueError, "rank must be below the number of ranks, got 2 of 2"),
        (([3], 2), {"method": "ring"}, ValueError, "unknown method 'ring'; it is one of auto, gather, pull, ulysses"),
        (([3], 2), {"mask": torch.ones(3, 3)}, TypeError, r"mask must be a Mask such as causal\(\)"),
        (([3], 3), {"method": "ulysses", "heads": (4, 2)}, ValueError, "3 ranks can divide heads"),
        (([3], 2), {"heads": (3, 2)}, ValueError, "h_q must be a multiple of h_k"),
        (([3], 2), {"heads": (3, 2, 1)}, TypeError, r"heads must be \(h_q, h_k\) or one number, got 3 numbers"),
        (
            ([3], 2),
            {"rows": "even"},
            ValueError,
            "unknown rows 'even'; it is one of balanced, equal, pairs",
        ),
        (([3], 2), {"rows": True}, TypeError, "rows must be an integer, got True"),
        (([3, 8], 2), {"rows": 5}, ValueError, "rows=5 is too few: 11 rows over 2 ranks need 6"),
        (([8, 6], 2), {"rows": "pairs"}, ValueError, r"needs lengths that are multiples of 4, got \[8, 6\]"),
        (([8], 2), {"rows": "pairs", "method": "ulysses"}, ValueError, "rows='pairs' works with method='gather'"),
        (([3], 2), {"head_dim": 0}, ValueError, "head_dim must be an integer from 1 on"),
        (([3], 2), {"timeout": 0}, ValueError, r"timeout must be a positive number of seconds, up to 1e\+09, got 0"),
        (([3], 2), {"timeout": math.inf}, ValueError, "timeout must be .*, got inf"),
        (([3], 2), {"timeout": math.nan}, ValueError, "timeout must be .*, got nan"),
        (([3], 2), {"timeout": True}, TypeError, "timeout must be a number of seconds, got True"),
        (([3], 2), {"timeout": torch.tensor(3.0)}, TypeError, "timeout must be a number of seconds, got torch.float32"),
        (([3], dist.GroupMember.NON_GROUP_MEMBER), {}, ValueError, "this process is not a rank of the group"),
        (([3],), {}, ValueError, "plan needs torch.distributed.init_process_group first"),
    ],
)
def test_wrong_arguments(arguments, keywords, error, words):
    with pytest.raises(error, match=words):
        plan(*arguments, **keywords)


def test_values_of_any_dtype():
    """All ranks have a fill that a dtype has not, also those without padding."""
    for dtype in (torch.uint16, torch.uint32, torch.uint64):
        mine = plan([3, 5], 2, rank=1).shard(torch.arange(8).to(dtype))
        assert mine.dtype == dtype
        assert mine.tolist() == plan([3, 5], 2, rank=1).shard(torch.arange(8)).tolist()
    for rank in range(3):
        made = plan([5, 2], 3, rank=rank, rows="equal")
        for fill, dtype in ((1e6, torch.float16), (-1000, torch.float8_e4m3fn)):
            with pytest.raises(ValueError, match=r"does not fit into x's torch.float"):
                made.shard(torch.ones(7).to(dtype), fill=fill)
        with pytest.raises(TypeError, match="fill must be a number"):
            made.shard(torch.ones(7), fill=None)
        assert made.shard(torch.ones(7), fill=math.nan).shape == (3,)


@pytest.mark.parametrize("documents", [[0, 0], [], (2, 0), (0, 0)], ids=str)
def test_plans_of_no_rows_explain_themselves(documents):
    assert "100% of ideal" in plan(documents, 1, heads=4, head_dim=64).explain()


def test_wrong_rows():
    made = plan([8, 3], 2, rank=1)
    with pytest.raises(ValueError, match=r"dimension 0 of x must have all 11 rows, got \(7,\)"):
        made.shard(torch.zeros(7))
    with pytest.raises(ValueError, match=r"dimension 1 of x must have this rank's 6 rows"):
        made.unshard(torch.zeros(6, 5), dim=1)
    with pytest.raises(RuntimeError, match=r"unshard: the plan was made for 2 ranks without processes"):
        made.unshard(torch.zeros(6))
    for dtype in (torch.uint8, torch.bool):
        with pytest.raises(
            ValueError, match=rf"fill=-100 does not fit into x's {dtype}: pass another fill, or x.long\(\)"
        ):
            made.roll(torch.zeros(6, dtype=dtype), -1)
    with pytest.raises(ValueError, match=r"fill=0.5 does not fit into x's torch.int64"):
        made.shard(torch.zeros(11, dtype=torch.int64), fill=0.5)
