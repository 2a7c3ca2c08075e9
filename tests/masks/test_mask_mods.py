"""Masks of any predicate: what they mean, which tiles they have, and the whole call against the oracle."""

from __future__ import annotations

import copy
import gc
import pickle
import re

import pytest
import torch

from saccade import Dense, alibi, attention, block_mask, causal, documents, explain, mask_mod, masks, softcap, window
from saccade.backends import block_sparsity
from saccade.call import Call
from saccade.masks import EMPTY, FULL, PARTIAL, TILE, as_mask, predicates
from saccade.testing import gallery
from saccade.testing.accuracy import check
from saccade.util import caches
from tests.support.devices import CPU, every_head_dim
from tests.support.scores import halved_from, near_or_third

flex = pytest.importorskip("torch.nn.attention.flex_attention")

S = 200
IDS = torch.tensor([0] * 100 + [1] * 57 + [2] * 43)
STEPS = torch.tensor([3, 1, 2, 5])


def same_document(b, h, q_idx, kv_idx):
    return IDS[q_idx] == IDS[kv_idx]


def by_head(b, h, q_idx, kv_idx):
    return (q_idx - kv_idx) // STEPS[h] % 2 == b


def odd_even(b, h, q_idx, kv_idx):
    return (q_idx + kv_idx) % 2 == 0


MASKS = {
    "ids": mask_mod(same_document),
    "ids&causal": mask_mod(same_document) & causal(),
    "~": ~mask_mod(same_document),
    "heads": mask_mod(by_head),
    "heads|window": mask_mod(by_head) | window(3, 0),
    "~(&)&window": ~(mask_mod(by_head) & mask_mod(same_document)) & window(50, 9),
    "~interval": ~window(9, 9),
    "documents": documents(IDS[None]) & mask_mod(odd_even),
    "nothing": mask_mod(lambda b, h, q_idx, kv_idx: q_idx < 0),
    "everything": mask_mod(lambda b, h, q_idx, kv_idx: b.new_ones((), dtype=torch.bool)),
    "tensor": torch.rand(2, 1, S, S) > 0.5,
    "row": torch.rand(S) > 0.5,
    "joined": mask_mod(flex.or_masks(flex.and_masks(same_document, by_head), lambda b, h, q, k: q == k)),
    "block_mask": flex.create_block_mask(
        lambda b, h, q, k: ((q // 64 + k // 64 + h) % 3 != 0) & (q >= k), 2, 4, S, S, device="cpu"
    ),
}


def operands(dtype=torch.float32, s_q=S, s_k=S):
    return [torch.randn(2, h, s, 16).to(dtype) for h, s in ((4, s_q), (2, s_k), (2, s_k))]


@pytest.mark.sample
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", MASKS)
def test_against_the_oracle(name, dtype, processor):
    check(*operands(dtype), mask=MASKS[name], dlse=torch.randn(2, 4, S)).assert_ok()


LENGTHS = {"cpu": S, "interpreter": 90, "emulator": 140}
"""More than a tile of the device: 700 on a GPU."""


def lists(device):
    """Masks of so many rows and keys, of two batch rows."""
    s = LENGTHS.get(device.name, 700)
    ids = torch.randint(0, 4, (2, s), device=device.type).sort().values
    steps = torch.tensor([30, 1, 200, 7], device=device.type)
    heads = mask_mod(lambda b, h, q, k: (q - k) // steps[h] % 2 == b)
    same = mask_mod(lambda b, h, q, k: ids[b, q] == ids[b, k])
    return {
        "ids&causal": same & causal(),
        "~ids": ~same,
        "~ids&causal": ~same & causal(),
        "heads": heads,
        "heads|window": heads & window(200, 9) | window(3, 0),
        "tensor": torch.rand(2, 1, s, s, device=device.type) > 0.5,
        "tensor of heads": torch.rand(1, device.h_q, s, s, device=device.type) > 0.5,
        "everything": mask_mod(lambda b, h, q, k: b.new_ones((), dtype=torch.bool)) | window(3, 3),
        "nothing": mask_mod(lambda b, h, q, k: q < 0),
        "blocks": gallery.random_blocks(-(-s // 128), 0.3, device=device.type),
    }


@every_head_dim()
@pytest.mark.parametrize("name", lists(CPU))
def test_lists_of_tiles(name, device):
    s = LENGTHS.get(device.name, 700)
    q, k, v = device.operands(b=2, s_q=s, s_k=s)
    dlse = device.randn(*q.shape[:3], dtype=torch.float32)
    once = device.name in ("interpreter", "emulator")
    for deterministic in (len(name) % 2 == 0,) if once else (False, True):
        keywords = {"mask": lists(device)[name], "deterministic": deterministic, "backend": device.backend}
        check(q, k, v, dlse=dlse, **keywords).assert_ok()


@pytest.mark.parametrize("name", gallery.NAMES)
def test_gallery(name, device):
    s = 1024 if device.type == "cuda" else 160
    mask = gallery.made(name, s, device.type)
    check(*device.operands(s_q=s, s_k=s), mask=mask, backend=device.backend).assert_ok()


@pytest.mark.parametrize("score", ["softcap", "alibi"])
def test_everything_at_once(score, device):
    s = LENGTHS.get(device.name, 700)
    used = (torch.tensor(x, device=device.type) for x in ([s * 2 // 3, s], [s, s // 6]))
    slopes = torch.randn(device.h_q, device=device.type, requires_grad=True)
    q, k, v = device.operands(b=2, s_q=s, s_k=s)
    check(
        q, k, v,
        mask=lists(device)["heads"] & window(60 if device.type == "cpu" else 300, 0),
        score_mod=softcap(3.0) if score == "softcap" else alibi(slopes),
        sink=device.randn(device.h_q, dtype=torch.float32),
        layout=Dense("bhsd", *used),
        dlse=device.randn(*q.shape[:3], dtype=torch.float32),
        backend=device.backend,
    ).assert_ok()  # fmt: skip


@pytest.mark.parametrize("name", MASKS)
def test_records_and_back(name):
    mask = as_mask(MASKS[name])
    ints, tensors, floats = list(mask.ints), list(mask.tensors), list(mask.floats)
    again = masks.from_tensors(mask.identity, ints, tensors, floats)
    assert (ints, tensors, floats) == ([], [], [])
    assert again.identity == mask.identity
    assert masks.is_kind(mask.kind)
    for head in range(2):  # by the graph, and by the function
        assert torch.equal(again.visible(S, S, 2, head), mask.visible(S, S, 2, head))


@pytest.mark.parametrize("name", MASKS)
def test_states(name):
    """Of tiles, as they are counted pair by pair."""
    mask = as_mask(MASKS[name])
    q, k, v = operands()
    states = block_sparsity.compute_states(Call(q, k, v, mask=mask))
    assert (states.shape[0] > 1) == ("b" in mask.indices)
    assert (states.shape[1] > 1) == ("h" in mask.indices)
    for head in range(4):
        seen = mask.visible(S, S, 2, head)
        for i in range(states.shape[2]):
            for j in range(states.shape[3]):
                tile = seen[:, i * TILE : (i + 1) * TILE, j * TILE : (j + 1) * TILE]
                for b in range(2):
                    whole = bool(tile[b].all()) and tile[b].numel() == TILE * TILE
                    wanted = FULL if whole else PARTIAL if bool(tile[b].any()) else EMPTY
                    at = b % states.shape[0], head % states.shape[1], i, j
                    assert states[at] == wanted or (states.shape[0] == 1 and at[0] != b)


def test_states_are_kept_and_remade():
    ids = IDS.clone()
    mask = mask_mod(lambda b, h, q_idx, kv_idx: ids[q_idx] == ids[kv_idx])
    q, k, v = operands()
    call = Call(q, k, v, mask=mask)
    count = []

    def make(x):
        count.append(1)
        return block_sparsity.compute_states(x)

    first, _ = block_sparsity.states_of(call, make)
    assert block_sparsity.states_of(call, make)[0] is first
    before = attention(q, k, v, mask=mask)
    ids.copy_(ids.flip(0))
    assert len(count) == 1
    block_sparsity.states_of(call, make)
    assert len(count) == 2
    after = attention(q, k, v, mask=mask)
    torch.testing.assert_close(after, attention(q, k, v, mask=mask, backend="reference"))
    assert not torch.equal(before, after)


def test_states_of_one_length_are_not_those_of_another():
    """Lengths with as many tiles, whose diagonals and last tiles differ."""
    mask = causal() & mask_mod(odd_even)
    for s_q, s_k in ((70, 70), (70, 120), (70, 128), (128, 120)):
        check(*operands(s_q=s_q, s_k=s_k), mask=mask).assert_ok()


def test_states_go_with_their_tensors():
    for _ in range(3):
        seen = torch.rand(S, S) > 0.5
        attention(*operands(), mask=seen)
    del seen
    gc.collect()
    attention(*operands(), mask=torch.rand(S, S) > 0.5)
    owners = [owner for entry in caches._derived._entries.values() for owner in entry.owners]
    assert len({owner.cdata for owner in owners if owner.expired()}) <= 1


@pytest.mark.parametrize("n", [3, 1 << 22, (1 << 22) + 1, 1 << 30, -(1 << 31), 1 << 40, (1 << 63) - 1, -(1 << 63)])
def test_sentinels(n):
    """Integers of 64 bits, in masks, in scores, and where a score hides keys."""
    for score_mod in (halved_from(n), lambda score, b, h, i, j: torch.where(i - j <= n, score, -torch.inf)):
        check(*operands(s_q=50, s_k=60), mask=mask_mod(near_or_third(n)), score_mod=score_mod).assert_ok()
        check(*operands(s_q=50, s_k=60), score_mod=score_mod).assert_ok()


def test_block_mask():
    mask = mask_mod(same_document) & causal()
    made = block_mask(mask, 2, 4, S, S)
    assert made.kind == mask.kind
    assert made.sparsity() > 0
    check(*operands(), mask=made).assert_ok()
    assert (made & window(3, 3)) == (mask & window(3, 3))
    assert (~made).kind == "~(mask_mod&causal)"
    assert block_mask(causal(), 1, 1, 8, 8) == causal()
    q, k, v = operands(s_q=S - 64)
    with pytest.raises(ValueError, match=re.escape("is for another shape than (b, h_q, s_q, s_k) = (2, 4, 136, 200)")):
        attention(q, k, v, mask=made)
    with pytest.raises(ValueError, match=re.escape("is for another shape than (200, 193)")):  # of as many tiles
        attention(*operands(s_k=193), mask=made)


def test_block_masks_beside_used_lengths():
    """Their tiles were found with all rows in use, where the bottom right is another place."""
    q, k, v = operands()
    used, mask = torch.tensor([100, 200]), causal() & mask_mod(same_document)
    torchs = flex.create_block_mask(lambda b, h, i, j: i >= j, None, None, S, S, device="cpu")
    for given in (block_mask(mask, 2, 4, S, S), torchs, as_mask(torchs) & causal(), ~as_mask(torchs)):
        with pytest.raises(
            ValueError, match=r"block masks are for calls whose rows are all in use.*q \(2, 4, 200, 16\)"
        ):
            attention(q, k, v, mask=given, layout=Dense(seqused_q=used))
    check(q, k, v, mask=mask, layout=Dense(seqused_q=used, seqused_k=used.flip(0))).assert_ok()


def test_lists_of_blocks_decide():
    """A BlockMask without a function: its lists are all there is."""
    count = torch.tensor([[[1, 2]]], dtype=torch.int32)
    index = torch.tensor([[[[1, 0], [1, 0]]]], dtype=torch.int32)
    given = flex.BlockMask.from_kv_blocks(count, index, seq_lengths=(S, S))
    assert torch.equal(as_mask(given).visible(S, S)[0].nonzero()[0], torch.tensor([0, 128]))
    check(*operands(), mask=given).assert_ok()
    with pytest.raises(ValueError, match=re.escape("for (b, h_q, s_q, s_k) = (1, 1, 200, 200), and the call has")):
        attention(*operands(s_q=128), mask=given)


def test_compiled():
    q, k, v = operands()
    for name in ("ids&causal", "~", "heads"):
        mask = MASKS[name]
        made = torch.compile(lambda q, k, v, mask=mask: attention(q, k, v, mask=mask), fullgraph=True, backend="eager")
        assert torch.equal(made(q, k, v), attention(q, k, v, mask=mask))


def test_tensor_first_used_while_compiling():
    """Nothing of the process has recorded the reading of such a tensor before."""
    q, k, v = operands()
    predicates._program.cache_clear()
    made = torch.compile(lambda q, k, v, seen: attention(q, k, v, mask=seen), fullgraph=True, backend="eager")
    seen = MASKS["tensor"]
    assert torch.equal(made(q, k, v, seen), attention(q, k, v, mask=seen))


def test_spec():
    q, k, v = operands()
    assert (
        str(explain(q, k, v, mask=~MASKS["ids"] & causal()).spec)
        == "fp32 group2 d16 dense ~mask_mod&causal aligned cpu"
    )


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda mask: pickle.loads(pickle.dumps(mask))], ids=["copy", "pickle"]
)
def test_copies(copied):
    mask = mask_mod(odd_even) & causal()
    assert torch.equal(copied(mask).visible(9, 9), mask.visible(9, 9))


@pytest.mark.parametrize(
    ("made", "error", "words"),
    [
        (lambda: mask_mod(3), TypeError, "needs a function of (b, h, q_idx, kv_idx), got 3"),
        (lambda: mask_mod(lambda b, h, q_idx, kv_idx: q_idx.sum() > 3), ValueError, "sum"),
        (lambda: mask_mod(lambda q_idx, kv_idx: q_idx >= kv_idx), ValueError, "(b, h, q_idx, kv_idx)"),
        (lambda: mask_mod(lambda b, h, q_idx, kv_idx: (q_idx - kv_idx) * 1.0), ValueError, "got torch.float32"),
        (lambda: mask_mod(lambda b, h, q_idx, kv_idx: True), ValueError, "a mask function one of bools; got True"),
        (lambda: attention(*operands(), mask=torch.zeros(S, S)), TypeError, "score_mod=bias(t)"),
        (lambda: attention(*operands(), mask=odd_even), TypeError, "mask_mod(fn)"),
        (lambda: attention(*operands(), mask="causal"), TypeError, "got str"),
        (lambda: attention(*operands(), mask=torch.ones(3, S, dtype=torch.bool)), ValueError, "got (3, 200)"),
        (lambda: attention(*operands(), mask=torch.ones(1, 1, 1, 1, 1).bool()), ValueError, "(1, 1, 1, 1, 1)"),
        (lambda: block_mask(None, 1, 1, 8, 8), TypeError, "got None"),
        (lambda: block_mask(torch.ones(8, 9).bool(), 1, 1, 8, 8), ValueError, "got (8, 9)"),
    ],
)
def test_errors(made, error, words):
    with pytest.raises(error, match=re.escape(words)):
        made()


BESIDE_TENSORS = {
    "causal & t": lambda t: causal() & t,
    "t & causal": lambda t: t & causal(),
    "mask_mod & t": lambda t: mask_mod(lambda b, h, q_idx, kv_idx: q_idx >= kv_idx) & t,
    "t | mask_mod": lambda t: t | mask_mod(lambda b, h, q_idx, kv_idx: q_idx >= kv_idx),
    "~causal | t": lambda t: ~causal() | t,
    "t & causal & t": lambda t: t & causal() & t.mT,
}


@pytest.mark.parametrize("name", BESIDE_TENSORS)
def test_tensors_combine_in_compiled_regions(name):
    """Dynamo takes an operator beside a tensor for torch's, and asks the mask."""
    torch._dynamo.reset()
    q, t = torch.randn(2, 2, 5, 8), torch.rand(2, 1, 5, 5) < 0.6
    made = torch.compile(
        lambda q, t: attention(q, q, q, mask=BESIDE_TENSORS[name](t)), fullgraph=True, backend="aot_eager"
    )
    wanted = attention(q, q, q, mask=BESIDE_TENSORS[name](t), backend="reference")
    torch.testing.assert_close(made(q, t), wanted)


def test_torch_does_nothing_else_to_masks():
    t = torch.ones(2, 2, dtype=torch.bool)
    assert (t == causal()) is False
    assert (t != causal()) is True
    with pytest.raises(TypeError):
        torch.add(t, causal())  # pyright: ignore[reportCallIssue, reportArgumentType]
