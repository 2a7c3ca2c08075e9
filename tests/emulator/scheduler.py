"""Who runs next: programs and their partitions take turns at random, and asynchronous operations happen at some time.

A partition is a thread, and one at a time runs. It lets others go on where its code could meet theirs: at waits and
arrivals, atomics and asynchronous operations. Who goes on is drawn from all that can, by weights that are drawn too: a
seed may have copies that are late, or one partition that is far behind the others.
"""

from __future__ import annotations

import math
import random
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np


class EmulatorError(Exception):
    """What a GPU would have done wrong, or not at all."""


class Deadlock(EmulatorError):
    """Nobody can go on."""


class Race(EmulatorError):
    """Two that are not ordered use one place."""


class _Killed(BaseException):
    """Ends the threads of a launch that failed."""


class AsyncOperation:
    """Something asynchronous that a partition has started. `reads` and `writes` are tiles of shared memory."""

    def __init__(
        self,
        task: Partition,
        what: str,
        run: Callable[[], None],
        reads: tuple[Any, ...] = (),
        writes: tuple[Any, ...] = (),
        after: AsyncOperation | None = None,
    ) -> None:
        self.task, self.what, self.run, self.reads, self.writes, self.after = task, what, run, reads, writes, after
        self.done = False
        self.weight = task.program.machine.operation_weight()
        task.program.operations.append(self)

    def ready(self) -> bool:
        return self.after is None or self.after.done

    def perform(self) -> None:
        self.done = True
        self.task.program.operations.remove(self)
        self.run()


class GridProgram:
    """A program of the grid: its shared memory, its barriers, and what is under way in it."""

    def __init__(self, machine: Machine, number: int) -> None:
        self.machine, self.number = machine, number
        self.operations: list[AsyncOperation] = []
        self.memories: list[Any] = []
        self.mbarriers: dict[tuple[int, int], Any] = {}
        self.named: dict[int, Any] = {}
        self.tasks = 0
        self.time = 0
        """so many writes to shared memory by threads"""


class Partition:
    """A partition of a program: some warps that run the same code."""

    def __init__(self, program: GridProgram, name: str, warps: int, work: Callable[[], Any]) -> None:
        self.program, self.name, self.warps, self.work = program, name, warps, work
        self.turn = threading.Semaphore(0)
        self.thread: threading.Thread | None = None
        self.until: Callable[[], bool] | None = None
        self.waits_for: Callable[[], str] | str = ""
        self.done = False
        self.weight = program.machine.task_weight()
        # Of the partition's own operations those that it has not waited for.
        self.products: deque[AsyncOperation] = deque()
        self.stores: list[Any] = []
        self.copies: list[AsyncOperation] = []
        self.unfenced: list[Any] = []
        self.fenced = 0
        program.tasks += 1

    def ready(self) -> bool:
        return self.until is None or self.until()

    def __str__(self) -> str:
        return f"program {self.program.number}, {self.name}"


class Machine:
    """A launch: a grid of programs, of which so many run at a time."""

    current: Machine | None = None

    def __init__(self, seed: int, processors: int, memory: Any) -> None:
        self.memory = memory
        self.random = random.Random(seed)
        self.processors = processors
        self.tasks: list[Partition] = []
        self.programs: list[GridProgram] = []
        self.task: Any = None
        self.error: BaseException | None = None
        self.finished = threading.Semaphore(0)
        self.late = self.random.choice((0.02, 0.2, 1.0, 5.0))
        self.spread = self.random.choice((0.0, 1.0, 3.0))

    def task_weight(self) -> float:
        return 10 ** (self.spread * self.random.random())

    def operation_weight(self) -> float:
        return self.late * 10 ** (self.spread * self.random.random())

    def run(self, grid: tuple[int, ...], warps: int, work: Callable[[], Any]) -> None:
        """Runs `work` in each program."""
        self.work, self.warps = work, warps
        self.grid = grid
        self.waiting = iter(range(math.prod(grid)))
        Machine.current = self
        try:
            for _ in range(self.processors):
                self._next_program()
            if self.tasks:
                self._hand_on(self._drawn())
                self.finished.acquire()
        finally:
            Machine.current = None
        if self.error is not None:
            raise self.error

    def _next_program(self) -> None:
        number = next(self.waiting, None)
        if number is not None:
            program = GridProgram(self, number)
            self.programs.append(program)
            self.start(Partition(program, "default", self.warps, self.work))

    def start(self, task: Partition) -> None:
        """Adds a partition, which runs when it is drawn."""
        self.tasks.append(task)
        task.thread = threading.Thread(target=self._body, args=(task,), daemon=True)
        task.thread.start()

    def _body(self, task: Partition) -> None:
        task.turn.acquire()
        try:
            if self.error is None:
                with np.errstate(all="ignore"):  # threads have settings of their own
                    task.work()
                self._check_end(task)
        except _Killed:
            pass
        except BaseException as error:  # raised again by `run`
            if self.error is None:
                error.add_note(f"in {task}")
                self.error = error
        self._leave(task)

    def _check_end(self, task: Partition) -> None:
        if any(not x.waited for x in task.stores):
            raise Race(f"{task} ends while copies from its shared memory may still read: tma.store_wait is missing")
        if task.products:
            raise Race(f"{task} ends with products that it never waits for")
        program = task.program
        program.tasks -= 1
        if program.tasks:
            return
        for x in program.operations:
            if x.writes:
                raise Race(f"program {program.number} ends while {x.what} is under way")
        for barrier in program.mbarriers.values():
            barrier.check_end()

    def _leave(self, task: Partition) -> None:
        task.done = True
        self.tasks.remove(task)
        if self.error is None:
            if not task.program.tasks:
                self._next_program()
            try:
                if self.tasks:
                    self._hand_on(self._drawn())
                    return
                self._drain()
            except BaseException as error:  # raised again by `run`
                self.error = error
        if self.tasks:  # an error: one after the other they end
            self.tasks[-1].turn.release()
        else:
            self.finished.release()

    def _drain(self) -> None:
        while left := [x for x in self._operations() if x.ready()]:
            self.random.choice(left).perform()

    def _operations(self) -> list[AsyncOperation]:
        return [x for program in self.programs for x in program.operations]

    def _hand_on(self, task: Partition) -> None:
        self.task = task
        task.turn.release()

    def _drawn(self) -> Partition:
        """The partition that goes on; operations that are drawn before it happen."""
        while True:
            tasks = [x for x in self.tasks if x.ready()]
            operations = [x for x in self._operations() if x.ready()]
            if not tasks and not operations:
                raise Deadlock(self._report())
            drawn = self.random.choices(
                [*tasks, *operations], [x.weight for x in tasks] + [x.weight for x in operations]
            )[0]
            if isinstance(drawn, Partition):
                return drawn
            drawn.perform()

    def _report(self) -> str:
        waits = [f"  {x} waits for {x.waits_for() if callable(x.waits_for) else x.waits_for}" for x in self.tasks]
        return "nobody can go on:\n" + "\n".join(waits)

    def switch(self) -> None:
        """Lets others go on, or goes on."""
        task = self.task
        drawn = self._drawn()
        if drawn is not task:
            self._hand_on(drawn)
            task.turn.acquire()
            if self.error is not None:
                raise _Killed
        self.task = task

    def wait(self, until: Callable[[], bool], what: Callable[[], str] | str) -> None:
        """Goes on when `until` says so."""
        task = self.task
        task.until, task.waits_for = until, what
        self.switch()
        task.until = None


def machine() -> Machine:
    found = Machine.current
    if found is None:
        raise RuntimeError("device code runs inside a launch")
    return found


def this_partition() -> Partition:
    return machine().task
