"""Tasks in processes of their own, of which one may die without taking the others with it."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from queue import SimpleQueue
from typing import TypeVar

Task = TypeVar("Task")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Died:
    """In place of the result of a task whose process ended before it, as LLVM ends one by `abort`."""

    def __str__(self) -> str:
        return "its process died; what it printed last may say why"


def in_processes(
    function: Callable[[Task], Result], tasks: Iterable[Task], count: int, *, fresh: bool = False
) -> Iterator[tuple[Task, Result | Died]]:
    """Each task with its result, in order; what a task raises is raised here.

    Args:
        count: how many processes run at once.
        fresh: every task has a new process.
    """
    # An executor whose process dies gives up all its tasks, and does not say which was at fault: each has one process.
    executors: SimpleQueue[ProcessPoolExecutor] = SimpleQueue()
    for _ in range(count):
        executors.put(_executor())

    def run(task: Task) -> Result | Died:
        executor, used_up = executors.get(), fresh
        try:
            return executor.submit(function, task).result()
        except BrokenProcessPool:
            used_up = True
            return Died()
        finally:
            if used_up:
                executor.shutdown()
                executor = _executor()
            executors.put(executor)

    todo = list(tasks)
    try:
        with ThreadPoolExecutor(count) as threads:
            try:
                yield from zip(todo, threads.map(run, todo), strict=True)
            finally:
                threads.shutdown(cancel_futures=True)
    finally:
        for _ in range(count):
            executors.get().shutdown()


def _executor() -> ProcessPoolExecutor:
    """Its process starts with its first task."""
    return ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))
