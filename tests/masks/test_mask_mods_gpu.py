"""Lists of tiles in the kernels on a GPU: what the interpreter and the compile gate cannot show."""

from __future__ import annotations

import time

import pytest
import torch

from saccade import attention, block_mask, causal, mask_mod, softcap, window
from saccade.backends import block_sparsity
from saccade.call import Call
from saccade.masks import as_mask
from saccade.testing import gallery

pytestmark = pytest.mark.gpu


@pytest.fixture(params=["auto", "triton"])
def backend(request: pytest.FixtureRequest) -> str:
    return request.param


def operands(b: int = 2, h_q: int = 4, h_k: int = 2, s: int = 700, d: int = 128) -> list[torch.Tensor]:
    return [torch.randn(b, h, s, d, device="cuda", dtype=torch.bfloat16) for h in (h_q, h_k, h_k)]


def masks(s: int = 700) -> dict:
    ids = torch.randint(0, 4, (2, s), device="cuda").sort().values
    steps = torch.tensor([30, 1, 200, 7], device="cuda")
    by_head = mask_mod(lambda b, h, q, k: (q - k) // steps[h] % 2 == b)
    same = mask_mod(lambda b, h, q, k: ids[b, q] == ids[b, k])
    return {
        "ids&causal": same & causal(),
        "~ids": ~same,
        "heads": by_head,
        "heads|window": by_head & window(200, 9) | window(3, 0),
        "tensor": torch.rand(2, 1, s, s, device="cuda") > 0.5,
        "nothing": mask_mod(lambda b, h, q, k: q < 0),
        "blocks": gallery.random_blocks(-(-s // 128), 0.3, device="cuda"),
    }


def test_repeats_are_bitwise_equal(backend: str) -> None:
    q, k, v = (x.requires_grad_() for x in operands(s=1500))
    mask = gallery.random_blocks(12, 0.3, device="cuda")
    first = None
    for _ in range(20):
        out = attention(q, k, v, mask=mask, score_mod=softcap(20.0), deterministic=True, backend=backend)
        found = [out, *torch.autograd.grad(out.float().square().sum(), (q, k, v))]
        first = first or found
        assert all(torch.equal(x, y) for x, y in zip(first, found, strict=True))


def test_states() -> None:
    q, k, v = operands()
    from saccade.backends.device import block_lists

    for mask in map(as_mask, masks().values()):
        call = Call(q, k, v, mask=mask)
        assert torch.equal(block_lists.states(call, {}), block_sparsity.compute_states(call))


@pytest.mark.parametrize("beforehand", [False, True])
def test_graphs(beforehand: bool, backend: str) -> None:
    """A graph follows what the captured tensors hold; with a block mask it keeps to that."""
    q, k, v = operands()
    ids = torch.zeros(700, dtype=torch.int64, device="cuda")
    mask = mask_mod(lambda b, h, i, j: ids[i] == ids[j])
    given = block_mask(mask, 2, 4, 700, 700) if beforehand else mask
    attention(q, k, v, mask=given, backend=backend)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attention(q, k, v, mask=given, backend=backend)
    if not beforehand:
        ids.copy_(torch.arange(700, device="cuda") // 90)
    graph.replay()
    assert torch.equal(out, attention(q, k, v, mask=mask, backend=backend))


def test_long_block_mask() -> None:
    """128k x 128k causal documents: time and memory of the states."""
    s = 131072
    ids = torch.randint(0, 100, (s,), device="cuda").sort().values
    mask = mask_mod(lambda b, h, q, k: (ids[q] == ids[k]) & (q >= k))
    block_mask(mask, 1, 1, 1024, 1024)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    started = time.perf_counter()
    made = block_mask(mask, 1, 1, s, s)
    torch.cuda.synchronize()
    print(f"{1000 * (time.perf_counter() - started):.1f} ms, {torch.cuda.max_memory_allocated() - before} bytes")
    assert torch.cuda.max_memory_allocated() - before < 64 << 20
    assert made.sparsity() > 0.9
