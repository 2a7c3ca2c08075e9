"""Memory that outlives a call: made as if the caller had no mode, transform, pool or capture."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from saccade.util.kept_memory import keep


class Seen(TorchDispatchMode):
    """Notes what it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.operations.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def where(request: pytest.FixtureRequest) -> str:
    if request.param == "cuda":
        torch.cuda.init()
    return request.param


def test_modes_and_transforms_are_left(where: str) -> None:
    def make() -> Tensor:
        return torch.ones(3, device=where, requires_grad=False) * 2

    kept: list[Tensor] = []

    def f(x: Tensor) -> Tensor:
        kept.append(keep(make))
        return (x * kept[-1]).sum()

    with Seen() as seen:
        kept.append(keep(make))
    assert not seen.operations
    with torch.inference_mode():
        kept.append(keep(make))
    torch.func.grad(f)(torch.randn(3, device=where))
    for x in kept:
        assert not x.is_inference()
        assert not x.requires_grad
        assert type(x) is Tensor
        assert torch.equal(x + 1, torch.full((3,), 3.0, device=where))  # nothing of a transform that has ended


def test_errors_are_the_callers(where: str) -> None:
    def fails() -> None:
        raise KeyError("a name")

    with pytest.raises(KeyError, match="a name"):
        keep(fails)


@pytest.mark.gpu
def test_pools_of_the_caller_are_not_used() -> None:
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        kept = keep(lambda: torch.zeros(1 << 20, device="cuda"))
        assert not pool.snapshot()
        own = torch.zeros(1 << 20, device="cuda")
        assert pool.snapshot()
    assert torch.equal(kept, own)


@pytest.mark.gpu
@pytest.mark.parametrize("current", [True, False], ids=["current", "side"])
def test_work_is_ordered_behind_the_callers_stream(current: bool) -> None:
    stream = torch.cuda.current_stream() if current else torch.cuda.Stream()
    with torch.cuda.stream(stream):
        x = torch.zeros(1 << 24, device="cuda")
        for _ in range(50):
            x += 1
        kept = keep(x.clone)
    torch.cuda.synchronize()
    assert torch.equal(kept, torch.full_like(kept, 50))


@pytest.mark.gpu
def test_a_capture_does_not_hold_it() -> None:
    """The host has it at once, and a replay does not make it anew."""
    x, graph = torch.ones(4, device="cuda"), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = keep(lambda: torch.arange(4, device="cpu").to("cuda"))
        y = x + kept
    assert kept.tolist() == [0, 1, 2, 3]
    kept.fill_(7)
    graph.replay()
    assert y.tolist() == [8, 8, 8, 8]
