"""Lists of keys that rows see, against an oracle that gathers them, row after row, in float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from saccade import (
    Dense,
    Packed,
    Paged,
    Unsupported,
    attention,
    block_mask,
    causal,
    explain,
    interval,
    mask_mod,
    merge,
    selected,
    selected_blocks,
    softcap,
    window,
)
from saccade.masks import Selected, from_tensors, of_leaves
from saccade.testing.accuracy import check

B, H_Q, H_K, S_Q, S_K, D, D_V, N = 2, 4, 2, 19, 50, 16, 24, 11
PLACES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
FAR = [-(1 << 31), -123456, -1, 114514, 2147480000, (1 << 31) - 1]
"""What names no key."""


def lists(*shape, blocks=S_K, device="cpu", dtype=torch.int64):
    """Entries that differ, in no order, among them numbers on both sides of the keys, and far ones in any place."""
    *form, n = shape
    drawn = torch.rand(*form, max(n, blocks + 6)).argsort(-1)[..., :n] - 3
    far = torch.tensor(FAR)[torch.rand(*form, len(FAR)).argsort(-1)]
    place = torch.rand(*form, n).argsort(-1)[..., : min(n // 4, len(FAR))]
    return drawn.scatter(-1, place, far[..., : place.shape[-1]]).to(device, dtype)


def operands(device="cpu", dtype=torch.float32, b=B, s_q=S_Q, s_k=S_K):
    shapes = (b, H_Q, s_q, D), (b, H_K, s_k, D), (b, H_K, s_k, D_V)
    return tuple(torch.randn(shape, device=device, dtype=dtype) for shape in shapes)


def keys_of(entries, length, size, used):
    """The keys that a list names, by the definition."""
    named = set()
    for entry in entries[:length]:
        if 0 <= entry < used:  # so that no range below is long
            named.update(range(entry * size, min((entry + 1) * size, used)))
    return sorted(named)


def gathered(q, k, v, mask, used=None, sink=None, cap=None, beside=None):
    """out (b, h_q, s_q, d_v) and lse in float64, differentiable: each row's keys are read by their numbers.

    Args:
        used: (b,) keys in use.
        beside: (b, i, j) -> bool, another mask.
    """
    (b, h_q, s_q, d), (h_k, s_k) = q.shape, k.shape[1:3]
    share, group = h_q // mask.lists.shape[1], h_q // h_k
    outs, lses, zero = [], [], 0 * (q.sum() + k.sum() + v.sum()).double()  # of which rows without keys have gradients
    for i in range(b * h_q * s_q):
        row, head, batch = i % s_q, i // s_q % h_q, i // (s_q * h_q)
        at = batch if mask.lists.shape[0] > 1 else 0, head // share, row // mask.rows
        length = mask.lists.shape[-1]
        if mask.lengths is not None:
            length = int(mask.lengths[at] if mask.lengths.dim() > 1 else mask.lengths[batch % len(mask.lengths)])
        named = keys_of(mask.lists[at].tolist(), length, mask.keys, s_k if used is None else int(used[batch]))
        named = [j for j in named if beside is None or beside(batch, row, j)]
        score = k[batch, head // group, named].double() @ q[batch, head, row].double() / d**0.5
        score = score if cap is None else cap * torch.tanh(score / cap)
        column = [] if sink is None else [sink[head : head + 1].double()]
        total = torch.cat([score, *column])
        if not len(total):
            outs.append(zero.expand(v.shape[-1]))
            lses.append(zero - torch.inf)
            continue
        lses.append(total.logsumexp(0))
        outs.append((score - lses[-1]).exp() @ v[batch, head // group, named].double())
    return torch.stack(outs).view(b, h_q, s_q, -1), torch.stack(lses).view(b, h_q, s_q)


def verify(mask, *, layout=None, also=None, given=None, **more):
    """Forward and gradients of `mask & also`, in float64, where the tolerance is torch's own."""
    q, k, v = (x.double().requires_grad_() for x in (operands() if given is None else given))
    out, lse = gathered(q, k, v, mask, **more)
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    seen = lse > -torch.inf
    keywords = {"mask": mask if also is None else mask & also, "sink": more.get("sink")}
    keywords |= {"score_mod": softcap(more["cap"])} if "cap" in more else {}
    keywords |= {} if layout is None else {"layout": layout}
    inputs = (q, k, v) if more.get("sink") is None else (q, k, v, more["sink"])
    wanted = torch.autograd.grad((out, torch.where(seen, lse, 0)), inputs, (dout, dlse))
    for backend in ("cpu", "reference"):
        found = attention(q, k, v, return_lse=True, backend=backend, **keywords)
        torch.testing.assert_close(found.out, out)
        torch.testing.assert_close(found.lse, lse)
        gradients = torch.autograd.grad((found.out, torch.where(seen, found.lse, 0)), inputs, (dout, dlse))
        for x, y in zip(gradients, wanted, strict=True):
            torch.testing.assert_close(x, y)


@pytest.mark.parametrize("heads", [1, H_K, H_Q])
@pytest.mark.parametrize("b", [1, B])
@pytest.mark.parametrize("rows", [1, 3, 64])
def test_lists_of_keys(rows, b, heads):
    groups = -(-S_Q // rows)
    verify(selected(lists(b, heads, groups, N), rows=rows))
    lengths = torch.randint(0, N + 1, (b, heads, groups))
    verify(selected(lists(b, heads, groups, N, dtype=torch.int32), lengths, rows=rows))


@pytest.mark.parametrize("size", [1, 7, 48, 64, 128])
@pytest.mark.parametrize("rows", [1, 5])
def test_lists_of_blocks(rows, size):
    blocks = -(-S_K // size)
    shape = B, H_K, -(-S_Q // rows)
    verify(selected_blocks(lists(*shape, 4, blocks=blocks), size, rows=rows))
    verify(selected_blocks(lists(*shape, 4, blocks=blocks), size, torch.randint(0, 5, (B,)), rows=rows))


@pytest.mark.parametrize("n", [0, 1, 63, 64, 65, 300])
def test_numbers_of_entries(n):
    verify(selected(lists(B, 1, S_Q, n)))
    verify(selected(lists(1, 1, S_Q, n), torch.full((1,), n)))


@pytest.mark.parametrize("length", [0, 1, N])
def test_lengths(length):
    verify(selected(lists(1, H_K, S_Q, N), torch.full((1, H_K, S_Q), length, dtype=torch.int32)))


HOSTILE = {
    "first": [-1, 3, 7, 9],
    "inside": [3, -1, 7, 9],
    "last": [3, 7, 9, -1],
    "none": [-1, -1, -1, -1],
    "far": [-(1 << 31), (1 << 31) - 1, 5, S_K],
    "edge": [S_K - 1, S_K, S_K + 1, 0],
    "hot": [0, 1, 2, 3],
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_lists(name):
    entries = torch.tensor(HOSTILE[name], dtype=torch.int32)
    verify(selected(entries.expand(B, H_K, S_Q, 4)))  # strides of 0
    verify(selected(entries.repeat(1, 1, S_Q, 1)), sink=torch.randn(H_Q, dtype=torch.float64).requires_grad_())


def test_every_second_row_is_empty():
    entries = lists(B, H_K, S_Q, N)
    entries[:, :, ::2] = -1
    verify(selected(entries))


def test_strides():
    entries = lists(B, H_K, 2 * S_Q, N).transpose(1, 2).contiguous().transpose(1, 2)[:, :, ::2]
    assert not entries.is_contiguous()
    verify(selected(entries))


def test_beside_other_masks_and_scores():
    off = S_K - S_Q
    mask = selected(lists(B, H_K, S_Q, 30))
    verify(mask, also=causal(), beside=lambda b, i, j: j <= i + off)
    verify(mask, also=window(20, 3), beside=lambda b, i, j: i + off - 20 <= j <= i + off + 3, cap=2.0)
    stop = torch.randint(0, S_K, (B, S_Q))
    verify(mask, also=interval(None, stop), beside=lambda b, i, j: j < int(stop[b, i]))
    verify(mask, also=mask_mod(lambda b, h, i, j: (i + j) % 3 > 0), beside=lambda b, i, j: (i + j) % 3 > 0)
    verify(mask, sink=torch.randn(H_Q, dtype=torch.float64).requires_grad_(), cap=3.0)


SHOWN = torch.tensor([[2, 5, -1], [0, 4, 9]]).view(2, 1, 1, 3)


@pytest.mark.parametrize(
    ("made", "visible"),
    [
        (lambda mask: ~mask, lambda listed, near: ~listed),
        (lambda mask: mask | window(1, 1), lambda listed, near: listed | near),
        (lambda mask: ~mask & window(1, 1), lambda listed, near: ~listed & near),
        (lambda mask: mask & ~window(1, 1), lambda listed, near: listed & ~near),
        (lambda mask: mask & interval(torch.tensor([[0]]), torch.tensor([[5]])), lambda listed, near: listed & (J < 5)),
    ],
    ids=["not", "or", "not and", "and not", "interval"],
)
def test_combinations(made, visible):
    listed = (SHOWN[..., None] == J).any(-2)  # (2, 1, 1, 10)
    near = ((J - torch.arange(8)[:, None] - 2).abs() <= 1)[None, None]
    wanted = visible(listed, near).expand(2, 4, 8, 10)
    given = operands(s_q=8, s_k=10)
    mask = made(selected(SHOWN, rows=8))
    for backend in ("cpu", "reference"):
        found = attention(*given, mask=mask, return_lse=True, backend=backend)
        exact = attention(*given, mask=wanted, return_lse=True, backend="reference")
        torch.testing.assert_close(found.out, exact.out)
        torch.testing.assert_close(found.lse, exact.lse)


J = torch.arange(10)


# Layouts


def test_padded():
    used_q, used_k = torch.tensor([S_Q, 12]), torch.tensor([31, S_K])
    given = operands()
    for x, used in zip(given, (used_q, used_k, used_k), strict=True):
        x.masked_fill_((torch.arange(x.shape[2]) >= used[:, None])[:, None, :, None], torch.nan)
    mask = selected(lists(B, H_K, S_Q, N), torch.randint(0, N + 1, (B, H_K, S_Q)))
    for backend in ("cpu", "reference"):
        layout = Dense("bhsd", used_q, used_k)
        check(*given, mask=mask, layout=layout, backend=backend).assert_ok()
        out, lse = attention(*given, mask=mask, layout=layout, return_lse=True, backend=backend)
        for b in range(B):
            one = [x[b : b + 1, :, : int(n[b])] for x, n in zip(given, (used_q, used_k, used_k), strict=True)]
            wanted = gathered(*one, mask.of_batch_row(b))
            torch.testing.assert_close(out[b : b + 1, :, : int(used_q[b])].double(), wanted[0], rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(lse[b : b + 1, :, : int(used_q[b])].double(), wanted[1], rtol=1e-4, atol=1e-4)


LENGTHS = [(5, 9), (0, 4), (12, 0), (7, 30)]


@pytest.mark.parametrize("heads", [1, H_K, H_Q])
@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_packed(backend, rows, heads):
    layout = Packed.from_lengths(*zip(*LENGTHS, strict=True))
    (t_q, t_k), b = (sum(n) for n in zip(*LENGTHS, strict=True)), len(LENGTHS)
    q, k, v = torch.randn(t_q, H_Q, D), torch.randn(t_k, H_K, D), torch.randn(t_k, H_K, D_V)
    shape = (heads, t_q, N) if rows == 1 else (b, heads, 3, N)
    lengths = torch.randint(0, N + 1, (shape[:-1] if rows == 1 else (b,)))
    mask = selected(lists(*shape, blocks=12), lengths, rows=rows)
    out, lse = attention(q, k, v, mask=mask, layout=layout, return_lse=True, backend=backend)
    check(q, k, v, mask=mask, layout=layout, backend=backend).assert_ok()
    for i, (rows_at, keys_at) in enumerate((p.rows, p.keys) for p in layout.sequence_slices(q, k)):
        one = [x[at].transpose(0, 1)[None] for x, at in ((q, rows_at), (k, keys_at), (v, keys_at))]
        wanted = gathered(*one, mask.of_rows(rows_at).of_batch_row(i)) if one[0].shape[2] else None
        if wanted is not None:
            torch.testing.assert_close(out[rows_at].transpose(0, 1)[None].double(), wanted[0], rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(lse[:, rows_at][None].double(), wanted[1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_groups_of_rows_with_a_bound_that_nothing_reads(backend):
    """`max_seqlen_q` may be a tensor, as engines have it."""
    q, starts, entries = torch.randn(8, H_Q, D), torch.tensor([0, 3, 8]), lists(2, 1, 3, 2, blocks=5)
    bound = Packed(starts, max_seqlen_q=torch.tensor(5))
    wanted = attention(q, q, q, mask=selected(entries, rows=2), layout=Packed(starts), backend=backend)
    assert torch.equal(attention(q, q, q, mask=selected(entries, rows=2), layout=bound, backend=backend), wanted)
    with pytest.raises(ValueError, match=r"indices must be \(2 or 1, h, 3, n\) .*; got \(2, 1, 2, 2\)"):
        attention(q, q, q, mask=selected(entries[:, :, :2], rows=2), layout=bound, backend=backend)


@pytest.mark.parametrize("end_to_end", [False, True], ids=["batch", "end to end"])
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_paged(backend, rows, end_to_end):
    size, table = 4, torch.tensor([[4, 0, 6], [7, 2, 1], [3, 5, 8]])
    used, cache = torch.tensor([10, 3, 12]), (torch.randn(9, size, H_K, D), torch.randn(9, size, H_K, D_V))
    starts = torch.tensor([0, 3, 4, 8]) if end_to_end else torch.tensor([0, 4, 8, 12])
    t_q, layout = int(starts[-1]), Paged(table, used, starts if end_to_end else None)
    q = torch.randn(t_q, H_Q, D)
    shape = (H_K, t_q, 5) if end_to_end and rows == 1 else (3, H_K, -(-4 // rows), 5)
    mask = selected(lists(*shape, blocks=12), rows=rows)
    given = q if end_to_end else q.view(3, 4, H_Q, D)
    found = attention(given, *cache, mask=mask & causal(), layout=layout, backend=backend)
    found = found.view(t_q, H_Q, D_V)
    for i in range(3):
        at = slice(int(starts[i]), int(starts[i + 1]))
        one = [x[table[i]].flatten(0, 1)[: int(used[i])].transpose(0, 1)[None] for x in cache]
        off = int(used[i]) - (at.stop - at.start)
        wanted, _ = gathered(
            q[at].transpose(0, 1)[None],
            *one,
            mask.of_rows(at).of_batch_row(i),
            beside=lambda b, i, j, o=off: j <= i + o,
        )
        torch.testing.assert_close(found[at].transpose(0, 1)[None].double(), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_rows_and_keys_count_in_the_call(backend):
    """While other masks of an `&` compare positions."""
    mask, given = selected(lists(B, 1, S_Q, 30)), operands()
    layout = Dense(q_offset=100, k_offset=90)
    found = attention(*given, mask=mask & causal(), layout=layout, backend=backend)
    wanted, _ = gathered(*given, mask, beside=lambda b, i, j: j + 90 <= i + 100)
    torch.testing.assert_close(found.double(), wanted, rtol=1e-4, atol=1e-4)


def test_long_lists_and_tiles():
    """Where block sparsity says which tiles are visited."""
    q, k, v = torch.randn(1, 2, 300, 32), torch.randn(1, 1, 700, 32), torch.randn(1, 1, 700, 32)
    tiles = torch.rand(1, 2, 5, 11).argsort(-1)[..., :3]
    check(q, k, v, mask=selected_blocks(tiles, rows=64)).assert_ok()
    check(q, k, v, mask=selected_blocks(tiles, rows=64) & causal()).assert_ok()
    check(q, k, v, mask=selected(torch.rand(1, 1, 300, 700).argsort(-1)[..., :40])).assert_ok()
    check(q, k, v, mask=selected_blocks(tiles, rows=64) | window(20, 0), dropout_p=0.2, sink=torch.randn(2)).assert_ok()


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("layout", ["dense", "packed", "paged"])
@pytest.mark.parametrize("fill", [torch.nan, torch.inf])
def test_keys_that_no_list_names_hold_anything(fill, layout, backend):
    """And rows without a key are zero, whatever the keys of others hold."""
    s_q, s_k = 6, 12
    entries = torch.tensor([[0, 3], [5, 3], [-1, 99], [0, -1], [7, 5], [-7, 12]])
    given = [torch.randn(n, h, D) for n, h in ((s_q, H_Q), (s_k, H_K), (s_k, H_K))]
    clean = [x.clone() for x in given]
    for x in given[1:]:
        x[[1, 2, 4, 6, *range(8, s_k)]] = fill
    clean[2][7] = given[2][7] = fill  # which row 4 alone sees

    def run(q, k, v):
        mask = selected(entries[None])
        if layout == "dense":
            dense = [x.transpose(0, 1)[None].requires_grad_() for x in (q, k, v)]
            found = attention(*dense, mask=selected(entries[None, None]), return_lse=True, backend=backend)
            gradients = torch.autograd.grad(found.out[:, :, [0, 1, 2, 3, 5]].sum(), dense[0])[0][:, :, [2, 5]]
            assert not gradients.any()
            return found.out[0].transpose(0, 1), found.lse[0]
        if layout == "packed":
            return attention(
                q, k, v, mask=mask, layout=Packed.from_lengths([s_q], [s_k]), return_lse=True, backend=backend
            )
        table, used = torch.arange(3)[None], torch.tensor([s_k])
        pages = (x.unflatten(0, (3, 4)) for x in (k, v))
        layout_of_pages = Paged(table, used, torch.tensor([0, s_q]))
        return attention(q, *pages, mask=mask, layout=layout_of_pages, return_lse=True, backend=backend)

    out, lse = run(*given)
    wanted, wanted_lse = run(*clean)
    rows = [2, 5]
    assert not out[rows].any()
    assert (lse[:, rows] == -torch.inf).all()
    torch.testing.assert_close(out, wanted, equal_nan=True)
    torch.testing.assert_close(lse, wanted_lse, equal_nan=True)


# Identities


def close(a, b):
    for x, y in zip(a, b, strict=True):
        torch.testing.assert_close(x, y)


def run(mask, given, **keywords):
    return attention(*given, mask=mask, return_lse=True, **keywords)


def test_identities():
    given = operands()
    entries = lists(B, H_K, S_Q, 40)
    every = torch.arange(S_K).flip(0).expand(1, 1, S_Q, S_K)
    close(run(selected(every), given), run(None, given))
    i, off = torch.arange(S_Q)[:, None], S_K - S_Q
    of_window = (i + off - torch.arange(6)).expand(1, 1, S_Q, 6)  # negative ones at the beginning
    close(run(selected(of_window), given), run(window(5, 0), given))
    close(run(selected(entries.flip(-1)), given), run(selected(entries), given))
    later = torch.where(entries <= i + off, entries, -1)
    close(run(selected(entries) & causal(), given), run(selected(later), given))
    parts = [run(selected(x), given) for x in (entries[..., :13], entries[..., 13:])]
    close(merge(*parts), run(selected(entries), given))
    blocks = lists(B, H_K, 3, 4, blocks=8)
    expanded = torch.where(blocks < 0, -1, blocks)[..., None] * 7 + torch.arange(7)
    expanded = torch.where(blocks[..., None] < 0, -1, expanded).flatten(-2).repeat_interleave(8, 2)[:, :, :S_Q]
    close(run(selected_blocks(blocks, 7, rows=8), given), run(selected(expanded), given))
    swapped = [x.flip(0) for x in given]
    close(run(selected(entries.flip(0)), swapped), [x.flip(0) for x in run(selected(entries), given)])


def test_keys_of_no_list_have_no_gradient():
    q, k, v = (x.requires_grad_() for x in operands())
    entries = lists(B, 1, S_Q, N) // 2 * 2  # even keys
    entries = torch.where((entries[..., :, None] == entries[..., None, :]).tril(-1).any(-1), -1, entries)
    attention(q, k, v, mask=selected(entries)).sum().backward()
    assert not k.grad[:, :, 1::2].any()
    assert not v.grad[:, :, 1::2].any()


def test_lists_are_read_in_each_call():
    given, entries, lengths = operands(), lists(B, H_K, S_Q, N), torch.full((B, H_K, S_Q), N)
    mask = selected(entries, lengths)
    for _ in range(2):
        close(run(mask, given), run(mask, given, backend="reference"))
        wanted, _ = gathered(*given, mask)
        torch.testing.assert_close(run(mask, given).out.double(), wanted, rtol=1e-4, atol=1e-4)
        entries.copy_(lists(B, H_K, S_Q, N))
        lengths.random_(0, N + 1)


# Wrong kernels


def _moved(x, by=1, dim=-2):
    return x.roll(by, dim)


WRONG = {
    "-1 is key 0": lambda m: replace(m, lists=torch.where(m.lists < 0, 0, m.lists)),
    "far numbers are clamped": lambda m: replace(m, lists=m.lists.clamp(max=S_K - 1)),
    "far numbers wrap": lambda m: replace(m, lists=torch.where(m.lists >= S_K, m.lists % S_K, m.lists)),
    "ends at the first -1": lambda m: replace(m, lists=torch.where((m.lists < 0).cumsum(-1) > 0, -1, m.lists)),
    "no lengths": lambda m: replace(m, lengths=None),
    "lengths of the neighbour": lambda m: replace(m, lengths=_moved(m.lengths, dim=-1)),
    "list of the neighbour": lambda m: replace(m, lists=_moved(m.lists)),
    "second row has the first one's list": lambda m: replace(m, lists=m.lists[:, :, torch.arange(S_Q) // 2 * 2]),
    "head 0 for all": lambda m: replace(m, lists=m.lists[:, :1].expand_as(m.lists)),
    "heads in turns": lambda m: replace(m, lists=m.lists.repeat(1, 2, 1, 1), lengths=m.lengths.repeat(1, 2, 1)),
    "batch row 0 for all": lambda m: replace(m, lists=m.lists[:1].expand_as(m.lists)),
    "the last entry is left out": lambda m: replace(m, lengths=(m.lengths - 1).clamp(min=0)),
    "causal by place": lambda m: replace(m, lists=torch.where(torch.ones(S_Q, N).tril() > 0, m.lists, -1)),
    "next key": lambda m: replace(m, lists=torch.where(m.lists >= 0, m.lists + 1, m.lists)),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_kernels_are_rejected(name):
    lengths = torch.randint(N // 2, N + 1, (B, H_K, S_Q))
    mask = selected(lists(B, H_K, S_Q, N), lengths)

    def function(q, k, v, mask, **keywords):
        wrong = WRONG[name](mask)
        mask = of_leaves(wrong, lambda leaf: Unchecked(leaf.lists, leaf.lengths, leaf.rows, leaf.block_size))
        return attention(q, k, v, mask=mask, **keywords)

    with pytest.raises(AssertionError):
        check(*operands(), mask=mask, function=function).assert_ok()


class Unchecked(Selected):
    def check(self, keys, rows, starts, lengths):
        pass


# Wrong calls


@pytest.mark.parametrize(
    ("made", "error", "told"),
    [
        (lambda: selected([[1]]), TypeError, "selected's indices must be a tensor"),
        (lambda: selected(torch.zeros(1, 1, 4, 2)), ValueError, r"torch.float32 \(1, 1, 4, 2\)"),
        (lambda: selected(torch.zeros(1, 1, 4, 2, dtype=torch.int16)), ValueError, "torch.int16"),
        (lambda: selected(torch.zeros(1, 1, 4, 2, dtype=torch.bool)), ValueError, "torch.bool"),
        (lambda: selected(torch.zeros(4, 2, dtype=torch.int32)), ValueError, r"\(4, 2\)"),
        (lambda: selected(ZEROS, rows=0), ValueError, "rows must be an integer from 1 on, got 0"),
        (lambda: selected(ZEROS, rows=1.5), TypeError, "rows must be an integer, got 1.5"),
        (lambda: selected_blocks(ZEROS, 0), ValueError, "block_size must be an integer from 1 on, got 0"),
        (lambda: selected_blocks(ZEROS, True), TypeError, "block_size must be an integer"),
        (lambda: selected(ZEROS, [3]), TypeError, "lengths must be a tensor"),
        (lambda: selected(ZEROS, torch.zeros(1, 1, 3, dtype=torch.int32)), ValueError, r"torch.int32 \(1, 1, 3\)"),
        (lambda: selected(ZEROS, torch.zeros(1, 1, 4)), ValueError, "torch.float32"),
        (lambda: selected(ZEROS, torch.zeros(1, dtype=torch.int32, device="meta")), ValueError, "cpu and meta"),
    ],
)  # fmt: skip
def test_wrong_lists(made, error, told):
    with pytest.raises(error, match=told):
        made()


ZEROS = torch.zeros(1, 1, 4, 2, dtype=torch.int32)


@pytest.mark.parametrize(
    ("shape", "rows"),
    [((3, 1, S_Q, 2), 1), ((1, 3, S_Q, 2), 1), ((1, 1, S_Q - 1, 2), 1), ((1, 1, S_Q, 2), 2), ((1, S_Q, 2), 1)],
    ids=str,
)
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_shapes_that_do_not_fit(backend, shape, rows):
    mask = selected(torch.full(shape, -1), rows=rows)
    with pytest.raises(ValueError, match=rf"indices must be .*; got \({shape[0]}, "):
        attention(*operands(), mask=mask & causal(), backend=backend)


def test_lengths_that_do_not_fit():
    entries = lists(B, 1, S_Q, N)
    with pytest.raises(ValueError, match=r"lengths must be \(2, 1, 19\) or \(2,\); got \(3,\)"):
        attention(*operands(), mask=selected(entries, torch.tensor([1, 2, 3])))
    for wrong in (-1, N + 1):
        lengths = torch.full((B, 1, S_Q), 3)
        lengths[1, 0, 5] = wrong
        with pytest.raises(ValueError, match=f"from 0 to the {N} entries of a list, got {wrong}"):
            attention(*operands(), mask=selected(entries, lengths))


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_duplicates(backend):
    entries = torch.full((B, 1, S_Q, N), -1)  # names that are none may come again
    entries[1, 0, 7, 2], entries[1, 0, 7, 9] = 5, 5
    with pytest.raises(ValueError, match=r"list \(1, 0, 7\) names key 5 twice: entries must differ"):
        attention(*operands(), mask=selected(entries), backend=backend)
    with pytest.raises(ValueError, match="names block 5 twice"):
        attention(*operands(), mask=selected_blocks(entries, 4), backend=backend)
    lengths = torch.full((B, 1, S_Q), 9)
    attention(*operands(), mask=selected(entries, lengths), backend=backend)
    attention(*operands(), mask=selected(torch.where(entries > 0, S_K, -1)), backend=backend)
    layout = Dense("bhsd", None, torch.tensor([S_K, 5]))
    attention(*operands(), mask=selected(entries), layout=layout, backend=backend)
    layout = Packed.from_lengths([3, 4], [8, 6])
    entries = torch.tensor([[6, 6], [1, 2], [2, 3], *[[4, 4]] * 4])[None]
    given = torch.randn(7, H_Q, D), *(torch.randn(14, H_K, D) for _ in range(2))
    with pytest.raises(ValueError, match=r"list \(0, 0\) names key 6 twice"):
        attention(*given, mask=selected(entries), layout=layout, backend=backend)
    entries[0, 0, 0] = 0
    with pytest.raises(ValueError, match=r"list \(0, 3\) names key 4 twice"):
        attention(*given, mask=selected(entries), layout=layout, backend=backend)
    entries[0, 3:] = 6  # of a sequence of six keys
    attention(*given, mask=selected(entries), layout=layout, backend=backend)


def test_refusals():
    layout = Packed(torch.tensor([0, 4]), starts_k=torch.tensor([0]), seqused_k=torch.tensor([4]))
    given = torch.randn(4, H_Q, D), *(torch.randn(9, H_K, D) for _ in range(2))
    with pytest.raises(ValueError, match=r"selected\(\[1, 4, 2\]\) counts the keys of whole sequences"):
        attention(*given, mask=selected(ZEROS[0]), layout=layout)
    with pytest.raises(ValueError, match="each call reads its tensors anew"):
        block_mask(selected(ZEROS), 1, 1, 4, 9)
    with pytest.raises(Unsupported, match=r"cudnn: .*has no mask selected"):
        attention(*operands(s_q=4), mask=selected(ZEROS[..., :1]), backend="cudnn")
    with pytest.raises(ValueError, match="must be on q's device"):
        attention(*operands(s_q=4), mask=selected(ZEROS.to("meta")))


def test_explain():
    assert str(explain(*operands(s_q=4), mask=selected(ZEROS) & causal()).spec).split()[4] == "selected&causal"
    told = explain(*operands(s_q=4), mask=selected_blocks(ZEROS[:, :, :1], rows=64))
    assert told.backend == told.gradient == "cpu"
    assert told.lists in str(told)
    assert told.lists.endswith("are computed, masked only where a list ends inside")
    assert explain(*operands(s_q=4), mask=selected(ZEROS)).lists.endswith("masked key by key")
    assert explain(*operands(s_q=4), mask=causal()).lists is None


# Transforms


def test_flat_form():
    entries = lists(1, 1, S_Q, N)
    for mask in (
        selected(entries),
        selected_blocks(entries, 3, torch.ones(1, dtype=torch.int32), rows=2) | causal(),
        ~selected(entries, entries[..., 0]) & window(3, 0),
    ):
        again = from_tensors(mask.identity, mask.ints, mask.tensors, mask.floats)
        assert again == mask
        assert repr(again) == repr(mask)


def test_vmap():
    given, entries = [x[:, None] for x in operands()], lists(B, 1, H_K, S_Q, N)
    wanted = attention(*(x[:, 0] for x in given), mask=selected(entries[:, 0]))
    mapped = torch.vmap(lambda q, k, v, lists: attention(q, k, v, mask=selected(lists)))
    torch.testing.assert_close(mapped(*given, entries), wanted[:, None])
    shared = torch.vmap(lambda q, k, v: attention(q, k, v, mask=selected(entries[0])))
    wanted = attention(*(x[:, 0] for x in given), mask=selected(entries[0]))
    torch.testing.assert_close(shared(*given), wanted[:, None])


def test_compiled_once_for_all_lengths():
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(
        lambda q, k, v, entries, lengths: attention(q, k, v, mask=selected_blocks(entries, 4, lengths) & causal()),
        backend="aot_eager",
        fullgraph=True,
        dynamic=True,
    )
    for s_q, s_k, n in ((9, 30, 5), (11, 44, 7), (13, 20, 3)):
        given, entries = operands(s_q=s_q, s_k=s_k), lists(B, H_K, s_q, n, blocks=-(-s_k // 4))
        lengths = torch.randint(0, n + 1, (B, H_K, s_q))
        wanted = attention(*given, mask=selected_blocks(entries, 4, lengths) & causal())
        torch.testing.assert_close(compiled(*given, entries, lengths), wanted)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


class Selecting(torch.nn.Module):
    def forward(self, q, k, v, entries):
        return attention(q, k, v, mask=selected(entries))


def test_exported():
    given, entries = operands(), lists(B, H_K, S_Q, N)
    program = torch.export.export(Selecting(), (*given, entries))
    other = lists(B, H_K, S_Q, N)
    torch.testing.assert_close(program.module()(*given, other), attention(*given, mask=selected(other)))


def test_lists_of_queries_end_to_end_are_drawn():
    mask = selected(torch.tensor([[[0, 2], [1, -1], [2, 9]]]), torch.tensor([[2, 2, 0]]))
    assert mask.draw(3).splitlines()[1:] == ["■ · ■", "· ■ ·", "· · ·"]
    assert "selected" in str(selected(torch.zeros(1, 1, 0, 2, dtype=torch.int64)))


def test_lists_after_the_last_sequence_are_not_read():
    q = torch.randn(5, 1, 4)
    layout = Packed(torch.tensor([0, 1, 3]), max_seqlen_q=2)
    lists, lengths = torch.tensor([[[0], [0], [1], [7], [7]]]).expand(1, 5, 2).clone(), torch.ones(1, 5).int()
    lengths[0, 3:] = 99
    out = attention(q, q, q, mask=selected(lists, lengths), layout=layout)
    assert torch.equal(out[:3], q[:3])
    assert not out[3:].any()
    lengths[0, 2] = 99
    with pytest.raises(ValueError, match="lengths must be from 0 to the 2 entries of a list, got 99"):
        attention(q, q, q, mask=selected(lists, lengths), layout=layout)


@pytest.mark.parametrize("form", ["padded", "packed", "pages"])
@pytest.mark.parametrize("shared", [False, True])
def test_lists_of_padding_rows_are_not_read(form, shared):
    """Of two batch rows with three and four rows in use, in lists of two rows; of a list for both the longer counts."""
    used, keys, cache = torch.tensor([3, 4]), torch.tensor([5, 7]), torch.randn(2, 7, 1, 4)
    lists, lengths = (
        torch.tensor([0, 4]).expand(1 if shared else 2, 1, 3, 2).clone(),
        torch.full((1 if shared else 2, 1, 3), 2),
    )
    lists[:, :, 2], lengths[:, :, 2] = 3, 99
    q, starts = torch.randn(2, 6, 1, 4), torch.tensor([0, 3, 7])
    if form == "padded":
        given, layout = (q, cache, cache), Dense("bshd", used, keys)
    elif form == "packed":
        given, layout = (q[0].repeat(2, 1, 1)[:9], *[cache.flatten(0, 1)] * 2), Packed(starts, starts * 2, 6, 7)
    else:
        given, layout = (q[0].repeat(2, 1, 1)[:9], cache, cache), Paged(torch.arange(2)[:, None], keys, starts)
    attention(*given, mask=selected(lists, lengths, rows=2), layout=layout)
    lists[-1:, :, 1] = 3
    with pytest.raises(ValueError, match="names key 3 twice"):
        attention(*given, mask=selected(lists, lengths, rows=2), layout=layout)


def test_a_block_of_all_keys():
    q = torch.randn(1, 1, 3, 4)
    lists = torch.tensor([[[[0]]]])
    for size in (1 << 31, 1 << 63, 1 << 70):
        mask = selected_blocks(lists, size, rows=3)
        assert torch.allclose(attention(q, q, q, mask=mask), attention(q, q, q), atol=1e-6)
    with pytest.raises(ValueError, match="indices must be a dense tensor"):
        selected(lists.to_sparse())
