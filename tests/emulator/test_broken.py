"""Kernels that are wrong in one place, each of which the emulator rejects, and what it says of them."""

# pyright: reportArgumentType=false, reportCallIssue=false, reportAttributeAccessIssue=false, reportIndexIssue=false
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from saccade import LatentCache, Packed, Paged, append_kv, attention, bias, causal
from saccade.backends.hopper.backward import epilogue as epilogue_of_dq
from saccade.backends.hopper.backward import load as backward_load
from saccade.backends.hopper.backward import pipeline as backward_pipeline
from saccade.backends.hopper.backward import wide as backward_wide
from saccade.backends.hopper.backward.kv_block import KVBlock
from saccade.backends.hopper.backward.pipeline import DSExchange, Outbox
from saccade.backends.hopper.forward import epilogue, kernel, load, schedule, work_item
from saccade.backends.hopper.forward.schedule import tiles_of_rows
from saccade.backends.hopper.latent import load as latent_load
from saccade.backends.hopper.latent.load import Seesaw
from saccade.backends.hopper.pipeline import Plans, Ring, Slots
from saccade.backends.hopper.ptx import barrier_arrive
from saccade.backends.hopper.shim import tma_load, tma_reduce_add, tma_store, view
from saccade.testing import check
from tests.emulator import Deadlock, EmulatorError, Race, emulated

SEEDS = 6


@gluon.jit
def no_wait(self, n, pred=True):
    return n % self.STAGES


@gluon.jit
def other_phase(self, n, pred=True):
    mbarrier.wait(self.full.index(n % self.STAGES), (n // self.STAGES) & 1 ^ 1, pred=pred)
    return n % self.STAGES


@gluon.jit
def wait_and_release(self, n, pred=True):
    mbarrier.wait(self.full.index(n % self.STAGES), (n // self.STAGES) & 1, pred=pred)
    barrier_arrive(self.EMPTY + n % self.STAGES, self.THREADS)
    return n % self.STAGES


@gluon.jit
def nothing(self, n):
    pass


@gluon.jit
def nothing_at_all(self):
    pass


@gluon.jit
def no_claim_of_half(self, n, stage, half):
    pass


@gluon.jit
def no_wait_for_half(self, n, stage: gl.constexpr, half: gl.constexpr):
    pass


@gluon.jit
def words_of_all(pointers, there, first, COLUMNS: gl.constexpr):
    column = first + gl.arange(0, COLUMNS, gl.SliceLayout(0, pointers.type.layout.parent))
    return gl.load(pointers[:, None] + column[None, :])


@gluon.jit
def more_bytes(self, stage, BYTES: gl.constexpr):
    full = self.full.index(stage)
    mbarrier.expect(full, BYTES + 16)
    return full


@gluon.jit
def fewer_bytes(self, stage, BYTES: gl.constexpr):
    full = self.full.index(stage)
    mbarrier.expect(full, BYTES - 16)
    return full


@gluon.jit
def no_claim(self, n):
    return n % self.STAGES


@gluon.jit
def no_fence():
    pass


@gluon.jit
def no_store_wait(pipe, done):
    if done > 0:
        pipe.slots.release(done - 1)


@gluon.jit
def release_twice(self, n):
    mbarrier.arrive(self.empty.index(n % self.SLOTS), count=1)
    mbarrier.arrive(self.empty.index(n % self.SLOTS), count=1)


@gluon.jit
def no_outbox_claim(self, c: gl.constexpr, n):
    pass


@gluon.jit
def bias_before_claim(q, captured_desc, shared, n, block, q_block, args):
    stage = n % 2
    barrier = q.ring.target(stage, q_block.whole)
    for c in gl.static_range(2):
        place = [q_block.b, q_block.h, q_block.row, block.start + c * 64]
        tma_load(captured_desc, place, barrier, shared.captured.index(2 * stage + c))
    q.ring.claim(n)
    mbarrier.expect(barrier, q.BLOCK_Q * (2 * q.COLUMNS + 4 + 2 * args.kv_blocks.BLOCK_K))
    q.copy(stage, barrier, q_block)


@gluon.jit
def ds_after_clear(c: gl.constexpr, dq_desc, gradient_desc, shared, block, first, steps, args):
    for n in range(steps):
        shared.outbox.receive(c)
        tma_reduce_add(dq_desc, [epilogue_of_dq.dq_tile(c, n, block, args), 0], shared.outbox.tiles.index(c))
        tma.store_wait(0)
        shared.outbox.clear(c)
        epilogue_of_dq.store_ds(c, gradient_desc, shared.ds.part(c, first + n), n, block, args)


@gluon.jit
def dq_of_the_other_half(c: gl.constexpr, desc, tile, n, block, args):
    h, q_block = block.step_at(n, args.group)
    tma_store(desc, [block.b, h, q_block * 128 + 64 - c * 64, 0], tile)


@gluon.jit
def send_unscaled(self, c: gl.constexpr, dq, scale):
    self.tiles.index(c).reshape([64, 64]).store(dq.to(self.tiles.dtype))
    fence_async_shared()
    barrier_arrive(backward_pipeline.DQ + c, 160)


@gluon.jit
def ds_of_the_next_step(self, c: gl.constexpr, n):
    BLOCK_Q: gl.constexpr = self.tiles.shape[1]
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([1, 1, BLOCK_Q, 64], self.tiles.dtype)
    return view(self.tiles, [4, 1, 1, BLOCK_Q, 64], LAYOUT).index((n + 1 & 1) * 2 + c)


@gluon.jit
def no_take(self, c: gl.constexpr, n):
    pass


@gluon.jit
def no_claim_of_out():
    pass


@gluon.jit
def one_record_less(self, n):
    return n % (self.SLOTS + 1) * self.NUMBERS


@gluon.jit
def no_captured_tile(args, pipe, stage, tile, start, full):
    pass


@gluon.jit
def quotient_that_may_be_less(n, d, inverse):
    q = gl.umulhi(n.to(gl.uint32, bitcast=True), inverse).to(gl.int32, bitcast=True)
    return q, n - q * d


@gluon.jit
def tiles_of_the_first_row(mask, b, row, rows, keys, ROWS: gl.constexpr, BLOCK_K: gl.constexpr):
    return tiles_of_rows(mask, b, row, gl.minimum(rows, row + 1), keys, ROWS, BLOCK_K)


own_edges = KVBlock.own_edges


@gluon.jit
def one_more_unseen(self, kv_blocks, c: gl.constexpr):
    unseen, edges = own_edges(self, kv_blocks, c)
    unseen = gl.minimum(unseen + 1, self.end - self.first)
    return unseen, gl.maximum(edges, unseen)


@gluon.jit
def one_edge_less(self, kv_blocks, c: gl.constexpr):
    unseen, edges = own_edges(self, kv_blocks, c)
    return unseen, gl.maximum(edges - 1, unseen)


FORWARD: dict[str, tuple[list[tuple[Any, str, Any]], type[Exception]]] = {
    "no wait for a copy": ([(Ring, "wait", no_wait)], Race),
    "a phase off by one": ([(Ring, "wait", other_phase)], EmulatorError),
    "a stage given back early": ([(Ring, "wait", wait_and_release), (Ring, "release", nothing)], Race),
    "too many bytes expected": ([(Ring, "announce", more_bytes)], Deadlock),
    "too few bytes expected": ([(Ring, "announce", fewer_bytes)], EmulatorError),
    "a stage taken early": ([(Ring, "claim", no_claim)], EmulatorError),
    "no fence before a copy": ([(epilogue, "fence_async_shared", no_fence)], Race),
    "no wait for a copy's reads": ([(kernel, "release_last_slot", no_store_wait)], Race),
    "an arrival too many": ([(Slots, "release", release_twice)], EmulatorError),
}
BACKWARD: dict[str, tuple[list[tuple[Any, str, Any]], type[Exception]]] = {
    "no wait for dq to leave": ([(Outbox, "claim", no_outbox_claim)], EmulatorError),
    "no fence before dq leaves": ([(backward_pipeline, "fence_async_shared", no_fence)], Race),
    "no wait for the other's ds": ([(DSExchange, "take", no_take)], EmulatorError),
}
EDGES: dict[str, tuple[list[tuple[Any, str, Any]], type[Exception]]] = {
    "rows that are passed over, but see keys": ([(KVBlock, "own_edges", one_more_unseen)], AssertionError),
    "a step without the mask that it needs": ([(KVBlock, "own_edges", one_edge_less)], AssertionError),
}
ONE_BLOCK: dict[str, tuple[list[tuple[Any, str, Any]], type[Exception]]] = {
    "no wait for dq to leave": ([(Outbox, "claim", no_outbox_claim)], EmulatorError),
    "no fence before dq leaves": ([(backward_pipeline, "fence_async_shared", no_fence)], Race),
    "dq of the other half": ([(epilogue_of_dq, "store_dq", dq_of_the_other_half)], AssertionError),
    "dq that is not scaled": ([(Outbox, "send", send_unscaled)], AssertionError),
}
TALL: dict[str, tuple[list[tuple[Any, str, Any]], type[Exception]]] = {
    "no fence before ds is read": ([(backward_wide, "fence_async_shared", no_fence)], Race),
    "no wait for the other's ds": ([(DSExchange, "take", no_take)], EmulatorError),
}


WIDE: dict[str, tuple[list[tuple[Any, str, Any]], type[Exception]]] = {
    "no wait for out's place": ([(epilogue, "claim_out", no_claim_of_out)], Race),
}
ITEMS: dict[str, tuple[list[tuple[Any, str, Any]], Any]] = {
    "an item that is drawn too early": ([(Plans, "wait_for_request", nothing_at_all)], EmulatorError),
    "a record read before it is written": ([(Plans, "wait", nothing)], (EmulatorError, AssertionError)),
    "an item that is somewhere else": ([(work_item, "divide", quotient_that_may_be_less)], AssertionError),
    "keys that no tile has": ([(schedule, "tiles_of_rows", tiles_of_the_first_row)], AssertionError),
}
PACKED: dict[str, tuple[list[tuple[Any, str, Any]], type[Exception]]] = {
    "a record written while it is read": ([(Slots, "record_of", one_record_less)], AssertionError),
}
CAPTURED: dict[str, tuple[list[tuple[Any, str, Any]], type[Exception]]] = {
    "no copy of what a function captures": ([(load, "load_captured", no_captured_tile)], Deadlock),
    "a stage given back early": ([(Ring, "wait", wait_and_release), (Ring, "release", nothing)], Race),
}
LEARNED: dict[str, tuple[list[tuple[Any, str, Any]], Any]] = {
    "a bias that comes before its stage is given back": (
        [(backward_load, "start_q", bias_before_claim)],
        (EmulatorError, AssertionError),
    ),
    "ds leaves when its place may be in use": ([(epilogue_of_dq, "reduce_steps", ds_after_clear)], Race),
    "the other ds leaves": ([(DSExchange, "part", ds_of_the_next_step)], Race),
}
RECORDS: dict[str, tuple[list[tuple[Any, str, Any]], Any]] = {
    "a stage that products read": ([(Seesaw, "claim", no_claim_of_half)], (Race, AssertionError)),
    "numbers that products do not see": ([(latent_load, "fence_async_shared", no_fence)], Race),
    "factors of the next numbers": ([(latent_load, "FACTORS", gl.constexpr(129))], AssertionError),
    "records that are not there": ([(latent_load, "words_at", words_of_all)], AssertionError),
    "a stage before it is whole": ([(Seesaw, "wait", no_wait_for_half)], (Race, AssertionError)),
}
KERNELS = {
    "records": RECORDS,
    "forward": FORWARD,
    "backward": BACKWARD,
    "edges": EDGES,
    "edges of 64 rows": EDGES,
    "one_block": ONE_BLOCK,
    "tall": TALL,
    "wide": WIDE,
    "items": ITEMS,
    "packed": PACKED,
    "captured": CAPTURED,
    "learned": LEARNED,
}


def rejected(seed: int, kernel: str) -> Exception | None:
    """What is said of a call; None if all is well. Results that are wrong are an AssertionError."""
    torch.manual_seed(0)
    more: dict[str, Any] = {}
    q, k, v = torch.randn(3, 1, 2, 496, 64, dtype=torch.bfloat16).unbind()
    if kernel.startswith("edges"):
        d = 64 if kernel == "edges" else 128
        q, k, v, more = *torch.randn(3, 1, 2, 384, d, dtype=torch.bfloat16).unbind(), {"mask": causal()}
        k, v = k[:, :1], v[:, :1]
    if kernel == "one_block":
        k, v = k[:, :, :77], v[:, :, :77]
    if kernel == "tall":  # 128 keys of head dims above 128
        q, k, v = torch.randn(3, 1, 1, 300, 192, dtype=torch.bfloat16).unbind()
        v = v[..., :128].contiguous()
    if kernel == "wide":  # with a mask out has a place of its own
        q, k, v = torch.randn(3, 1, 2, 496, 256, dtype=torch.bfloat16).unbind()
        more = {"mask": causal()}
    if kernel == "items":  # of one slot
        q, k, v, more = *torch.randn(3, 1, 3, 200, 256, dtype=torch.bfloat16).unbind(), {"mask": causal()}
    if kernel == "packed":  # and sequences of a tile of keys, whose numbers a consumer reads again when its out leaves
        q, k, v = torch.randn(3, 300, 2, 256, dtype=torch.bfloat16).unbind()
        more = {"layout": Packed.from_lengths([60, 30, 50, 40, 20, 60, 40]), "mask": causal()}
    if kernel == "captured":
        more = {"score_mod": bias(torch.randn(2, 496, 496, dtype=torch.bfloat16))}
    if kernel == "learned":
        q, k, v = q[:, :, :450], k[:, :, :264], v[:, :, :264]
        more = {"score_mod": bias(torch.randn(1, 2, 450, 264, dtype=torch.bfloat16, requires_grad=True))}
    if kernel == "records":  # of which those without a slot are NaN
        cache = LatentCache(torch.full((1, 401, 656), 0xFF, dtype=torch.uint8), "v3.2")
        append_kv(cache, cache, None, torch.randn(400, 1, 576), None, slot_mapping=torch.arange(400) + 1)
        k = cache.rows(None, torch.bfloat16).view(1, 401, 1, 576)
        q, v, slots = torch.randn(2, 64, 576, dtype=torch.bfloat16), k[..., :512], torch.arange(400).view(2, 200) + 1
        more = {"layout": Paged(slots=slots, seqused_k=torch.tensor([200, 70]))}
        more["function"] = lambda q, k, v, **keywords: attention(q, cache, cache, **keywords)
    try:
        with emulated(seed, processors=1):
            backward = kernel in ("backward", "edges", "edges of 64 rows", "one_block", "tall", "learned")
            check(q, k, v, backend="gluon", backward=backward, **more).assert_ok()
    except (EmulatorError, AssertionError) as error:
        return error
    return None


@pytest.mark.parametrize(("kernel", "name"), [(kernel, name) for kernel, names in KERNELS.items() for name in names])
def test_broken(kernel: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some seed, of a few, rejects it for that reason."""
    changes, kind = KERNELS[kernel][name]
    for owner, attribute, value in changes:
        monkeypatch.setattr(owner, attribute, value)
    found: list[Exception | None] = []
    for seed in range(SEEDS):
        found.append(rejected(seed, kernel))
        if isinstance(found[-1], kind):
            return
    raise AssertionError(str(found))


@pytest.mark.parametrize("kernel", KERNELS)
def test_without_a_fault(kernel: str) -> None:
    assert all(rejected(seed, kernel) is None for seed in range(2))


def test_a_deadlock_says_who_waits_for_what(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Ring, "announce", more_bytes)
    told = str(rejected(0, "forward"))
    assert re.search(
        r"program 0, partition 1 \(consume\) waits for phase 0 of mbarrier 0 of .* lacks 0 arrivals and 16", told
    )


# Programs of their own


@gluon.jit
def copy_kernel(x, out, n, N: gl.constexpr):
    i = gl.arange(0, N, gl.BlockedLayout([1], [32], [4], [0]))
    gl.store(out + i, gl.load(x + i), mask=i < n)


@gluon.jit
def unknown_kernel(x):
    gl.inline_asm_elementwise("nop;", "=r,r", [gl.to_tensor(0)], dtype=gl.int32, is_pure=False, pack=1)


def test_memory_outside_of_tensors() -> None:
    x, out = torch.randn(64), torch.zeros(64)
    with emulated():
        copy_kernel[(1,)](x, out, 60, 64)
        assert torch.equal(out[:60], x[:60])
        assert not out[60:].any()
        with pytest.raises(EmulatorError, match="memory outside of every tensor"):
            copy_kernel[(1,)](x, out, 60, 128)


def test_what_is_not_known_raises() -> None:
    with emulated(), pytest.raises(NotImplementedError, match="does not know the PTX 'nop;'"):
        unknown_kernel[(1,)](torch.zeros(1))
