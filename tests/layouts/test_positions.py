"""Positions that the caller gives, against an oracle of their own in float64, and on every backend."""

from __future__ import annotations

import pytest
import torch

from saccade import (
    Dense,
    Packed,
    Paged,
    alibi,
    attention,
    bias,
    causal,
    documents,
    interval,
    mask_mod,
    prefix,
    relative_bias,
    t5_bias,
    window,
)
from saccade.backends import hopper as gluon
from saccade.call import Call
from saccade.call.dropout import Dropout
from saccade.masks import FARTHEST
from saccade.testing.accuracy import check

B, H_Q, H_K, S_Q, S_K, D = 2, 4, 2, 7, 50, 8
TABLE = torch.randn(H_Q, 401, dtype=torch.float64)

OFFSETS = {
    "q": (-5, None),
    "k": (None, 3),
    "numbers": (20, -4),
    "sequences": (torch.tensor([3, 30]), torch.tensor([-2, 6])),
    "column": (torch.tensor([[3], [30]], dtype=torch.int32), None),
    "rows": (torch.tensor([[9, 8, 7, 30, 31, 2, 5], [3, 4, 5, 6, 7, 8, 49]]), torch.tensor([1, 0])),
    "shared rows": (torch.tensor([[9, 8, 7, 30, 31, 2, 5]]), -4),
}
MASKS = {
    "none": (None, lambda p, r: (p + r) < 10**9),
    "causal": (causal(), lambda p, r: r <= p),
    "window": (window(5, 2), lambda p, r: (r >= p - 5) & (r <= p + 2)),
    "prefix": (prefix(9), lambda p, r: (r < 9) | (r <= p)),
    "interval": (interval(3, 30), lambda p, r: (r >= 3) & (r < 30) & (p < 10**9)),
    "open start": (interval(None, 30), lambda p, r: (r < 30) & (p < 10**9)),
    "predicate": (mask_mod(lambda b, h, q_idx, kv_idx: (q_idx - kv_idx) % 3 != 0), lambda p, r: (p - r) % 3 != 0),
    "complement": (~causal(), lambda p, r: r > p),
    "union": (
        (causal() & interval(2, None)) | mask_mod(lambda b, h, q_idx, kv_idx: kv_idx % 5 == 0),
        lambda p, r: ((r <= p) & (r >= 2)) | (r % 5 == 0),
    ),
}


def positions(offset, n):
    offset = torch.as_tensor(0 if offset is None else offset)
    if offset.dim() == 2 and offset.shape[1] != 1:
        return offset.expand(B, n)
    return (offset.view(-1, 1) + torch.arange(n)).expand(B, n)


def operands(**like):
    return tuple(torch.randn(shape, **like) for shape in ((B, H_Q, S_Q, D), (B, H_K, S_K, D), (B, H_K, S_K, D)))


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("given", OFFSETS)
def test_by_the_definition(given, name, backend):
    q, k, v = operands(dtype=torch.float64)
    p, r = positions(OFFSETS[given][0], S_Q)[:, None, :, None], positions(OFFSETS[given][1], S_K)[:, None, None]
    mask, sees = MASKS[name]

    def relative(score, b, h, q_idx, kv_idx):
        return score + TABLE[h, (q_idx - kv_idx).clamp(-200, 200) + 200]

    plain = q @ k.repeat_interleave(2, 1).mT / D**0.5
    h = torch.arange(H_Q)[:, None, None]
    score = plain + TABLE[h, (p - r).clamp(-200, 200) + 200]
    weights = torch.where(sees(p, r), score, -torch.inf).softmax(-1).nan_to_num(0)
    layout = Dense("bhsd", None, None, *OFFSETS[given])
    found = attention(q, k, v, mask=mask, score_mod=relative, layout=layout, backend=backend)
    torch.testing.assert_close(found, weights @ v.repeat_interleave(2, 1))


PLACES = [("cpu", "cpu"), *(pytest.param("cuda", x, marks=pytest.mark.gpu) for x in ("gluon", "triton"))]


def there(x, device):
    return x.to(device) if isinstance(x, torch.Tensor) else x


@pytest.mark.parametrize(("torch_device", "backend"), PLACES)
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("given", OFFSETS)
def test_masks(given, name, torch_device, backend):
    dtype = torch.float32 if torch_device == "cpu" else torch.bfloat16
    s_q, s_k = (S_Q, S_K) if torch_device == "cpu" else (300, 700)
    shapes = (B, H_Q, s_q, 64), (B, H_K, s_k, 64), (B, H_K, s_k, 64)
    q, k, v = (torch.randn(shape, device=torch_device, dtype=dtype) for shape in shapes)
    q_offset, k_offset = (there(x, torch_device) for x in OFFSETS[given])
    if "rows" in given and s_q != S_Q:
        q_offset = torch.randint(-9, 700, (q_offset.shape[0], s_q), device=torch_device)
    layout = Dense(q_offset=q_offset, k_offset=k_offset)
    dlse = torch.randn(B, H_Q, s_q, device=torch_device)
    check(q, k, v, mask=MASKS[name][0], layout=layout, dlse=dlse, backend=backend).assert_ok()


@pytest.mark.sample
@pytest.mark.parametrize(("torch_device", "backend"), PLACES)
@pytest.mark.parametrize("deterministic", [False, True], ids=["", "deterministic"])
@pytest.mark.parametrize("given", OFFSETS)
def test_functions_and_dropout(given, deterministic, torch_device, backend):
    """Dropout draws the same numbers in forward and backward, and score functions have gradients at positions."""
    dtype = torch.float32 if torch_device == "cpu" else torch.float16
    shapes = (B, H_Q, S_Q, 64), (B, H_K, S_K, 64), (B, H_K, S_K, 64)
    q, k, v = (torch.randn(shape, device=torch_device, dtype=dtype) for shape in shapes)
    table = torch.randn(H_Q, 401, device=torch_device, requires_grad=True)

    def relative(score, b, h, q_idx, kv_idx):
        return score + table[h, (kv_idx - q_idx).clamp(-200, 200) + 200]

    layout = Dense("bhsd", None, None, *(there(x, torch_device) for x in OFFSETS[given]))
    keywords = {"layout": layout, "deterministic": deterministic, "backend": backend}
    check(
        q, k, v, score_mod=relative, dropout_p=0.3, sink=torch.randn(H_Q, device=torch_device), **keywords
    ).assert_ok()
    slopes = torch.rand(H_Q, device=torch_device)
    check(q, k, v, mask=causal(), score_mod=alibi(slopes), **keywords).assert_ok()


ENDS = torch.tensor([0, 40, 40, 77]), torch.tensor([0, 70, 75, 130])
PACKED = {
    "number": {"q_offset": 30},
    "sequences": {"q_offset": torch.tensor([30, 0, 18]), "k_offset": torch.tensor([0, 4, 7])},
    "rows": {"q_offset": torch.randint(0, 80, (80,))},
}


@pytest.mark.parametrize(("torch_device", "backend"), PLACES)
@pytest.mark.parametrize("given", PACKED)
def test_packed(given, torch_device, backend):
    like = {"device": torch_device, "dtype": torch.float32 if torch_device == "cpu" else torch.bfloat16}
    q, k, v = torch.randn(80, H_Q, 64, **like), *torch.randn(2, 131, H_K, 64, **like)
    ends = (x.to(torch_device) for x in ENDS)
    layout = Packed(*ends, 40, 70, **{name: there(x, torch_device) for name, x in PACKED[given].items()})
    mod = mask_mod(lambda b, h, q_idx, kv_idx: (q_idx + kv_idx) % 5 != b)
    for mask in (causal(), causal() & mod, window(20, 3)):
        score = alibi(torch.rand(H_Q, device=torch_device))
        check(q, k, v, mask=mask, score_mod=score, layout=layout, dropout_p=0.2, backend=backend).assert_ok()


PAGED = {
    "none": {},
    "number": {"q_offset": 11},
    "sequences": {"q_offset": torch.tensor([40, 3, 0])[:, None], "k_offset": torch.tensor([0, -4, 0])},
    "rows": {"q_offset": torch.randint(0, 60, (15,))},
}


@pytest.mark.parametrize(("torch_device", "backend"), [PLACES[0], PLACES[2]])  # gluon takes more rows over pages
@pytest.mark.parametrize("end_to_end", [False, True], ids=["batch", "end to end"])
@pytest.mark.parametrize("given", PAGED)
def test_paged(given, end_to_end, torch_device, backend):
    like = {"device": torch_device, "dtype": torch.float32 if torch_device == "cpu" else torch.bfloat16}
    rows = (15,) if end_to_end else (3, 5)
    q, cache = torch.randn(*rows, H_Q, 64, **like), torch.randn(2, 12, 16, H_K, 64, **like).unbind()
    offsets = {name: there(x, torch_device) for name, x in PAGED[given].items()}
    if given == "rows":
        offsets["q_offset"] = offsets["q_offset"].view(rows)
    ends = torch.tensor([0, 6, 6, 11], device=torch_device) if end_to_end else None
    table, used = torch.randperm(12).view(3, 4).to(torch_device), torch.tensor([60, 7, 0], device=torch_device)
    layout = Paged(table, used, ends, **offsets)
    mod = mask_mod(lambda b, h, q_idx, kv_idx: (q_idx - kv_idx) % 3 != 1)
    for mask in (causal() & mod, window(20, 0), None):
        score = alibi(torch.rand(H_Q, device=torch_device))
        check(q, *cache, mask=mask, score_mod=score, layout=layout, backend=backend).assert_ok()


@pytest.mark.parametrize("score", [relative_bias, t5_bias], ids=["relative_bias", "t5_bias"])
@pytest.mark.parametrize("rows", [1, 3])
def test_relative_scores_over_a_cache_are_those_of_the_whole_sequence(score, rows):
    s, size = 21, 4
    q, k, v = torch.randn(1, s, 2, 16), *torch.randn(2, 1, s, 2, 16)
    mod = score(torch.randn(2, 33)) if score is relative_bias else score(torch.randn(32, 2), False)
    whole = attention(q, k, v, mask=causal(), score_mod=mod, layout=Dense("bshd"))
    cache = [torch.cat([x, x.new_zeros(1, 3, 2, 16)], 1).view(6, size, 2, 16) for x in (k, v)]
    layout = Paged(torch.arange(6)[None], torch.tensor([s]))
    found = attention(q[:, -rows:], *cache, mask=causal(), score_mod=mod, layout=layout)
    torch.testing.assert_close(found, whole[:, -rows:])


def test_a_static_cache_is_the_filled_part_of_it():
    """Rows at `filled - s_q` of a cache with room for more, whose rest is never seen."""
    q, k, v = operands()
    filled = torch.tensor([20, 33])
    offset = filled - S_Q
    k[0, :, 20:], v[1, :, 33:] = 1e4, 1e4
    found = attention(q, k, v, mask=causal(), layout=Dense(q_offset=offset))
    wanted = attention(q, k, v, mask=causal(), layout=Dense(seqused_k=filled))
    torch.testing.assert_close(found, wanted)


def test_compiled_for_any_numbers():
    q, k, v = operands()

    @torch.compile(fullgraph=True, dynamic=True, backend="aot_eager")
    def step(q, k, v, n, offset):
        return attention(q, k, v, mask=causal(), layout=Dense(q_offset=n, k_offset=offset))

    for n in (3, 20, 41):
        offset = torch.tensor([n % 5, 0])
        wanted = attention(q, k, v, mask=causal(), layout=Dense(q_offset=n, k_offset=offset))
        torch.testing.assert_close(step(q, k, v, n, offset), wanted)


def test_vmap_and_gradients_of_transforms():
    q, k, v = operands(dtype=torch.float64)
    layout = Dense(q_offset=torch.tensor([3, 30]))

    def loss(q):
        return attention(q, k, v, mask=causal(), layout=layout).square().sum()

    one = torch.func.grad(loss)(q)
    many = torch.func.vmap(torch.func.grad(loss))(torch.stack([q, 2 * q]))
    torch.testing.assert_close(many[0], one)


SEEN = torch.ones(S_Q, S_K, dtype=torch.bool)
WRONG = {
    "float": (lambda: Dense(q_offset=1.0), TypeError, "q_offset must be an integer"),
    "bool": (lambda: Dense(k_offset=True), TypeError, "k_offset must be an integer"),
    "float tensor": (lambda: Dense(q_offset=torch.zeros(2)), ValueError, "int32 or int64"),
    "three dimensions": (lambda: Dense(q_offset=torch.zeros(2, 1, 1).long()), ValueError, "(2, 1, 1)"),
    "too far": (lambda: Dense(q_offset=FARTHEST + 1), ValueError, str(FARTHEST)),
    "a number for each of three": (lambda: call(Dense(q_offset=torch.zeros(3).long())), ValueError, "(2,), an offset"),
    "keys by row": (
        lambda: call(Dense(k_offset=torch.zeros(2, S_K).long())),
        ValueError,
        "k_offset must have shape (2",
    ),
    "too far on a CPU": (
        lambda: call(Dense(q_offset=torch.tensor([0, FARTHEST + 1]))),
        ValueError,
        "q_offset must be from",
    ),
    "too far for a function": (
        lambda: call(Dense(q_offset=torch.tensor([0, 1 << 23])), score_mod=alibi(torch.ones(H_Q))),
        ValueError,
        str(1 << 22),
    ),
    "a number too far for a function": (
        lambda: call(Dense(q_offset=-(1 << 23)), score_mod=alibi(torch.ones(H_Q))),
        ValueError,
        "functions take positions from",
    ),
    "a number too far for a predicate": (
        lambda: call(Dense(k_offset=1 << 22), mask=mask_mod(lambda b, h, q_idx, kv_idx: q_idx >= kv_idx)),
        ValueError,
        "functions take positions from",
    ),
    "keys of a cache alone": (
        lambda: Paged(torch.zeros(1, 1).long(), torch.zeros(1).long(), k_offset=3),
        ValueError,
        "needs q_offset",
    ),
    "a bool tensor": (lambda: call(Dense(q_offset=3), mask=SEEN), ValueError, "omit q_offset"),
    "documents": (
        lambda: attention(
            *(x[:, :, :S_Q] for x in operands()),
            mask=documents(torch.zeros(1, S_Q).long()),
            layout=Dense(q_offset=3),
        ),
        ValueError,
        "omit q_offset",
    ),
    "a bias of too few rows": (
        lambda: call(Dense(q_offset=3), score_mod=bias(torch.zeros(S_Q, S_K))),
        ValueError,
        "or more rows",
    ),
    "sequences or rows": (
        lambda: attention(
            *torch.randn(3, 3, 1, 8),
            layout=Packed(torch.tensor([0, 2, 2, 3]), q_offset=torch.zeros(3).long()),
        ),
        ValueError,
        "pass q_offset[:, None]",
    ),
}


def call(layout, **keywords):
    return attention(*operands(), layout=layout, **keywords)


@pytest.mark.parametrize("name", WRONG)
def test_errors(name):
    wrong, kind, text = WRONG[name]
    with pytest.raises(kind) as error:
        wrong()
    assert text in str(error.value)


def test_offsets_of_zero_take_masks_of_the_first_row_on():
    q, k, v = operands()
    seen = torch.rand(S_Q, S_K) < 0.5
    found = attention(q, k, v, mask=seen, layout=Dense(q_offset=0))
    torch.testing.assert_close(found, attention(q, k, v, mask=seen))


def test_bool_tensors_over_a_cache_count_from_the_first_row():
    q, cache = torch.randn(1, 3, 2, 16), torch.randn(2, 2, 4, 2, 16).unbind()
    seen = torch.rand(3, 8) < 0.7
    layout = Paged(torch.arange(2)[None], torch.tensor([8]))
    found = attention(q, *cache, mask=seen, layout=layout)
    k, v = (x.view(1, 8, 2, 16) for x in cache)
    torch.testing.assert_close(found, attention(q, k, v, mask=seen, layout=Dense("bshd")))
    compiled = torch.compile(lambda q: attention(q, *cache, mask=seen, layout=layout), backend="aot_eager")
    torch.testing.assert_close(compiled(q), found)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_dropout_draws_by_positions(backend):
    """The parts of a call, its rows in another order, and packed rows draw the bits that the whole call draws."""
    s = 40
    q, k = torch.zeros(1, 2, s, 8), torch.zeros(1, 2, s, 8)
    v = torch.eye(s).expand(1, 2, s, s)  # out shows which probabilities stay

    def drawn(q, k, v, **keywords):
        torch.manual_seed(3)
        return attention(q, k, v, dropout_p=0.4, backend=backend, **keywords) != 0

    whole = drawn(q, k, v)
    rows = torch.randperm(s)
    assert torch.equal(drawn(q, k, v, layout=Dense(q_offset=rows[None])), whole[:, :, rows])
    part = drawn(q[:, :, 7:30], k[:, :, 11:], v[:, :, 11:], layout=Dense(q_offset=7, k_offset=torch.tensor([11])))
    assert torch.equal(part[..., 11:], whole[:, :, 7:30, 11:])
    ends = torch.tensor([0, 23])
    packed = drawn(
        q[0, :, 7:30].transpose(0, 1),
        k[0].transpose(0, 1),
        v[0].transpose(0, 1),
        layout=Packed(ends, torch.tensor([0, s]), q_offset=torch.tensor([[7]])),
    )
    assert torch.equal(packed.transpose(0, 1)[None], whole[:, :, 7:30])


def test_offsets_that_are_written_to_are_read_again():
    q, k, v = operands()
    offset = torch.tensor([3, 30])
    mask = causal() & mask_mod(lambda b, h, q_idx, kv_idx: (q_idx + kv_idx) % 3 != 0)
    layout = Dense(q_offset=offset)
    for values in ([3, 30], [20, 1], [3, 30]):
        offset.copy_(torch.tensor(values))
        wanted = attention(q, k, v, mask=mask, layout=layout, backend="reference")
        torch.testing.assert_close(attention(q, k, v, mask=mask, layout=layout), wanted)


def test_garbage_in_positions_of_unused_rows_is_not_read():
    q, k, v = (x[:1, :, :S_Q].transpose(1, 2)[0] for x in operands())
    rows = torch.tensor([4, 5, 6, 1 << 40, 7, -(1 << 40), 1 << 40])
    ends, used = torch.tensor([0, 4, 6]), torch.tensor([3, 1])
    layout = Packed(ends, seqused_q=used, q_offset=rows)
    clean = Packed(ends, seqused_q=used, q_offset=rows.clamp(0, 7))
    score = alibi(torch.ones(H_Q))
    found, wanted = (attention(q, k, v, mask=causal(), score_mod=score, layout=x) for x in (layout, clean))
    assert torch.equal(found, wanted)


def test_nested_tensors_take_numbers():
    x = torch.nested.nested_tensor([torch.randn(5, 2, 8), torch.randn(3, 2, 8)], layout=torch.jagged)
    found = attention(x, x, x, mask=causal(), layout=Dense("bshd", q_offset=-2))
    flat = x.values()
    wanted = attention(flat, flat, flat, mask=causal(), layout=Packed(x.offsets(), q_offset=-2))
    torch.testing.assert_close(found.values(), wanted)
    with pytest.raises(ValueError, match="offsets that are tensors"):
        attention(x, x, x, layout=Dense("bshd", q_offset=torch.tensor([1, 2])))


def test_gluon_leaves_the_backward_of_positions_beside_dropout_to_triton():
    """Its warps pass what they are called with through shared memory, where these do not fit."""
    q, k, v = (x.contiguous() for x in operands(dtype=torch.bfloat16))
    layout = Dense(q_offset=3)
    call = Call(q, k, v, mask=causal(), layout=layout, dropout=Dropout(torch.zeros(2).long(), 0.5))
    assert gluon.refusals(call, True) == ["has too little shared memory for positions together with dropout"]
    assert not gluon.refusals(call, False)
    assert not gluon.refusals(call.replace(dropout=None), True)
