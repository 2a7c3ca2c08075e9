"""The same on GPUs, by NCCL: as many ranks as there are, and by --everything fewer too."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from saccade.testing import Case
from tests.support.ranks import Pool, measured

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


def pytest_generate_tests(metafunc):
    if "gpus" in metafunc.fixturenames:
        there = [n for n in RANKS if n <= torch.cuda.device_count()] or [2]
        whole = metafunc.config.getoption("--everything")
        metafunc.parametrize(
            "gpus", there if whole else there[-1:], indirect=True, scope="module", ids="{} GPUs".format
        )


@pytest.fixture(scope="module")
def gpus(request):
    if request.param > torch.cuda.device_count():
        pytest.skip(f"needs {request.param} GPUs")
    with Pool(request.param, "nccl") as pool:
        yield pool


@pytest.mark.parametrize("method", ["gather", "pull", "ulysses"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_by_the_one_tolerance(gpus, case, method):
    if method == "ulysses" and case.h_k % gpus.size and gpus.size % case.h_k:
        pytest.skip("the heads do not divide")
    settings = {"method": method, "device": "cuda"}
    for ratios in gpus.run(measured, gpus.size, case, settings, seconds=300):
        assert max(ratios.values()) <= 1


@pytest.mark.parametrize("h_k", [2, 8])
def test_keys_that_come_while_the_kernel_runs(gpus, h_k):
    case = packed("causal", mask="causal", sink=True, h_k=h_k)
    for ratios in gpus.run(measured, gpus.size, case, {"method": "pull", "device": "cuda"}, seconds=300):
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


def test_pull_with_delays(gpus):
    """Before signals and after them, and of copies that kernels wait for: to the bit."""
    assert all(gpus.run((str(Path(__file__)), "delayed"), gpus.size, 1000, seconds=300))


def delayed(group, times):
    from saccade import attention, causal
    from saccade.distributed import plan
    from saccade.distributed.pull import PeerMemory

    made = plan(list(LENGTHS), group, mask=causal(), method="pull", timeout=30)
    torch.manual_seed(3)
    q, k, v, dout = (made.shard(torch.randn(sum(LENGTHS), 8, 64)).to("cuda", torch.bfloat16) for _ in range(4))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    barrier, copied, state = PeerMemory.barrier, PeerMemory.copied, [made.rank + 1]

    def late(self, seconds=None):
        state[0] = state[0] * 1103515245 + 12345 & 0x7FFFFFFF
        if state[0] >> 16 & 3 == 0:
            torch.cuda._sleep(100_000 * (1 + (state[0] >> 20) % 9))
        barrier(self, seconds)
        if state[0] >> 18 & 3 == 0:
            torch.cuda._sleep(200_000)

    def copied_late(self, copies):
        def later():
            if state[0] >> 19 & 3 == 0:
                torch.cuda._sleep(300_000)
            copies()

        return copied(self, later)

    PeerMemory.barrier, PeerMemory.copied = late, copied_late
    try:
        found = []
        for _ in range(times):
            out = attention(q, k, v, mask=causal(), context=made, deterministic=True)
            found.append(torch.stack([_bits(x) for x in (out.detach(), *torch.autograd.grad(out, leaves, dout))]))
    finally:
        PeerMemory.barrier, PeerMemory.copied = barrier, copied
    return bool((torch.stack(found) == found[0]).all())


def _bits(x):
    """A sum that one other bit changes, most likely."""
    bits = x.contiguous().view(torch.int16).long().flatten()
    return (bits * torch.arange(1, len(bits) + 1, device=x.device)).sum()


@pytest.mark.parametrize("method", ["gather", "pull", "ulysses"])
def test_cuda_graphs(gpus, method):
    assert all(gpus.run((str(Path(__file__)), "captured"), gpus.size, method, seconds=300))


def captured(group, method):
    """A graph of forward and backward, replayed with other operands between eager calls."""
    from saccade import attention, causal
    from saccade.distributed import plan

    made = plan(list(LENGTHS), group, mask=causal(), method=method, heads=8)
    torch.manual_seed(3)
    whole = [torch.randn(4, sum(LENGTHS), 8, 64) for _ in range(3)]
    sets = [made.shard(x, 1).to("cuda", torch.bfloat16) for x in whole]
    static = sets[0].clone()
    leaves = [static[i].detach().requires_grad_() for i in range(3)]

    def call(leaves, dout):
        out = attention(*leaves, mask=causal(), context=made, deterministic=True)
        return [out, *torch.autograd.grad(out, leaves, dout)]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            call(leaves, static[3])
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = call(leaves, static[3])
    same = []
    for i in (0, 1, 2, 1):
        static.copy_(sets[i])
        graph.replay()
        graph.replay()
        eager = call([x.requires_grad_() for x in sets[i].detach()[:3].unbind()], sets[i][3])
        same += [torch.equal(x, y) for x, y in zip(results, eager, strict=True)]
    return all(same)


@pytest.mark.parametrize("method", ["gather", "pull", "ulysses"])
def test_dropout_and_functions_of_the_head_compiled(gpus, method):
    found = gpus.run((str(Path(__file__)), "compiled"), gpus.size, method, seconds=300)
    assert found == [[True, True]] * gpus.size


def compiled(group, method):
    """Whether each step of a compiled function is the eager one, to the bit, with the gradients."""
    from saccade import alibi, attention, causal
    from saccade.distributed import plan

    torch._dynamo.reset()
    made = plan(list(LENGTHS), group, mask=causal(), method=method)
    torch.manual_seed(3)
    q, k, v, dout = (
        made.shard(torch.randn(sum(LENGTHS), 8, 64)).to("cuda", torch.bfloat16).requires_grad_() for _ in range(4)
    )
    same = []
    for more in ({"dropout_p": 0.5}, {"score_mod": alibi(torch.linspace(0.1, 0.9, 8, device="cuda"))}):
        results = []
        for run in (attention, torch.compile(attention, backend="aot_eager", fullgraph=True)):
            torch.manual_seed(5)
            out = run(q, k, v, mask=causal(), context=made, deterministic=True, **more)
            results.append([out.detach(), *torch.autograd.grad(out, [q, k, v], dout)])
        same.append(all(map(torch.equal, *results)))
    return same


@pytest.mark.parametrize("method", ["gather", "pull", "ulysses"])
def test_ranks_that_differ(gpus, method):
    """All hear the same, nothing was exchanged, and they go on."""
    found = gpus.run((str(Path(__file__)), "differing"), gpus.size, method, seconds=300)
    assert len({*found}) == 1
    for told in found[0]:
        assert told.startswith("ranks are in different exchanges:\n  rank 0: plan ")
        assert "the exchange of " in told
    assert "torch.float16" in found[0][0]
    assert "torch.float32" in found[0][0]


def differing(group, method):
    """What a rank hears when the last one alone has another dtype, or other heads."""
    from saccade import attention, causal
    from saccade.distributed import plan

    made, told = plan(list(LENGTHS), group, mask=causal(), method=method, timeout=20), []
    x = made.shard(torch.randn(sum(LENGTHS), 8, 64)).to("cuda", torch.bfloat16)
    alone = made.rank == made.size - 1
    first = attention(x, x, x, mask=causal(), context=made)
    for y in (x.half() if alone else x.float(), x.repeat(1, 2 + 2 * alone, 1)):
        with pytest.raises(RuntimeError) as raised:
            attention(y, y, y, mask=causal(), context=made)
        told.append(str(raised.value))
    assert torch.equal(first, attention(x, x, x, mask=causal(), context=made))
    return tuple(told)


def ending(group, method):
    """The last rank ends between two calls, as a process that is out of memory does. NCCL's watchdog ends the others a
    minute after a group's timeout, which it leaves to PyTorch's flight recorder."""
    from saccade import attention, causal
    from saccade.distributed import plan

    group = dist.new_group(list(range(group.size())), timeout=timedelta(seconds=20))
    made = plan(list(LENGTHS), group, mask=causal(), method=method, timeout=5)
    x = made.shard(torch.randn(sum(LENGTHS), 8, 64)).to("cuda", torch.bfloat16)
    attention(x, x, x, mask=causal(), context=made)
    torch.cuda.synchronize()
    if made.rank == made.size - 1:
        os._exit(1)
    attention(x, x, x, mask=causal(), context=made)
    torch.cuda.synchronize()


@pytest.mark.parametrize("method", ["gather", "pull", "ulysses"])
def test_a_rank_that_ends(gpus, method):
    """The others end too, by an error or by the group's timeout."""
    start = time.perf_counter()
    with pytest.raises(RuntimeError, match=rf"rank {gpus.size - 1}: the process has ended"):
        gpus.run((str(Path(__file__)), "ending"), gpus.size, method, seconds=150)
    assert time.perf_counter() - start < 140
