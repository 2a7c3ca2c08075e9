"""What users wrap calls in on a GPU: compiled modes that capture graphs, graphs of their own, and pools of memory.

Every call is checked against the oracle. Kernels are met for the first time inside of the mode, in a process of its own
where that matters.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._functorch import config as functorch_config
from torch.nn.attention.flex_attention import create_block_mask
from torch.utils.checkpoint import checkpoint

from saccade import Dense, Descale, Paged, append_kv, attention, causal, mask_mod
from saccade.call.partial import Partial
from saccade.ops import replay
from saccade.testing import check
from saccade.testing.cases import NAMED, Case

pytestmark = pytest.mark.gpu

PLAIN = Case("plain", h_q=4, h_k=2, s_q=200, s_k=200, d=64, mask="causal")
DECODE = Case("decode", b=4, h_q=8, h_k=2, s_q=1, s_k=150, d=64, mask="causal", order="paged", page_size=64)
CASES = {
    case.name: case
    for case in (
        PLAIN,
        PLAIN.replace(name="wide", d=256, d_v=256),
        PLAIN.replace(name="padded", used="qk", order="bshd"),
        PLAIN.replace(name="windowed", mask="window(40,0)", sink=True),
        PLAIN.replace(name="documents", mask="documents&causal"),
        PLAIN.replace(name="intervals", mask="interval_rows&causal"),
        PLAIN.replace(name="predicate", mask="dilated_window"),
        PLAIN.replace(name="softcap", score="softcap(9)"),
        PLAIN.replace(name="table", score="relative_bias(20)"),
        PLAIN.replace(name="packed", b=5, order="thd"),
        PLAIN.replace(name="packed-predicate", b=5, order="thd", mask="dilated_window"),
        PLAIN.replace(name="ranges", b=5, order="thd", ranges=True),
        DECODE,
        DECODE.replace(name="prompts", s_q=130, s_k=300),
        DECODE.replace(name="mixed", b=5, s_k=180, lengths=(1, 60, 0, 7, 1), tail=9),
        DECODE.replace(name="latent", h_q=128, h_k=1, d=576, d_v=512, cache="latent"),
        NAMED["d320"].replace(dropout_p=0.0),
    )
}


@pytest.fixture(autouse=True)
def _nothing_is_known() -> Any:
    replay.forget()
    torch._dynamo.reset()
    gc.collect()  # graphs that are freed while another one is captured would spoil it
    yield
    torch._dynamo.reset()


def copied(found: Any) -> Any:
    """Results as tensors of their own: the next replay writes those of a graph."""
    return found.clone() if isinstance(found, Tensor) else Partial(*(x.clone() for x in found))


def compiled(mode: str) -> Callable[..., Any]:
    call = torch.compile(attention, mode=mode, fullgraph=True)

    def run(*operands: Tensor, **keywords: Any) -> Any:
        torch.compiler.cudagraph_mark_step_begin()
        copy_gradients(*operands, keywords.get("sink"), *getattr(keywords.get("score_mod"), "tensors", []))
        return copied(call(*operands, **keywords))

    return run


def copy_gradients(*leaves: Tensor | None) -> None:
    """Gradients are results of a graph too."""
    for x in leaves:
        if x is not None and x.requires_grad:
            x.register_hook(torch.clone)


def in_graph(*operands: Tensor, **keywords: Any) -> Any:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = attention(*operands, **keywords)
    for x in (found,) if isinstance(found, Tensor) else found:
        x.fill_(torch.nan)
    graph.replay()
    return copied(found)


def in_pool(*operands: Tensor, **keywords: Any) -> Any:
    """The pool is taken back after the call, and what it was made of is used for something else."""
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        found = attention(*operands, **keywords)
    kept = copied(found)
    del found, pool
    gc.collect()
    torch.cuda.empty_cache()
    others = [torch.full((size,), 255, dtype=torch.uint8, device="cuda") for size in (512, 1 << 20, 1 << 24) * 8]
    others.clear()
    return kept


def graphed(q: Tensor, k: Tensor, v: Tensor, **keywords: Any) -> Any:
    """Forward and backward as graphs."""
    if not q.requires_grad:
        return attention(q, k, v, **keywords)

    def plain(*operands: Tensor) -> tuple[Tensor, ...]:
        return tuple(attention(*operands, **keywords))

    call: Any = torch.cuda.make_graphed_callables(plain, tuple(x.detach().requires_grad_() for x in (q, k, v)))
    return Partial(*call(q, k, v))


@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_compiled(case: Case, mode: str) -> None:
    """Warmed up, captured and replayed, with and without gradients."""
    run = compiled(mode)
    for seed in range(3):
        given = case.inputs("cuda", seed=seed, requires_grad=True)
        check(given.q, given.k, given.v, function=run, **given.keywords).assert_ok()


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_first_call_is_captured(case: Case) -> None:
    for seed in range(2):
        given = case.inputs("cuda", seed=seed)
        check(given.q, given.k, given.v, function=in_graph, backward=False, **given.keywords).assert_ok()
        check(given.q, given.k, given.v, backward=False, **given.keywords).assert_ok()  # as if there had been no graph


FRESH = """
import sys, torch
from saccade.testing import check
from tests.ops.test_modes_gpu import CASES, in_graph
case = CASES[{name!r}]
given = case.inputs("cuda")
check(given.q, given.k, given.v, function=in_graph, backward=False, **given.keywords).assert_ok()
check(given.q, given.k, given.v, **given.keywords).assert_ok()
"""


@pytest.mark.parametrize("name", ["plain", "padded", "predicate", "table", "packed", "decode", "prompts", "latent"])
def test_kernels_are_compiled_and_loaded_in_a_capture(
    name: str, fresh_process: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = f"import os; os.environ['TRITON_CACHE_DIR'] = {str(tmp_path)!r}; {FRESH.format(name=name)}"
    fresh_process(code)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_first_call_allocates_from_a_pool(case: Case) -> None:
    for seed in range(3):
        given = case.inputs("cuda", seed=seed)
        check(given.q, given.k, given.v, function=in_pool, backward=False, **given.keywords).assert_ok()
        check(given.q, given.k, given.v, **given.keywords).assert_ok()


@pytest.mark.parametrize("name", ["plain", "wide", "padded", "predicate", "table", "packed", "ranges", "intervals"])
def test_graphed_callables(name: str) -> None:
    given = CASES[name].inputs("cuda")
    check(given.q, given.k, given.v, function=graphed, **given.keywords).assert_ok()


@pytest.mark.parametrize("name", ["plain", "predicate", "packed"])
@functorch_config.patch(donated_buffer=False)  # `check` keeps the graph of autograd
def test_checkpoints_of_compiled_graphs(name: str) -> None:
    """Recomputed in the backward, two calls whose results live at once."""

    def twice(q: Tensor, k: Tensor, v: Tensor, **keywords: Any) -> Any:
        def one(*operands: Tensor) -> Any:
            return tuple(attention(*operands, return_lse=True, **keywords))

        first = checkpoint(one, q, k, v, use_reentrant=False)
        second = checkpoint(one, q * 0.5, k, v, use_reentrant=False)
        return *first, *second

    call = torch.compile(twice, mode="reduce-overhead", fullgraph=True)

    def run(*operands: Tensor, return_lse: bool = False, backend: str = "auto", **keywords: Any) -> Any:
        torch.compiler.cudagraph_mark_step_begin()
        copy_gradients(*operands)
        out, lse, other, _ = call(*operands, **keywords)
        eager = attention(operands[0] * 0.5, *operands[1:], **keywords)
        assert torch.equal(other, eager)
        return Partial(out.clone(), lse.clone()) if return_lse else out.clone()

    for seed in range(3):
        given = CASES[name].inputs("cuda", seed=seed)
        check(given.q, given.k, given.v, function=run, **given.keywords).assert_ok()


def test_a_block_mask_of_torch() -> None:
    mask = create_block_mask(lambda b, h, i, j: (i >= j) & (i - j < 90), None, None, 256, 256, device="cuda")
    q, k, v = (torch.randn(1, 4, 256, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    right = attention(q, k, v, mask=mask_mod(lambda b, h, i, j: (i >= j) & (i - j < 90)), backend="reference")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = attention(q, k, v, mask=mask)
    graph.replay()
    torch.testing.assert_close(found, right, atol=2e-2, rtol=0)
    torch.testing.assert_close(attention(q, k, v, mask=mask), right, atol=2e-2, rtol=0)
    run = compiled("reduce-overhead")
    for _ in range(3):
        torch.testing.assert_close(run(q, k, v, mask=mask), right, atol=2e-2, rtol=0)


def test_eight_bits() -> None:
    q, k, v = (torch.randn(2, 4, 256, 128, device="cuda").to(torch.float8_e4m3fn) for _ in range(3))
    scales = Descale(q=torch.tensor(1.5, device="cuda"))
    right = attention(q, k, v, mask=causal(), descale=scales)
    replay.forget()
    run = compiled("reduce-overhead")
    for function in (in_graph, run, run, run):
        assert torch.equal(function(q, k, v, mask=causal(), descale=scales), right)


def test_a_number_that_changes() -> None:
    """A graph is replayed with the numbers of its capture: those that torch.compile computes stay outside."""
    q, k, v = (torch.randn(1, 2, 256, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))

    def capped(q: Tensor, k: Tensor, v: Tensor, cap: float) -> Tensor:
        return attention(q, k, v, mask=causal(), score_mod=lambda s, b, h, i, j: cap * torch.tanh(s / cap))

    call = torch.compile(capped, mode="reduce-overhead", fullgraph=True)
    for cap in (5.0, 0.5, 2.0, 1.0, 0.25, 3.0, 0.5, 1.5, 4.0):
        torch.compiler.cudagraph_mark_step_begin()
        found, right = (f(q, k, v, cap) for f in (call, capped))
        assert torch.equal(found, right)
        grads = [torch.autograd.grad(x.sum(), (q, k, v)) for x in (found, right)]
        for one, other in zip(*grads, strict=True):
            torch.testing.assert_close(one, other, atol=2e-2, rtol=0)


def test_dropout_draws_anew_in_each_replay() -> None:
    q, k, v = (torch.randn(1, 2, 256, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = attention(q, k, v, dropout_p=0.5)
    draws = []
    for _ in range(3):
        graph.replay()
        draws.append(found.clone())
    assert not any(torch.equal(one, other) for one, other in pairwise(draws))
    run = compiled("reduce-overhead")
    draws = [run(q, k, v, dropout_p=0.5) for _ in range(5)]
    assert not any(torch.equal(one, other) for one, other in pairwise(draws))


def test_a_cache_that_grows_in_compiled_steps() -> None:
    """Rows are written by index_copy_, as static caches have it, or by append_kv."""
    make: Any = {"device": "cuda", "dtype": torch.bfloat16}
    static = [torch.zeros(2, 512, 2, 64, **make) for _ in range(2)]
    pages = [torch.zeros(16, 64, 2, 64, **make) for _ in range(2)]
    table = torch.randperm(16, device="cuda").int().view(2, 8)

    def step(q: Tensor, k: Tensor, v: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
        for cache, x in zip(static, (k, v), strict=True):
            cache.index_copy_(1, at[None], x)
        out = attention(q, *static, mask=causal(), layout=Dense("bshd", q_offset=at.expand(2)))
        append_kv(pages[0], pages[1], Paged(table, at.expand(2).int()), k, v)
        return out, attention(q, *pages, mask=causal(), layout=Paged(table, at.expand(2).int() + 1))

    call = torch.compile(step, mode="reduce-overhead", fullgraph=True)
    keys: list[list[Tensor]] = [[], []]
    with torch.no_grad():
        for t in range(12):
            q, k, v = (torch.randn(2, 1, h, 64, **make) for h in (8, 2, 2))
            keys[0].append(k)
            keys[1].append(v)
            torch.compiler.cudagraph_mark_step_begin()
            found = call(q, k, v, torch.tensor(t, device="cuda"))
            right = attention(q, *(torch.cat(x, 1) for x in keys), layout=Dense("bshd"), backend="reference")
            for one in found:
                torch.testing.assert_close(one, right, atol=2e-2, rtol=0)


@pytest.mark.parametrize("name", ["decode", "prompts", "latent", "plain"])
def test_graphs_of_an_engine(name: str) -> None:
    """Thirty batch sizes that fall, in one pool, with eager calls between replays."""
    pool, graphs = torch.cuda.graph_pool_handle(), []
    largest = CASES[name].replace(b=30).inputs("cuda")
    layout = largest.keywords["layout"]

    def call(b: int) -> Tensor:
        if not isinstance(layout, Paged):
            return attention(largest.q[:b], largest.k[:b], largest.v[:b], mask=causal())
        part = Paged(layout.block_table[:b], layout.seqused_k[:b])
        return attention(largest.q[:b], largest.k, largest.v, mask=causal(), layout=part)

    for b in range(30, 0, -1):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            found = call(b)
        graphs.append((b, graph, found))
    for turn in range(2):
        largest.q.normal_()
        for b, graph, found in graphs[:: 1 if turn else -1]:
            graph.replay()
            replayed = found.clone()
            assert torch.equal(replayed, call(b)), b


def test_graphs_on_side_streams() -> None:
    q, k, v = (torch.randn(2, 4, 300, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    streams, graphs = [torch.cuda.Stream() for _ in range(2)], []
    for stream in streams:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            graphs.append((graph, attention(q, k, v, mask=mask_mod(lambda b, h, i, j: i >= j))))
    right = attention(q, k, v, mask=causal())
    torch.cuda.synchronize()
    for (graph, _), stream in zip(graphs * 3, streams * 3, strict=True):
        with torch.cuda.stream(stream):
            graph.replay()
    torch.cuda.synchronize()
    for _, found in graphs:
        torch.testing.assert_close(found, right, atol=2e-2, rtol=0)


@pytest.mark.parametrize("name", ["plain", "predicate", "packed", "decode", "latent"])
def test_captures_leave_no_memory_behind(name: str) -> None:
    given = CASES[name].inputs("cuda")
    shapes = [CASES[name].replace(s_k=140 + i, s_q=CASES[name].s_q).inputs("cuda") for i in range(20)]

    def bytes_after(captures: int, of: list[Any]) -> tuple[int, int]:
        for i in range(captures):
            x = of[i % len(of)]
            in_graph(x.q, x.k, x.v, **x.keywords)
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return torch.cuda.memory_allocated(), torch.cuda.memory_reserved()

    for of in ([given], shapes):
        assert bytes_after(100, of) == bytes_after(900, of)
