"""SGLang's steps in CUDA graphs, on its own classes where SGLang 0.5.23 is installed, else tested against stubs."""

from __future__ import annotations

import pytest
import torch

from saccade import causal

pytestmark = pytest.mark.gpu

TOKENS = 96
STEPS = {"tokens": [[1, 1, 1], [1, 1, 1], [1, 1, 1]], "prompts": [[20, 3, 1], [60, 1, 30], [1, 0, 40]]}


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("kind", STEPS)
def test_one_graph_serves_any_batch(kind, page_size, requests_of, engine_of):
    """Captured once, replayed after the metadata of each step; nothing waits for the host."""
    requests = requests_of(3, page_size, "cuda", d=64, d_v=64)
    engine = engine_of(requests)
    backend, mode = engine.backend, "DECODE" if kind == "tokens" else "EXTEND"
    if kind == "tokens":
        requests.step([30, 7, 80])
        for x, rows in zip(backend.token_to_kv_pool.both, (requests.k, requests.v), strict=True):
            for i, n in enumerate(requests.cached):
                at = torch.arange(n)
                slots = requests.tables[i, at // page_size] * page_size + at % page_size
                x[slots.to(x.device)] = rows[i, :n]
    backend.init_cuda_graph_state(3, TOKENS)

    def drawn(lengths):
        return requests.step(lengths, padding=0 if kind == "tokens" else TOKENS - sum(lengths))

    def prepared(step, capture=False):
        batch = engine.batch(step, mode)
        backend.init_forward_metadata_out_graph(batch, in_capture=capture)
        return batch

    with torch.inference_mode():
        step = drawn(STEPS[kind][0])
        held = step.q.flatten(1).clone()
        batch = prepared(step, True)
        engine.run(step, batch)(step.q, torch.empty_like(step.q))  # keys and values are in the pool from here on
        backend.forward(held, None, None, engine.layer, batch)
        torch.cuda.set_sync_debug_mode("error")
        try:
            backend.init_forward_metadata(batch)
            backend.forward(held, None, None, engine.layer, batch)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        batch = prepared(step, True)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = backend.forward(held, None, None, engine.layer, batch)
        for lengths in STEPS[kind]:
            step = step if lengths is STEPS[kind][0] else drawn(lengths)
            where = type("Loc", (), {"loc": step.slots})
            backend.token_to_kv_pool.set_kv_buffer(None, where, step.k_new, step.v_new)

            def replayed(q, out, step=step):
                held.copy_(q.flatten(1))
                prepared(step)
                graph.replay()
                out[: step.rows] = found.view_as(out)[: step.rows]
                return out

            step.assert_right(replayed, mask=causal(), scale=0.3)
