"""The cpu backend in the place of one with kernels: its replays compute what the call did, on what lies at the
addresses that they get, as kernels do. So a key that lacks something gives another call's result, which the long way
does not."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from saccade.backends import cpu
from saccade.call import flatten, unflatten
from saccade.ops import execution, replay


class Replay:
    """Does a call again on what lies at other addresses."""

    static = None

    def __init__(self, work: Any, operands: list[Tensor], done: list[str]) -> None:
        self.plan, self.call, self.rest = work.args
        self.operands = operands
        self.lies = [(x.shape, x.stride(), x.dtype) for x in operands]
        self.function, self.done = work.func, done
        self.backward = self.function is execution._planned_backward
        self.stopped = False

    def ready(self) -> bool:
        return not self.stopped

    def nothing(self) -> Tensor:
        return torch.empty(0, dtype=self.call.lse_dtype())

    def __call__(self, addresses: list[int]) -> list[Tensor | None]:
        self.done.append("backward" if self.backward else "forward")
        given = [at(address, *lie) for address, lie in zip(addresses, self.lies, strict=True)]
        others = {id(x): y for x, y in zip(self.operands, given, strict=True)}
        rest, flat = self.rest, [other(x, others) for x in flatten(self.call, self.plan.backend)]
        out = self.call.given[3]
        call, _ = unflatten(*flat, out=None if out is None else others[id(out)])
        if self.backward:
            with_dlse = rest.dlse is not None
            dout, dlse, out, lse = given[:4] if with_dlse else (given[0], None, *given[1:3])
            views = {"dout": call.layout.canonical(dout), "out": call.layout.canonical(out)}
            of_rows = {
                name: x if x is None else call.layout.canonical_lse(x) for name, x in (("lse", lse), ("dlse", dlse))
            }
            rest = replace(rest, **views, **of_rows)
        with torch._C._AutoDispatchBelowAutograd():
            results = list(self.function(self.plan, call, rest))
        return [None if x is out and not self.backward else x for x in results]


def other(x: Any, others: dict[int, Tensor]) -> Any:
    """What stands in the place of an operand."""
    if isinstance(x, (list, tuple)):
        return [other(y, others) for y in x]
    return others[id(x)] if isinstance(x, Tensor) else x


def at(address: int, shape: torch.Size, strides: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """What lies in memory."""
    size = 1 + sum((n - 1) * m for n, m in zip(shape, strides, strict=True))
    raw = (ctypes.c_char * (size * dtype.itemsize)).from_address(address)
    return torch.frombuffer(raw, dtype=dtype).as_strided(shape, strides)


class LaunchRecorder:
    """What `CallKey.recorded` asks a backend for."""

    compiles = False

    def __init__(self, done: list[str]) -> None:
        self.done, self.work = done, None

    def __enter__(self) -> None:
        pass

    def __exit__(self, *of: Any) -> None:
        pass

    def replay(self, operands: list[Tensor], results: Any) -> Replay | None:
        known = {*map(id, operands)}
        plan, call, _ = self.work.args
        read = [x for of in flatten(call, plan.backend) for x in (of if isinstance(of, (list, tuple)) else [of])]
        unknown = [x for x in read if isinstance(x, Tensor) and id(x) not in known]
        return None if unknown else Replay(self.work, operands, self.done)


@pytest.fixture
def done(monkeypatch: pytest.MonkeyPatch) -> Any:
    """What was replayed."""
    done: list[str] = []
    recorders: list[LaunchRecorder] = []

    def recorder() -> LaunchRecorder:
        recorders.append(LaunchRecorder(done))
        return recorders[-1]

    recorded = replay.CallKey.recorded

    def noted(self: Any, module: Any, more: Any, work: Callable[[], Any]) -> Any:
        def noted_work() -> Any:
            for one in recorders:
                one.work = one.work or work
            return work()

        return recorded(self, module, more, noted_work)

    monkeypatch.setattr(replay.CallKey, "recorded", noted)
    monkeypatch.setattr(replay, "on_host", lambda x: False)
    monkeypatch.setattr(cpu, "recorder", recorder, raising=False)
    replay.forget()
    yield done
    replay.forget()
