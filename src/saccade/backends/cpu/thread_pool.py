"""Work spread over threads of our own, each of which runs PyTorch's operations alone.

An operation that PyTorch itself spreads over threads ends in a barrier, and a tile has a dozen of them: with another
process on one of the cores, each of them waits for the slowest thread. Here a thread draws the next item after it has
done one. A slow core takes fewer items, and threads wait only at the end. A result has the same bits on any thread.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import cache
from typing import TypeVar

import torch

Item = TypeVar("Item")


def threads() -> int:
    """How many the caller may use: torch's number, or one where threads cannot have numbers of their own."""
    return torch.get_num_threads() if _own_numbers() else 1


def spread(items: Iterable[Item], start_worker: Callable[[], Callable[[Item], None]], workers: int) -> None:
    """Runs every item once, by at most `workers` threads, each of which calls `start_worker` for what runs its items.

    After the first exception no more items are drawn; it is raised when all threads are done.
    """
    queue, lock, stopped = iter(items), threading.Lock(), threading.Event()
    inference = torch.is_inference_mode_enabled()

    def draw() -> None:
        with torch.inference_mode(inference), torch.no_grad():
            run = start_worker()
            try:
                while not stopped.is_set():
                    with lock:
                        item = next(queue, _END)
                    if item is _END:
                        return
                    run(item)  # pyright: ignore[reportArgumentType]
            except BaseException:
                stopped.set()
                raise

    if workers <= 1:
        run = start_worker()
        for item in items:
            run(item)
        return
    futures: list[Future[None]] = []
    try:
        try:
            futures += [_executor().submit(draw) for _ in range(workers)]
        except RuntimeError:  # no more threads, as when the interpreter ends
            draw()
        wait(futures)
    except BaseException:
        stopped.set()
        wait(futures)
        raise
    for future in futures:
        future.result()


_END = object()


@cache
def _own_numbers() -> bool:
    """Whether each thread has a number of threads of its own, as with OpenMP, not one for the process."""
    return "ATen parallel backend: OpenMP" in torch.__config__.parallel_info()


@cache
def _executor() -> ThreadPoolExecutor:
    """It starts threads as they are needed, and keeps them."""
    return ThreadPoolExecutor(max(64, os.cpu_count() or 1), "saccade", _alone)


def _alone() -> None:
    """Makes this thread use no other. `set_num_threads` also sets what later threads begin with, so another thread
    restores that."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    again = threading.Thread(target=torch.set_num_threads, args=(before,))
    again.start()
    again.join()


if hasattr(os, "register_at_fork"):  # a forked process has none of the threads
    os.register_at_fork(after_in_child=_executor.cache_clear)
