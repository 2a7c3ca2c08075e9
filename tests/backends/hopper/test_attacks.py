"""Where users break `gluon`, in the emulator: replays without memory, few keys, and rows that see nothing."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

pytest.importorskip("triton")

from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from saccade import Dense, Mask, Packed, attention, causal, interval, mask_mod, prefix, relative_bias, softcap, window
from saccade.backends.device import replay as launches
from saccade.backends.hopper import tma_launch
from saccade.backends.hopper.forward import work_item
from saccade.ops import replay
from tests.emulator import emulated
from tests.emulator.launch import Emulation

# Replays: `device/replay.py` over the emulator's kernels. What it allocates holds NaN.


class Repeat:
    """A launch by slots, as a PackedLaunch."""

    def __init__(self, compiled: Any, grid: Any, arguments: Any, find: Callable[[Tensor], Any]) -> None:
        self.compiled, self.grid = compiled, grid
        self.sizes: dict[int, int] = {}
        self.makers = [self.maker(x, find) for x in arguments]

    def maker(self, x: Any, find: Callable[[Tensor], Any]) -> Callable[[Any], Any]:
        if isinstance(x, TensorDescriptor):
            base = self.maker(x.base, find)

            def descriptor(spaces: Any) -> TensorDescriptor:
                made = object.__new__(TensorDescriptor)
                made.__dict__.update({**x.__dict__, "base": base(spaces)})
                return made

            return descriptor
        if isinstance(x, tuple):
            parts = [self.maker(y, find) for y in x]
            whole: Any = type(x)._make if hasattr(x, "_fields") else tuple
            return lambda spaces: whole([part(spaces) for part in parts])
        if not isinstance(x, Tensor) or not x.numel():
            return lambda spaces: x
        slot, far = find(x)
        size = 1 + sum((n - 1) * m for n, m in zip(x.shape, x.stride(), strict=True))
        self.sizes[slot] = max(self.sizes.get(slot, 0), far + size * x.element_size())
        first, shape, strides, dtype = far // x.element_size(), x.shape, x.stride(), x.dtype
        return lambda spaces: torch.empty(0, dtype=dtype).set_(spaces[slot].untyped_storage(), first, shape, strides)

    def __call__(self, device: Any, stream: Any, addresses: Any) -> None:
        spaces = {}
        for slot, size in self.sizes.items():
            assert addresses[slot], "memory that is not there yet"
            spaces[slot] = torch.frombuffer((ctypes.c_char * size).from_address(addresses[slot]), dtype=torch.uint8)
        self.compiled.run(*self.grid, *[None] * 6, *[make(spaces) for make in self.makers])


class Room:
    """How many allocations of a replay succeed; and how many replays there were."""

    def __init__(self) -> None:
        self.left, self.replays = 1 << 30, 0

    def empty(self, shape: Any, strides: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
        self.left -= 1
        if self.left < 0:
            raise torch.OutOfMemoryError
        made = torch.empty_strided(shape, strides, dtype=dtype, device=device)
        made.untyped_storage().fill_(0xFF)
        return made


@contextlib.contextmanager
def replayed(seed: int) -> Iterator[Room]:
    room, launch, repeat = Room(), Emulation.launch, launches.Replay.__call__

    def quiet(*given: Any) -> None:
        with _disable_current_modes():  # the emulator's own operations are no part of the call
            launch(*given)

    def fill(self: Any, device: Any, stream: Any, addresses: Any) -> None:
        bytes_there = self.pattern.to_bytes(self.width, "little") * self.elements
        ctypes.memmove(addresses[self.slot[0]] + self.slot[1], bytes_there, len(bytes_there))

    def counted(self: Any, addresses: Any) -> Any:
        room.replays += 1
        return repeat(self, addresses)

    def packed(compiled: Any, grid: Any, arguments: Any, encodings: Any, find: Any) -> Repeat:
        return Repeat(compiled, grid, arguments, find)

    replaced = [
        (Emulation, "launch", quiet),
        (replay, "on_host", lambda x: False),
        (launches, "new_launch_recorder", launches.LaunchRecorder),
        (launches, "driver", object),
        (launches, "packed", packed),
        (launches, "empty", room.empty),
        (launches.Fill, "__call__", fill),
        (launches.Replay, "__call__", counted),
    ]
    with emulated(seed), contextlib.ExitStack() as stack:
        for owner, name, value in replaced:
            stack.enter_context(mock.patch.object(owner, name, value))
        stack.enter_context(mock.patch.object(torch._C, "_cuda_getDevice", create=True, return_value=None))
        replay.forget()
        try:
            yield room
        finally:
            replay.forget()


CALLS: dict[str, tuple[tuple[int, int, int], dict[str, Any]]] = {
    "stored dq": ((90, 77, 64), {}),
    "stored dq, in order": ((90, 77, 64), {"deterministic": True}),
    "a sum": ((90, 150, 64), {"mask": causal()}),
    "a sum in order": ((90, 150, 64), {"mask": causal(), "deterministic": True}),
    "wide": ((70, 100, 192), {"mask": causal(), "deterministic": True}),
    "used": ((90, 77, 64), {"layout": Dense(seqused_k=torch.tensor([50]))}),
    "a table": ((70, 65, 64), {"score_mod": relative_bias(torch.linspace(-1, 1, 34).view(2, 17))}),
}


@pytest.mark.parametrize("name", CALLS)
def test_replays_without_room(name: str) -> None:
    """Whichever allocation of a replay fails, forward or backward, the next call is right and counters are zero. A
    replay has the bits of the call that it repeats, in memory that held NaN."""
    (s_q, s_k, d), given = CALLS[name]
    exactly = name != "a sum"

    def run(seed: int) -> list[Tensor]:
        torch.manual_seed(seed)
        shapes = (1, 2, s_q, d), (1, 1, s_k, d), (1, 1, s_k, d)
        q, k, v = (torch.randn(x, dtype=torch.bfloat16).requires_grad_() for x in shapes)
        out, lse = attention(q, k, v, backend="gluon", return_lse=True, **given)
        dlse = torch.randn(lse.shape).masked_fill(lse == -torch.inf, 0)
        return [out.detach(), *torch.autograd.grad([out, lse], (q, k, v), [torch.randn_like(out), dlse])]

    def check(found: list[Tensor], wanted: list[Tensor]) -> None:
        for x, y in zip(found, wanted, strict=True):
            torch.testing.assert_close(x, y, rtol=0 if exactly else 0.02, atol=0 if exactly else 0.02)

    wanted = []
    for seed in range(2):
        with emulated(seed):
            wanted.append(run(seed))
    with replayed(7) as room:
        for turn in range(4):
            check(run(turn % 2), wanted[turn % 2])
        assert room.replays == 4
        failed = 0
        for allocations in range(8):
            room.left = allocations
            try:
                run(0)
            except torch.OutOfMemoryError:
                failed += 1
            room.left = 1 << 30
            assert not any(x.any() for x in tma_launch._counters.values())
            check(run(1), wanted[1])
        assert failed >= 6


# One block of keys.


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(
    ("s_q", "s_k", "heads", "d"), [(129, 128, (4, 1), 64), (63, 1, (2, 2), 128), (190, 65, (6, 2), 64)]
)
def test_bits_of_one_block_of_keys(s_q: int, s_k: int, heads: tuple[int, int], d: int, deterministic: bool) -> None:
    """dq is near the float64 gradient, and has the same bits whoever runs when, on however many processors."""
    torch.manual_seed(s_k)
    h_q, h_k = heads
    x = torch.randn(2, max(s_q, s_k), h_q + 2 * h_k, d, dtype=torch.bfloat16)  # views of one projection
    q, k, v = (y.transpose(1, 2) for y in x.split([h_q, h_k, h_k], 2))
    q, k, v = q[:, :, :s_q], k[:, :, :s_k], v[:, :, :s_k]
    dout, dlse = torch.randn(2, h_q, s_q, d, dtype=torch.bfloat16), torch.randn(2, h_q, s_q)
    found = []
    for seed, processors in ((0, 1), (1, 3), (2, 132)):
        leaves = [y.detach().requires_grad_() for y in (q, k, v)]
        with emulated(seed, processors=processors):
            results = attention(*leaves, backend="gluon", return_lse=True, deterministic=deterministic)
            found.append(torch.autograd.grad([*results], leaves, [dout, dlse]))
    for others in found[1:]:
        assert torch.equal(others[0], found[0][0])
    wide = [y.detach().double().requires_grad_() for y in (q, k, v)]
    scores = wide[0] @ wide[1].repeat_interleave(h_q // h_k, 1).mT * d**-0.5
    out = scores.softmax(-1) @ wide[2].repeat_interleave(h_q // h_k, 1)
    exact = torch.autograd.grad([out, scores.logsumexp(-1)], wide, [dout.double(), dlse.double()])
    for y, z in zip(found[0], exact, strict=True):
        assert (y.double() - z).norm() < 0.01 * z.norm()


# Masks.

EVERY_SECOND = mask_mod(lambda b, h, q_idx, kv_idx: (q_idx // 64 + kv_idx // 64) % 2 == 0)
SPOTS = torch.tensor([[200], [0]]), torch.tensor([[210], [0]])
MASKS: dict[str, tuple[Mask, Callable[[int, Tensor, Tensor, int], Tensor]]] = {
    # (b, rows, keys, off) -> what rows see
    "rows before all keys": (causal() & interval(40, None), lambda b, i, j, off: (j <= i + off) & (j >= 40)),
    "rows behind all keys": (
        window(30, None) & interval(None, 64), lambda b, i, j, off: (j >= i + off - 30) & (j < 64)
    ),
    "nothing": (interval(300, 200) & causal(), lambda b, i, j, off: (i < 0) & (j < 0)),
    "nothing in one batch row": (
        interval(*SPOTS), lambda b, i, j, off: (j >= int(SPOTS[0][b])) & (j < int(SPOTS[1][b])) & (i >= 0)
    ),
    "beyond all keys": (~prefix(1000) | interval(64, 65), lambda b, i, j, off: (j == 64) & (i >= 0)),
    "gaps": (EVERY_SECOND & window(100, 0), lambda b, i, j, off: ((i // 64 + j // 64) % 2 == 0)
             & (j <= i + off) & (j >= i + off - 100)),
}  # fmt: skip


@pytest.mark.parametrize("processors", [1, 132])
@pytest.mark.parametrize("form", ["dense", "padded", "packed"])
@pytest.mark.parametrize("name", MASKS)
def test_rows_and_items_that_see_nothing(name: str, form: str, processors: int) -> None:
    """One program goes over items that see keys and items that do not, in rows that are in use and in others, of NaN;
    two runs have the same bits."""
    torch.manual_seed(0)
    mask, sees = MASKS[name]
    lengths, total = [(300, 260), (70, 250)], (390, 520)  # queries and keys of two sequences; rows are left over
    if form == "dense":
        lengths = [(300, 260)] * 2
    starts = ((0, 0), lengths[0]) if form == "packed" else ((0, 0), (0, 0))
    shape = (lambda h, i: (total[i], h, 64)) if form == "packed" else (lambda h, i: (2, (300, 260)[i], h, 64))
    q, k, v = (torch.full(shape(h, i), torch.nan) for h, i in ((2, 0), (1, 1), (1, 1)))
    ranges = []
    for b, ((n_q, n_k), (at_q, at_k)) in enumerate(zip(lengths, starts, strict=True)):
        first = () if form == "packed" else (b,)
        ranges.append(((*first, slice(at_q, at_q + n_q)), (*first, slice(at_k, at_k + n_k))))
        for x, place in ((q, 0), (k, 1), (v, 1)):
            x[ranges[b][place]] = torch.randn(x[ranges[b][place]].shape)
    q, k, v = (x.bfloat16() for x in (q, k, v))
    used_q, used_k = torch.tensor(lengths).unbind(1)
    layout: Any = Dense("bshd", used_q, used_k) if form == "padded" else Dense("bshd")
    if form == "packed":
        ends = [torch.tensor([0, *x.cumsum(0)]) for x in (used_q, used_k)]
        layout = Packed(*ends)
    found = []
    for seed in range(2):
        with emulated(seed, processors=processors):
            found.append(attention(q, k, v, backend="gluon", mask=mask, layout=layout, return_lse=True))
    assert all(torch.equal(x, y) for x, y in zip(*found, strict=True))
    wanted = torch.zeros(q.shape, dtype=torch.float64)
    lse = torch.full((*q.shape[:-3], 2, q.shape[-3]), -torch.inf, dtype=torch.float64)
    for b, ((n_q, n_k), (of_q, of_k)) in enumerate(zip(lengths, ranges, strict=True)):
        visible = sees(b, torch.arange(n_q)[:, None], torch.arange(n_k), n_k - n_q)
        scores = torch.einsum("ihd,jd->hij", q[of_q].double(), k[of_k][:, 0].double()) / 8
        scores = scores.masked_fill(~visible, -torch.inf)
        lse[(*of_q[:-1], slice(None), of_q[-1])] = scores.logsumexp(-1)
        wanted[of_q] = torch.einsum("hij,jd->ihd", scores.softmax(-1).nan_to_num(0), v[of_k][:, 0].double())
    torch.testing.assert_close(found[0].out.double(), wanted, rtol=0.02, atol=0.02)
    torch.testing.assert_close(found[0].lse.double(), lse, rtol=1e-3, atol=1e-3)
    assert not found[0].out.double()[(lse == -torch.inf).mT].any()


STARTS: dict[str, tuple[Mask, Callable[[Tensor, Tensor], Tensor]]] = {
    # (rows, keys) -> what rows see
    "causal": (causal() & interval(65, None), lambda i, j: (j <= i) & (j >= 65)),
    "all rows": (interval(70, None), lambda i, j: (j >= 70) & (i >= 0)),
    "few keys": (interval(100, 110), lambda i, j: (j >= 100) & (j < 110) & (i >= 0)),
    "window": (window(100, 0) & interval(200, None), lambda i, j: (j <= i) & (j >= i - 100) & (j >= 200)),
    "prefix": (prefix(70) & interval(66, None), lambda i, j: ((j < 70) | (j <= i)) & (j >= 66)),
}


@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("name", STARTS)
def test_a_mask_that_starts_inside_of_64_keys(name: str, d: int) -> None:
    """The second consumer does not pass over rows that see its later keys where no row sees its first one."""
    torch.manual_seed(0)
    mask, sees = STARTS[name]
    q, k, v, dout = torch.randn(4, 1, 1, 256, d, dtype=torch.bfloat16).unbind()
    leaves, exact = ([x.to(t).requires_grad_() for x in (q, k, v)] for t in (torch.bfloat16, torch.float64))
    with emulated(d, processors=1):
        found = torch.autograd.grad(attention(*leaves, mask=mask, backend="gluon"), leaves, dout)
    visible = sees(torch.arange(256)[:, None], torch.arange(256))
    scores = (exact[0] @ exact[1].mT * d**-0.5).masked_fill(~visible, -torch.inf)
    p = scores.masked_fill(~visible.any(1)[:, None], 0).softmax(-1).masked_fill(~visible, 0)
    for x, y in zip(found, torch.autograd.grad(p @ exact[2], exact, dout.double()), strict=True):
        assert (x.double() - y).norm() < 0.02 * y.norm()


@pytest.mark.parametrize("sink", [None, -torch.inf, 0.5])
@pytest.mark.parametrize(("cap", "scale"), [(5.0, -0.2), (5.0, 0.125), (1e30, 0.125), (0.0, 1e9)])
def test_rows_without_keys_beside_large_factors(cap: float, scale: float, sink: float | None) -> None:
    """What a row's maximum starts from, times a cap or a scale, is no infinity, of which a difference would be NaN."""
    torch.manual_seed(0)
    q = torch.randn(1, 1, 4, 64, dtype=torch.bfloat16, requires_grad=True)
    k, v = torch.randn(2, 1, 1, 9, 64, dtype=torch.bfloat16).unbind()
    leaves = [q] if sink is None else [q, torch.tensor([sink], requires_grad=True)]
    mask, score_mod = interval(None, torch.tensor([[9, 0, 3, 0]])), softcap(cap) if cap else None
    with emulated():
        out, lse = attention(
            q,
            k,
            v,
            mask=mask,
            score_mod=score_mod,
            scale=scale,
            sink=[*leaves, None][1],
            backend="gluon",
            return_lse=True,
        )
        gradients = torch.autograd.grad([out, lse], leaves, [torch.ones_like(out), torch.ones_like(lse)])
    assert all(x.isfinite().all() for x in gradients)
    x = q[0, 0, ::2].double() @ k[0, 0].double().T * scale
    x = cap * torch.tanh(x / cap) if cap else x
    x[1, 3:] = -torch.inf
    extra = torch.full((2, 1), -torch.inf if sink is None else sink)
    torch.testing.assert_close(lse[0, 0, ::2].double(), torch.cat([x, extra], 1).logsumexp(1), rtol=1e-3, atol=1e-3)
    assert lse[0, 0, 1::2].tolist() == extra[:, 0].tolist()
    assert not out[0, 0, 1::2].any()
    assert not gradients[0][0, 0, 1::2].any()


@pytest.mark.parametrize("s_k", [1153, 1217])
def test_first_rows_last_by_their_own_rule(s_k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each row is there where sections of one head have few rounds, and the first rows of all heads come last."""
    torch.manual_seed(0)
    monkeypatch.setattr(work_item, "L2_BYTES", 1)
    given, rule = [], work_item.late_rows
    monkeypatch.setattr(work_item, "late_rows", lambda *sizes: given.append(rule(*sizes)) or given[-1])
    q = torch.randn(1, 4, 1153, 128, dtype=torch.bfloat16)
    k, v = torch.randn(2, 1, 2, s_k, 128, dtype=torch.bfloat16).unbind()
    with emulated(0, processors=16):
        out = attention(q, k, v, mask=causal(), backend="gluon")
    assert given[-1] > 0
    hidden = torch.ones(1153, s_k, dtype=torch.bool).triu(s_k - 1153 + 1)
    scores = (q.double() @ k.double().repeat_interleave(2, 1).mT * 128**-0.5).masked_fill(hidden, -torch.inf)
    wanted = scores.softmax(-1) @ v.double().repeat_interleave(2, 1)
    torch.testing.assert_close(out.double(), wanted, rtol=0.02, atol=0.02)


def test_replays_of_calls_of_other_lengths() -> None:
    """Calls of many lengths take turns, and each repeats its own order of blocks and its own shares."""
    for mask, heads, lengths in ((causal(), 2, (127, 129, 640)), (None, 3, (63, 129, 257))):
        with replayed(3) as room:
            for turn in range(3):
                for s in lengths:
                    torch.manual_seed(s + turn)
                    q = torch.randn(1, heads, s, 64, dtype=torch.bfloat16)
                    k, v = torch.randn(2, 1, 1, s, 64, dtype=torch.bfloat16).unbind()
                    dout = torch.randn_like(q)
                    leaves, exact = ([x.to(t).requires_grad_() for x in (q, k, v)] for t in (q.dtype, torch.float64))
                    out = attention(*leaves, mask=mask, backend="gluon")
                    found = out, *torch.autograd.grad(out, leaves, dout)
                    scores = exact[0] @ exact[1].mT / 8
                    if mask is not None:
                        scores = scores.masked_fill(torch.ones(s, s, dtype=torch.bool).triu(1), -torch.inf)
                    right = scores.softmax(-1) @ exact[2]
                    right = right, *torch.autograd.grad(right, exact, dout.double())
                    for x, y in zip(found, right, strict=True):
                        assert (x.double() - y).norm() < 0.01 * y.norm()
            assert room.replays >= len(lengths)


LITTLE: dict[str, dict[str, Any]] = {
    "gaps": {"memory": lambda x: torch.nn.functional.pad(x, (8, 16), value=torch.nan)[..., 8:-16]},
    "sink": {"sink": torch.float32, "dout": lambda x: torch.nn.functional.pad(x, (1, 2), value=torch.nan)[..., 1:-2]},
    "short sink": {"sink": torch.bfloat16, "scale": -0.1},
    "dk alone": {"wanted": [1], "dlse": 0.0},
}


def test_replays_of_calls_that_differ_little() -> None:
    """In memory, in what has a gradient, in a sink's dtype; bounds are edited in place from call to call."""
    start = torch.zeros(1, 1, dtype=torch.int64)
    with replayed(5) as room:
        for turn in range(3):
            for name, given in LITTLE.items():
                torch.manual_seed(turn)
                start.fill_(10 * turn + len(name))
                q, k, v, dout = (
                    given.get("memory", Tensor.contiguous)(x) for x in torch.randn(4, 1, 1, 40, 64).bfloat16()
                )
                dout = given.get("dout", Tensor.contiguous)(dout)
                sinks = [torch.randn(1).to(given["sink"])] if "sink" in given else []
                dlse = given.get("dlse", 1.0) * torch.randn(1, 1, 40)
                wanted, found = given.get("wanted", range(3 + len(sinks))), []
                for wide in (False, True):
                    leaves = [x.double() if wide else x for x in (q, k, v, *sinks)]
                    leaves = [x.detach().requires_grad_(i in wanted) for i, x in enumerate(leaves)]
                    scale = given.get("scale", 0.125)
                    if wide:
                        hidden = torch.ones(40, 40, dtype=torch.bool).triu(1) | (torch.arange(40) < start)
                        scores = (leaves[0] @ leaves[1].mT * scale).masked_fill(hidden, -1e300)
                        columns = [x.view(1, 1, 1, 1).expand(1, 1, 40, 1) for x in leaves[3:]]
                        lse = torch.cat([scores, *columns], 3).logsumexp(3)
                        out = (scores - lse[..., None]).exp().masked_fill(hidden, 0) @ leaves[2]
                    else:
                        mask, sink = causal() & interval(start, None), [*leaves[3:], None][0]
                        out, lse = attention(
                            *leaves[:3], mask=mask, sink=sink, scale=scale, backend="gluon", return_lse=True
                        )
                    seen = lse.detach() > -1e30
                    grads = torch.autograd.grad(
                        [out, lse],
                        [leaves[i] for i in wanted],
                        [dout.to(out.dtype), dlse.masked_fill(~seen, 0).to(lse.dtype)],
                    )
                    found.append([out, lse.masked_fill(~seen, 0), *grads])
                for x, y in zip(*found, strict=True):
                    assert (x.double() - y).norm() < 0.05 * y.norm(), name
        assert room.replays >= len(LITTLE)
