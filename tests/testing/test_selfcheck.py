"""The check that users run on their machines."""

from __future__ import annotations

import json
from functools import partial

import pytest
import torch

from saccade import attention
from saccade.testing import accuracy, selfcheck
from saccade.testing.timing import Clock


@pytest.fixture(autouse=True)
def _short(monkeypatch):
    monkeypatch.setattr(selfcheck, "CASES", ["causal", "packed", "sink"])
    monkeypatch.setattr(selfcheck, "CLOCK", Clock(rounds=1, sample=0.0))


def told(capsys, *words: str) -> tuple[int, str]:
    with pytest.raises(SystemExit) as stop:
        selfcheck.main([*words, "--device", "cpu"])
    return int(stop.value.code or 0), capsys.readouterr().out


def test_this_machine_is_right(capsys):
    code, text = told(capsys)
    assert code == 0
    assert "8 of 8 right" in text
    assert "times as fast" in text
    assert f"torch {torch.__version__}" in text


def test_as_json(capsys):
    code, text = told(capsys, "--json")
    found = json.loads(text)
    assert code == 0
    assert {outcome["case"] for outcome in found["outcomes"]} == {"causal", "packed", "sink", "paged"}
    assert all(outcome["passed"] and outcome["error"] <= 1 for outcome in found["outcomes"])
    assert len(found["speeds"]) == 2
    assert found["peers"]["xformers"] is None or isinstance(found["peers"]["xformers"], str)


def test_wrong_results_are_said_and_not_timed(capsys, monkeypatch):
    """An LSE that is a hundredth too large."""

    def wrong(*arguments, **keywords):
        found = attention(*arguments, **keywords)
        return found._replace(lse=found.lse + 0.01) if keywords.get("return_lse") else found

    monkeypatch.setattr(accuracy, "check", partial(accuracy.check, function=wrong))
    code, text = told(capsys)
    assert code == 1
    assert "0 of 8 right" in text
    assert "WRONG" in text
    assert "times as fast" not in text


def test_what_fails_is_named(capsys, monkeypatch):
    def fails(*arguments, **keywords):
        raise RuntimeError("no compiler\nmore")

    monkeypatch.setattr(accuracy, "check", fails)
    code, text = told(capsys)
    assert code == 1
    assert "RuntimeError: no compiler\n" in text


def test_refusals_are_named(capsys):
    code, text = told(capsys, "--backend", "cudnn")
    assert code == 1
    assert "cudnn: runs on sm80+, not on cpu" in text


def test_time_may_end(capsys):
    """One case of each dtype runs whatever the clock says."""
    code, text = told(capsys, "--seconds", "1e-9")
    assert code == 0
    assert "2 of 2 right; no time for 6 more" in text


@pytest.mark.parametrize(
    ("option", "word"),
    [("backend", "nonsense"), ("device", "nonsense"), *(("seconds", word) for word in ("many", "0", "-1", "nan"))],
)
def test_wrong_words_are_usage_errors(option, word, capsys):
    with pytest.raises(SystemExit) as stop:
        selfcheck.main([f"--{option}", word])
    assert stop.value.code == 2
    told = capsys.readouterr()
    assert f"argument --{option}" in told.err or f"--{option} {word!r}" in told.err
    assert word in told.err
    assert not told.out
