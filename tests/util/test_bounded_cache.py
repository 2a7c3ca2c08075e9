"""BoundedCache: what goes when it is full, when its owners die, and after a fork."""

from __future__ import annotations

import gc
import os
import threading

import numpy as np
import pytest
import torch

from saccade.util.caches import BoundedCache, derived, derived_from_values


def test_what_was_not_asked_for_goes_first():
    cache = BoundedCache[str, int](2)
    cache.put("a", 1)
    cache.put("b", 2)
    assert cache.get("a") == 1
    cache.put("c", 3)
    assert (cache.get("a"), cache.get("b"), cache.get("c")) == (1, None, 3)
    assert cache.info() == (3, 1, 2, 2)
    cache.clear()
    assert cache.info() == (0, 0, 2, 0)


def test_a_new_entry_stays_where_all_others_were_asked_for():
    cache = BoundedCache[str, int](2)
    for key in "abcd":
        cache.put(key, 1)
        assert (cache.get(key), len(cache)) == (1, min(ord(key) - ord("a") + 1, 2)), key
    cache.put("larger than all", 5, size=3)
    assert (cache.get("larger than all"), len(cache)) == (5, 1)


def test_sizes_add_up():
    cache = BoundedCache[str, int](10)
    for key, size in (("a", 4), ("b", 4), ("b", 6), ("c", 5)):
        cache.put(key, size, size=size)
    assert (cache.get("a"), cache.get("b"), cache.get("c")) == (None, None, 5)


def test_none_is_a_value():
    cache, count = BoundedCache[str, None](2), []
    for _ in range(3):
        assert cache.get_or_make("a", lambda: count.append(1)) is None
    assert len(count) == 1


def test_an_entry_dies_with_its_owner():
    class Owner:
        pass

    cache, owner, x = BoundedCache[str, int](8), Owner(), torch.zeros(4)
    cache.put("object", 1, [owner])
    cache.put("tensor", 2, [x[:2]])
    assert (cache.get("object"), cache.get("tensor")) == (1, 2)
    del owner
    gc.collect()
    assert cache.get("object") is None
    del x
    cache.put("another", 3, [torch.zeros(1)])
    assert cache.get("tensor") is None
    with pytest.raises(TypeError, match="weak reference"):
        cache.put("number", 4, [5])


def test_a_fork_while_another_thread_holds_the_lock():
    cache = BoundedCache[str, int](8)
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with cache._lock:
            held.set()
            done.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    child = os.fork()
    if child == 0:
        os._exit(cache.put("a", 0))
    done.set()
    thread.join()
    assert os.waitpid(child, 0)[1] == 0


def test_derived_from_values_until_they_differ():
    """Writes by numpy are not counted."""
    array, count = np.arange(4), []
    x = torch.from_numpy(array)

    def total() -> int:
        count.append(1)
        return int(x.sum())

    assert [derived_from_values("total", [x], total) for _ in range(2)] == [6, 6]
    assert len(count) == 1
    array[0] = 5
    assert [derived_from_values("total", [x], total) for _ in range(2)] == [11, 11]
    assert len(count) == 2
    with torch.inference_mode():
        y = torch.ones(1)
        assert [derived_from_values("inference", [y], lambda: len(count)) for _ in range(2)] == [2, 2]
        y += 1
        count.append(1)
        assert derived_from_values("inference", [y], lambda: len(count)) == 3


def test_derived_until_a_write():
    x, count = torch.arange(4), []

    def total() -> int:
        count.append(1)
        return int(x.sum())

    assert [derived("total", [x], total) for _ in range(2)] == [6, 6]
    assert len(count) == 1
    x[0] = 5
    assert derived("total", [x], total) == 11
    with torch.inference_mode():  # which does not count writes
        y = torch.ones(1)
        assert [derived("inference", [y], lambda: len(count)) for _ in range(2)] == [2, 2]
