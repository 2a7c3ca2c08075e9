"""TransformerEngine's `InferenceParams`: sequences enter, grow and leave, against attention over all their keys."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor

from saccade import Packed, Unsupported, attention, bias, causal, softcap, window
from saccade.compat.transformer_engine import DotProductAttention, InferenceParams, get_attention_backend
from saccade.testing import check
from saccade.testing.callbacks import case

H, G, D, D_V, SEQUENCES, LONGEST, SIZE = 4, 2, 16, 8, 4, 24, 4
STEPS: list[dict[str, int]] = [
    {"a": 7, "b": 12},
    {"a": 1, "b": 1},
    {"b": 1, "a": 1, "c": 5},
    {"c": 1, "b": 6},
    {"d": 9, "b": 1, "c": 1},
    {"d": 1},
    {"d": 2, "e": 3, "f": 3, "g": 3},
    {"d": 3, "e": 3, "f": 3, "g": 3},
]


class Server:
    """All steps: queries and new keys of each, and the packed call that they must be equal to."""

    def __init__(self, dtype: torch.dtype, device: str = "cpu") -> None:
        made = torch.Generator().manual_seed(7)

        def rows(n: int, *shape: int) -> Tensor:
            return torch.randn(n, *shape, generator=made).to(device, dtype)

        self.steps, q, k, v, lengths = [], [], [], [], []
        held = {}
        for step in STEPS:
            new = {name: (rows(n, H, D), rows(n, G, D), rows(n, G, D_V)) for name, n in step.items()}
            held = {
                name: tuple(torch.cat([old, x]) for old, x in zip(held[name], tensors[1:], strict=True))
                if name in held
                else tensors[1:]
                for name, tensors in new.items()
            }
            self.steps.append((step, list(new.values())))
            for name, tensors in new.items():
                q.append(tensors[0])
                k.append(held[name][0])
                v.append(held[name][1])
                lengths.append((len(tensors[0]), len(held[name][0])))
        offsets = torch.tensor([(0, 0), *lengths], device=device).cumsum(0).int()
        self.lengths = torch.tensor(lengths, device=device)
        self.q, self.k, self.v = (torch.cat(x) for x in (q, k, v))
        self.layout = Packed(offsets[:, 0].contiguous(), offsets[:, 1].contiguous(), LONGEST, LONGEST)

    def tensors(self, which: int, order: str) -> list[Tensor]:
        """q, k and v of a step; what is padding is NaN, and the batch has rows that nobody is in."""
        step, new = self.steps[which]
        made = []
        for parts in zip(*new, strict=True):
            if order == "thd":
                made.append(torch.cat([*parts, parts[0].new_full((3, *parts[0].shape[1:]), torch.nan)]))
                continue
            spare = which % 2 and SEQUENCES - len(step)
            x = parts[0].new_full((len(step) + spare, max(step.values()), *parts[0].shape[1:]), torch.nan)
            for row, part in zip(x, parts, strict=False):
                row[: len(part)] = part
            made.append(x.transpose(0, 1).contiguous() if order == "sbhd" else x)
        return made

    def rows(self, which: int, out: Tensor, order: str) -> Tensor:
        """Those in use, end to end; the others are zero."""
        lengths = list(self.steps[which][0].values())
        if order == "thd":
            assert not out[sum(lengths) :].any()
            return out[: sum(lengths)]
        out = out.transpose(0, 1) if order == "sbhd" else out
        used = torch.zeros(out.shape[:2], dtype=torch.bool, device=out.device)
        for row, n in zip(used, lengths, strict=False):
            row[:n] = True
        assert not out[~used].any()
        return torch.cat([row[:n] for row, n in zip(out, lengths, strict=False)])

    def run(self, core: DotProductAttention, params: InferenceParams, order: str, **keywords) -> Tensor:
        other = DotProductAttention(H, (D, D_V), G, layer_number=2, **core.defaults._asdict())
        other.softmax_offset = core.softmax_offset
        found = []
        params.reset()
        for which, (step, _) in enumerate(self.steps):
            params.pre_step(step)
            q, k, v = self.tensors(which, order)
            out = core(q, k, v, inference_params=params, **keywords)
            assert torch.equal(other(q, k, -v, inference_params=params, **keywords), -out)
            found.append(self.rows(which, out, order))
        return torch.cat(found).unflatten(-1, (H, D_V))


SLOPES = torch.tensor([0.5, 0.25, 1.0, 0.125])
BIAS = torch.linspace(-1, 1, H * LONGEST).view(1, H, 1, LONGEST)


def distances(lengths: Tensor):
    offset = lengths[:, 1] - lengths[:, 0]
    return lambda score, b, h, q_idx, kv_idx: score - SLOPES[h] * (q_idx + offset[b] - kv_idx).abs()


# Format, pages, constructor, forward, what it means.
CASES = {
    "prompts and decoding": ("bshd", True, {}, {}, {"mask": causal()}),
    "no pages": ("sbhd", False, {"attn_mask_type": "padding_causal_bottom_right"}, {}, {"mask": causal()}),
    "everything sees everything": ("thd", False, {"attn_mask_type": "padding"}, {}, {}),
    "window and sink": ("sbhd", True, {"window_size": (4, 0), "softmax_type": "learnable"}, {},
                        {"mask": window(4, 0), "sink": True}),
    "softcap": ("thd", True, {"softcap": 1.5}, {"num_splits": 3}, {"mask": causal(), "score_mod": softcap(1.5)}),
    "alibi": ("bshd", False, {}, {"core_attention_bias_type": "alibi", "alibi_slopes": SLOPES},
              {"mask": causal(), "score_mod": distances}),
    "bias": ("thd", True, {"attn_mask_type": "padding", "window_size": (5, 2)},
             {"core_attention_bias": BIAS, "core_attention_bias_type": "post_scale_bias"},
             {"mask": window(5, 2), "score_mod": bias(BIAS)}),
    "callback": ("bshd", True, {}, case("softcap", H, 1, 1)._asdict(),
                 {"mask": causal(), "score_mod": case("softcap", H, 1, 1).score()}),
}  # fmt: skip


def made(order: str, paged: bool, dtype: torch.dtype = torch.float32, device: str = "cpu", **constructor):
    given = {"attn_mask_type": "padding_causal", "layer_number": 1, **constructor}
    core = DotProductAttention(H, (D, D_V), G, qkv_format=order, **given).to(device)
    pages = {"is_paged": True, "page_size": SIZE, "total_num_pages": 13} if paged else {}
    return core, InferenceParams(SEQUENCES, LONGEST, G, D, dtype, D_V, **pages, device=device)


@pytest.mark.parametrize("name", CASES)
def test_growing_sequences(name, poison):
    order, paged, constructor, forward, meaning = CASES[name]
    server, (core, params) = Server(torch.float32), made(order, paged, **constructor)
    meaning = dict(meaning)
    if meaning.get("sink"):
        with torch.no_grad():
            core.softmax_offset.copy_(torch.randn(H))
        meaning["sink"] = core.softmax_offset.detach()
    if meaning.get("score_mod") is distances:
        meaning["score_mod"] = distances(server.lengths)

    def steps(q, k, v, *, return_lse=False, **keywords):
        with torch.no_grad():
            out = server.run(core, params, order, **forward)
        return (out, attention(q, k, v, return_lse=True, **keywords).lse) if return_lse else out

    given = {"layout": server.layout, **meaning}
    check(server.q, server.k, server.v, function=steps, backward=False, **given).assert_ok()


@pytest.mark.parametrize("order", ["thd", "bshd", "sbhd"])
def test_what_a_graph_would_capture(order, monkeypatch):
    """Lengths that only the device knows."""
    server, (core, params) = Server(torch.float32), made(order, True)
    wanted = server.run(core, params, order)
    monkeypatch.setattr("saccade.compat.transformer_engine.inference.capturing", lambda: True)
    assert torch.equal(server.run(core, params, order), wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("order", ["thd", "bshd"])
def test_a_graph_is_replayed_with_other_sequences(order):
    """A prompt's graph serves every step; bit for bit, as keys are not split."""
    server, (core, params) = Server(torch.float16, "cuda"), made(order, True, torch.float16, "cuda")

    def steps(q, k, v, *, return_lse=False, **keywords):
        out = server.run(core, params, order)
        return (out, attention(q, k, v, return_lse=True, **keywords).lse) if return_lse else out

    given = {"layout": server.layout, "mask": causal()}
    check(server.q, server.k, server.v, function=steps, backward=False, **given).assert_ok()
    lead = (SEQUENCES * 12,) if order == "thd" else (SEQUENCES, 12)
    q, k, v = (torch.zeros(*lead, h, d, device="cuda", dtype=torch.float16) for h, d in ((H, D), (G, D), (G, D_V)))
    params.reset()
    params.pre_step({"short": 3})
    core(q, k, v, inference_params=params, cu_seqlens_q=params.cu_seqlens_q)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = core(q, k, v, inference_params=params, cu_seqlens_q=params.cu_seqlens_q)
    wanted, found = server.run(core, params, order), []
    params.reset()
    for which, (step, _) in enumerate(server.steps):
        params.pre_step(step)
        for x, new in zip((q, k, v), server.tensors(which, order), strict=True):
            x.fill_(torch.nan)
            x[tuple(slice(n) for n in new.shape)] = new
        graph.replay()
        found.append(server.rows(which, out, order).clone())  # the next replay writes there again
    assert torch.equal(torch.cat(found).unflatten(-1, (H, D_V)), wanted)


def test_max_logit():
    server, (core, params) = Server(torch.float32), made("bshd", True, return_max_logit=True)
    step, _ = server.steps[0]
    params.pre_step(step)
    _, top = core(*server.tensors(0, "bshd"), inference_params=params)
    lengths = torch.tensor([0, *step.values()]).cumsum(0).int()
    n = int(lengths[-1])
    wanted = attention(
        *(x[:n] for x in (server.q, server.k, server.v)), mask=causal(), layout=Packed(lengths, lengths, n, n),
        return_max_scores=True,
    )  # fmt: skip
    torch.testing.assert_close(top, wanted.max_scores.amax(1))


def test_explaining_writes_nothing(poison):
    core, params = made("bshd", True)
    params.pre_step({"a": 5})
    told = get_attention_backend(core, *Server(torch.float32).tensors(0, "bshd")[:3], inference_params=params)
    assert told.spec.layout.startswith("paged")
    assert told.backend == "cpu"
    assert "gluon: " in str(told)
    assert all(x.isnan().all() for x in params.caches(1))


@pytest.mark.parametrize("paged", [False, True])
def test_step_by_hand(paged):
    """What `step` returns is the keys so far, and sequences that leave give their pages back."""
    server, (_, params) = Server(torch.float32), made("sbhd", paged)
    for which in (0, 1, 2):
        params.pre_step(server.steps[which][0])
        _, k, v = server.tensors(which, "sbhd")
        found = params.step(3, k, v, "sbhd")
    names = list(STEPS[2])
    totals = [sum(step.get(name, 0) for step in STEPS[:3]) for name in names]
    assert dict(params.sequences) == dict(zip(names, totals, strict=True))
    assert params.get_seqlens_pre_step().tolist() == [13, 8, 0, 0]
    assert found[2].tolist() == [0, 1, 2, 7, 7]
    assert found[3].tolist() == [0, 14, 23, 28, 28]
    assert found[4:] == (LONGEST, "sbhd_2bshd")
    k, v = params.convert_paged_to_nonpaged(3)
    assert params.cache_manager.cache[3][0].shape == ((13, SIZE, G, D) if paged else (SEQUENCES, LONGEST, G, D))
    shown = found[:2] if not paged else (k, v)
    first = len(server.lengths[: sum(len(step) for step in STEPS[:2])])
    starts = server.layout.cu_seqlens_k
    for i, n in enumerate(totals):
        rows = slice(int(starts[first + i]), int(starts[first + i + 1]))
        assert torch.equal(shown[0][i, :n], server.k[rows])
        assert torch.equal(shown[1][i, :n], server.v[rows])
    free = len(params.cache_manager.free)
    params.pre_step({"b": 1})
    assert len(params.cache_manager.free) == free + (5 if paged else 2)
    assert "1 of 4 sequences" in repr(params)


def stepped(order="bshd", first=None, **given):
    def call():
        core, params = made(order, True, layer_number=given.pop("layer_number", 1))
        if first is not False:
            params.pre_step(first or {"a": 7, "b": 12})
        return core(*Server(torch.float32).tensors(0, order), **{"inference_params": params, **given})

    return call


def asked(step):
    _, params = made("bshd", True)
    params.pre_step({"a": 20})
    return lambda: params.pre_step(step)


WRONG = {
    "another's": (stepped(inference_params=object()), ValueError, "must be a saccade.compat.transformer_engine.Inf"),
    "no step": (stepped(first=False), ValueError, "call pre_step"),
    "mask": (stepped(attn_mask_type="causal"), AssertionError, "padding, padding_causal, padding_causal_bottom_right"),
    "layer": (stepped(layer_number=None), AssertionError, "give layer_number"),
    "other lengths": (stepped(first={"a": 13}), ValueError, "a step of 1 sequences with up to 13 tokens"),
    "other sequences": (stepped(first={"a": 1, "b": 1, "c": 1}), ValueError, "a step of 3 sequences"),
    "gaps": (stepped("thd", cu_seqlens_q_padded=BIAS), Unsupported, "after the last one, or give bshd"),
    "top left": (
        stepped(attn_mask_type="padding", window_size=(3, 3), bottom_right_diagonal=False),
        Unsupported,
        "aligned at the bottom right",
    ),
    "bias": (
        stepped(core_attention_bias_type="post_scale_bias", core_attention_bias=BIAS[..., :9]),
        ValueError,
        "must broadcast to (b, h_q, s_q, s_k) = (2, 4, 12, 24), got (1, 4, 1, 9)",
    ),
    "too long": (asked({"a": 5}), ValueError, "max_sequence_length=24 in all; 'a' has 5 and 25"),
    "nothing": (asked({"a": 0}), ValueError, "at least one token"),
    "too many": (asked(dict.fromkeys(range(5), 1)), ValueError, "up to max_batch_size=4 sequences, got 5"),
    "full": (
        asked({"a": 1, "b": 24, "c": 24}),
        RuntimeError,
        "the cache is full: 13 more pages of 4 rows are needed, 8",
    ),
    "numbers": (lambda: InferenceParams(4, 24), AssertionError, "needs num_heads_kv, head_dim_k and dtype"),
    "page size": (
        lambda: InferenceParams(4, 24, G, D, torch.float32, is_paged=True, page_size=5),
        AssertionError,
        "divides max_sequence_length=24, got 5",
    ),
    "manager": (
        lambda: InferenceParams(4, 24, G, D, torch.float32, custom_cache_manager=object),
        Unsupported,
        "custom_cache_manager",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_calls(name):
    wrong, kind, told = WRONG[name]
    with pytest.raises(kind, match=re.escape(told)):
        wrong()


def test_a_refused_step_changes_nothing():
    _, params = made("bshd", True)
    params.pre_step({"a": 20})
    before = params.cache_manager.page_table.clone(), params.cu_seqlens_q.clone(), dict(params.sequences)
    with pytest.raises(RuntimeError, match="the cache is full"):
        params.pre_step({"a": 1, "b": 24, "c": 24})
    assert torch.equal(params.cache_manager.page_table, before[0])
    assert torch.equal(params.cu_seqlens_q, before[1])
    assert dict(params.sequences) == before[2]


def test_gradients_are_refused():
    core, params = made("bshd", True)
    params.pre_step(STEPS[0])
    q, k, v = Server(torch.float32).tensors(0, "bshd")
    with pytest.raises(ValueError, match="append_kv has no gradients"):
        core(q, k.requires_grad_(), v, inference_params=params)
