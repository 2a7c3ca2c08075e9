"""The Programs of this process: each new recording is lowered once, by one thread at a time.

No user code runs here. A fork waits until a lowering ends, so that a child process finds nothing half done.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, TypeVar

import torch

from saccade.bounded_cache import BoundedCache, CacheInfo
from saccade.scores.codegen.program import Program
from saccade.scores.recording.recorder import Recording, error_text
from saccade.scores.recording.tape import Refused
from saccade.scores.recording.trace import trace

T = TypeVar("T")


class _ProgramCache:
    """Programs by the keys of recordings, and by their identities."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.programs: BoundedCache[Any, Program] = BoundedCache(256)
        self.by_identity: weakref.WeakValueDictionary[str, Program] = weakref.WeakValueDictionary()
        self.lowered = 0

    def program(self, recording: Recording, name: str) -> Program:
        key = name, recording.key
        program = self.programs.get(key)
        if program is None:
            with self.lock:
                program = self.programs.get(key) or self.programs.put(key, self._lower(recording, name))
        return program

    def _lower(self, recording: Recording, name: str) -> Program:
        self.lowered += 1
        # Equal programs are one, so that they share what is compiled.
        return self.unique(_in_thread(lambda: Program(name, trace(recording), recording.tape.dtype)))

    def derive(self, program: Program, key: str, make: Callable[[], Any]) -> Any:
        """What `make` returns, once for each program. It runs as a lowering does."""
        if key not in program.emitted:
            with self.lock:
                if key not in program.emitted:
                    program.emitted[key] = _in_thread(make)
        return program.emitted[key]

    def adopt(self, identity: str, make: Callable[[], Program]) -> None:
        """Keeps a Program under the name that graphs of another process have for it."""
        with self.lock:
            program = self.by_identity.get(identity) or self.unique(_in_thread(make))
            pinned[identity] = self.by_identity[identity] = program

    def unique(self, program: Program) -> Program:
        return self.by_identity.setdefault(program.identity, program)


def _in_thread(make: Callable[[], T]) -> T:
    """Calls `make` in a thread of its own, which has no mode, transform or context of the caller."""
    results: list[T] = []
    errors: list[Refused] = []

    def run() -> None:
        # Anomaly detection is one mode for all threads. It finds nothing in derivatives of stand-ins.
        quiet = torch.autograd.set_detect_anomaly(False) if torch.is_anomaly_enabled() else nullcontext()
        try:
            with quiet:
                results.append(make())
        except Refused as refused:
            errors.append(refused)
        except Exception as failed:  # such as an operation without a derivative
            errors.append(Refused(error_text(failed)))

    thread = threading.Thread(target=run, name="saccade lowers a score function")
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


cache = _ProgramCache()
os.register_at_fork(before=cache.lock.acquire, after_in_parent=cache.lock.release, after_in_child=cache.lock.release)
pinned: dict[str, Program] = {}
"""Programs that compiled and exported graphs name, which do not keep them alive."""


def program_of(identity: str) -> Any:
    """The Program of this name, or None."""
    return cache.by_identity.get(identity)


def cache_info() -> CacheInfo:
    """How many recordings of score functions were known, and how many had to be traced.

    >>> cache_info().maxsize
    256
    """
    return cache.programs.info()._replace(misses=cache.lowered)


def cache_clear() -> None:
    """Forgets all traced score functions; those in use stay."""
    with cache.lock:
        cache.programs.clear()
        cache.lowered = 0
