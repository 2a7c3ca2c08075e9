"""The random calls themselves: what they draw, and what becomes of one that fails."""

from __future__ import annotations

import pytest

from saccade import Unsupported
from tests.random_calls.calls import FEATURES, LAYOUTS, draw, impossible
from tests.random_calls.outcome import Outcome, Tally, refusal
from tests.random_calls.program import LONGEST, Program
from tests.random_calls.worker import outcomes, run


def tallied(calls: int) -> Tally:
    """What a run would count in which every call is right."""
    tally = Tally()
    for number in range(calls):
        tally.add(draw(0, number, "cuda"), Outcome(number, "right"))
    return tally


def test_every_layout_is_beside_every_feature():
    """5,000 calls have each pair 50 times."""
    tally = tallied(5000)
    assert tally.missing() == []
    assert [pair for pair in tally.cells if pair[1] in FEATURES and impossible(*pair)] == []


@pytest.mark.parametrize("by_modes", [False, True])
def test_programs_are_short_and_repeat(by_modes):
    texts = [draw(3, number, "cpu", by_modes=by_modes).text for number in range(120)]
    assert max(text.count("\n") for text in texts) <= LONGEST
    assert texts == [draw(3, number, "cpu", by_modes=by_modes).text for number in range(120)]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_calls_are_right(layout):
    number = LAYOUTS.index(layout) + len(LAYOUTS)
    program = draw(SEED, number, "cpu")
    outcome = run(program, number)
    assert outcome.kind == "right", f"{outcome.message}\n{program.text}"
    assert program.layout == layout


SEED = 7


def test_wrong_numbers_are_told():
    program = Program("call 0", "bhsd", 0, ["raise AssertionError('the error of out is 2.00 of the tolerance')"])
    tally = Tally()
    told = tally.add(program, run(program, 0))
    assert told is not None
    assert told.startswith("# wrong: the error of out is 2.00")
    assert program.lines[0] in told
    assert tally.failed()


def test_refusals_are_no_failures():
    assert refusal(Unsupported("no backend runs\n  gluon: takes fp16")) == "gluon: takes fpn"
    assert refusal(ValueError("q must have four dimensions")) is None
    assert refusal(TypeError("mask")) is None


@pytest.mark.rare
def test_crashes_and_hangs_are_failures_of_their_calls():
    """And a process that died is replaced."""
    lines = "import os; os.kill(os.getpid(), 9)", "import time; time.sleep(600)"
    draws = {i: Program(f"call {i}", "bhsd", i, [line]) for i, line in enumerate(lines)}.__getitem__
    found = {outcome.number: outcome for outcome in outcomes(draws, iter(range(2)), processes=2, limit=1)}
    assert [found[i].kind for i in range(2)] == ["crash", "hang"]
    assert "-9" in found[0].message
