"""The Programs of this process: each recording that is new is lowered, once, by one thread at a time.

No user code runs here. A fork waits for the end of what is being lowered, so that a child finds nothing half done.
"""

from __future__ import annotations

import os
import threading
import weakref
from contextlib import nullcontext
from typing import Any

import torch

from saccade.bounded_cache import CacheInfo
from saccade.scores.codegen.program import Program
from saccade.scores.hiding import hiding
from saccade.scores.recording.recorder import Recording, told
from saccade.scores.recording.tape import Refused
from saccade.scores.recording.trace import traced

MAXSIZE = 256


class _Cache:
    """Programs by the keys of recordings. It is read without a lock; what was not asked for goes first."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.programs: dict[Any, Program] = {}
        self.asked: set[Any] = set()
        """Keys that were found since one had to go."""
        self.by_identity: weakref.WeakValueDictionary[str, Program] = weakref.WeakValueDictionary()
        self.hits = self.misses = 0

    def program(self, recording: Recording, name: str) -> Program:
        key = name, recording.key
        found = self.programs.get(key)
        if found is None:
            with self.lock:
                found = self.programs.get(key)
                if found is None:
                    return self._lowered(key, recording, name)
        self.hits += 1
        self.asked.add(key)
        return found

    def _lowered(self, key: Any, recording: Recording, name: str) -> Program:
        self.misses += 1
        made = _apart(recording, name)
        # Equal programs are one, so that they share what is compiled.
        made = self.by_identity.setdefault(made.identity, made)
        if made.hiding is not None and (rest := made.hiding.rest) is not None:
            made.hiding = made.hiding._replace(rest=self.by_identity.setdefault(rest.identity, rest))
        self.programs[key] = made
        while len(self.programs) > MAXSIZE:
            oldest = next(iter(self.programs))
            held = self.programs.pop(oldest)
            if oldest in self.asked:
                self.asked.discard(oldest)
                self.programs[oldest] = held
        return made


def _apart(recording: Recording, name: str) -> Program:
    """In a thread of its own, where no mode, transform or context of the caller's is."""
    found: list[Any] = [None, None]

    def run() -> None:
        try:
            with _no_anomaly():
                raw = traced(recording)
                program = Program(name, raw, recording.tape.dtype)
                program.hiding = hiding(program, raw, recording.tape.numbers)
            found[0] = program
        except Refused as refused:
            found[1] = refused
        except Exception as failed:  # such as torch has no derivative of
            found[1] = Refused(told(failed))

    thread = threading.Thread(target=run, name="saccade lowers a score function")
    thread.start()
    thread.join()
    if found[1] is not None:
        raise found[1]
    return found[0]


def _no_anomaly() -> Any:
    """What torch looks for in derivatives of stand-ins it cannot find; the mode is one for all threads."""
    return torch.autograd.set_detect_anomaly(False) if torch.is_anomaly_enabled() else nullcontext()


cache = _Cache()
os.register_at_fork(before=cache.lock.acquire, after_in_parent=cache.lock.release, after_in_child=cache.lock.release)
pinned: dict[str, Program] = {}
"""Programs that compiled graphs name: those do not keep them alive."""


def program_of(identity: str) -> Any:
    """The Program of this name, or None."""
    return cache.by_identity.get(identity)


def cache_info() -> CacheInfo:
    """How many recordings of score functions were known, and how many had to be traced.

    >>> cache_info().maxsize
    256
    """
    return CacheInfo(cache.hits, cache.misses, MAXSIZE, len(cache.programs))


def cache_clear() -> None:
    """Forgets all traced score functions; those in use stay."""
    with cache.lock:
        cache.programs.clear()
        cache.asked.clear()
        cache.hits = cache.misses = 0
