"""The collectives of a plan, with errors that name rank, stage and exchange."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

KNOWN = 4096
"""The most agreed exchanges that a group remembers. Then it forgets all, on every rank at the same exchange."""


class Agreement:
    """Agreement of the ranks of a group on what they exchange, through the group's store.

    On devices, a rank skips the comparison before an exchange only if all ranks have compared the same exchange
    before. All ranks then skip it together. A rank that alone does something else waits in a comparison, while the
    others wait for its rows. No row is exchanged, and all ranks end by the timeout.
    """

    def __init__(self, name: str, rank: int, size: int) -> None:
        store: Any = distributed_c10d._get_default_store()
        # A connection of its own: who waits on one keeps other threads from it.
        self.store: Any = distributed_c10d.PrefixStore(f"saccade/{name}", store.clone())
        self.rank, self.size = rank, size
        self.exchanges = 0
        """The exchanges that this rank has begun in the group, with any plan."""
        self._meetings = 0
        self._known: set[str] = set()

    def note(self, what: str) -> None:
        """Publishes what this rank does, for the errors of other ranks."""
        self.store.set(f"at/{self.rank}", f"exchange {self.exchanges}: {what}")

    def notes(self) -> str:
        """What each rank did last, one line per rank."""
        lines = []
        for rank in range(self.size):
            there = self.store.check([key := f"at/{rank}"])
            lines.append(f"  rank {rank}: {self.store.get(key).decode() if there else 'in no exchange yet'}")
        return "\n".join(lines)

    def known(self, what: str) -> bool:
        return what in self._known

    def meet(self, what: str, seconds: float) -> str:
        """One line per rank with what it says, or an empty string if all ranks say the same. Raises RuntimeError if a
        rank does not arrive in time."""
        self._meetings += 1
        meeting, store = f"meeting/{self._meetings}", self.store
        store.set(f"{meeting}/{self.rank}", what)
        if store.add(f"{meeting}/count", 1) == self.size:  # the last one tells all
            found = [store.get(f"{meeting}/{i}").decode() for i in range(self.size)]
            differ = len({*found}) > 1
            store.set(f"{meeting}/report", "\n".join(f"  rank {i}: {text}" for i, text in enumerate(found)) * differ)
        store.wait([f"{meeting}/report"], timedelta(seconds=seconds))
        report = store.get(f"{meeting}/report").decode()
        self._forget(self._meetings - 1)
        if not report:
            if len(self._known) >= KNOWN:
                self._known.clear()
            self._known.add(what)
        return report

    def _forget(self, meeting: int) -> None:
        """Deletes the keys of a meeting. All ranks have left it, because all have arrived at the next one."""
        names = [str(self.rank), *(("count", "report") if self.rank == 0 else ())]
        for name in names if meeting else ():
            self.store.delete_key(f"meeting/{meeting}/{name}")


_agreements: WeakKeyDictionary[Any, Agreement] = WeakKeyDictionary()


def agreement_of(group: Any) -> Agreement:
    """The one Agreement of a process group, shared by all plans. It lives as long as the group."""
    found = _agreements.get(group)
    if found is None:
        _agreements[group] = found = Agreement(group.group_name, group.rank(), group.size())
    return found


@dataclass
class Transport:
    """The exchanges of one group of ranks."""

    group_name: str
    rank: int
    size: int
    plan: str
    """The fingerprint of what must be equal on all ranks, with text for errors."""
    timeout: float | None = None
    """The most seconds of an exchange; None takes the timeout of the group."""
    debug: bool = False
    """Whether ranks on devices compare every exchange instead of the first of each kind. CPUs always do."""

    def all_to_all(
        self, x: Tensor, received: Sequence[int], sent: Sequence[int], stage: str, of: Sequence[Tensor] | None = None
    ) -> Tensor:
        """Rows of x, `sent[i]` of them to rank i in order; returns the rows of all others, `received[i]` of rank i.
        `of` is what x is made of, for errors."""
        of = of or [x]
        group = self.begin(of, stage)
        flat, out = _numbers(x.contiguous()), _numbers(x.new_empty(sum(received), *x.shape[1:]))
        arguments = out, flat, list(received), list(sent)
        self._run(stage, of, lambda: dist.all_to_all_single(*arguments, group=group, async_op=True))
        return out.view(x.dtype)

    def broadcast(self, x: Tensor, stage: str) -> Tensor:
        """Rank 0's x, in place."""
        group = self.begin([x], stage)
        self._run(stage, [x], lambda: dist.broadcast(x, group=group, group_src=0, async_op=True))
        return x

    def begin(self, xs: Sequence[Tensor], stage: str) -> Any:
        """The process group, after all ranks have agreed on plan, stage, dtype and row shapes of the next exchange.
        Raises RuntimeError if ranks are in different exchanges, or a rank does not arrive."""
        group = self.group(stage)
        ranks = agreement_of(group)
        ranks.exchanges += 1
        mine, device = f"plan {self.plan}, {stage}, rows of {_named(xs, 1)}", xs[0].device
        if device.type == "cpu":
            ranks.note(mine)
            mine += f", exchange {ranks.exchanges}"  # that of a call which this rank missed is another
            if self._equal(group, mine, stage, xs):
                return group
        elif ranks.known(mine) and not self.debug:
            return group
        else:
            ranks.note(mine)
        try:
            report = ranks.meet(mine, self.timeout or group_seconds(group, device))
        except RuntimeError as error:
            raise RuntimeError(self.report(stage, xs, error)) from error
        if report:
            raise RuntimeError(f"ranks are in different exchanges:\n{report}")
        return group

    def _equal(self, group: Any, mine: str, stage: str, xs: Sequence[Tensor]) -> bool:
        """Whether all ranks say the same, on CPUs. It uses a collective of the group, which notices a rank that has
        ended at once. Either every rank finds a difference, or none does."""
        digest = int.from_bytes(hashlib.sha256(mine.encode()).digest()[:7], "little")
        given, found = (
            torch.full((self.size,), digest, device="cpu"),
            torch.empty(self.size, dtype=torch.int64, device="cpu"),
        )
        self._run(stage, xs, lambda: dist.all_to_all_single(found, given, group=group, async_op=True))
        return bool((found == digest).all())

    def group(self, stage: str) -> Any:
        """The process group, after a check that it has not changed since the plan was made."""
        if not self.group_name:
            raise RuntimeError(
                f"{stage}: the plan was made for {self.size} ranks without processes: pass plan(…, group) a group"
            )
        group = distributed_c10d._resolve_process_group(self.group_name)  # pyright: ignore[reportPrivateImportUsage, reportArgumentType]
        if (group.rank(), group.size()) != (self.rank, self.size):
            raise RuntimeError(
                f"{stage}: the plan is for rank {self.rank} of {self.size}, and its group now has rank {group.rank()} "
                f"of {group.size()}: make a new plan"
            )
        return group

    def _run(self, stage: str, xs: Sequence[Tensor], start: Any) -> None:
        try:
            work = start()
            # With a timeout NCCL's wait would block the host: its own watchdog ends what takes too long.
            if self.timeout is None or xs[0].device.type == "cuda":
                work.wait()
            else:
                work.wait(timedelta(seconds=self.timeout))
        except RuntimeError as error:
            raise RuntimeError(self.report(stage, xs, error)) from error

    def report(self, stage: str, xs: Sequence[Tensor], error: object) -> str:
        ranks = agreement_of(self.group(stage))
        try:
            stages = ranks.notes()
        except RuntimeError:
            stages = "  unknown: the group's store has ended too"
        return (
            f"rank {self.rank} of {self.size}: {stage}, exchange {ranks.exchanges} of its group, of {_named(xs)}, "
            f"failed; another rank has failed, or is not in the same call: {error}\nWhere ranks were last:\n{stages}"
        )


def group_seconds(group: Any, device: torch.device) -> float:
    """The timeout of the group itself, in seconds."""
    try:
        return group._get_backend(device).options._timeout.total_seconds()
    except (AttributeError, RuntimeError):
        return 600.0


@contextmanager
def counted(*transports: Transport) -> Iterator[None]:
    """Counts a call that fails before its exchange as one exchange. The other ranks have begun theirs, and what they
    sent must not reach the next call."""
    groups = [agreement_of(x.group("attention")) for x in transports if x.group_name and x.size > 1]
    begun = [x.exchanges for x in groups]
    try:
        yield
    except Exception:
        for x, count in zip(groups, begun, strict=True):
            x.exchanges = max(x.exchanges, count + 1)
        raise


def _named(xs: Sequence[Tensor], first: int = 0) -> str:
    return f"{xs[0].dtype} {' and '.join(str(tuple(x.shape[first:])) for x in xs)}"


def _numbers(x: Tensor) -> Tensor:
    """x viewed as a dtype that gloo supports."""
    return x.view(torch.float16) if x.dtype in (torch.bfloat16, torch.int16) else x
