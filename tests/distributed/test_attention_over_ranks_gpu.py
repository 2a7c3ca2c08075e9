"""The same on GPUs, by NCCL: as many ranks as there are."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from saccade.testing import Case
from saccade.testing.ranks import Pool, measured

pytestmark = pytest.mark.gpu

LENGTHS = (700, 5, 1300, 1, 0, 400, 37)
RANKS = [2, 4, 8]


def packed(name, **fields):
    given = {"dtype": "bf16", "b": len(LENGTHS), "h_q": 8, "h_k": 2, "d": 128, "order": "thd", "lengths": LENGTHS}
    return Case(name, s_q=1300, s_k=1300, **(given | fields))


# fmt: off
CASES = [
    packed("causal", mask="causal"),
    packed("plain", d=64),
    packed("window", mask="window(100,0)", sink=True, dtype="fp16"),
    packed("scores", mask="causal", score="softcap(9)", h_k=8),
    packed("alibi", mask="causal", score="alibi", d=64),
    packed("dropout", mask="causal", dropout_p=0.2, d=64),
    packed("prefixes", mask="prefixes"),
    packed("float32", mask="causal", dtype="fp32", d=64),
    Case("dense", dtype="bf16", b=2, h_q=8, h_k=2, s_q=1111, s_k=1111, d=128, mask="causal", order="bshd"),
    Case("dense-bhsd", dtype="bf16", b=2, h_q=8, h_k=2, s_q=1024, s_k=1024, d=64, mask="window(300,0)"),
]
# fmt: on


@pytest.fixture(scope="module")
def gpus():
    size = max((n for n in RANKS if n <= torch.cuda.device_count()), default=0)
    if not size:
        pytest.skip("needs two GPUs")
    with Pool(size, "nccl") as pool:
        yield pool


@pytest.mark.parametrize("method", ["gather", "pull", "ulysses"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_by_the_one_tolerance(gpus, case, method):
    if method == "ulysses" and case.h_k % gpus.size and gpus.size % case.h_k:
        pytest.skip("the heads do not divide")
    settings = {"method": method, "device": "cuda"}
    for ratios in gpus.run(measured, gpus.size, case, settings, seconds=300):
        assert max(ratios.values()) <= 1


@pytest.mark.parametrize("method", ["gather", "pull", "ulysses"])
def test_repeats_are_bitwise_equal(gpus, method):
    assert all(gpus.run((str(Path(__file__)), "repeated"), gpus.size, method, 100, seconds=300))


def repeated(group, method, times):
    """With delays before the exchanges."""
    from saccade import attention, causal
    from saccade.distributed import plan

    made = plan(list(LENGTHS), group, mask=causal(), method=method)
    torch.manual_seed(3)
    q, k, v, dout = (
        made.shard(torch.randn(sum(LENGTHS), h, 64)).to("cuda", torch.bfloat16).requires_grad_() for h in (8, 8, 8, 8)
    )
    first = None
    for i in range(times):
        if i % (made.rank + 2) == 0:
            torch.cuda._sleep(1_000_000 * (made.rank + 1))
        out = attention(q, k, v, mask=causal(), context=made, deterministic=True)
        found = [out.detach(), *torch.autograd.grad(out, [q, k, v], dout)]
        first = first or found
        if not all(torch.equal(x, y) for x, y in zip(found, first, strict=True)):
            return False
    return True
