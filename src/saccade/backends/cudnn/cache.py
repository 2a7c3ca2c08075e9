"""Graphs that were built, by what they were built for."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any

from saccade.scores import CacheInfo

MAXSIZE = 128
"""A built graph holds its compiled kernels."""


class GraphCache:
    """Bounded, least recently used first to go, safe for threads. What fails to be built is not kept."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.graphs: OrderedDict[Hashable, Any] = OrderedDict()
        self.hits = self.misses = 0

    def built(self, key: Hashable, build: Callable[[], Any]) -> Any:
        """One thread builds at a time: two would build the same."""
        with self.lock:
            found = self.graphs.get(key)
            if found is not None:
                self.hits += 1
                self.graphs.move_to_end(key)
                return found
            self.misses += 1
            found = self.graphs[key] = build()
            if len(self.graphs) > MAXSIZE:
                self.graphs.popitem(last=False)
            return found

    def info(self) -> CacheInfo:
        """`misses` counts the graphs that were built, or that cuDNN refused to build."""
        with self.lock:
            return CacheInfo(self.hits, self.misses, MAXSIZE, len(self.graphs))

    def clear(self) -> None:
        with self.lock:
            self.graphs.clear()
            self.hits = self.misses = 0


cache = GraphCache()
