"""Times of several callables in turns: drift (clocks, heat, other users) affects all of them alike.

Every round takes one sample of each. The next round reverses the order, and the one after that starts one further, so
that no callable always follows the same neighbour. On a GPU, events time a sample; before it the L2 cache is
overwritten, and a short spin lets the host run ahead, so that the events time the device alone.
"""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import torch

_SPIN = 10e-3
"""Seconds: the longest that the device waits for the host."""
_HERTZ = 2e9
"""A GPU's clock, roughly."""
_REPEATS = 1000

Failed = Callable[[str, Exception], None]
"""Is told which callable raised."""


@dataclass(frozen=True)
class Timed:
    """A call that does the work that is timed, and nothing else."""

    call: Callable[[], Any]
    before: Callable[[], None] | None = None
    """Prepares each call, untimed."""


@dataclass(frozen=True)
class Clock:
    """How long to measure."""

    rounds: int = 15
    """Samples of each callable; the figures are their median and quartiles."""
    sample: float = 4e-3
    """Seconds: a sample repeats the call until it takes about this long."""


@dataclass(frozen=True)
class Times:
    """Milliseconds of one call: median and quartiles over the samples."""

    ms: float
    ms_q1: float
    ms_q3: float

    @staticmethod
    def of(samples: list[float]) -> Times:
        """From seconds."""
        ms = sorted(1e3 * sample for sample in samples)
        if len(ms) == 1:
            return Times(ms[0], ms[0], ms[0])
        q1, median, q3 = statistics.quantiles(ms, n=4, method="inclusive")
        return Times(median, q1, q3)


class Stopwatch:
    """One sample: seconds for each of `repeats` calls."""

    def sample(self, prepared: Timed, repeats: int, lead: float) -> float:
        raise NotImplementedError

    @staticmethod
    def on(device: torch.device) -> Stopwatch:
        return CudaStopwatch(device) if device.type == "cuda" else HostStopwatch()


class HostStopwatch(Stopwatch):
    """For calls that are complete when they return."""

    def sample(self, prepared: Timed, repeats: int, lead: float) -> float:
        total = 0.0
        for _ in range(repeats):
            if prepared.before:
                prepared.before()
            start = time.perf_counter()
            prepared.call()
            total += time.perf_counter() - start
        return total / repeats


class CudaStopwatch(Stopwatch):
    """Events on the current stream."""

    def __init__(self, device: torch.device) -> None:
        cache = getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 64 << 20)
        size = max(256 << 20, 4 * cache)
        self.buffer = torch.empty(size, dtype=torch.uint8, device=device)

    def sample(self, prepared: Timed, repeats: int, lead: float) -> float:
        # A call with something before it is timed alone. Other calls follow one another inside one pair of events.
        groups, inside = (repeats, 1) if prepared.before else (1, repeats)
        pairs = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(groups)]
        self.buffer.zero_()
        torch.cuda._sleep(int(min(lead, _SPIN) * _HERTZ))
        for start, stop in pairs:
            if prepared.before:
                prepared.before()
            start.record()
            for _ in range(inside):
                prepared.call()
            stop.record()
        torch.cuda.synchronize()
        return sum(start.elapsed_time(stop) for start, stop in pairs) / 1e3 / repeats


@dataclass(frozen=True)
class _Pace:
    repeats: int
    lead: float
    """Seconds that the host needs to enqueue a sample."""


def measure(prepared: Mapping[str, Timed], device: torch.device, clock: Clock, failed: Failed) -> dict[str, Times]:
    """The Times of each, by name; those that raise have none."""
    watch = Stopwatch.on(device)
    paces: dict[str, _Pace] = {}
    for name, one in prepared.items():
        try:
            paces[name] = _paced(one, watch, clock)
        except Exception as problem:  # a peer may raise anything
            failed(name, problem)
    return in_turns(
        list(paces),
        clock.rounds,
        lambda name: watch.sample(prepared[name], paces[name].repeats, paces[name].lead),
        failed,
    )


def medians(calls: Mapping[str, Callable[[], Any]], device: torch.device, clock: Clock) -> dict[str, float]:
    """Median milliseconds of each call; what one of them raises is raised here."""
    failures: list[Exception] = []
    timed = {name: Timed(call) for name, call in calls.items()}
    times = measure(timed, device, clock, lambda name, failure: failures.append(failure))
    if failures:
        raise failures[0]
    return {name: round(of_call.ms, 4) for name, of_call in times.items()}


def in_turns(names: list[str], rounds: int, sample: Callable[[str], float], failed: Failed) -> dict[str, Times]:
    """The Times of each name: a sample is seconds of one call; a name whose sample raises has none."""
    samples: dict[str, list[float]] = {name: [] for name in names}
    for order in rotated(names, rounds):
        for name in order:
            if name not in samples:
                continue
            try:
                samples[name].append(sample(name))
            except Exception as problem:  # a peer may raise anything
                failed(name, problem)
                del samples[name]
    return {name: Times.of(seconds) for name, seconds in samples.items() if seconds}


def rotated(names: list[str], rounds: int) -> Iterator[list[str]]:
    """The order of each round.

    >>> list(rotated(["a", "b", "c"], 4))
    [['a', 'b', 'c'], ['c', 'b', 'a'], ['b', 'c', 'a'], ['a', 'c', 'b']]
    """
    for number in range(rounds):
        first = number // 2 % max(1, len(names))
        order = names[first:] + names[:first]
        yield order[::-1] if number % 2 else order


def _paced(one: Timed, watch: Stopwatch, clock: Clock) -> _Pace:
    """Warms up, and counts the calls that make a sample."""
    watch.sample(one, 1, 0.0)
    # With a full lead: the device's time alone, without its waits for the host.
    seconds = max(watch.sample(one, 2, _SPIN), 1e-7)
    repeats = max(1, min(_REPEATS, round(clock.sample / seconds)))
    if isinstance(watch, HostStopwatch):
        return _Pace(repeats, 0.0)
    start = time.perf_counter()
    if one.before:
        one.before()
    one.call()
    host = time.perf_counter() - start
    torch.cuda.synchronize()
    if not one.before:  # as many as the host enqueues while the device waits
        repeats = max(1, min(repeats, int(_SPIN / (1.5 * host))))
    return _Pace(repeats, 1e-4 + 1.5 * host * (1 if one.before else repeats))


# What a report says of the machine: devices by name, versions, and problems in one line.


def device_name(device: torch.device) -> str:
    """The name of the GPU, or of the processor with the number of threads."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        with open("/proc/cpuinfo") as lines:
            name = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        name = platform.processor() or platform.machine()
    return f"{name}, {torch.get_num_threads()} threads"


def version(package: str) -> str | None:
    """Of an installed package; None where there is none."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def described(problem: BaseException) -> str:
    """One line."""
    lines = str(problem).strip().splitlines() or [""]
    return f"{type(problem).__name__}: {lines[0]}"[:300]
