"""`flash_attn_with_kvcache` against the oracle on keys that are put together by hand."""

from __future__ import annotations

import random
from typing import NamedTuple

import pytest
import torch

from saccade import Dense, Unsupported, causal, compose, interval, softcap, window
from saccade.call.partial import Partial
from saccade.compat.flash_attn import cache as cache_module
from saccade.compat.flash_attn import flash_attn_with_kvcache
from saccade.scores import ScoreMod
from saccade.testing import check

B, ROOM, PAGE, H_Q = 3, 96, 16, 4


class Step(NamedTuple):
    """One call, as upstream's tests vary it."""

    s_q: int = 1
    s_new: int = 0
    h_k: int = 2
    d: int = 32
    paged: bool = False
    batch_idx: bool = False
    leftpad: bool = False
    pairs: int = 0
    interleaved: bool = True
    view: str = "none"
    alibi: bool = False
    softcap: float = 0.0
    num_splits: int = 0
    length: str = "vector"

    def __str__(self) -> str:
        return "-".join(f"{name}{value}" for name, value in self._asdict().items() if value not in (False, 0, "none"))


def some_steps(n):
    """Combinations that are drawn once."""
    draw = random.Random(0)
    for _ in range(n):
        s_new = draw.choice([0, 1, 3, 7])
        paged, pairs = draw.random() < 0.4, draw.choice([0, 4, 8, 16]) if s_new else 0
        yield Step(
            s_q=draw.choice([1, s_new or 4, 5]),
            s_new=s_new,
            h_k=draw.choice([1, 2, 4]),
            d=draw.choice([32, 40]),
            paged=paged,
            batch_idx=not paged and draw.random() < 0.4,
            leftpad=draw.random() < 0.3,
            pairs=pairs,
            interleaved=draw.random() < 0.5,
            view=draw.choice(["none", "causal", "window"]),
            alibi=draw.random() < 0.3,
            softcap=draw.choice([0.0, 0.0, 5.0]),
            num_splits=draw.choice([0, 1, 3]),
            length=draw.choice(["vector", "vector", "number"]),
        )


STEPS = [
    Step(),
    Step(length="none"),
    Step(s_q=5, view="causal", length="none"),
    Step(s_new=1, view="causal", pairs=16),
    Step(s_q=3, s_new=3, view="causal", pairs=8, interleaved=False, paged=True),
    Step(s_q=3, s_new=3, pairs=8),  # all queries have one place
    Step(s_q=5, s_new=2, view="window", pairs=8),
    Step(s_q=2, s_new=2, view="causal", leftpad=True, alibi=True),
    *some_steps(60),
]


def turned(x, cos, sin, interleaved):
    """x (b, s, h, d), its pairs multiplied as complex numbers by angles (b, s, pairs)."""
    pairs = cos.shape[-1]
    rows, rest = x[..., : 2 * pairs].float(), x[..., 2 * pairs :]
    rows = rows.unflatten(-1, (pairs, 2)) if interleaved else rows.unflatten(-1, (2, pairs)).mT
    first, second = rows.unbind(-1)
    cos, sin = cos[:, :, None].float(), sin[:, :, None].float()
    rows = torch.stack([first * cos - second * sin, first * sin + second * cos], -1)
    rows = rows.flatten(-2) if interleaved else rows.mT.flatten(-2)
    return torch.cat([rows.to(x.dtype), rest], -1)


class Drawn:
    """The tensors of a step, the face's arguments, and the call that they mean: q, k, v and the oracle's keywords."""

    def __init__(self, step: Step, device) -> None:
        self.step = step
        dtype = torch.float16 if device == "cuda" else torch.float32

        def normal(*shape):
            return torch.randn(shape, dtype=dtype, device=device)

        lengths = torch.tensor([37, 1, 80]) if step.length == "vector" else torch.full((B,), 41)
        lengths = torch.full((B,), ROOM) if step.length == "none" else lengths
        self.lengths = lengths.to(device, torch.int32)
        self.q, rows = normal(B, step.s_q, H_Q, step.d), 2 * B if step.batch_idx else B
        self.caches = [normal(rows, ROOM, step.h_k, step.d) for _ in range(2)]
        self.new = [normal(B, step.s_new, step.h_k, step.d) for _ in range(2)] if step.s_new else [None, None]
        self.given = {"cache_seqlens": {"vector": self.lengths, "number": 41, "none": None}[step.length]}
        self.of = torch.arange(B, device=device)
        if step.batch_idx:
            self.of = torch.tensor([4, 0, 3], device=device)
            self.given["cache_batch_idx"] = self.of.int()
        self.table = None
        if step.paged:
            self.table = torch.randperm(B * ROOM // PAGE + 5, device=device)[: B * ROOM // PAGE].view(B, -1).int()
            self.given["block_table"] = self.table
        self.left = (self.lengths // 3).int() if step.leftpad else None
        if step.pairs:
            angles = torch.rand(ROOM + 8, step.pairs, device=device) * 6
            self.angles = angles.cos().to(dtype), angles.sin().to(dtype)
            self.given |= dict(zip(("rotary_cos", "rotary_sin"), self.angles, strict=True))
        self.slopes = torch.rand(B, H_Q, device=device) * 0.2 if step.alibi else None
        self.given |= {
            "k": self.new[0],
            "v": self.new[1],
            "cache_leftpad": self.left,
            "causal": step.view == "causal",
            "window_size": (20, 0) if step.view == "window" else (-1, -1),
            "softcap": step.softcap,
            "alibi_slopes": self.slopes,
            "num_splits": step.num_splits,
            "rotary_interleaved": step.interleaved,
        }

    def stored(self):
        """The caches as the face takes them."""
        if self.table is None:
            return [x.clone() for x in self.caches]
        pages = []
        for x in self.caches:
            made = torch.full((int(self.table.max()) + 2, PAGE, *x.shape[2:]), torch.nan, device=x.device).to(x.dtype)
            made[self.table.flatten().long()] = x.view(-1, PAGE, *x.shape[2:])
            pages.append(made)
        return pages

    def gathered(self, stored):
        return stored if self.table is None else [x[self.table.long()].flatten(1, 2) for x in stored]

    def meant(self):
        """The operands, the keywords, and the caches as they are afterwards."""
        step = self.step
        q, after, start = self.q, [x.clone() for x in self.caches], self.lengths.long()[:, None]
        if step.s_new:
            at = start + torch.arange(step.s_new, device=q.device)
            new = list(self.new)
            if step.pairs:
                cos, sin = self.angles
                new[0] = turned(new[0], cos[at], sin[at], step.interleaved)
                own = start + torch.arange(step.s_q, device=q.device) * (step.view != "none")
                q = turned(q, cos[own], sin[own], step.interleaved)
            for x, rows in zip(after, new, strict=True):
                x[self.of[:, None], at] = rows
        used = self.lengths + step.s_new
        masks = [{"none": None, "causal": causal(), "window": window(20, 0)}[step.view]]
        masks += [interval(self.left[:, None], None)] if self.left is not None else []
        masks = [mask for mask in masks if mask is not None]
        mods = [softcap(step.softcap)] if step.softcap else []
        if self.slopes is not None:
            off = used - step.s_q
            mods.append(ScoreMod(distance, self.slopes, off))
        keywords = {"layout": Dense("bshd", None, used)}
        keywords |= {"mask": masks[0] if len(masks) == 1 else masks[0] & masks[1]} if masks else {}
        keywords |= {"score_mod": compose(*mods)} if mods else {}
        return (q, *(x[self.of] for x in after)), keywords, after


def distance(score, b, h, q_idx, kv_idx, slopes, off):
    return score - slopes[b, h] * (q_idx + off[b] - kv_idx).abs()


@pytest.mark.sample
@pytest.mark.parametrize("step", STEPS, ids=str)
def test_against_the_oracle(step, device):
    drawn = Drawn(step, device)
    operands, keywords, after = drawn.meant()
    written = []

    def face(*_, return_lse=False, **keywords):
        stored = drawn.stored()
        result = flash_attn_with_kvcache(drawn.q, *stored, return_softmax_lse=return_lse, **drawn.given)
        written.append(drawn.gathered(stored))
        return Partial(*result) if return_lse else result

    with torch.no_grad():
        check(*operands, backward=False, function=face, **keywords).assert_ok()
    for found in written:
        for x, wanted in zip(found, after, strict=True):
            torch.testing.assert_close(x.nan_to_num(), wanted)


def test_a_gradient_by_torch_func():
    q, k, v = torch.randn(2, 1, 4, 16), torch.randn(2, 9, 2, 16), torch.randn(2, 9, 2, 16)
    with pytest.raises(Unsupported, match="attention to a cache of keys has no gradients"):
        torch.func.grad(lambda q: flash_attn_with_kvcache(q, k, v, cache_seqlens=5).sum())(q)


def test_results():
    drawn = Drawn(Step(s_q=3), "cpu")
    out, lse = flash_attn_with_kvcache(drawn.q, *drawn.stored(), return_softmax_lse=True, **drawn.given)
    assert (out.shape, lse.shape, lse.dtype) == ((B, 3, H_Q, 32), (B, H_Q, 3), torch.float32)


def test_values_with_another_head_dim():
    q, k, v = torch.randn(2, 1, 4, 16), torch.randn(2, 9, 2, 16), torch.randn(2, 9, 2, 24)
    assert flash_attn_with_kvcache(q, k, v, cache_seqlens=5).shape == (2, 1, 4, 24)


def test_more_rows_in_the_cache_than_sequences():
    q, k, v = torch.randn(2, 1, 4, 16), torch.randn(5, 9, 2, 16), torch.randn(5, 9, 2, 16)
    found = flash_attn_with_kvcache(q, k, v, cache_seqlens=5)
    assert torch.equal(found, flash_attn_with_kvcache(q, k[:2], v[:2], cache_seqlens=5))


def test_a_kept_table_is_not_made_twice():
    x = torch.empty(0)
    assert cache_module.own_rows(3, x).data_ptr() == cache_module.own_rows(200, x).data_ptr()
    assert cache_module.own_rows(300, x)[:, 0].tolist() == list(range(300))
    assert cache_module.own_rows(0, x).shape == (0, 1)


WRONG = [
    ({"v": None}, ValueError, "k and v come together"),
    ({"cache_seqlens": None}, ValueError, "give cache_seqlens"),
    ({"k": None, "v": None}, ValueError, "rotary_cos is for new keys and values"),
    ({"rotary_sin": None}, ValueError, "rotary_cos and rotary_sin come together"),
    ({"cache_batch_idx": torch.zeros(B)}, ValueError, "cache_batch_idx must be int32 or int64"),
    (
        {"cache_batch_idx": torch.zeros(B, 1).int()},
        ValueError,
        r"must be int32 or int64 \(b,\), got torch.int32 \(3, 1\)",
    ),
    ({"block_table": torch.zeros(3).int(), "cache_batch_idx": torch.arange(B)}, ValueError, r"page table.*got \(3,\)"),
    ({"num_splits": -1}, ValueError, "num_splits"),
    ({"cache_seqlens": 4.5}, TypeError, "cache_seqlens must be an integer"),
    ({"cache_seqlens": torch.ones(2).int()}, ValueError, "seqused_k"),
    ({"cache_leftpad": torch.ones(B, 1)}, ValueError, r"cache_leftpad must be int32 or int64 \(b,\)"),
    ({"cache_leftpad": torch.ones(1).int()}, ValueError, r"cache_leftpad must be int32 or int64 \(b,\)"),
    ({"cache_leftpad": 3}, TypeError, "leftpad must be a tensor"),
    ({"cache_seqlens": ROOM}, ValueError, r"cache_seqlens must be from 0 to 95, got \[96, 96, 96\]"),
    ({"causal": 2.0}, TypeError, "causal must be True or False"),
]


@pytest.mark.parametrize(("given", "error", "message"), WRONG, ids=lambda value: str(value)[:40])
def test_wrong_calls(given, error, message):
    drawn = Drawn(Step(s_new=1, pairs=8, view="causal"), "cpu")
    with pytest.raises(error, match=message):
        flash_attn_with_kvcache(drawn.q, *drawn.stored(), **drawn.given | given)


def test_wrong_operands():
    drawn = Drawn(Step(), "cpu")
    k, v = drawn.stored()
    with pytest.raises(ValueError, match=r"q must be \(b, s_q, h_q, d\), got"):
        flash_attn_with_kvcache(drawn.q[0], k, v)
    with pytest.raises(ValueError, match="k_cache and v_cache must be"):
        flash_attn_with_kvcache(drawn.q, k[0], v)
    with pytest.raises(ValueError, match="3 sequences need as many rows of the cache"):
        flash_attn_with_kvcache(drawn.q, k[:2], v[:2])


@pytest.mark.parametrize("step", [Step(s_new=1, pairs=8, view="causal"), Step(s_q=4, s_new=4, paged=True)], ids=str)
def test_operands_that_require_gradients(step):
    """The call runs, also outside torch.no_grad(); a backward through it is refused, not silently nothing."""
    drawn = Drawn(step, "cpu")
    wanted = flash_attn_with_kvcache(drawn.q, *drawn.stored(), return_softmax_lse=True, **drawn.given)
    drawn.given |= {"k": drawn.new[0].requires_grad_(), "v": drawn.new[1].requires_grad_()}
    found = flash_attn_with_kvcache(drawn.q.requires_grad_(), *drawn.stored(), return_softmax_lse=True, **drawn.given)
    for x, y in zip(found, wanted, strict=True):
        assert torch.equal(x, y)
        with pytest.raises(Unsupported, match="attention to a cache of keys has no gradients"):
            x.sum().backward()


@pytest.mark.parametrize("step", [Step(s_new=1, pairs=8, view="causal"), Step(s_q=4, s_new=4, paged=True)], ids=str)
def test_compiled(step, device):
    drawn, found = Drawn(step, device), []
    compiled = torch.compile(flash_attn_with_kvcache, fullgraph=True, backend="aot_eager")
    for function in (compiled, flash_attn_with_kvcache):
        stored = drawn.stored()
        out = function(drawn.q, *stored, **drawn.given)
        found.append((out, *(x.nan_to_num() for x in stored)))
    assert all(torch.equal(x, y) for x, y in zip(*found, strict=True))


@pytest.mark.parametrize("paged", [False, True])
def test_angles_for_less_than_the_cache_has_room_for(paged):
    x, cache, angles = torch.randn(1, 1, 2, 8), torch.zeros(2, 4, 2, 8), torch.ones(7 if paged else 3, 2)
    given = {"block_table": torch.tensor([[0, 1]], dtype=torch.int32)} if paged else {}
    message = rf"rotary_cos needs a row for each of the {len(angles) + 1} keys of a sequence, got \({len(angles)}, 2\)"
    with pytest.raises(ValueError, match=message):
        flash_attn_with_kvcache(
            x, cache, cache.clone(), x, x, rotary_cos=angles, rotary_sin=angles, cache_seqlens=0, **given
        )
    assert not cache.any()
