"""A call's result is what the function would compute if it ran at that call."""

from __future__ import annotations

import enum
import functools
import math
import multiprocessing
import threading
from fractions import Fraction

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import saccade
from saccade import Packed, ScoreMod, alibi, attention, bias, block_mask, causal, mask_mod, scores, softcap
from saccade.compat.flex import flex_attention
from saccade.testing.accuracy import check

S = 8


def operands(s: int = S) -> list[Tensor]:
    return [torch.randn(1, 2, s, 4) for _ in range(3)]


def elementwise(fn, score: Tensor) -> Tensor:
    """The function on one score after the other, each a tensor of no dimensions."""
    at = [torch.arange(n) for n in score.shape]
    rows = [
        fn(score[b, h, i, j], b, h, i, j) for b in at[0] for h in at[1] for i in at[2] for j in at[3]
    ]  # fmt: skip
    return torch.stack(rows).reshape(score.shape)


def wanted(q: Tensor, k: Tensor, v: Tensor, fn) -> Tensor:
    return elementwise(fn, q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1) @ v


def means(fn) -> None:
    """What attention makes of a function is what Python makes of it now."""
    q, k, v = operands()
    torch.testing.assert_close(attention(q, k, v, score_mod=fn), wanted(q, k, v, fn))


def test_constant_tensors_are_told_apart():
    means(lambda s, b, h, i, j: s + torch.tensor([0.1, 0.2])[h] * j)
    means(lambda s, b, h, i, j: s + torch.tensor([-0.5, 0.9])[h] * j)
    q = operands()[0].requires_grad_()
    for limits in ([1, 2], [7, 3]):
        mask = mask_mod(lambda b, h, i, j, limits=limits: j <= torch.tensor(limits)[h])
        check(q, q, q, mask=mask, backend="cpu").assert_ok()


class Layer(torch.nn.Module):
    gain = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.held = torch.nn.ModuleDict({"a": torch.nn.Linear(1, 2)})
        self.listed = torch.nn.ParameterList([torch.nn.Parameter(torch.randn(2))])
        self.linear = torch.nn.Linear(2, 2)
        self.weight = torch.nn.Parameter(torch.randn(2))

    @property
    def strength(self) -> Tensor:
        return self.weight * 2

    def by_dict(self, s, b, h, i, j):
        return s + self.held["a"].bias[h] * j

    def by_list(self, s, b, h, i, j):
        return s + self.listed[0][h] * j

    def by_call(self, s, b, h, i, j):
        return s + self.linear(self.weight)[h] * j

    def by_property(self, s, b, h, i, j):
        return s + self.strength[h] * j * self.gain

    def by_getattr(self, s, b, h, i, j):
        return s + getattr(self, "weight")[h] * j  # noqa: B009 (what is tested)


@pytest.mark.parametrize("name", ["by_dict", "by_list", "by_call", "by_property", "by_getattr"])
def test_each_layer_is_itself(name):
    first, second = Layer(), Layer()
    q, k, v = operands()
    attention(q, k, v, score_mod=getattr(first, name))
    means(getattr(second, name))
    attention(q, k, v, score_mod=getattr(second, name)).square().sum().backward()
    assert all(x.grad is None for x in first.parameters())
    assert any(x.grad is not None and x.grad.abs().sum() > 0 for x in second.parameters())


FACTOR = 1.0


class Config:
    alpha = 1.0


class Scaled:
    def __call__(self, s, b, h, i, j):
        return s * FACTOR


def test_what_is_read_is_read_at_the_call(monkeypatch):
    held, numbers, keyed = Scaled(), [1.0], {2: 1.0}
    functions = [
        held,
        lambda s, b, h, i, j: s * Config.alpha,
        lambda s, b, h, i, j: s * numbers[0],
        lambda s, b, h, i, j: s * sum(numbers),
        lambda s, b, h, i, j: s * keyed.get(2, 5.0),
        lambda s, b, h, i, j: s * globals()["FACTOR"],
        functools.partial(lambda by, s, b, h, i, j: s * by[0], numbers),
    ]
    for factor in (1.0, 3.0, -2.0):
        monkeypatch.setitem(globals(), "FACTOR", factor)
        monkeypatch.setattr(Config, "alpha", factor)
        numbers[0] = keyed[2] = factor
        for function in functions:
            means(function)


def test_classes_and_defaults_are_read_at_the_call(monkeypatch):
    layer = Layer()

    def scaled(s, b, h, i, j, by=2.0):
        return s * by

    for gain in (1.0, 4.0):
        monkeypatch.setattr(Layer, "gain", gain)
        scaled.__defaults__ = (gain,)
        means(layer.by_property)
        means(scaled)


def test_what_a_name_resolves_to_now(monkeypatch):
    def bent(s, b, h, i, j):
        return torch.tanh(s)

    means(bent)
    means(bent)
    monkeypatch.setattr(torch, "tanh", lambda x: x * 3)
    means(bent)
    monkeypatch.undo()
    means(bent)
    monkeypatch.setitem(globals(), "abs", lambda x: x)
    means(lambda s, b, h, i, j: s * abs(-3.0))


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 3


class Mine(float):
    pass


@pytest.mark.parametrize("pair", [(Level.LOW, Level.HIGH), (Mine(1.5), Mine(2.5)), (True, False), (1, 2.0)])
def test_numbers_of_other_types(pair):
    for number in pair:
        means(lambda s, b, h, i, j, number=number: s * number)


def test_python_looks_at_numbers_themselves():
    def chosen(n):
        def fn(s, b, h, i, j):
            match n:
                case int():
                    s = s * 2
                case float():
                    s = s * 3
            s = s * {2: 3.0}.get(n, 1.0) * (n if torch.is_tensor(n) else 2 * n)
            return s + len(str(n)) if n in (2, 5.0) else s

        return fn

    for n in (2, 5.0, 7, 2.0):
        means(chosen(n))
    means(lambda s, b, h, i, j: s * float(Fraction(1, 3)))
    means(lambda s, b, h, i, j: s if isinstance(s, Tensor) else s * 2)


def test_new_numbers_lower_nothing():
    def made(c, n):
        return lambda s, b, h, i, j: torch.where(i - j < n, s * c + 0.25, s - c)

    means(made(2.0, 3))
    before = saccade.cache_info().misses
    for c, n in ((0.0, 2), (1.0, 7), (-3.5, 4)):
        means(made(c, n))
    assert saccade.cache_info().misses == before


def test_tensors_written_in_place_are_live():
    table, level, row = torch.randn(2, S), torch.tensor(1.0), torch.randn(2)
    functions = [bias(level), softcap(level + 1), lambda s, b, h, i, j: s + table[h, j] * level, alibi(row)]
    level_bias = functions[0]
    for _ in range(3):
        for function in functions:
            means(function)
        for x in (table, row):
            x.copy_(torch.randn_like(x))
        level.fill_(float(torch.rand(())) + 0.5)
    level.requires_grad_()
    q, k, v = operands()
    attention(q, k, v, score_mod=level_bias, return_lse=True).lse.sum().backward()
    torch.testing.assert_close(level.grad, torch.tensor(2.0 * S))


def test_masks_are_live():
    S = 200  # several tiles, some of them empty and some full
    n, table = 3, torch.ones(S, S, dtype=torch.bool).tril()
    live = mask_mod(lambda b, h, i, j: i - j < n)
    read = mask_mod(lambda b, h, i, j: table[i, j])
    blocked = block_mask(live, 1, 2, S, S), block_mask(read & causal(), 1, 2, S, S)
    q, k, v = operands(S)
    for n in (3, 80, 150, 1):
        table.copy_(torch.rand(S, S) < n / 100)
        table.fill_diagonal_(True)
        i = torch.arange(S)
        for mask, seen in (
            (live, i[:, None] - i < n), (~live, i[:, None] - i >= n), (read, table),
            (blocked[0], i[:, None] - i < n), (blocked[1], table & (i[:, None] >= i)),
        ):  # fmt: skip
            for x in (q, q.clone().requires_grad_()):
                check(x, k, v, mask=mask, backend="cpu").assert_ok()
                torch.testing.assert_close(attention(x, k, v, mask=mask), attention(x, k, v, mask=seen))


def test_writes_that_torch_does_not_count():
    s = 200
    seen = torch.ones(s, s, dtype=torch.bool).tril()
    mask = mask_mod(lambda b, h, i, j: seen[i, j])
    q, k, v = operands(s)
    attention(q, k, v, mask=mask)
    seen.data.copy_(seen.mT.clone())
    mask.refresh()
    check(q, k, v, mask=mask, backend="cpu").assert_ok()


def test_a_captured_tensor_that_was_written_before_the_backward():
    table = torch.randn(2)
    q = operands()[0].requires_grad_()
    out = attention(q, q, q, score_mod=lambda s, b, h, i, j: s * table[h])
    table.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_a_block_mask_of_another_function():
    from torch.nn.attention.flex_attention import create_block_mask

    q, k, v = operands()
    held = create_block_mask(lambda b, h, i, j: i >= j, 1, 1, S, S, device="cpu")
    for reach in (0, 3, 0):
        held.mask_mod = lambda b, h, i, j, reach=reach: i >= j - reach
        i = torch.arange(S)
        seen = attention(q, k, v, mask=i[:, None] >= i - reach)
        torch.testing.assert_close(flex_attention(q, k, v, block_mask=held), seen)


# First use, anywhere


def fresh(n: float):
    """A function that no other test has lowered."""
    held: dict = {"torch": torch}
    exec(f"def fn(s, b, h, i, j):\n    return torch.tanh(s) {' + s' * int(n)}", held)
    return held["fn"]


def gradient(call) -> Tensor:
    torch.manual_seed(7)
    q, k, v = operands()
    q.requires_grad_()
    call(q, k, v).square().sum().backward()
    assert q.grad is not None
    return q.grad


def plain(fn):
    return gradient(lambda q, k, v: attention(q, k, v, score_mod=fn, backend="reference"))


def test_attributes_that_somebody_gave_to_a_tensor():
    """They hide what the class has, and guards of the class say nothing of them."""
    table = torch.randn(S)

    def fn(score, b, h, q_idx, kv_idx):
        return score + table.exp()[kv_idx]

    given = operands()
    for _ in range(4):
        attention(*given, score_mod=fn)
    table.exp = lambda: torch.zeros(S)
    torch.testing.assert_close(attention(*given, score_mod=fn), attention(*given))
    del table.exp
    torch.testing.assert_close(attention(*given, score_mod=fn), attention(*given, score_mod=bias(table.exp())))


def test_a_gradient_that_comes_and_goes():
    table = torch.zeros(S, requires_grad=True)

    def fn(score, b, h, q_idx, kv_idx):
        return score + (table.detach() if table.grad is None else table.grad)[kv_idx]

    given = operands()
    for step in range(12):
        table.grad = torch.randn(S) if step % 6 < 4 else None
        added = torch.zeros(S) if table.grad is None else table.grad
        torch.testing.assert_close(attention(*given, score_mod=fn), attention(*given, score_mod=bias(added)))


def test_first_in_inference_mode():
    fn = fresh(1)
    with torch.inference_mode():
        attention(*operands(), score_mod=fn)
    torch.testing.assert_close(gradient(lambda q, k, v: attention(q, k, v, score_mod=fn)), plain(fn))


@pytest.mark.parametrize("backend", ["auto", "cpu", "reference"])
@pytest.mark.parametrize("packed", [False, True])
def test_tensors_that_were_made_in_inference_mode(packed, backend):
    """Where no gradient of them is needed, in score functions, masks and layouts."""
    with torch.inference_mode():
        ids, w, z = torch.tensor([0, 0, 1, 1, 1, 2, 2, 2]), torch.randn(S), torch.tensor(0.5)
        cu = torch.tensor([0, 3, S], dtype=torch.int32)

    def results(ids, w, z, cu):
        q, k, v = (x.detach().requires_grad_() for x in given)
        layout = {"layout": Packed(cu)} if packed else {}
        mask = mask_mod(lambda b, h, i, j: ids[j] == ids[i])

        def fn(s, b, h, i, j):
            return s * w[j] + z * j

        out = attention(q, k, v, mask=mask, score_mod=fn, backend=backend, **layout)
        if backend != "reference" and w.is_inference():  # the backward takes what they held at the call
            with torch.inference_mode():
                w.mul_(3)
                ids.zero_()
        return out, *torch.autograd.grad(out.square().sum(), (q, k, v))

    given = [torch.randn(S, 2, 4) for _ in range(3)] if packed else operands()
    expected = results(ids.clone(), w.clone(), z.clone(), cu.clone())
    torch.testing.assert_close(results(ids, w, z, cu), expected)


@pytest.mark.parametrize("reentrant", [False, True])
def test_first_in_checkpointing(reentrant):
    scores.cache_clear()
    fn = fresh(2 + reentrant)

    def run(q, k, v):
        return checkpoint(lambda q: attention(q, k, v, score_mod=fn), q, use_reentrant=reentrant)

    torch.testing.assert_close(gradient(run), plain(fn))


def test_first_in_anomaly_mode():
    fn = fresh(4)
    with torch.autograd.detect_anomaly(check_nan=True):
        found = gradient(lambda q, k, v: attention(q, k, v, score_mod=fn))
        assert torch.is_anomaly_enabled()
    torch.testing.assert_close(found, plain(fn))


@pytest.mark.parametrize("known", [False, True])
def test_hooks_of_all_modules_meet_no_module_of_ours(known):
    """Neither for what is computed beforehand, numbers, values, slopes, gradients of tensors, nor for masks."""
    scores.cache_clear()
    t, ids = torch.randn(S), torch.tensor([0, 0, 1, 1, 1, 2, 2, 2])
    w = torch.randn(S, requires_grad=True)
    z = torch.tensor(0.5, dtype=torch.float16)

    def fn(s, b, h, i, j):
        return s * 2 + t.exp()[j] * w[i] + torch.where(i > j, z, 0.3) * j

    def found():
        q, k, v = (x.requires_grad_() for x in given)
        mask = mask_mod(lambda b, h, i, j: (ids + 1)[j] == (ids + 1)[i])
        out = attention(q, k, v, mask=mask, score_mod=fn, backend="cpu")
        return out, *torch.autograd.grad(out.square().sum(), (q, k, v, w))

    given = operands()
    met: list = []
    right = found() if known else None
    hooks = [
        torch.nn.modules.module.register_module_forward_pre_hook(lambda module, args: met.append(module)),
        torch.nn.modules.module.register_module_forward_hook(lambda module, args, out: met.append(module)),
    ]
    try:
        hooked = found()
    finally:
        for hook in hooks:
            hook.remove()
    assert not met
    torch.testing.assert_close(hooked, right or found())


def test_first_in_autocast():
    w, x = torch.randn(2, 3), torch.randn(3)

    def fn(s, b, h, i, j):
        return s + (w @ x)[h] * j + s + s + s

    with torch.autocast("cpu", dtype=torch.bfloat16):
        attention(*operands(), score_mod=fn)
    means(fn)


def test_first_in_a_transform():
    scores.cache_clear()
    q, k, v = operands()

    def loss(t, backend="auto"):
        return attention(q, k, v, score_mod=alibi(t), backend=backend).square().sum()

    t = torch.ones(2)
    torch.testing.assert_close(
        torch.func.grad(loss)(t), torch.func.grad(functools.partial(loss, backend="reference"))(t)
    )


def test_cold_threads():
    scores.cache_clear()
    held: dict = {"torch": torch}
    failed = []

    def run(n: int) -> None:
        name = f"fn{n}"
        exec(f"def {name}(s, b, h, i, j):\n    return torch.sin(s) {' * s' * n}", held)
        try:
            means(held[name])
        except BaseException as wrong:
            failed.append(wrong)

    threads = [threading.Thread(target=run, args=(n,)) for n in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed


def _attends(found, n: int) -> None:
    q = torch.randn(1, 2, 8, 4)
    attention(q, q, q, score_mod=fresh(n))
    found.put("ok")


@pytest.mark.rare
def test_a_fork_while_another_thread_lowers():
    context = multiprocessing.get_context("fork")
    torch.set_num_threads(1)
    stop = threading.Event()

    def lower() -> None:
        n = 20
        while not stop.is_set():
            n += 1
            attention(*operands(), score_mod=fresh(n % 60))
            scores.cache_clear()

    thread = threading.Thread(target=lower)
    thread.start()
    try:
        for n in (5, 6, 7):
            found = context.Queue()
            child = context.Process(target=_attends, args=(found, n))
            child.start()
            assert found.get(timeout=60) == "ok"
            child.join(60)
    finally:
        stop.set()
        thread.join()


def test_side_effects_happen_at_most_once_in_a_call():
    calls = []

    def fn(s, b, h, i, j):
        calls.append(1)
        return s * len(calls)

    q, k, v = operands()
    for n in range(1, 4):
        out = attention(q.requires_grad_(), k, v, score_mod=fn)
        assert len(calls) <= n
        torch.testing.assert_close(out, attention(q, k, v, scale=0.5 * len(calls)))
        out.sum().backward()
        assert len(calls) <= n


def test_learned_numbers():
    cap = torch.tensor(3.0, requires_grad=True)
    q, k, v = operands()
    found = [
        torch.autograd.grad(attention(q, k, v, score_mod=softcap(cap), backend=x).square().sum(), cap)[0]
        for x in ("auto", "reference")
    ]
    torch.testing.assert_close(*found)
    with pytest.raises(ValueError, match="multiply q"):
        attention(q, k, v, scale=cap)


# Rows of captured tensors

DOUBLE = {"dtype": torch.float64, "requires_grad": True}
P, B = torch.randn(S, 16, **DOUBLE), torch.randn(2, S, S, **DOUBLE)
ROWS = {
    "distance": lambda s, b, h, i, j: s + (P[i] - P[j]).pow(2).sum(-1),
    "dot": lambda s, b, h, i, j: s + torch.dot(B[h, i], B[h // 2, j]),
    "matmul": lambda s, b, h, i, j: s + B[h, i] @ B[h, j],
    "one by one": lambda s, b, h, i, j: s + B[h][i][j],
    "behind a view": lambda s, b, h, i, j: s + B[0][i, j] + B[None][b, h][i][j],
    "columns": lambda s, b, h, i, j: s + B[:, i][h, j] + P[j, -1] + P[i, 2:5].mean(),
    "rotated": lambda s, b, h, i, j: s + (torch.cat([-P[i, 8:], P[i, :8]]) * P[j]).sum(-1),
    "stacked": lambda s, b, h, i, j: (torch.stack([s, P[i, 0]]) * P[j, :2]).sum(),
    "unpacked": lambda s, b, h, i, j: s + P[i][:2].unbind()[1] * P[j].norm() + P[i].amax() + P[i].shape[-1],
}


@pytest.mark.parametrize("name", ROWS)
def test_rows(name):
    q, k, v = (x.double() for x in operands())
    out, right = attention(q, k, v, score_mod=ROWS[name]), wanted(q, k, v, ROWS[name])
    torch.testing.assert_close(out, right)
    pairs = (torch.autograd.grad(x.square().sum(), (P, B), allow_unused=True) for x in (out, right))
    for found, expected in zip(*pairs, strict=True):
        if expected is not None:
            torch.testing.assert_close(found, expected)


H = torch.randn(2, **DOUBLE)
PRODUCTS = {
    "table first": lambda s, b, h, i, j: s - H[h] * (i - j).abs() * 0.1,
    "distance first": lambda s, b, h, i, j: s + (i - j).abs() * 0.1 * H[h],
    "number first": lambda s, b, h, i, j: s + 0.1 * H[h] * (i - j),
    "quotient": lambda s, b, h, i, j: s + H[h] / (1 + (i - j).abs()),
    "quotient of numbers": lambda s, b, h, i, j: s + H[h] * (i - j) / 3,
    "both": lambda s, b, h, i, j: s * (1 + 0.1 * H[h] * j) + (H[h] * (i - j) * 0.3).tanh(),
    "chosen": lambda s, b, h, i, j: torch.where(i > j, s - H[h] * (i - j) * 0.7, s * H[h] * j / 7),
    "powers": lambda s, b, h, i, j: s + H[h] ** 2 * (i + j) ** 2 * 0.01,
}


@pytest.mark.sample
@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("name", PRODUCTS)
def test_gradients_of_tensors_beside_indices_are_of_float64(name, backend):
    """Also where derivatives multiply numbers and indices, which alone are float32 in torch."""
    q, k, v = (x.double() for x in operands())
    out = attention(q, k, v, score_mod=PRODUCTS[name], backend=backend)
    right = wanted(q, k, v, PRODUCTS[name])
    found = [out, *torch.autograd.grad(out.square().sum(), H)]
    expected = [right, *torch.autograd.grad(right.square().sum(), H)]
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13)


BESIDE_INDICES = {
    "product": lambda z: lambda s, b, h, i, j: s + z * j,
    "difference": lambda z: lambda s, b, h, i, j: s + (z - j) * 0.1,
    "quotient": lambda z: lambda s, b, h, i, j: s + z / (j + 1),
    "power": lambda z: lambda s, b, h, i, j: s + z**j * 0.1,
    "computed": lambda z: lambda s, b, h, i, j: s + (z * j + h).sin(),
    "compared": lambda z: lambda s, b, h, i, j: s + (100 * z * j < 100 * (z * i)),
    "truth": lambda z: lambda s, b, h, i, j: s + (i > j) * z * 90,
    "chosen": lambda z: lambda s, b, h, i, j: s + torch.where(i > j, z, j),
    "chosen beside a number": lambda z: lambda s, b, h, i, j: s + torch.where(i > j, z, 0.3) * (j + 1),
    "both": lambda z: lambda s, b, h, i, j: s * (z * j) * z * 0.01 + (s * j * z).tanh(),
    "dtype": lambda z: lambda s, b, h, i, j: s + (z * j) * (z * j).dtype.itemsize,
}


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int32, torch.int8]
)
@pytest.mark.parametrize("name", BESIDE_INDICES)
def test_tensors_without_dimensions_decide_beside_indices(name, dtype):
    """Their dtype is that of what is computed where they meet integers alone, as in torch."""
    for score in (torch.float64, torch.float32):
        q, k, v = (x.to(score).requires_grad_() for x in operands())
        fn = BESIDE_INDICES[name](torch.tensor(3.3, dtype=torch.float64).to(dtype))
        out, right = attention(q, k, v, score_mod=fn, backend="cpu"), wanted_of_a_tile(q, k, v, fn)
        found, expected = ([x, *torch.autograd.grad(x.square().sum(), (q, k))] for x in (out, right))
        error = {"rtol": 1e-12, "atol": 1e-12} if score == torch.float64 else {"rtol": 1e-4, "atol": 1e-5}
        torch.testing.assert_close(found, expected, **error)


def wanted_of_a_tile(q: Tensor, k: Tensor, v: Tensor, fn) -> Tensor:
    """The function on all scores and broadcasting indices."""
    score = q @ k.mT / math.sqrt(q.shape[-1])
    at = [torch.arange(n).view([-1 if dim == i else 1 for i in range(4)]) for dim, n in enumerate(score.shape)]
    return fn(score, *at).to(v.dtype).softmax(-1) @ v


def test_what_float32_cannot_hold():
    """Also of what is computed of captured tensors alone."""
    q, k, v = (x.double() for x in operands())
    z, big = torch.tensor(16777217.0, **DOUBLE), torch.tensor(1e40, dtype=torch.float64)
    w = torch.rand(4, dtype=torch.float64)
    for fn in (
        lambda s, b, h, i, j: s + w.sum() * j,
        lambda s, b, h, i, j: s + w[0] * j,
        lambda s, b, h, i, j: s + (z.detach() * (j + 1) - 2**24 * (j + 1)),
        lambda s, b, h, i, j: s + (big * (j + 1)).log(),
        lambda s, b, h, i, j: s + 0.3**j,  # float32, which is torch's default dtype
        lambda s, b, h, i, j: s + torch.where(i > j, 0.1, 0.7),
    ):
        for _ in range(3):
            out = attention(q, k, v, score_mod=fn, backend="cpu")
            torch.testing.assert_close(out, wanted_of_a_tile(q, k, v, fn), rtol=1e-12, atol=1e-13)


def test_another_default_dtype():
    q, k, v = (x.double() for x in operands())
    z = torch.tensor(0.3)
    torch.set_default_dtype(torch.float64)
    try:
        for fn in (lambda s, b, h, i, j: s + z * j, lambda s, b, h, i, j: s + 0.3 * j + 0.3**j):
            out = attention(q, k, v, score_mod=fn, backend="cpu")
            torch.testing.assert_close(out, wanted_of_a_tile(q, k, v, fn), rtol=1e-12, atol=1e-13)
    finally:
        torch.set_default_dtype(torch.float32)


def test_masks_of_tensors_without_dimensions():
    """Beside a bfloat16 one, distances are rounded to bfloat16: 1023 is 1024 there, and is not below it."""
    q, k, v = (torch.randn(1, 1, 1100, 2) for _ in range(3))
    limit = torch.tensor(1024.0, dtype=torch.bfloat16)
    at = torch.arange(1100)
    seen = (at[:, None] - at < limit) & (at[:, None] >= at)
    assert not seen[1023, 0]
    right = (q @ k.mT / math.sqrt(2)).masked_fill(~seen, -torch.inf).softmax(-1) @ v
    masked = mask_mod(lambda b, h, i, j: (i - j < limit) & (i >= j))
    chosen = attention(
        q, k, v, score_mod=lambda s, b, h, i, j: torch.where((i - j < limit) & (i >= j), s, -torch.inf), backend="cpu"
    )
    torch.testing.assert_close(chosen, right)
    torch.testing.assert_close(attention(q, k, v, mask=masked, backend="cpu"), right)


# What is refused says so

REFUSED = {
    "shape": (lambda s, *at: s * math.log(s.shape[-1]), "shape of the score"),
    "tuple": (lambda s, *at: (s * 2, s * 0), "got tuple"),
    "random": (lambda s, *at: s * torch.rand(()), "dropout_p"),
    "numpy": (lambda s, *at: s * s.numpy(), "only the kernel knows"),
    "long rows": (lambda s, b, h, i, j: s + torch.zeros(S, 300)[i].sum(), "up to 256"),
    "in place": (lambda s, b, h, i, j: s.mul_(2), "in place"),
    "augmented": (lambda s, b, h, i, j: s.__iadd__(2), "in place"),
    "sort": (lambda s, b, h, i, j: torch.cumsum(s, -1), "cumsum"),
    "index": (lambda s, b, h, i, j: s + P[i, 99], "out of range"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    function, told = REFUSED[name]
    with pytest.raises(ValueError, match=told) as caught:
        attention(*operands(), score_mod=function)
    assert "test_score_meaning.py" in str(caught.value) or name == "tuple"


def test_a_value_that_was_kept():
    kept = []

    def fn(s, b, h, i, j):
        kept.append(s)
        return s + kept[0]

    attention(*operands(), score_mod=fn)
    with pytest.raises(ValueError, match="another call"):
        attention(*operands(), score_mod=fn)
    with pytest.raises(ValueError, match="after its call ended"):
        kept[0] + 1


def test_other_names_are_not_looked_at(monkeypatch):
    monkeypatch.setitem(globals(), "weight", torch.zeros(3, device="meta"))
    layer = Layer()
    means(lambda s, b, h, i, j: s + layer.weight[h] * j)


def test_a_score_mod_of_changed_tensors():
    mod = ScoreMod(lambda s, b, h, i, j, t: s + t[h] * j, torch.ones(2))
    means(mod)
    mod.tensors = (torch.tensor([2.0, -1.0]),)
    means(mod)
