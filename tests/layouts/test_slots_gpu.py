"""Rows that list the slots of a cache, on a GPU."""

from __future__ import annotations

import pytest
import torch

from saccade import Paged, attention, explain
from saccade.testing import check

pytestmark = pytest.mark.gpu

PAGES, SIZE = 60, 64


def slots(*shape):
    drawn = torch.rand(*shape[:-1], PAGES * SIZE, device="cuda").argsort(-1)[..., : shape[-1]]
    drawn = drawn.clamp(1, PAGES * SIZE - 2)
    far = torch.tensor([-1, -(1 << 31), PAGES * SIZE, (1 << 31) - 1], device="cuda")
    far = far[torch.randint(0, 4, drawn.shape, device="cuda")]
    return torch.where(torch.rand(drawn.shape, device="cuda") < 0.2, far, drawn).int()


def right(q, k, v, layout, **keywords):
    """The first row of the caches and the last one are NaN, and in no slot."""
    for x in (k, v):
        x[0, 0], x[-1, -1] = torch.nan, torch.nan
    check(q, k, v, layout=layout, return_max_scores=True, **keywords).assert_ok()


@pytest.mark.parametrize("n", [1, 64, 200, 2048])
@pytest.mark.parametrize("end_to_end", [False, True], ids=["batch", "end to end"])
@pytest.mark.parametrize("h_q", [8, 16, 64, 128])
def test_latent(h_q, end_to_end, n):
    cache = torch.randn(PAGES, SIZE, 1, 576, device="cuda").bfloat16()
    rows = (10,) if end_to_end else (5, 2)
    used = torch.randint(0, n + 1, rows, device="cuda")
    starts = torch.tensor([0, 3, 10], device="cuda").int() if end_to_end else None
    layout = Paged(slots=slots(*rows, n), seqused_k=used, cu_seqlens_q=starts)
    q = torch.randn(*rows, h_q, 576, device="cuda").bfloat16()
    values = cache[..., :512]
    assert explain(q, cache, values, layout=layout).backend == ("gluon" if h_q > 16 and not end_to_end else "triton")
    right(q, cache, values, layout, sink=torch.randn(h_q, device="cuda"))


def test_graphs():
    cache = torch.randn(PAGES, SIZE, 1, 576, device="cuda").bfloat16()
    q = torch.randn(4, 1, 64, 576, device="cuda").bfloat16()
    layout = Paged(slots=slots(4, 1, 256), seqused_k=torch.full((4, 1), 256, device="cuda"))

    def run():
        return attention(q, cache, cache[..., :512], layout=layout)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run()
    for length in (256, 100):
        layout.slots.copy_(slots(4, 1, 256))
        layout.seqused_k.fill_(length)
        graph.replay()
        assert torch.equal(found, run())
    with pytest.raises(ValueError, match="omit the mask"):
        attention(
            q, cache, cache[..., :512], layout=layout, mask=torch.ones(1, 1, 1, 1, dtype=torch.bool, device="cuda")
        )
