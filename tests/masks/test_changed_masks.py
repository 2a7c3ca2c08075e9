"""Masks that change between calls: each call takes what they are then."""

from __future__ import annotations

import gc
import pickle
from copy import deepcopy

import pytest
import torch

from saccade import attention, block_mask, causal, mask_mod, window
from saccade.backends import block_sparsity
from saccade.compat.flex import BlockMask, create_block_mask, flex_attention
from saccade.masks import as_mask, predicates

S, SIZE, LONG = 576, 192, 512
"""A BlockMask's rows and keys and those of a block; rows and keys whose tiles a CPU looks at."""
MAKERS = [create_block_mask, torch.nn.attention.flex_attention.create_block_mask]
COMBINED = {
    "&": lambda mask: causal() & mask,
    "|": lambda mask: window(5, 5) | mask,
    "~": lambda mask: ~(window(5, None) & mask),
    "block_mask": lambda mask: block_mask(mask, 1, 1, S, S),
}
"""Masks that are made of a BlockMask, or of a bool tensor, before it changes."""


def by_lists(given):
    """A BlockMask without partial blocks as a bool tensor."""
    seen = torch.zeros(given.seq_lengths, dtype=torch.bool)
    for row, count in enumerate(given.full_kv_num_blocks[0, 0].tolist()):
        for key in given.full_kv_indices[0, 0, row, :count].tolist():
            seen[row * SIZE : (row + 1) * SIZE, key * SIZE : (key + 1) * SIZE] = True
    return seen


def everything(b, h, q_idx, kv_idx):
    return kv_idx >= 0


def counts(*numbers):
    return torch.tensor([[numbers]], dtype=torch.int32)


def assign(given, n):
    given.full_kv_num_blocks = torch.randint(0, 4, (1, 1, 3), dtype=torch.int32)


def copy(given, n):
    given.full_kv_num_blocks.copy_(counts(n % 3, 1, 2))


def resize(given, n):
    given.full_kv_indices = given.full_kv_indices.flip(-1)[..., : 1 + n % 3]
    given.full_kv_num_blocks.clamp_(max=1 + n % 3)


def change_data(given, n):
    given.full_kv_num_blocks.data = counts(n % 4, 0, 3)


def write_by_numpy(given, n):
    given.full_kv_num_blocks.numpy()[:] = [n % 4, 2, 0]


def exchange(given, n):
    given.kv_num_blocks, given.full_kv_num_blocks = given.full_kv_num_blocks, given.kv_num_blocks
    given.kv_indices, given.full_kv_indices = given.full_kv_indices, given.kv_indices
    given.mask_mod = everything if n % 2 else lambda b, h, q_idx, kv_idx: kv_idx < 0  # of the partial ones


CHANGES = [assign, copy, resize, change_data, write_by_numpy]


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("made_by", MAKERS)
@pytest.mark.parametrize("change", CHANGES)
def test_lists(change, made_by, inference):
    with torch.inference_mode(inference):
        q = torch.randn(1, 1, S, 4)
        given = made_by(everything, None, None, S, S, device="cpu", BLOCK_SIZE=SIZE)
        for n in range(5):
            change(given, n)
            assert torch.equal(as_mask(given).visible(S, S)[0], by_lists(given))
            assert torch.allclose(attention(q, q, q, mask=given), attention(q, q, q, mask=by_lists(given)), atol=1e-5)


@pytest.mark.parametrize(("made_by", "inference"), [*zip(MAKERS, (False, True), strict=True)])
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", COMBINED)
def test_lists_of_masks_made_before(name, change, made_by, inference):
    """The gradients are those of the lists that the forward saw."""
    combined = COMBINED[name]
    with torch.inference_mode(inference):
        given = made_by(everything, None, None, S, S, device="cpu", BLOCK_SIZE=SIZE)
        mask = combined(given)
    q = torch.randn(1, 1, S, 4, requires_grad=True)
    for n in range(3):
        right = combined(by_lists(given))
        found, wanted = attention(q, q, q, mask=mask), attention(q, q, q, mask=right)
        assert torch.equal(mask.visible(S, S), right.visible(S, S))
        oracle = attention(q, q, q, mask=mask, backend="reference")
        with torch.inference_mode(inference):
            change(given, n)
        for out in (found, oracle):
            assert torch.allclose(out, wanted, atol=1e-5)
            gradients = (torch.autograd.grad(x.sum(), q, retain_graph=True)[0] for x in (out, wanted))
            assert torch.allclose(*gradients, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", COMBINED)
def test_compiled_masks_made_before(name):
    given = create_block_mask(everything, None, None, S, S, device="cpu", BLOCK_SIZE=SIZE)
    mask, q = COMBINED[name](given), torch.randn(1, 1, S, 4)
    torch._dynamo.reset()
    call = torch.compile(lambda q: attention(q, q, q, mask=mask), backend="aot_eager", fullgraph=True)
    for n, change in enumerate((copy, write_by_numpy, assign)):
        change(given, n)
        wanted = attention(q, q, q, mask=COMBINED[name](by_lists(given)))
        assert torch.allclose(call(q), wanted, atol=1e-5)


def test_unchanged_lists_are_read_once(monkeypatch):
    calls = []
    monkeypatch.setattr(predicates, "_mark", lambda *given, mark=predicates._mark: calls.append(1) or mark(*given))
    q = torch.randn(1, 1, S, 4)
    given = create_block_mask(everything, None, None, S, S, device="cpu", BLOCK_SIZE=SIZE)
    given.full_kv_num_blocks.copy_(counts(3, 1, 2))
    mask = causal() & given
    for _ in range(3):
        attention(q, q, q, mask=mask)
        attention(q, q, q, mask=given)
    assert len(calls) == 2  # partial blocks and full ones
    assert mask == causal() & given != causal() & as_mask(by_lists(given))


def test_copies_of_masks_have_lists_of_their_own():
    given = create_block_mask(everything, None, None, S, S, device="cpu", BLOCK_SIZE=SIZE)
    mask = causal() & given
    copies = deepcopy(mask), pickle.loads(pickle.dumps(mask))
    before = mask.visible(S, S)
    given.full_kv_num_blocks.zero_()
    assert not mask.visible(S, S).any()
    assert all(torch.equal(x.visible(S, S), before) for x in copies)


def test_kinds_of_blocks_exchanged():
    given = create_block_mask(everything, None, None, S, S, device="cpu", BLOCK_SIZE=SIZE)
    for n in range(4):
        exchange(given, n)
        assert as_mask(given).visible(S, S).all() == (n % 2 == 1)


def test_lengths():
    """As decoding loops assign them."""
    q, k = torch.randn(1, 1, SIZE, 4), torch.randn(1, 1, S, 4)

    def near(b, h, q_idx, kv_idx):
        return kv_idx <= q_idx + 100

    given = create_block_mask(near, None, None, SIZE, S, device="cpu", BLOCK_SIZE=SIZE)
    full = flex_attention(q, k, k, block_mask=given)
    both, made = causal() & given, block_mask(given, 1, 1, SIZE, S)
    given.seq_lengths = (1, S)
    assert torch.allclose(attention(q[:, :, :1], k, k, mask=given), full[:, :, :1], atol=1e-6)
    assert torch.allclose(attention(q[:, :, :1], k, k, mask=both), full[:, :, :1], atol=1e-6)
    for mask in (given, both, made):
        with pytest.raises(ValueError, match="the call has"):
            attention(q, k, k, mask=mask)
    with pytest.raises(ValueError, match="is for another shape than"):
        attention(q[:, :, :1], k, k, mask=made)


def test_size_of_blocks():
    index = torch.arange(3, dtype=torch.int32).expand(1, 1, 3, 3).contiguous()
    given = BlockMask.from_kv_blocks(counts(1, 1, 1), index, BLOCK_SIZE=SIZE, seq_lengths=(S, S))
    assert int(as_mask(given).visible(S, S).sum()) == S * SIZE
    given.BLOCK_SIZE = (SIZE, SIZE // 2)
    assert int(as_mask(given).visible(S, S).sum()) == S * SIZE // 2


def first_keys(n):
    return torch.arange(LONG).expand(LONG, LONG) < n


@pytest.mark.parametrize("inference", [False, True])
def test_block_mask_of_a_tensor(inference):
    """Torch counts no writes to tensors that are made in inference mode: their tiles hold for no later call."""
    with torch.inference_mode(inference):
        q, seen = torch.randn(1, 1, LONG, 4), first_keys(64).clone()
        made = block_mask(mask_mod(lambda b, h, q_idx, kv_idx: seen[q_idx, kv_idx]), 1, 1, LONG, LONG)
        for n in (64, 300, 10):
            seen.copy_(first_keys(n))
            assert torch.allclose(attention(q, q, q, mask=made), attention(q, q, q, mask=first_keys(n)), atol=1e-5)


@pytest.mark.parametrize("shape", [(), (6,), (6, 6), (2, 1, 6, 6)])
def test_memory_of_a_tensor_exchanged(shape):
    """By `t.data = …` and `set_`, as loading and offloading do."""
    q, t = torch.randn(2, 2, 6, 8), torch.ones(shape, dtype=torch.bool)
    mask = causal() & t
    attention(q, q, q, mask=mask)
    for change in (lambda new: setattr(t, "data", new), lambda new: t.set_(new.untyped_storage(), 0, *form(new))):
        change(torch.rand(shape) < 0.4)
        expected = attention(q, q, q, mask=causal() & t.clone())
        torch.testing.assert_close(attention(q, q, q, mask=mask), expected)


def form(t):
    return t.shape, t.stride()


def test_states_know_no_tensor_that_died():
    """Another tensor may have its address, and its number of writes."""
    seen = first_keys(64).clone()
    made = block_mask(mask_mod(lambda b, h, q_idx, kv_idx: seen[q_idx, kv_idx]), 1, 1, LONG, LONG)
    known = block_sparsity._sources
    assert known.get(made.states.untyped_storage()._cdata) is not None
    seen = first_keys(300).clone()
    gc.collect()
    other = block_mask(as_mask(seen), 1, 1, LONG, LONG)
    assert known.get(made.states.untyped_storage()._cdata) is None
    assert known.get(other.states.untyped_storage()._cdata) is not None


def test_negative_zero():
    """It is equal to 0.0, and a quotient by it is not."""
    q, divisor = torch.randn(1, 1, 8, 4), 0.0
    mask = mask_mod(lambda b, h, q_idx, kv_idx: ((q_idx + 1) / divisor > 0) | (kv_idx == 0))
    everything_seen = attention(q, q, q, mask=mask)
    assert torch.allclose(everything_seen, attention(q, q, q), atol=1e-6)
    divisor = -0.0
    first_alone = attention(q, q, q, mask=mask)
    assert torch.allclose(first_alone, q[:, :, :1].expand_as(q), atol=1e-6)


@pytest.mark.rare
def test_writes_by_compiled_code():
    """Inductor writes a later tensor into the memory of an earlier one, which torch does not count."""
    ids = torch.ones(LONG, dtype=torch.int64)
    q = torch.randn(1, 2, LONG, 16)

    def twice(q, x):
        ids = torch.cumsum(x, 0)
        first = attention(q, q, q, mask=mask_mod(lambda b, h, i, j: ids[i] == ids[j]))
        other = ids * (2 * first[0, 0, :, 0] > -1e30).int() // 64
        return first, attention(q, q, q, mask=mask_mod(lambda b, h, i, j: other[i] == other[j]))

    for found, right in zip(torch.compile(twice)(q, ids), twice(q, ids), strict=True):
        torch.testing.assert_close(found, right)


@pytest.mark.gpu
def test_writes_by_replays_of_a_graph():
    """Eager calls between the replays of a graph that writes what a mask captures."""
    q = torch.randn(1, 2, LONG, 64, device="cuda", dtype=torch.float16)
    source = torch.zeros(LONG, dtype=torch.int64, device="cuda")
    ids, graph = torch.zeros_like(source), torch.cuda.CUDAGraph()
    mask = mask_mod(lambda b, h, i, j: ids[i] == ids[j])
    with torch.cuda.graph(graph):
        ids.copy_(source)
    for tokens in (512, 64, 128, 100):
        source.copy_(torch.arange(LONG) // tokens)
        graph.replay()
        right = attention(q, q, q, mask=mask, backend="reference")
        torch.testing.assert_close(attention(q, q, q, mask=mask), right, atol=1e-2, rtol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("made_by", MAKERS)
@pytest.mark.parametrize("name", COMBINED)
def test_lists_written_by_replays_of_a_graph(name, made_by):
    """Eager calls with a BlockMask, and with a mask made of it before, between replays that write its lists."""
    q = torch.randn(1, 2, S, 64, device="cuda", dtype=torch.float16, requires_grad=True)
    given = made_by(everything, None, None, S, S, device="cuda", BLOCK_SIZE=SIZE)
    mask, source, graph = COMBINED[name](given), given.full_kv_num_blocks.clone(), torch.cuda.CUDAGraph()
    attention(q, q, q, mask=mask)
    with torch.cuda.graph(graph):
        given.full_kv_num_blocks.copy_(source)
    for numbers in ((3, 1, 2), (0, 2, 1), (1, 1, 3)):
        source.copy_(counts(*numbers))
        graph.replay()
        seen = by_lists(given).cuda()
        for made, right in ((given, seen), (mask, COMBINED[name](seen))):
            found, wanted = (attention(q, q, q, mask=x) for x in (made, right))
            torch.testing.assert_close(found, wanted, atol=1e-2, rtol=0)
            gradients = (torch.autograd.grad(x.sum(), q)[0] for x in (found, wanted))
            torch.testing.assert_close(*gradients, atol=2e-2, rtol=1e-2)
