"""Processes that run calls, one after the other: a hang or a crash of one is the failure of the call it was at."""

from __future__ import annotations

import linecache
import math
import multiprocessing
import os
import sys
import time
import traceback
import types
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from typing import Any

from saccade.util import hardware
from tests.random_calls.outcome import Outcome, refusal
from tests.random_calls.program import Program

Draw = Callable[[int], Program]
"""A call by its number; it crosses to another process."""


def run(program: Program, number: int) -> Outcome:
    """Runs the text of a call, here."""
    text, name = program.text, f"random_call_{number}"
    linecache.cache[name] = (len(text), None, text.splitlines(True), name)
    compiled: list[str] = []
    before = time.monotonic()
    sys.modules[name] = module = types.ModuleType(name)  # torch.compile looks for it
    found = module.__dict__
    try:
        with _listening(compiled):
            exec(compile(text, name, "exec"), found)
        kind, message = "right", ""
    except Exception as error:
        reason = refusal(error)
        wrong = isinstance(error, AssertionError) and "of the tolerance" in str(error)
        kind = "refused" if reason is not None else "wrong" if wrong else "error"
        message = reason if reason is not None else str(error) if wrong else _told(error)
    finally:
        del linecache.cache[name], sys.modules[name]
    backend = found["report"].backend if "report" in found else ""
    lost = kind == "error" and any(word in message for word in ("CUDA error", "AcceleratorError", "CUDA driver error"))
    return Outcome(number, kind, message, backend, bool(compiled), time.monotonic() - before, lost)


class _listening:
    """While it lasts, names of kernels that are compiled join a list."""

    def __init__(self, compiled: list[str]) -> None:
        self.compiled = compiled

    def __enter__(self) -> None:
        if "triton" not in sys.modules:
            return
        from triton import knobs

        def listen(**what: Any) -> None:
            if not what["cache_hit"]:
                self.compiled.append(str(what["src"].name))

        knobs.compilation.listener = listen

    def __exit__(self, *_: object) -> None:
        if "triton" in sys.modules:
            from triton import knobs

            knobs.compilation.listener = None


def _told(error: BaseException) -> str:
    """An error's type and text, and the last lines of the library that it came from."""
    frames = traceback.extract_tb(error.__traceback__)
    places = [f"{os.path.basename(x.filename)}:{x.lineno}" for x in frames if "saccade" in x.filename][-4:]
    return f"{type(error).__name__}: {str(error)[:600]}\nat {' '.join(places)}"


def serve(pipe: Connection, draw: Draw, threads: int) -> None:
    """Says that it is ready, and runs the calls whose numbers come, until the device is lost."""
    import torch

    torch.set_num_threads(threads)
    if hardware.triton_version():
        import triton  # noqa: F401  so that the listener hears of the first kernel
    pipe.send(None)  # ready
    lost = False
    while not lost:
        number = pipe.recv()
        outcome = run(draw(number), number)
        pipe.send(outcome)
        lost = outcome.lost


STARTING = 300
"""Seconds that a process may take to start."""


class Worker:
    """A process, and the call that it is at."""

    def __init__(self, draw: Draw, threads: int) -> None:
        self.pipe, there = multiprocessing.Pipe()
        context = multiprocessing.get_context("spawn")
        self.process = context.Process(target=serve, args=(there, draw, threads), daemon=True)
        self.process.start()
        there.close()
        self.number, self.since, self.ready = -1, 0.0, False

    def give(self, number: int) -> None:
        self.number, self.since = number, time.monotonic() + (0 if self.ready else STARTING)
        self.pipe.send(number)

    def take(self, limit: float) -> Outcome | None:
        """What became of the call, or None while it runs."""
        seconds = time.monotonic() - self.since
        if seconds > limit and not self.pipe.poll():
            return Outcome(self.number, "hang", f"no result after {limit:.0f} s", seconds=seconds, lost=True)
        if not self.pipe.poll():
            return None
        try:
            if (outcome := self.pipe.recv()) is None:
                self.since, self.ready = time.monotonic(), True
            return outcome
        except (EOFError, ConnectionError):
            self.process.join(5)
            message = f"the process ended with exit code {self.process.exitcode}"
            return Outcome(self.number, "crash", message, seconds=seconds, lost=True)

    def stop(self) -> None:
        self.process.kill()
        self.process.join()
        self.pipe.close()


def outcomes(
    draw: Draw, numbers: Iterator[int], processes: int, limit: float, threads: int = 1, grace: float = math.inf
) -> Iterator[Outcome]:
    """The outcome of each call, as they come.

    Args:
        limit: seconds that a call may take.
        threads: of each process.
        grace: seconds after the last number, in which calls may still end: those that do not have no outcome.
    """
    ends = math.inf
    idle: list[Worker | None] = [None] * processes
    busy: list[Worker] = []
    try:
        while True:
            while idle and ends == math.inf:
                if (number := next(numbers, None)) is None:
                    ends = time.monotonic() + grace
                    break
                worker = idle.pop() or Worker(draw, threads)
                worker.give(number)
                busy.append(worker)
            if not busy or time.monotonic() > ends:
                return
            wait([worker.pipe for worker in busy], timeout=1)
            for worker in [*busy]:
                if (outcome := worker.take(limit)) is None:
                    continue
                busy.remove(worker)
                if outcome.lost:
                    worker.stop()
                idle.append(None if outcome.lost else worker)
                yield outcome
    finally:
        for worker in filter(None, [*idle, *busy]):
            worker.stop()
