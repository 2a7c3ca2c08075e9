"""attention(…, context=plan) on many ranks is what one process computes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from saccade.testing import Case
from tests.support.ranks import differences, measured

EQUAL = 1e-12
"""What sums in another order differ by, in float64, relative to the largest element."""

DOCUMENTS = (37, 5, 64, 18, 1, 0, 75)
HERE = str(Path(__file__))


def packed(name, lengths=DOCUMENTS, **fields):
    given = {"dtype": "fp64", "b": len(lengths), "h_q": 4, "h_k": 2, "d": 16, "order": "thd", "lengths": lengths}
    longest = max(lengths, default=0)
    return Case(name, s_q=longest, s_k=longest, **(given | fields))


def dense(name, order="bshd", **fields):
    given = {"dtype": "fp64", "b": 2, "h_q": 4, "h_k": 2, "s_q": 61, "s_k": 61, "d": 16}
    return Case(name, order=order, **(given | fields))


# fmt: off
CASES = [
    packed("causal", mask="causal"),
    packed("plain"),
    packed("window", mask="window(9,0)", sink=True),
    packed("window-both", mask="window(20,5)", score="softcap(9)"),
    packed("prefixes", mask="prefixes"),
    packed("intervals", mask="interval_rows&causal"),
    packed("wide-values", mask="causal", d=8, d_v=24, h_q=6),
    packed("scores", mask="causal", score="temperature+relative_bias(9)+softcap(9)", sink=True),
    packed("t5", score="t5_bias"),
    packed("bias", mask="window(30,9)", score="bias"),
    packed("dropout", mask="causal", dropout_p=0.3, sink=True),
    packed("dropout-score", mask="window(40,0)", dropout_p=0.2, score="alibi"),
    packed("one", lengths=(150,), mask="causal"),
    packed("short", lengths=(1, 1, 2), mask="causal", score="alibi"),
    packed("nothing", lengths=(0, 0), mask="causal", sink=True),
    packed("prime", lengths=(97, 2, 101, 3), mask="prefix(7)"),
    dense("dense", mask="causal"),
    dense("dense-bhsd", "bhsd", mask="window(20,3)", score="alibi", sink=True),
    dense("dense-sbhd", "sbhd", mask="prefixes", dropout_p=0.3),
    dense("dense-intervals", mask="interval_rows|causal"),
    dense("dense-one", s_q=1, s_k=1, mask="causal"),
]
BY_HEADS = [
    packed("causal", mask="causal"),
    packed("window", mask="window(9,4)", sink=True, h_q=16, h_k=4, d_v=24),
    packed("scores", mask="causal", score="temperature+relative_bias(9)+softcap(9)", sink=True),
    packed("dropout", mask="causal", dropout_p=0.3, h_q=16, sink=True),
    packed("intervals", mask="interval_rows&causal", score="softcap(9)"),
    packed("multi-query", mask="prefixes", h_k=1),
    packed("multi-head", score="alibi", h_k=8),
    packed("short", lengths=(1, 1, 2), mask="causal", score="alibi"),
    packed("nothing", lengths=(0, 0), mask="causal", sink=True),
    dense("dense", "bhsd", mask="causal", score="alibi", sink=True, dropout_p=0.2),
    dense("dense-sbhd", "sbhd", mask="prefixes"),
]
BY_HEADS = [case.replace(h_q=max(case.h_q, 8)) for case in BY_HEADS]
# fmt: on


MATRICES = {
    "test_keys_are_gathered": ("ranks", CASES, [1, 2, 3, 4, 8]),
    "test_heads_are_divided": ("ranks", BY_HEADS, [2, 4, 8]),
    "test_both_on_a_mesh": ("mesh", BY_HEADS, [(4, 2), (2, 4), (8, 1), (1, 8)]),
}


def pytest_generate_tests(metafunc):
    """Each case with two of the others, and with all of them by --everything."""
    if (matrix := MATRICES.get(metafunc.definition.name)) is None:
        return
    name, cases, others = matrix
    whole = metafunc.config.getoption("--everything")
    pairs = [
        pytest.param(case, other, id=f"{case}-{other}")
        for i, case in enumerate(cases)
        for j, other in enumerate(others)
        if whole or (i + j) % len(others) < 2
    ]
    metafunc.parametrize(("case", name), pairs)


@pytest.mark.slow
@pytest.mark.sample
def test_keys_are_gathered(pool, case, ranks):
    assert max(differences(pool, case, ranks, method="gather").values()) <= EQUAL


@pytest.mark.slow
@pytest.mark.sample
def test_heads_are_divided(pool, case, ranks):
    assert max(differences(pool, case, ranks, method="ulysses").values()) <= EQUAL


@pytest.mark.slow
@pytest.mark.sample
def test_both_on_a_mesh(pool, case, mesh):
    assert max(differences(pool, case, 8, mesh=mesh).values()) <= EQUAL


PADDED = [
    packed("documents", mask="causal", sink=True, score="alibi", h_q=8, dropout_p=0.2),
    packed("short", lengths=(1, 0, 1), mask="window(9,0)", h_q=8),
    dense("dense", mask="causal", sink=True, h_q=8),
    dense("dense-sbhd", "sbhd", h_q=8, dropout_p=0.2),
]
PADDINGS = [
    (4, {"method": "gather", "rows": "equal"}),
    (3, {"method": "gather", "rows": 90}),
    (4, {"method": "ulysses", "rows": 87}),
    (8, {"mesh": (4, 2), "rows": "equal"}),
]


@pytest.mark.sample
@pytest.mark.parametrize("case", PADDED, ids=str)
@pytest.mark.parametrize(("ranks", "settings"), PADDINGS, ids=str)
def test_rows_of_padding_change_nothing(pool, case, ranks, settings):
    """They hold NaN; their results and gradients are zero, and their LSE is -inf."""
    assert max(differences(pool, case, ranks, **settings).values()) <= EQUAL


def test_padding_on_one_rank(pool):
    assert max(differences(pool, packed("", mask="causal"), 1, rows=230).values()) <= EQUAL


def test_reference_backend(pool):
    case = packed("", mask="causal", score="alibi", dropout_p=0.3)
    assert max(differences(pool, case, 3, method="gather", backend="reference").values()) <= EQUAL


@pytest.mark.parametrize("settings", [{"method": "gather"}, {"method": "ulysses"}], ids=lambda x: x["method"])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_other_dtypes(pool, dtype, settings):
    """By the one tolerance: partial gradients of keys are rounded on their way."""
    case = packed("", mask="causal", sink=True, dtype=dtype, h_q=8, h_k=4, d=64)
    for ratios in pool.run(measured, 4, case, settings):
        assert max(ratios.values()) <= 1


# What ranks do beside it


def rows_and_labels(group, lengths, mesh, rows):
    """What `shard`, `unshard` and `roll` say on one rank."""
    from torch.distributed.device_mesh import init_device_mesh

    from saccade import causal
    from saccade.distributed import plan

    made = plan(lengths, group if mesh is None else init_device_mesh("cpu", mesh), mask=causal(), rows=rows)
    x = torch.arange(sum(lengths))
    mine = made.shard(x, fill=-1)
    wide = torch.stack([mine, mine], dim=0).double().requires_grad_()
    whole = made.unshard(wide, dim=1)
    (gradient,) = torch.autograd.grad(whole.sum() * 2, wide)
    rolled = [made.roll(mine, shift) for shift in (-1, 0, 2, -9)]
    return mine, whole.detach(), gradient, rolled, made.position_ids, made.document_ids


@pytest.mark.sample
@pytest.mark.parametrize(
    ("ranks", "mesh", "rows"),
    [(1, None, "balanced"), (3, None, "equal"), (8, None, 33), (8, (4, 2), "balanced"), (8, (1, 8), 40)],
    ids=str,
)
@pytest.mark.parametrize("lengths", [list(DOCUMENTS), [3, 1], [0]], ids=["documents", "few", "none"])
def test_rows_and_labels(pool, ranks, mesh, rows, lengths):
    found = pool.run((HERE, "rows_and_labels"), ranks, lengths, mesh, rows)
    x, documents = torch.arange(sum(lengths)), torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    starts = torch.tensor(lengths).cumsum(0) - torch.tensor(lengths)
    positions = x - starts[documents]
    assert sorted(i for mine, *_ in found for i in mine.tolist() if i >= 0) == x.tolist()
    for mine, whole, gradient, rolled, position_ids, document_ids in found:
        assert torch.equal(whole, torch.stack([x, x]).double())
        assert torch.equal(gradient, (mine >= 0).expand(2, -1) * (2.0 * ranks))
        if rows != "balanced":
            assert len(mine) == (-(-len(x) // ranks) if rows == "equal" else rows)
        n = int((mine >= 0).sum())
        for padding, value in ((mine, -1), (position_ids, 0), (document_ids, -1), *((y, -100) for y in rolled)):
            assert torch.equal(padding[n:], torch.full_like(padding[n:], value))
        mine, rolled = mine[:n], [labels[:n] for labels in rolled]
        assert torch.equal(position_ids[:n], positions[mine])
        assert torch.equal(document_ids[:n], documents[mine])
        for shift, labels in zip((-1, 0, 2, -9), rolled, strict=True):
            source = positions[mine] - shift
            exists = (source >= 0) & (source < torch.tensor(lengths)[documents[mine]])
            assert torch.equal(labels, torch.where(exists, mine - shift, -100))


DTYPES = [
    "bool", "uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64", "float16", "bfloat16", "float32",
    "float64", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz",
]  # fmt: skip


def other_rows(group, name):
    """Rows of any dtype: whole again, and rolled by 0 and by 1."""
    from saccade.distributed import plan

    made = plan(list(DOCUMENTS), group, rows=90)
    x = (torch.arange(200 * 3) % 2).view(200, 3).to(getattr(torch, name))
    mine = made.shard(x)
    same, rolled = made.roll(mine, 0, fill=0), made.roll(mine.float(), 1, fill=1)
    assert same.dtype == mine.dtype == x.dtype
    assert torch.equal(same.float(), mine.float())
    assert torch.equal(made.roll(mine, 1, fill=1).float(), rolled)
    return torch.equal(made.unshard(mine).float(), x.float())


@pytest.mark.parametrize("name", DTYPES)
def test_rows_of_any_dtype(pool, name):
    assert all(pool.run((HERE, "other_rows"), 3, name))


def repeated(group, times):
    """Gradients of the same call, again and again."""
    from saccade import attention, causal
    from saccade.distributed import plan

    made = plan(list(DOCUMENTS), group, mask=causal())
    torch.manual_seed(3)
    q, k, v, dout = (made.shard(torch.randn(sum(DOCUMENTS), h, 16)).requires_grad_() for h in (4, 2, 2, 4))
    found = []
    for _ in range(times):
        out = attention(q, k, v, mask=causal(), context=made, deterministic=True)
        found.append([out.detach(), *torch.autograd.grad(out, [q, k, v], dout)])
    return all(torch.equal(x, y) for again in found for x, y in zip(again, found[0], strict=True))


def test_repeats_are_bitwise_equal(pool):
    assert all(pool.run((HERE, "repeated"), 4, 5))


def recomputed(group, method, reentrant=False):
    """Gradients with checkpointing, which repeats the exchange of the forward, beside those without."""
    from torch.utils.checkpoint import checkpoint

    from saccade import attention, causal
    from saccade.distributed import plan

    made, found = plan(list(DOCUMENTS), group, mask=causal(), method=method), []
    for again in (False, True):
        torch.manual_seed(3 + made.rank)
        x = made.shard(torch.randn(sum(DOCUMENTS), 4, 16, dtype=torch.float64)).requires_grad_()

        def layer(x, made=made):
            return x + attention(x, x * 2, x, mask=causal(), dropout_p=0.3, context=made)

        y = x
        for _ in range(2):
            y = checkpoint(layer, y, use_reentrant=reentrant) if again else layer(y)
        y.square().sum().backward()
        found.append(x.grad)
    return torch.equal(*found)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize(("ranks", "method"), [(3, "gather"), (4, "ulysses")])
def test_checkpointing(pool, ranks, method, reentrant):
    assert all(pool.run((HERE, "recomputed"), ranks, method, reentrant))


def mapped(group, method):
    """torch.vmap, and batches of gradients, beside loops."""
    from saccade import Unsupported, attention, causal
    from saccade.distributed import plan

    made = plan(list(DOCUMENTS), group, mask=causal(), method=method)
    torch.manual_seed(made.rank)
    x, dys = torch.randn(3, made.rows, 8, 16, dtype=torch.float64), torch.randn(5, 3, made.rows, 8, 16).double()
    x.requires_grad_()
    k = torch.randn(made.rows, 8, 16, dtype=torch.float64)

    def call(x, **keywords):
        return attention(x, k, x, mask=causal(), context=made, **keywords)

    right, found = torch.stack([call(y) for y in x]), torch.vmap(call)(x)
    gradients = torch.stack([torch.autograd.grad(right, x, dy, retain_graph=True)[0] for dy in dys])
    batched = [torch.autograd.grad(y, x, dys, is_grads_batched=True, retain_graph=True)[0] for y in (found, right)]
    pairs = [(found, right), *((y, gradients) for y in batched)]
    for function in (made.unshard, lambda y: made.roll(y, 2)):
        pairs += [(torch.vmap(function)(x), torch.stack([function(y) for y in x]))]
    x.requires_grad_(False)
    gradient = torch.func.grad(lambda y: call(y).square().sum())
    batch = [gradient(x[0]), torch.vmap(gradient)(x)[0]]
    y = x[0].clone().requires_grad_()
    pairs += [(z, torch.autograd.grad(call(y).square().sum(), y)[0]) for z in batch]
    with pytest.raises(Unsupported, match="randomness='different'"):
        torch.vmap(lambda y: call(y, dropout_p=0.5), randomness="different")(x)
    torch.vmap(lambda y: call(y, dropout_p=0.5), randomness="same")(x)
    return max(float((y.detach() - z.detach()).abs().amax()) for y, z in pairs)


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "method"), [(3, "gather"), (2, "ulysses")])
def test_batches_of_calls_and_of_gradients(pool, ranks, method):
    assert max(pool.run((HERE, "mapped"), ranks, method)) <= EQUAL


def compiled(group, method):
    """A layer under torch.compile beside itself: results, gradients, and how often it was compiled."""
    from torch._dynamo.testing import CompileCounterWithBackend

    from saccade import attention, causal
    from saccade.distributed import plan

    def layer(q, k, v, made):
        return attention(q * 2, k, v, mask=causal(), context=made).square()

    torch._dynamo.reset()  # what other tests compiled of it in these processes counts too
    counter = CompileCounterWithBackend("aot_eager")
    quick = torch.compile(layer, backend=counter, fullgraph=True)
    same = []
    for lengths in (list(DOCUMENTS), [50, 100, 50], list(DOCUMENTS)):  # of as many rows
        made = plan(lengths, group, mask=causal(), method=method, heads=8)
        torch.manual_seed(3)
        whole = torch.randn(3, sum(lengths), 8, 16, dtype=torch.float64)
        leaves = [x.requires_grad_() for x in made.shard(whole, 1)]
        found = []
        for function in (quick, quick, layer):
            out = function(*leaves, made)
            found.append([out.detach(), *torch.autograd.grad(out.sum(), leaves)])
        same += [torch.equal(x, y) for x, y in zip(*found[:2], strict=True)]
        same += [bool((x - y).abs().max() <= EQUAL) for x, y in zip(*found[1:], strict=True)]
    return all(same), counter.frame_count


@pytest.mark.slow
@pytest.mark.parametrize("method", ["gather", "ulysses"])
def test_compiles_as_one_graph(pool, method):
    assert pool.run((HERE, "compiled"), 2, method) == [(True, 2)] * 2
