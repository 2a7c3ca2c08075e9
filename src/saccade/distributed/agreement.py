"""What ranks tell one another beside their collectives: where they are, and whether they are in the same exchange."""

from __future__ import annotations

from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

from torch.distributed import distributed_c10d

KNOWN = 4096
"""How many exchanges that ranks agreed on are known; then a group forgets them, on every rank at the same one."""


class Agreement:
    """Of the ranks of a group, through its store.

    A rank takes part in an exchange on devices without comparing it only where all ranks have compared the same one
    before: as all were there, all skip the comparison together. A rank that alone does something else waits in a
    comparison to which nobody comes, as the others wait for its rows: no row is exchanged, and all end by the timeout.
    """

    def __init__(self, name: str, rank: int, size: int) -> None:
        store: Any = distributed_c10d._get_default_store()
        # A connection of its own: who waits on one keeps other threads from it.
        self.store: Any = distributed_c10d.PrefixStore(f"saccade/{name}", store.clone())
        self.rank, self.size = rank, size
        self.exchanges = 0
        """How many this rank has begun in the group, by any plan."""
        self._meetings = 0
        self._known: set[str] = set()

    def note(self, what: str) -> None:
        """Where this rank is, for the others' errors."""
        self.store.set(f"at/{self.rank}", f"exchange {self.exchanges}: {what}")

    def notes(self) -> str:
        """Where each rank was last."""
        lines = []
        for rank in range(self.size):
            there = self.store.check([key := f"at/{rank}"])
            lines.append(f"  rank {rank}: {self.store.get(key).decode() if there else 'in no exchange yet'}")
        return "\n".join(lines)

    def known(self, what: str) -> bool:
        return what in self._known

    def meet(self, what: str, seconds: float) -> str:
        """What every rank says, a line for each; empty where all say the same.

        Raises:
            RuntimeError: ranks that do not come in time.
        """
        self._meetings += 1
        meeting, store = f"meeting/{self._meetings}", self.store
        store.set(f"{meeting}/{self.rank}", what)
        if store.add(f"{meeting}/count", 1) == self.size:  # the last one tells all
            found = [store.get(f"{meeting}/{i}").decode() for i in range(self.size)]
            differ = len({*found}) > 1
            store.set(f"{meeting}/told", "\n".join(f"  rank {i}: {text}" for i, text in enumerate(found)) * differ)
        store.wait([f"{meeting}/told"], timedelta(seconds=seconds))
        told = store.get(f"{meeting}/told").decode()
        self._forget(self._meetings - 1)
        if not told:
            if len(self._known) >= KNOWN:
                self._known.clear()
            self._known.add(what)
        return told

    def _forget(self, meeting: int) -> None:
        """One that all ranks have left, as all have come to the next."""
        names = [str(self.rank), *(("count", "told") if self.rank == 0 else ())]
        for name in names if meeting else ():
            self.store.delete_key(f"meeting/{meeting}/{name}")


_agreements: WeakKeyDictionary[Any, Agreement] = WeakKeyDictionary()


def agreement_of(group: Any) -> Agreement:
    """The one of a process group: it ends with it, and no plan has another."""
    found = _agreements.get(group)
    if found is None:
        _agreements[group] = found = Agreement(group.group_name, group.rank(), group.size())
    return found
