"""The ways in which people run a call: each is a function with the arguments and the result of `attention`."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from saccade import attention
from saccade.testing.call_slice import captured as captured_tensors

Result = Any
REPEATS = 3
"""Runs of one function: warm-up, recording, replay."""


def reseed(device: torch.device) -> None:
    """The state of torch's generators in which `check` starts a call, so that a later run draws the same dropout."""
    torch.default_generator.manual_seed(1)
    if device.type == "cuda":
        torch.cuda.default_generators[device.index or 0].manual_seed(1)


def each(change: Callable[[Tensor], Tensor], result: Result) -> Result:
    """A result with its tensors changed."""
    if isinstance(result, Tensor):
        return change(result)
    return type(result)(*[None if x is None else change(x) for x in result])


def copies(*operands: Tensor) -> list[Tensor]:
    """Copies that are leaves; values that are columns of keys stay so."""
    q, k, v = (x.detach() for x in operands)
    shared = k.data_ptr() == v.data_ptr() and k.stride() == v.stride() and k.shape[-1] >= v.shape[-1]
    made = [q.clone(), k.clone()]
    return [*made, made[1][..., : v.shape[-1]] if shared else v.clone()]


def repeated(*operands: Tensor, **keywords: Any) -> Result:
    """The same call of other tensors, some times, which a cache of launches may serve."""
    for _ in range(REPEATS - 1):
        made = zip(copies(*operands), operands, strict=True)
        attention(*(x.requires_grad_(given.requires_grad) for x, given in made), **keywords)
    reseed(operands[0].device)
    return attention(*operands, **keywords)


def compiled(*operands: Tensor, mode: str | None = None, dynamic: bool | None = None, **keywords: Any) -> Result:
    """torch.compile, run as often as graphs need to be recorded and replayed, backward as well."""
    torch._dynamo.reset()
    torch._inductor.config.fallback_random = True  # the generator of eager calls
    torch._functorch.config.donated_buffer = False  # `check` differentiates a graph twice
    call = torch.compile(lambda q, k, v: attention(q, k, v, **keywords), mode=mode, dynamic=dynamic, fullgraph=True)
    learned = [x for x in operands if x.requires_grad] if torch.is_grad_enabled() else []
    for _ in range(REPEATS - 1):
        torch.compiler.cudagraph_mark_step_begin()
        result = call(*operands)
        out = result if isinstance(result, Tensor) else result[0]
        if learned and out.requires_grad:
            torch.autograd.grad(out.sum(), learned, allow_unused=True, retain_graph=True)  # as `check` does
        del result, out
    reseed(operands[0].device)
    torch.compiler.cudagraph_mark_step_begin()
    result = call(*operands)
    return result if learned or "out" in keywords else each(torch.clone, result)


def exported(*operands: Tensor, **keywords: Any) -> Result:
    class Call(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Result:
            return attention(q, k, v, **keywords)

    program = torch.export.export(Call(), tuple(x.detach() for x in operands), strict=False)
    reseed(operands[0].device)
    return program.module()(*operands)


def checkpointed(*operands: Tensor, **keywords: Any) -> Result:
    return checkpoint(lambda q, k, v: attention(q, k, v, **keywords), *operands, use_reentrant=False)


def vmapped(*operands: Tensor, **keywords: Any) -> Result:
    """The second of two examples; the first has other numbers."""
    if not keywords.get("return_lse"):  # a Scored would have None for it, which vmap does not return
        keywords.pop("return_max_scores", None)
    stacked = [torch.stack([x.roll(1, -1), x]) for x in operands]
    result = torch.vmap(lambda q, k, v: attention(q, k, v, **keywords), randomness="same")(*stacked)
    return each(lambda x: x[1], result)


def autocast(*operands: Tensor, **keywords: Any) -> Result:
    with torch.autocast(operands[0].device.type, dtype=operands[0].dtype):
        return attention(*(x.float() for x in operands), **keywords)


def inference(*operands: Tensor, **keywords: Any) -> Result:
    """Tensors that are made in inference mode; the results leave it as copies."""
    with torch.inference_mode():
        result = attention(*copies(*operands), **keywords)
    return result if "out" in keywords else each(torch.clone, result)


@contextlib.contextmanager
def side_stream(device: torch.device) -> Iterator[None]:
    """Another stream, after what was launched before, and before what comes after."""
    if device.type != "cuda":
        yield
        return
    before, stream = torch.cuda.current_stream(device), torch.cuda.Stream(device)
    stream.wait_stream(before)
    with torch.cuda.stream(stream):
        yield
    before.wait_stream(stream)


def on_a_side_stream(*operands: Tensor, **keywords: Any) -> Result:
    with side_stream(operands[0].device):
        return attention(*operands, **keywords)


def in_threads(*operands: Tensor, **keywords: Any) -> Result:
    """Threads with streams of their own do the same at once, and get the same bits."""
    results: list[Any] = []
    enabled = torch.is_grad_enabled()

    def run() -> None:
        try:
            with torch.set_grad_enabled(enabled), side_stream(operands[0].device):
                results.append(attention(*operands, **keywords))
        except Exception as error:
            results.append(error)

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if operands[0].is_cuda:
        torch.cuda.synchronize(operands[0].device)
    for result in results:
        if isinstance(result, Exception):
            raise result
        one, other = (x if isinstance(x, Tensor) else x[0] for x in (result, results[0]))
        assert torch.equal(one.nan_to_num(), other.nan_to_num()), "threads have other bits than one another"
    return results[0]


def on_another_device(*operands: Tensor, **keywords: Any) -> Result:
    """Where the current device is not that of the operands."""
    with torch.cuda.device((operands[0].device.index + 1) % torch.cuda.device_count()):
        return attention(*operands, **keywords)


def graphed(*operands: Tensor, **keywords: Any) -> Result:
    """The first call is inside a capture; a replay computes with what is copied in."""
    static = copies(*operands)
    for x in static:
        x.zero_()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = attention(*static, **keywords)
    for x, given in zip(static, operands, strict=True):
        x.copy_(given)
    reseed(operands[0].device)
    graph.replay()
    torch.cuda.synchronize(operands[0].device)
    return result if "out" in keywords else each(torch.clone, result)


class _Graphs(torch.autograd.Function):
    """A forward and its backward, each captured at its first call."""

    @staticmethod
    def forward(ctx: Any, keywords: dict[str, Any], *leaves: Tensor) -> tuple[Tensor, ...]:
        device, static = leaves[0].device, [x.requires_grad_() for x in copies(*leaves[:3])]
        graph = torch.cuda.CUDAGraph()
        with torch.enable_grad(), torch.cuda.graph(graph, stream=torch.cuda.current_stream(device)):
            results = tuple(attention(*static, **keywords, return_lse=True))
        reseed(device)
        graph.replay()
        ctx.graph, ctx.results, ctx.leaves = graph, results, [*static, *leaves[3:]]
        found = tuple(x.detach().clone() for x in results)
        ctx.mark_non_differentiable(*found[2:])
        return found

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        static = [torch.zeros_like(x) for x in gradients[:2]]
        graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.current_stream(static[0].device)
        with torch.cuda.graph(graph, pool=ctx.graph.pool(), stream=stream):
            found = torch.autograd.grad(ctx.results[:2], ctx.leaves, static, allow_unused=True)
        for x, given in zip(static, gradients[:2], strict=True):
            x.copy_(given)
        graph.replay()
        torch.cuda.synchronize(static[0].device)
        return None, *(None if x is None else x.clone() for x in found)


def graphed_step(*operands: Tensor, **keywords: Any) -> Result:
    """As `graphed`, with a graph of the backward."""
    keywords.pop("return_lse", None)
    if not any(x.requires_grad for x in operands):
        return attention(*operands, **keywords)
    sink = [keywords["sink"]] if "sink" in keywords else []
    leaves = [*operands, *sink, *captured_tensors(keywords.get("score_mod")).values()]
    with side_stream(
        operands[0].device
    ):  # that of the captures: a graph accumulates on the stream that first used a leaf
        return _Graphs.apply(keywords, *leaves)


compiled_dynamic = partial(compiled, dynamic=True)
reduce_overhead = partial(compiled, mode="reduce-overhead")
max_autotune = partial(compiled, mode="max-autotune")
EVERYWHERE = (
    "repeated", "compiled", "compiled_dynamic", "exported", "checkpointed", "vmapped", "autocast", "inference",
    "in_threads",
)  # fmt: skip
ON_GPUS = ("reduce_overhead", "max_autotune", "graphed", "graphed_step", "on_a_side_stream")
ALL = (*EVERYWHERE, *ON_GPUS, "on_another_device")


def suiting(features: set[str], device: str) -> list[str]:
    """The modes that a call with these features has, on this device."""
    modes = [*EVERYWHERE]
    if device.startswith("cuda"):
        modes += [*ON_GPUS, *(["on_another_device"] if torch.cuda.device_count() > 1 else [])]
    learns, eight = "gradient" in features, bool(features & {"8-bit q"})
    unfit = {
        "autocast": eight or "float32" in features or "Descale" in features,
        "exported": bool(features & {"gradient of a captured tensor", "gradient of a sink"}),  # which are constants
        "inference": learns,
        "graphed": learns,
        "graphed_step": not learns,
        "checkpointed": not learns,
        "vmapped": "out=" in features or eight,
        "in_threads": bool(features & {"dropout", "out="}),
    }
    return [mode for mode in modes if not unfit.get(mode)]
