"""Where partitions meet: mbarriers in shared memory, and the named barriers of the hardware."""

from __future__ import annotations

from typing import Any

from tests.emulator.memory import SharedTile
from tests.emulator.scheduler import EmulatorError, Partition, machine, this_partition


class MBarrier:
    """Counts arrivals and bytes; a phase completes when both are there."""

    def __init__(self, name: str, count: int) -> None:
        self.name, self.count, self.pending = name, count, count
        self.bytes = 0
        """expected less those that came"""
        self.phases = 0
        """completed"""

    def __str__(self) -> str:
        return f"{self.name} in phase {self.phases}, which lacks {self.pending} arrivals and {self.bytes} bytes"

    def arrive(self, count: int = 1, expected: int = 0) -> None:
        if count > self.pending:
            raise EmulatorError(f"{this_partition()} arrives once too often: {self}")
        self.pending -= count
        self.bytes += expected
        self._complete()

    def land(self, count: int) -> None:
        self.bytes -= count
        self._complete()

    def passed(self, parity: int) -> bool:
        return self.phases & 1 != parity

    def _complete(self) -> None:
        if not self.pending and not self.bytes:
            self.phases += 1
            self.pending = self.count

    def check_end(self) -> None:
        if self.bytes:
            raise EmulatorError(f"other bytes came than were expected: {self}")


def mbarrier_at(tile: SharedTile) -> MBarrier:
    key = id(tile.memory), int(tile.places.min())
    found = this_partition().program.mbarriers.get(key)
    if found is None:
        raise EmulatorError(f"{this_partition()} uses an mbarrier before mbarrier.init")
    return found


def init(tile: SharedTile, count: int) -> None:
    barriers = this_partition().program.mbarriers
    key = id(tile.memory), int(tile.places.min())
    if key in barriers:
        raise EmulatorError(f"{this_partition()} makes an mbarrier twice")
    number = next(i for i, x in enumerate(this_partition().program.memories) if x is tile.memory)
    barriers[key] = MBarrier(f"mbarrier {int(tile.places.min()) // 8} of allocation {number}", int(count))


def wait(tile: SharedTile, phase: Any, pred: Any = True, deps: Any = ()) -> None:
    if not pred:
        return
    barrier, parity = mbarrier_at(tile), int(phase)
    if parity not in (0, 1):
        raise EmulatorError(f"{this_partition()} waits for phase {parity}: phases are 0 and 1 in turn")
    machine().wait(lambda: barrier.passed(parity), lambda: f"phase {parity} of {barrier}")


def arrive(tile: SharedTile, *, count: int = 1, pred: Any = True) -> None:
    if pred:
        mbarrier_at(tile).arrive(int(count))
        machine().switch()


def expect(tile: SharedTile, bytes_per_cta: Any, pred: Any = True) -> None:
    if pred:
        mbarrier_at(tile).arrive(1, int(bytes_per_cta))
        machine().switch()


class NamedBarrier:
    """Counts threads of those who arrive and of those who wait."""

    def __init__(self, number: int, threads: int) -> None:
        self.number, self.threads = number, threads
        self.there: list[Partition] = []
        self.rounds = 0

    def __str__(self) -> str:
        count = sum(32 * x.warps for x in self.there)
        return f"named barrier {self.number}, where {count} of {self.threads} threads are"

    def enter(self, task: Partition, threads: int) -> None:
        if threads != self.threads:
            if self.there:
                raise EmulatorError(f"{task} comes with {threads} threads in mind to {self}")
            self.threads = threads
        if task in self.there:
            raise EmulatorError(f"{task} comes a second time to {self}")
        self.there.append(task)
        count = sum(32 * x.warps for x in self.there)
        if count > threads:
            raise EmulatorError(f"{task} is one too many at {self}")
        if count == threads:
            self.there.clear()
            self.rounds += 1


def _named(number: int, threads: int) -> NamedBarrier:
    if not 0 <= number < 16:
        raise EmulatorError(f"{this_partition()} uses named barrier {number} of 16")
    return this_partition().program.named.setdefault(number, NamedBarrier(number, threads))


def named_sync(number: int, threads: int) -> None:
    barrier = _named(number, threads)
    rounds = barrier.rounds
    barrier.enter(this_partition(), threads)
    machine().wait(lambda: barrier.rounds > rounds, lambda: str(barrier))


def named_arrive(number: int, threads: int) -> None:
    _named(number, threads).enter(this_partition(), threads)
    machine().switch()
