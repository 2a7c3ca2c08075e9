"""Ranks that fail, lag or are elsewhere: all others end, and say which rank it was, and where."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch

from saccade import attention, causal
from saccade.distributed import make, plan

HERE = str(Path(__file__))
LENGTHS = [8, 4, 0, 9]
HEADS = 24
"""Which 2, 3 and 8 ranks divide."""


def call(made, dtype=torch.float32, h=HEADS, **keywords):
    x = made.shard(torch.randn(21, h, 16, dtype=dtype))
    return attention(x, x, x, mask=causal(), context=made, **keywords)


def heard(work, *arguments, **keywords):
    """The words of an error, and after how long."""
    start = time.perf_counter()
    try:
        work(*arguments, **keywords)
    except (RuntimeError, ValueError) as error:
        return str(error), time.perf_counter() - start
    return "", time.perf_counter() - start


def pytest_generate_tests(metafunc):
    """Two ranks, and eight where a rank ends or is elsewhere; both everywhere by --everything."""
    if "ranks" in metafunc.fixturenames:
        whole = metafunc.config.getoption("--everything")
        name = metafunc.definition.name
        few, many = (3, 8) if name == "test_a_rank_that_is_elsewhere" else (2, 8)
        metafunc.parametrize("ranks", [few, many] if whole or few == 3 else [many if "ends" in name else few])


@pytest.fixture
def broken_pool(request):
    """Of its own: what fails breaks its groups."""
    from tests.support.ranks import Pool

    with Pool(request.getfixturevalue("ranks") if "ranks" in request.fixturenames else 2) as pool:
        yield pool


def lagging(group):
    made = plan(LENGTHS, group, mask=causal(), timeout=2.0)
    call(made)
    if made.rank == 1:
        return time.sleep(6)
    return heard(call, made)


def test_a_rank_that_lags(broken_pool, ranks):
    told, seconds = broken_pool.run((HERE, "lagging"), ranks)[0]
    assert told.startswith(
        f"rank 0 of {ranks}: the exchange of keys and values, exchange 2 of its group, of torch.float32"
    )
    assert "another rank has failed, or is not in the same call" in told
    assert "\n  rank 0: exchange 2: plan " in told
    assert "\n  rank 1: exchange 1: plan " in told
    assert seconds < 5


def raising(group):
    made = plan(LENGTHS, group, mask=causal(), timeout=2.0)

    def score(s, b, h, i, j):
        return s * (1 / (1 - made.rank))

    found = heard(call, made, score_mod=score)
    if made.rank == 1:
        time.sleep(5)
    return found


def test_a_score_function_that_raises_on_one_rank(broken_pool, ranks):
    """It fails before the exchange, in which the others wait for that rank."""
    (ended, seconds), (raised, _), *_ = broken_pool.run((HERE, "raising"), ranks)
    assert "division by zero" in raised
    assert ended.startswith(f"rank 0 of {ranks}: the exchange of keys and values, exchange 1 of its group")
    assert "\n  rank 1: in no exchange yet" in ended
    assert 1 < seconds < 5


def going_on(group):
    """Rank 1 has a row too many in its first call; then every rank goes on as if nothing had been."""
    made = plan(LENGTHS, group, mask=causal(), timeout=2.0)
    x = made.shard(torch.randn(21, HEADS, 16))
    start = time.perf_counter()
    wrong = [heard(attention, *[torch.cat([x, x[:1]])] * 3, context=made) if made.rank == 1 else heard(call, made)]
    time.sleep(max(0.0, start + 3 - time.perf_counter()))  # all are out of it
    return wrong + [heard(call, made) for _ in range(2)]


def test_a_rank_that_goes_on_after_an_error_of_its_own(broken_pool):
    """What the others had sent for the call that it missed is not taken for that of the next one."""
    ((failed, _), *others), ((missed, _), *mine) = broken_pool.run((HERE, "going_on"), 2)
    assert "another rank has failed" in failed
    assert missed.startswith("rank 1 has")
    assert all("another rank has failed" in text or "in different exchanges" in text for text, _ in others + mine)


def ending(group):
    """Rank 1 ends between two calls, as a process that is out of memory does."""
    made = plan(LENGTHS, group, mask=causal())
    call(made)
    if made.rank == 1:
        os._exit(1)
    call(made)


def test_a_rank_that_ends(broken_pool, ranks):
    start = time.perf_counter()
    with pytest.raises(
        RuntimeError, match=f"rank 0 of {ranks}: the exchange of keys and values, exchange 2 of its group"
    ):
        broken_pool.run((HERE, "ending"), ranks)
    assert time.perf_counter() - start < 30


def apart(group, how):
    """Rank 1 is elsewhere, alone; after that all are together again."""
    how, _, method = how.partition(" by ")
    given = {"mask": causal(), "method": method or "auto"}
    made, other = plan(LENGTHS, group, **given), plan([*LENGTHS[:3], 2, 7], group, **given)
    alone = made.rank == 1
    whole = torch.randn(21, HEADS, 16, requires_grad=True)
    call(made)
    if how == "heads":
        told = heard(call, made, h=2 * HEADS if alone else HEADS)
    elif how == "dtype":
        told = heard(call, made, torch.float16 if alone else torch.bfloat16)
    elif how == "plan":
        told = heard(call, other if alone else made)
    elif how == "stage":
        told = heard(lambda: made.unshard(made.shard(whole)[:, 0, :4]) if alone else made.roll(made.shard(whole), -1))
    elif how == "gradients":
        x = made.shard(whole.detach()).requires_grad_(alone)  # the others would wait for its backward
        told = heard(attention, x, x, x, mask=causal(), context=made)
    elif how == "shift":
        told = heard(made.roll, made.shard(whole), 1 if alone else -1)
    else:
        told = heard(call, made, dropout_p=0.1 if alone else 0.0)
        if not alone:  # in the next exchange
            told = heard(call, made)
    call(made)
    return told


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("heads by gather", ("rows of torch.float32 (24, 1, 16)", "rows of torch.float32 (48, 1, 16)")),
        ("heads by ulysses", ("rows of torch.float32 (24, 1, 32)", "rows of torch.float32 (48, 1, 32)")),
        ("dtype", ("rows of torch.bfloat16", "rows of torch.float16")),
        ("plan", ("plan ", "plan ")),
        ("stage", ("roll by -1, with gradients, rows of torch.float32 (24, 16)", "unshard, with gradients, rows")),
        ("shift", ("roll by -1", "roll by 1")),
        ("gradients", ("values, rows of torch.float32", "values, with gradients, rows of torch.float32")),
        ("dropout", ("the exchange of keys and values", "the seed of dropout_p=0.1")),
    ],
)
def test_a_rank_that_is_elsewhere(pool, how, words, ranks):
    """Every rank hears the same, at once, and nothing was exchanged: the group goes on."""
    found = pool.run((HERE, "apart"), ranks, how)
    assert len({told for told, _ in found}) == 1
    first, *lines = found[0][0].splitlines()
    assert first == "ranks are in different exchanges:"
    for i, line in enumerate(lines):
        assert line.startswith(f"  rank {i}: plan ")
        assert words[i == 1] in line
    assert lines[0][10:] == lines[2][10:] != lines[1][10:]
    assert all(seconds < 10 for _, seconds in found)


def histories(group, debug):
    """Ranks whose caches of plans differ."""
    found = []
    for i in range(3):
        if group.rank() == i:
            make._plans.clear()
        found.append(call(plan(LENGTHS, group, mask=causal(), debug=debug)))
    return all(bool(out.isfinite().all()) for out in found)


@pytest.mark.parametrize("debug", [False, True])
def test_ranks_may_have_other_histories(pool, debug):
    assert pool.run((HERE, "histories"), 3, debug) == [True] * 3


def compared(group, debug):
    """Exchanges on devices, as far as the host is in them: which of them ranks compare, and rank 1 alone at last."""
    from saccade.distributed.transport import agreement_of

    made, other = (plan(x, group, mask=causal(), timeout=2.0, debug=debug) for x in (LENGTHS, [21]))
    ranks, found = agreement_of(group), []
    for given, shape in ((made, (3, 4)), (made, (5, 4)), (made, (3, 8)), (other, (3, 4)), (made, (3, 4))):
        before = ranks._meetings
        given.rows_transport().begin([torch.empty(shape, device="meta")], "a stage")
        found.append(ranks._meetings - before)
    shape = (3, 4) if made.rank != 1 else (3, 16)
    alone = heard(made.rows_transport().begin, [torch.empty(shape, device="meta")], "a stage")
    left = [i for i in range(1, ranks._meetings + 1) if ranks.store.check([f"meeting/{i}/report"])]
    return found, alone, left


def test_ranks_compare_the_first_exchange_of_a_kind(broken_pool):
    """And one that alone does another is not among the others."""
    (found, (told, _), left), (same, (alone, seconds), _) = broken_pool.run((HERE, "compared"), 2, False)
    assert found == same == [1, 0, 1, 1, 0]
    assert left == [3]
    assert not told
    assert alone.startswith("rank 1 of 2: a stage, exchange 6 of its group, of torch.float32 (3, 16), failed")
    assert "\n  rank 0: exchange 4: plan " in alone
    assert 1 < seconds < 5


def test_ranks_compare_all_exchanges_if_asked(broken_pool):
    (found, (told, _), left), (_, (alone, seconds), _) = broken_pool.run((HERE, "compared"), 2, True)
    assert found == [1] * 5
    assert left == [6]
    assert told == alone
    assert told.startswith("ranks are in different exchanges:\n  rank 0: plan ")
    assert seconds < 2
