"""vLLM's steps in CUDA graphs, on its own classes where vLLM 0.33.0 is installed, else tested against stubs of them."""

from __future__ import annotations

import pytest
import torch

from saccade import causal, softcap, window

pytestmark = pytest.mark.gpu

TOKENS, REQUESTS = 128, 4
STEPS = [[1, 1, 1, 1], [90, 3, 0, 20], [1, 40, 17, 1], [1, 1, 1, 1], [30, 0, 0, 9]]
LAYERS = {
    "plain": ({}, {}),
    "window": ({"sliding_window": 20}, {"mask": window(19, 0)}),
    "cap": ({"logits_soft_cap": 5.0}, {"score_mod": softcap(5.0)}),
}


class Held:
    """What vLLM keeps at one address for all replays."""

    def __init__(self, step, heads):
        self.q, self.k_new, self.v_new = step.q.clone(), step.k_new.clone(), step.v_new.clone()
        self.offsets, self.used, self.table, self.slots = (
            x.clone() for x in (step.offsets, step.used, step.table, step.slots)
        )
        self.out = step.q.new_empty(*step.q.shape[:-1], heads.d_v)
        self.rows, self.longest = step.rows, step.longest

    def load(self, step):
        for name in ("q", "k_new", "v_new", "offsets", "used", "table", "slots"):
            getattr(self, name).copy_(getattr(step, name))


@pytest.mark.parametrize("heads", [{"d": 128, "d_v": 128, "q": 8}, {"d": 64, "d_v": 64}], ids=str)
@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize("name", LAYERS)
def test_one_graph_serves_any_batch(name, page_size, heads, requests_of, layer_of, captured):
    """Captured with single tokens, replayed with prompts and mixtures; nothing waits for the host."""
    arguments, meaning = LAYERS[name]
    requests = requests_of(REQUESTS, page_size, "cuda", **heads)
    layer = layer_of(requests, **arguments)

    def drawn(lengths):
        return requests.step(lengths, padding=TOKENS - sum(lengths))

    step = drawn(STEPS[0])
    held = Held(step, requests.heads)
    metadata = layer.builder.build_for_cudagraph_capture(layer.common(held, actual=TOKENS))

    def run():
        layer.update(held)
        layer.run(metadata)(held.q, held.out)

    with torch.inference_mode():
        graph, _ = captured(run)

        def replayed(q, out):
            held.load(step)
            held.out.copy_(out)
            graph.replay()
            return out.copy_(held.out)

        for lengths in STEPS:
            step = step if lengths is STEPS[0] else drawn(lengths)
            step.assert_right(replayed, **{"mask": causal(), "scale": 0.3, **meaning})
