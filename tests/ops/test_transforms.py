"""torch.func, forward mode and batched gradients: right, or one clear error."""

from __future__ import annotations

import functools
import re

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

from saccade import (
    Dense,
    Packed,
    Paged,
    ScoreMod,
    Unsupported,
    alibi,
    append_kv,
    attention,
    bias,
    causal,
    interval,
    mask_mod,
    merge,
    prefix,
    softcap,
    window,
)
from saccade.backends.cpu import tiled
from saccade.compat.sdpa import scaled_dot_product_attention
from saccade.compat.torch_varlen import varlen_attn
from saccade.testing.accuracy import worst_row_error
from tests.support.devices import Device

SHAPES = (2, 4, 5, 3), (2, 2, 6, 3), (2, 2, 6, 2)
REFUSED = pytest.raises(Unsupported, match=re.escape('pass backend="reference"'))


def tensors(*batch: int, order: str = "bhsd") -> list[Tensor]:
    made = (torch.randn(*batch, *shape, dtype=torch.float64) for shape in SHAPES)
    return [Dense(order).ordered(x) if not batch else torch.stack([*map(Dense(order).ordered, x)]) for x in made]


# Forward mode, and derivatives of derivatives


def faces():
    offsets, table = torch.tensor([0, 3, 8], dtype=torch.int32), torch.randn(4, 5, 6, dtype=torch.float64)

    def packed(q, k, v, face):
        q, k, v = (x[0].transpose(0, 1)[:5] for x in (q, k, v))
        return face(q, k, v, offsets.clamp(max=5))

    def halves(q, k, v):
        return merge(*(attention(q, k[:, :, at], v[:, :, at], return_lse=True) for at in (slice(0, 2), slice(2, 6))))

    return {
        "plain": attention,
        "causal": functools.partial(attention, mask=causal()),
        "lse": lambda *x: attention(*x, return_lse=True).lse,
        "max_scores": lambda *x: attention(*x, return_max_scores=True).out,
        "score": functools.partial(attention, score_mod=softcap(2.0)),
        "captures": functools.partial(attention, score_mod=bias(table)),
        "dropout": functools.partial(attention, dropout_p=0.5),
        "sdpa": lambda q, k, v: scaled_dot_product_attention(q, k, v, enable_gqa=True),
        "packed": lambda *x: packed(*x, lambda q, k, v, ends: attention(q, k, v, layout=Packed(ends, ends, 3, 3))),
        "varlen": lambda *x: packed(*x, lambda q, k, v, ends: varlen_attn(q, k, v, ends, ends, 3, 3, enable_gqa=True)),
        "merge": lambda *x: halves(*x).out,
    }


@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize("face", faces())
def test_forward_mode_is_refused(face, which):
    """On every way in, whichever operand has the tangent; nothing returns zeros."""
    given, call = tensors(), faces()[face]
    call(*given)  # functions are traced once

    def of_one(x):
        return call(*given[:which], x, *given[which + 1 :])

    x = given[which]
    with REFUSED:
        jvp(of_one, (x,), (x,))
    with REFUSED:
        torch.func.linearize(of_one, x)
    with REFUSED:
        jacfwd(of_one, randomness="same")(x)
    with forward_ad.dual_level(), REFUSED:
        of_one(forward_ad.make_dual(x, x))
    with forward_ad.dual_level(), torch.no_grad(), REFUSED:
        of_one(forward_ad.make_dual(x, x))
    if face != "dropout":  # whose draw torch refuses there
        with REFUSED:
            torch.autograd.functional.jacobian(of_one, x, strategy="forward-mode", vectorize=True)


@pytest.mark.parametrize("face", [x for x in faces() if x != "dropout"])  # whose draw torch refuses in all of these
def test_second_derivatives_are_refused(face):
    q, k, v = tensors()
    call = faces()[face]
    call(q, k, v)

    def loss(q):
        return call(q, k, v).square().sum()

    with REFUSED:
        grad(lambda x: grad(loss)(x).square().sum())(q)
    for second in (hessian(loss), jacrev(jacrev(loss)), jacfwd(grad(loss)), jacrev(jacfwd(loss))):
        with REFUSED:
            second(q)
    with REFUSED:
        jvp(grad(loss), (q,), (q,))
    with REFUSED:
        vmap(grad(lambda x: grad(loss)(x).square().sum()))(torch.stack([q, q]))
    leaf = q.clone().requires_grad_()
    (first,) = torch.autograd.grad(loss(leaf), leaf, create_graph=True)
    with REFUSED:
        first.sum().backward()


def test_other_operands_have_no_tangents_either():
    """A sink, captured tensors, `out`, and what is appended to a cache."""
    q, k, v = tensors()
    sink, table = torch.randn(4, dtype=torch.float64), torch.randn(5, 6, dtype=torch.float64)
    for call, x in (
        (lambda x: attention(q, k, v, sink=x), sink),
        (lambda x: attention(q, k, v, score_mod=bias(x)), table),
        (lambda x: attention(q, k, v, score_mod=ScoreMod(lambda s, b, h, i, j, t: s + t[i, j], x)), table),
        (lambda x: attention(x, k, v, out=torch.empty(2, 4, 5, 2, dtype=x.dtype)), q),
    ):
        call(x)
        with REFUSED:
            jvp(call, (x,), (x,))
    cache, layout = torch.zeros(3, 4, 2, 3), Paged(torch.tensor([[0], [2]]), torch.tensor([0, 1]))
    new = torch.randn(2, 1, 2, 3)
    with forward_ad.dual_level(), REFUSED:
        append_kv(cache, cache.clone(), layout, forward_ad.make_dual(new, new), new)


def test_the_reference_has_all_derivatives():
    q, k, v = tensors()

    def loss(q):
        return attention(q, k, v, mask=causal(), backend="reference").square().sum()

    step = torch.randn_like(q)
    along = jvp(loss, (q,), (step,))[1]
    torch.testing.assert_close(along, (grad(loss)(q) * step).sum())
    torch.testing.assert_close(hessian(loss)(q), jacrev(jacrev(loss))(q))


def test_constants_under_forward_mode():
    """A call whose operands have no tangents is a constant, and runs."""
    q, k, v = tensors()
    scale = torch.tensor(2.0, dtype=torch.float64)
    found, tangent = jvp(lambda x: x * attention(q, k, v), (scale,), (scale,))
    torch.testing.assert_close(found, tangent)
    with forward_ad.dual_level():
        torch.testing.assert_close(attention(q, k, v) * 2, found)


# Batches of calls


def scored(table):
    return ScoreMod(lambda s, b, h, i, j, t: s + t[h, j], table)


FOLDED = {
    "plain": {},
    "causal": {"mask": causal() & window(3, None)},
    "prefix": {"mask": prefix(2)},
    "softcap": {"score_mod": softcap(1.5)},
    "captures": {"score_mod": scored(torch.randn(4, 6, dtype=torch.float64))},
    "predicate": {"mask": mask_mod(lambda b, h, i, j: (i + j + h) % 3 != 0)},
    "padded": {"layout": Dense("bhsd", torch.tensor([4, 0]), torch.tensor([6, 2])), "mask": causal()},
    "tensor": {"mask": torch.rand(5, 6) > 0.3},
    "max_scores": {"return_max_scores": True},
    **{order: {"layout": Dense(order)} for order in ("bshd", "sbhd")},
}
LOOPED = {
    "prefixes": {"mask": prefix(torch.tensor([1, 4]))},
    "score of b": {"score_mod": lambda s, b, h, i, j: s * (b + 1)},
    "predicate of b": {"mask": mask_mod(lambda b, h, i, j: (i + j) % 2 == b)},
}


def examples(x, dims, i):
    return [y if dim is None else y.select(dim, i) for y, dim in zip(x, dims, strict=True)]


def results(found):
    return [x for x in found if x is not None] if isinstance(found, tuple) else [found]


def assert_as_a_loop(call, operands, dims, **options):
    """vmap of a call, and of its gradients, is the loop."""
    sizes = {x.shape[dim] for x, dim in zip(operands, dims, strict=True) if dim is not None}
    (size,) = sizes

    def gradients(*x):
        return grad(lambda *x: sum(y.nan_to_num(neginf=0).square().sum() for y in results(call(*x))), argnums)(*x)

    argnums = tuple(i for i, x in enumerate(operands) if x.is_floating_point())
    for function in (call, gradients):
        loop = [results(function(*examples(operands, dims, i))) for i in range(size)]
        found = results(vmap(function, dims, **options)(*operands))
        for x, *wanted in zip(found, *loop, strict=True):
            torch.testing.assert_close(x, torch.stack(wanted))


@pytest.mark.parametrize("dims", [(0, 0, 0), (0, None, None), (None, 1, 0), (None, None, 4)], ids=str)
@pytest.mark.parametrize("name", [*FOLDED, *LOOPED])
def test_vmap(name, dims, monkeypatch):
    keywords = (FOLDED | LOOPED)[name]
    order = keywords.get("layout", Dense()).order
    operands = []
    for shape, dim in zip(SHAPES, dims, strict=True):
        x = [Dense(order).ordered(torch.randn(shape, dtype=torch.float64)) for _ in range(3)]
        operands.append(x[0] if dim is None else torch.stack(x, dim))

    def call(*x):
        return attention(*x, **({"return_lse": True} | keywords))

    assert_as_a_loop(call, operands, dims)
    calls = []
    forward = tiled.forward
    monkeypatch.setattr(tiled, "forward", lambda *x: calls.append(x[0].q.shape[0]) or forward(*x))
    vmap(call, dims)(*operands)
    assert calls == ([6] if name in FOLDED else [2, 2, 2])


@pytest.mark.parametrize("dim", [None, 1])
def test_vmap_over_sinks(dim):
    q, k, v = tensors(3)
    sink = torch.randn(*((4,) if dim is None else (4, 3)), dtype=torch.float64)

    def call(q, k, v, sink):
        return attention(q, k, v, sink=sink, return_lse=True)

    assert_as_a_loop(call, (q, k, v, sink), (0, 0, 0, dim))


@pytest.mark.parametrize("dims", [(0, 0, 0, None), (None, None, None, 0), (0, None, None, 2)], ids=str)
def test_vmap_over_captured_tensors(dims):
    """Not batched, they get a gradient for each example."""
    given = (
        x if dim is None else x.expand(3, *x.shape).movedim(0, dim) for x, dim in zip(tensors(), dims, strict=False)
    )
    table = torch.randn(4, 6, dtype=torch.float64)
    table = table if dims[3] is None else torch.stack([table, table * 2, -table], dims[3])
    assert_as_a_loop(lambda q, k, v, t: attention(q, k, v, score_mod=scored(t)), (*given, table), dims)


def test_vmap_over_masks_and_lengths():
    q, k, v = tensors()
    seen = torch.rand(3, 5, 6) > 0.4
    assert_as_a_loop(lambda q, m: attention(q, k, v, mask=m), (torch.stack([q, q, q]), seen), (0, 0))
    used = torch.tensor([[6, 2], [1, 0], [5, 5]])

    def padded(q, used):
        return attention(q, k, v, layout=Dense("bhsd", seqused_k=used), return_lse=True)

    assert_as_a_loop(padded, (torch.stack([q, q, q]), used), (0, 0))
    lengths = torch.tensor([[1, 4], [0, 6], [3, 3]])
    assert_as_a_loop(lambda q, n: attention(q, k, v, mask=prefix(n)), (torch.stack([q, q, q]), lengths), (0, 0))


def test_vmap_over_packed_sequences():
    ends = torch.tensor([0, 2, 5], dtype=torch.int32)
    operands = [torch.randn(3, 5, h, 4, dtype=torch.float64) for h in (4, 2, 2)]

    def call(q, k, v):
        return attention(q, k, v, layout=Packed(ends, ends, 3, 3), mask=causal(), return_lse=True)

    assert_as_a_loop(call, operands, (0, 0, 0))


def test_vmap_over_queries_of_a_cache():
    layout = Paged(torch.tensor([[0, 1], [2, 3]]), torch.tensor([5, 3]))
    q, (k, v) = torch.randn(3, 2, 1, 4, 8), torch.randn(2, 4, 4, 2, 8)
    found = vmap(lambda q: attention(q, k, v, layout=layout))(q)
    torch.testing.assert_close(found, torch.stack([attention(x, k, v, layout=layout) for x in q]))


CACHE_MASKS = {
    "causal": causal(),
    "rows": interval(torch.arange(6), None),
    "prefix": prefix(torch.tensor([3, 1, 0])),
    "predicate": mask_mod(lambda b, h, q_idx, kv_idx: (q_idx + kv_idx) % 3 != b),
    "tensor": torch.arange(6)[:, None] >= torch.arange(8) - 3,
}


@pytest.mark.parametrize("name", CACHE_MASKS)
@pytest.mark.parametrize("shared", [0, 1])
def test_vmap_over_offsets(name, shared):
    """Nobody can read offsets that are mapped over, and no result needs them to be read."""
    offsets, q = torch.tensor([[0, 2, 4, 6], [0, 0, 5, 6]]), torch.randn(2, 6, 2, 4, dtype=torch.float64)
    cache, used = torch.randn(5, 4, 2, 4, dtype=torch.float64), torch.tensor([7, 3, 0])
    table = torch.tensor([[4, 0], [4, 1], [4, 2]])

    def paged(q, offsets):
        layout = Paged(table, used, offsets, shared_pages=shared)
        return attention(q, cache, cache, mask=CACHE_MASKS[name], layout=layout)

    torch.testing.assert_close(vmap(paged)(q, offsets), torch.stack([*map(paged, q, offsets)]))

    def packed(q, offsets):
        return attention(q, q, q, mask=CACHE_MASKS[name], layout=Packed(offsets)).sum()

    gradients = torch.stack([*map(torch.func.grad(packed), q, offsets)])
    torch.testing.assert_close(vmap(torch.func.grad(packed))(q, offsets), gradients)


@pytest.mark.parametrize("slots", [False, True])
def test_vmap_appends_to_caches_that_it_maps(slots):
    k_cache, v_cache = caches = torch.zeros(2, 2, 3, 4, 2, 4)
    k, v = torch.randn(2, 2, 3, 2, 4)
    where = torch.tensor([[3, -1, 9], [1, 2, -1]]) if slots else torch.tensor([[3], [5]])

    def append(k_cache, v_cache, k, v, where):
        if slots:
            return append_kv(k_cache, v_cache, None, k, v, slot_mapping=where)
        return append_kv(k_cache, v_cache, Paged(torch.tensor([[2, 0]]), where), k[None], v[None])

    one_by_one = caches.clone()
    for arguments in zip(*one_by_one, k, v, where, strict=True):
        append(*arguments)
    vmap(append, out_dims=None)(k_cache, v_cache, k, v, where)
    assert caches.any()
    assert torch.equal(caches, one_by_one)
    with pytest.raises(ValueError, match=r"vmap: v_cache \(3, 4, 2, 4\) is one tensor for a batch of 2 calls"):
        vmap(append, (0, None, 0, 0, 0))(k_cache, v_cache[0], k, v, where)


def test_vmap_writes_into_out():
    q, k, v = tensors(3)
    out = torch.full((3, 2, 4, 5, 2), torch.nan, dtype=torch.float64)
    vmap(lambda q, k, v, out: attention(q, k, v, out=out))(q, k, v, out)
    torch.testing.assert_close(out, vmap(attention)(q, k, v))
    with pytest.raises(ValueError, match="map over it too"):
        vmap(lambda q, k, v: attention(q, k, v, out=out[0]))(q, k, v)


def test_nested_vmap():
    q, k, v = ([*x.unflatten(0, (2, 3))] for x in tensors(6))
    q, k, v = (torch.stack(x) for x in (q, k, v))
    found = vmap(vmap(attention, (0, None, 0)), (0, 0, 1))(q, k[:, 0], v.transpose(0, 1))
    wanted = [[attention(q[i, j], k[i, 0], v[i, j]) for j in range(3)] for i in range(2)]
    torch.testing.assert_close(found, torch.stack([torch.stack(x) for x in wanted]))


def test_dropout_follows_the_randomness_of_vmap():
    q, k, v = (x.expand(3, *x.shape) for x in tensors())

    def call(q, k, v):
        return attention(q, k, v, dropout_p=0.5)

    with pytest.raises(RuntimeError, match="randomness"):
        vmap(call)(q, k, v)
    same = vmap(call, randomness="same")(q, k, v)
    assert torch.equal(same[0], same[1])
    assert torch.equal(same[0], same[2])
    different = vmap(call, randomness="different")(q, k, v)
    assert not torch.equal(different[0], different[1])
    torch.manual_seed(1)
    found = vmap(grad(lambda *x: call(*x).square().sum()), randomness="same")(q, k, v)
    torch.manual_seed(1)
    torch.testing.assert_close(found[2], grad(lambda *x: call(*x).square().sum())(q[2], k[2], v[2]))


@pytest.mark.parametrize("name", [*FOLDED, *LOOPED])
def test_batched_gradients(name):
    """`is_grads_batched`, and torch.func.jacrev."""
    keywords = {"return_lse": True} | (FOLDED | LOOPED)[name]
    order = keywords.get("layout", Dense()).order
    leaves = [x.requires_grad_() for x in tensors(order=order)]
    found = results(attention(*leaves, **keywords))
    found = [x for x in found if x.requires_grad]
    weights = [torch.randn(4, *x.shape, dtype=x.dtype) for x in found]
    batched = torch.autograd.grad(found, leaves, weights, is_grads_batched=True, retain_graph=True)
    loop = [torch.autograd.grad(found, leaves, [w[i] for w in weights], retain_graph=True) for i in range(4)]
    for x, *wanted in zip(batched, *loop, strict=True):
        torch.testing.assert_close(x, torch.stack(wanted))


def test_batched_gradients_inside_of_batched_gradients():
    """Of torch's older vmap, in which nothing tells which level is meant."""
    leaves = [x.requires_grad_() for x in tensors()]
    out = attention(*leaves)
    weights = torch.randn(2, 3, *out.shape, dtype=out.dtype)

    def gradients(weight):
        return torch.autograd.grad(out, leaves, weight, is_grads_batched=True, retain_graph=True)

    with pytest.raises(RuntimeError, match=re.escape("use torch.func.vmap")):
        torch._vmap_internals._vmap(gradients)(weights)


def test_batched_gradients_of_sinks_and_captured_tensors():
    operands = *tensors(), torch.randn(4, dtype=torch.float64), torch.randn(4, 6, dtype=torch.float64)

    def call(q, k, v, sink, table, backend="auto"):
        return attention(q, k, v, sink=sink, score_mod=scored(table), backend=backend)

    call(*operands)  # functions are traced once
    every = tuple(range(5))
    found = jacrev(call, every)(*operands)
    wanted = jacrev(functools.partial(call, backend="reference"), every)(*operands)
    torch.testing.assert_close(found, wanted)


def test_jacrev_in_chunks():
    q, k, v = tensors()
    whole = jacrev(lambda q: attention(q, k, v, mask=causal()))(q)
    chunks = jacrev(lambda q: attention(q, k, v, mask=causal()), chunk_size=7)(q)
    torch.testing.assert_close(chunks, whole)
    torch.testing.assert_close(jacrev(lambda q: attention(q, k, v, mask=causal(), backend="reference"))(q), whole)


def test_vmap_of_vjp():
    q, k, v = tensors()
    out, pull = vjp(lambda *x: attention(*x, mask=causal()), q, k, v)
    weights = torch.randn(5, *out.shape, dtype=out.dtype)
    for x, *wanted in zip(vmap(pull)(weights), *map(pull, weights), strict=True):
        torch.testing.assert_close(x, torch.stack(wanted))


BATCHED = {
    "causal": {"mask": causal()},
    "softcap": {"score_mod": softcap(5.0)},
    "alibi": {},
    "predicate": {"mask": mask_mod(lambda b, h, i, j: (i - j) % 3 != 1)},
    "of b": {"mask": mask_mod(lambda b, h, i, j: (i - j) % 3 != b)},
}


def batch(device: Device, *examples: int) -> list[Tensor]:
    s = 130 if device.type == "cuda" else 20
    return [device.randn(*examples, 2, h, s, device.d) for h in (device.h_q, device.h_k, device.h_k)]


def keywords(name: str, device: Device) -> dict:
    found = {**BATCHED[name], "backend": device.backend}
    if name == "alibi":
        found["score_mod"] = alibi(torch.tensor([0.5, 0.25, 0.1, 0.05][: device.h_q], device=device.type))
    return found


def assert_same(x: torch.Tensor, wanted: torch.Tensor) -> None:
    """Of 16 bits to two roundings: a group's heads are added up in another order where more programs run."""
    if x.dtype.itemsize > 2:
        torch.testing.assert_close(x, wanted)
    else:
        assert float(worst_row_error(x, wanted, torch.finfo(x.dtype).eps)) <= 1


@pytest.mark.parametrize("name", BATCHED)
def test_batches_of_gradients_are_a_loop(name: str, device: Device) -> None:
    """As those of one call after the other."""
    options = keywords(name, device)
    leaves = [x.requires_grad_() for x in batch(device)]
    out = attention(*leaves, **options)
    weights = torch.randn(3, *out.shape, device=out.device, dtype=out.dtype)
    batched = torch.autograd.grad(out, leaves, weights, is_grads_batched=True, retain_graph=True)
    loop = [torch.autograd.grad(out, leaves, w, retain_graph=True) for w in weights]
    for x, *wanted in zip(batched, *loop, strict=True):
        assert_same(x, torch.stack(wanted))


@pytest.mark.parametrize("name", BATCHED)
def test_vmap_is_a_loop(name: str, device: Device) -> None:
    options, (q, k, v) = keywords(name, device), batch(device, 3)

    def call(q, k, v):
        return attention(q, k, v, **options)

    def gradients(q, k, v):
        return grad(lambda *x: call(*x).float().square().sum(), (0, 1, 2))(q, k, v)

    loop = [(call(*x), *gradients(*x)) for x in zip(q, k, v, strict=True)]
    for x, *wanted in zip((vmap(call)(q, k, v), *vmap(gradients)(q, k, v)), *loop, strict=True):
        assert_same(x, torch.stack(wanted))


def test_forward_mode_needs_the_reference(device: Device) -> None:
    q, k, v = batch(device)
    with pytest.raises(Unsupported, match=re.escape('pass backend="reference"')):
        jvp(lambda q: attention(q, k, v, backend=device.backend), (q,), (q,))
