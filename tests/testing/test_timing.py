"""Times of calls in turns."""

from __future__ import annotations

import pytest
import torch

from saccade.testing.timing import Clock, CudaStopwatch, Stopwatch, Timed, Times, measure, medians, rotated


@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_every_round_has_everyone_and_nobody_always_the_same_neighbour(n: int):
    names = [str(i) for i in range(n)]
    orders = list(rotated(names, 4 * n))
    assert all(sorted(order) == names for order in orders)
    assert {order[0] for order in orders} == set(names)
    for name in names if n > 2 else []:
        assert len({order[order.index(name) - 1] for order in orders if order[0] != name}) > 1


def test_samples_are_interleaved():
    called = []
    ready = {name: Timed(lambda name=name: called.append(name) or ()) for name in "abc"}
    found = measure(ready, torch.device("cpu"), Clock(rounds=3, sample=0.0), lambda name, problem: None)
    assert set(found) == set("abc")
    assert called[-9:] == [name for order in rotated(list("abc"), 3) for name in order]


def test_medians_and_quartiles_are_of_calls():
    assert Times.of([3e-3, 1e-3, 2e-3, 5e-3, 4e-3]) == Times(3.0, 2.0, 4.0)
    assert Times.of([1e-3]) == Times(1.0, 1.0, 1.0)


def test_on_a_gpu_events_are_around_calls_and_around_nothing_else(monkeypatch):
    log = []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            log.append("event")

        def elapsed_time(self, stop):
            return 6.0

    class Buffer:
        def zero_(self):
            log.append("flush")

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "_sleep", log.append, raising=False)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: log.append("wait"))
    watch = object.__new__(CudaStopwatch)
    watch.buffer = Buffer()
    assert watch.sample(Timed(lambda: log.append("call") or ()), 3, 1e-3) == pytest.approx(2e-3)
    assert log == ["flush", 2000000, "event", "call", "call", "call", "event", "wait"]
    log.clear()
    both = Timed(lambda: log.append("call") or (), before=lambda: log.append("before"))
    assert watch.sample(both, 2, 0.0) == pytest.approx(6e-3)
    assert log == ["flush", 0, *["before", "event", "call", "event"] * 2, "wait"]
    monkeypatch.setattr(Stopwatch, "on", lambda device: watch)
    found = measure({"a": Timed(list), "b": both}, torch.device("cuda"), Clock(3, 12e-3), pytest.fail)
    assert found["a"].ms > 0
    assert found["b"].ms == pytest.approx(6.0)


def test_what_a_call_raises_is_raised():
    with pytest.raises(ZeroDivisionError):
        medians({"right": list, "wrong": lambda: 1 / 0}, torch.device("cpu"), Clock(2, 0.0))
