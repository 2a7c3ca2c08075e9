"""What is measured besides the time of a call: the host's time for it, a CUDA graph's, and the memory that it takes."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import torch

from benchmarks.harness.providers.base import Prepared, Results
from saccade.testing.timing import Clock, Failed, Times, in_turns

HOST_CALLS = 1000
"""Calls in one sample of the host's time."""


def measure_host(
    prepared: Mapping[str, Prepared], device: torch.device, clock: Clock, failed: Failed
) -> dict[str, Times]:
    """The host's time for one call: many calls in a row, without synchronization in between."""

    def sample(name: str, calls: int = HOST_CALLS) -> float:
        call = prepared[name].call
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        for _ in range(calls):
            call()
        seconds = (time.perf_counter() - start) / calls
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return seconds

    for name in prepared:
        sample(name, max(1, HOST_CALLS // 20))
    return in_turns(list(prepared), max(5, clock.rounds // 2), sample, failed)


def measure_with_host(
    prepared: Mapping[str, Prepared], device: torch.device, clock: Clock, failed: Failed
) -> dict[str, Times]:
    """The time of one call of several in a row, from an idle device to the last one's results."""
    paces: dict[str, int] = {}

    def sample(name: str) -> float:
        one, calls = prepared[name], paces.get(name, 2)
        seconds = 0.0
        # A call with something before it is timed alone.
        for inside in [1] * calls if one.before else [calls]:
            if one.before:
                one.before()
            _idle(device)
            start = time.perf_counter()
            for _ in range(inside):
                one.call()
            _idle(device)
            seconds += time.perf_counter() - start
        return seconds / calls

    for name in prepared:
        try:
            sample(name)
            paces[name] = max(2, min(HOST_CALLS, round(clock.sample / sample(name))))
        except Exception as problem:  # a peer may raise anything
            failed(name, problem)
    return in_turns(list(paces), clock.rounds, sample, failed)


def _idle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def captured(prepared: Prepared, device: torch.device) -> Prepared:
    """The call as a CUDA graph, as servers replay it: the host's time does not count. On a CPU, the call itself."""
    if device.type != "cuda":
        return prepared
    prepared.call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        prepared.call()
    return replace(prepared, call=partial(_replay, graph, prepared))


def _replay(graph: torch.cuda.CUDAGraph, _prepared: Prepared) -> Results:
    """Holds what was captured: the graph reads the memory of its operands, which may have no other owner."""
    graph.replay()
    return ()


def peak_mib(prepared: Prepared, device: torch.device) -> float | None:
    """The most device memory that a call allocates, in MiB."""
    if device.type != "cuda":
        return None
    prepared.call()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    prepared.call()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20
