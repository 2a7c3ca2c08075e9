"""The attention function that transformers calls, on stubs of its layers and caches."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

from saccade import Packed, attention, causal, compose, softcap, window
from saccade.call.partial import Partial
from saccade.integrations.transformers import StructuredMask, attention_forward
from saccade.scores import bias
from saccade.testing import check
from saccade.testing.cases import Case

LAYER = SimpleNamespace(is_causal=True, layer_idx=0)
LEFT_PADDED = torch.tensor([[1] * 9, [0] * 4 + [1] * 5], dtype=torch.bool)


def operands(s_q=9, s_k=9, h_q=4, h_k=2, b=2, device="cpu", dtype=torch.float32):
    return (torch.randn(b, h, s, 16, device=device, dtype=dtype) for h, s in ((h_q, s_q), (h_k, s_k), (h_k, s_k)))


def structured(mask, s_q=9, s_k=9, padded=False):
    return StructuredMask(mask, (2, 1, s_q, s_k), padded)


def run(q, k, v, mask=None, **keywords):
    out, weights = attention_forward(LAYER, q, k, v, mask, **keywords)
    assert weights is None
    assert out.is_contiguous()
    return out.transpose(1, 2)


def test_the_whole_formula(device):
    """Softcap, the bias, the sink and the mask, forward and backward, against the oracle."""
    made = Case("", dtype="fp16" if device == "cuda" else "fp32", h_q=4, h_k=2, s_q=33, s_k=33, d=16).inputs(device)
    position_bias = torch.randn(1, 4, 33, 33, device=device)
    sink = torch.randn(4, device=device)
    mask = window(6, 0)

    def function(q, k, v, *, return_lse=False, sink=None, score_mod=None, **_):
        size = (q.shape[0], 1, q.shape[2], k.shape[2])
        keywords = {"softcap": 20.0, "position_bias": position_bias, "s_aux": sink, "scaling": 0.3}
        out, _ = attention_forward(LAYER, q, k, v, StructuredMask(mask, size, False), **keywords)
        out = out.transpose(1, 2)
        if not return_lse:
            return out
        options = {"mask": mask, "score_mod": score_mod, "sink": sink, "scale": 0.3, "return_lse": True}
        return out, attention(q.detach(), k.detach(), v.detach(), **options).lse

    score = compose(softcap(20.0), bias(position_bias.requires_grad_()))
    keywords = {"mask": mask, "score_mod": score, "sink": sink, "scale": 0.3}
    check(made.q, made.k, made.v, dout=made.dout, function=function, **keywords).assert_ok()


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32], ids=str)
def test_masks_of_the_user(dtype):
    """Four dimensions, bool or added, with more keys than there are, as generation with a static cache has them."""
    q, k, v = operands()
    seen = torch.rand(2, 1, 9, 12) > 0.3
    seen[..., 0] = True
    mask = seen if dtype == torch.bool else torch.where(seen, 0.0, torch.finfo(dtype).min)
    torch.testing.assert_close(run(q, k, v, mask), attention(q, k, v, mask=seen[..., :9]))


def test_softcap_comes_before_an_added_mask():
    q, k, v = operands()
    added = torch.randn(2, 1, 9, 9)
    wanted = attention(q, k, v, score_mod=compose(softcap(2.0), bias(added)))
    torch.testing.assert_close(run(q, k, v, added, softcap=2.0), wanted)


def test_block_masks():
    q, k, v = operands(128, 128)
    mask = create_block_mask(lambda b, h, q_idx, kv_idx: q_idx >= kv_idx, None, None, 128, 128, device="cpu")
    torch.testing.assert_close(run(q, k, v, mask), attention(q, k, v, mask=causal()))


@pytest.mark.parametrize(
    ("lengths", "keywords", "mask"),
    [
        ((9, 9), {}, causal()),
        ((9, 9), {"sliding_window": 4}, window(3, 0)),
        ((9, 9), {"is_causal": False}, None),
        ((9, 5), {"is_causal": False, "sliding_window": 6}, None),
        ((1, 9), {}, None),
        ((1, 9), {"sliding_window": 9}, None),
    ],
    ids=str,
)
def test_without_a_mask(lengths, keywords, mask):
    q, k, v = operands(*lengths)
    torch.testing.assert_close(run(q, k, v, **keywords), attention(q, k, v, mask=mask))


def test_keywords_that_do_not_matter():
    q, k, v = operands()
    ids = torch.arange(9)[None]
    others = {"position_ids": ids, "use_cache": True, "output_attentions": False, "num_items_in_batch": 3}
    torch.testing.assert_close(run(q, k, v, **others), attention(q, k, v, mask=causal()))


def test_dropout():
    q, k, v = operands()
    torch.manual_seed(0)
    out = run(q, k, v, structured(causal()), dropout=0.3)
    torch.manual_seed(0)
    assert torch.equal(out, attention(q, k, v, mask=causal(), dropout_p=0.3))


@pytest.mark.parametrize(
    ("keywords", "text"),
    [
        ({"output_attentions": True}, "output_attentions=True needs"),
        ({"head_mask": torch.ones(4), "sinks": None}, "does not take head_mask:"),
        ({"indices": torch.ones(4), "sinks": torch.ones(4)}, "does not take indices, sinks"),
        ({"mask": structured(causal(), 9, 8)}, r"2 x 9 rows and 8 keys, got query \(2, 4, 9, 16\)"),
        ({"mask": torch.ones(2, 9)}, r"four dimensions, got \(2, 9\)"),
        ({"mask": torch.ones(2, 1, 9, 9, dtype=torch.long)}, "bool or floats that are added, got torch.int64"),
        ({"is_causal": False, "sliding_window": 4}, "sliding_window=4 needs a mask"),
        ({"position_bias": torch.ones(4, 8, 9)}, r"\(4, 8, 9\)"),
        ({"s_aux": torch.ones(3)}, r"sink must be a float tensor \(4,\)"),
    ],
)  # fmt: skip
def test_errors(keywords, text):
    q, k, v = operands()
    with pytest.raises(ValueError, match=text):
        run(q, k, v, **keywords)


@pytest.mark.parametrize("lengths", [(4, 9), (9, 4)], ids=str)
def test_causal_of_other_lengths_needs_a_mask(lengths):
    q, k, v = operands(*lengths)
    with pytest.raises(ValueError, match="as many rows as keys"):
        run(q, k, v)
    with pytest.raises(ValueError, match="sliding_window=2 needs a mask"):
        run(q, k, v, sliding_window=2)


# Sequences end to end.

OFFSETS = torch.tensor([0, 3, 10], dtype=torch.int32)


@pytest.mark.parametrize("keywords", [{}, {"sliding_window": 3}, {"is_causal": False}, {"softcap": 5.0}], ids=str)
def test_offsets(keywords):
    q, k, v = operands(10, 10, b=1)
    offsets = {"cu_seq_lens_q": OFFSETS, "cu_seq_lens_k": OFFSETS, "max_length_q": 7, "max_length_k": 7}
    given = structured(causal()) if "is_causal" not in keywords else None
    flat = (x[0].transpose(0, 1) for x in (q, k, v))
    mask = window(2, 0) if "sliding_window" in keywords else causal() if given else None
    score = softcap(5.0) if "softcap" in keywords else None
    wanted = attention(*flat, mask=mask, score_mod=score, layout=Packed(OFFSETS)).transpose(0, 1)[None]
    torch.testing.assert_close(run(q, k, v, given, **offsets, **keywords), wanted)


def test_offsets_over_batch_rows():
    """As one sequence of all rows."""
    q, k, v = operands(5, 5)
    out = run(q, k, v, cu_seq_lens_q=OFFSETS, cu_seq_lens_k=OFFSETS)
    flat = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))
    wanted = attention(*flat, mask=causal(), layout=Packed(OFFSETS))
    torch.testing.assert_close(out.transpose(1, 2).flatten(0, 1), wanted)


def test_offsets_and_what_they_cannot_say():
    q, k, v = operands(10, 10, b=1)
    offsets = {"cu_seq_lens_q": OFFSETS, "cu_seq_lens_k": OFFSETS}
    with pytest.raises(ValueError, match="attention_mask do not go together"):
        run(q, k, v, structured(causal(), padded=True), **offsets)
    with pytest.raises(ValueError, match="attention_mask do not go together"):
        run(q, k, v, torch.ones(1, 1, 10, 10, dtype=torch.bool), **offsets)
    with pytest.raises(ValueError, match="position_bias and cu_seq_lens_q"):
        run(q, k, v, position_bias=torch.zeros(1, 4, 10, 10), **offsets)
    for kind in ("chunked_attention", "sliding_attention"):
        layer = SimpleNamespace(is_causal=True, layer_idx=0, config=SimpleNamespace(layer_types=[kind]))
        with pytest.raises(ValueError, match=f"layer of {kind}"):
            attention_forward(layer, q, k, v, None, **offsets)


def test_windows_without_a_key():
    with pytest.raises(ValueError, match="itself included, got 0"):
        run(*operands(b=1), sliding_window=0)


def test_offsets_of_the_keys_alone():
    with pytest.raises(ValueError, match="pass cu_seq_lens_q too"):
        run(*operands(b=1), cu_seq_lens_k=OFFSETS)


class CacheOf5:
    """The cache of continuous batching of transformers 5: the old keys of two sequences before the new ones."""

    def __init__(self, keys, values, offsets):
        self.full = keys, values
        self.offsets = offsets

    def update(self, key_states, value_states, layer_idx, kwargs):
        assert key_states.shape[2] == 3
        assert layer_idx == 0
        assert kwargs["read_index"] == "read"
        kwargs["cu_seq_lens_k"] = kwargs["cu_seq_lens_k"]["full_attention"]
        return self.full


class CacheOfIndices(CacheOf5):
    """That of transformers 4, and of 5 before 5.20, which takes no other keyword."""

    def update(self, key_states, value_states, layer_idx, read_index, write_index):
        assert key_states.shape[2] == 3
        assert (layer_idx, read_index, write_index) == (0, "read", "write")
        return tuple(x[0].transpose(0, 1) for x in self.full)


@pytest.mark.parametrize("kind", [CacheOfIndices, CacheOf5], ids=["before 5.20", "from 5.20"])
def test_continuous_batching(kind):
    """One new row of a sequence of 4, and two of one of 6."""
    q, k, v = operands(3, 10, b=1)
    offsets_q, offsets_k = (torch.tensor(x, dtype=torch.int32) for x in ([0, 1, 3], [0, 4, 10]))
    out = run(
        q,
        k[:, :, :3],
        v[:, :, :3],
        torch.zeros(1, 1, 3, 10) if kind is CacheOfIndices else None,
        cache=kind(k, v, offsets_k),
        cu_seq_lens_q=offsets_q,
        cu_seq_lens_k={"full_attention": offsets_k},
        read_index="read",
        write_index="write",
        block_table=None,
    )
    flat = (x[0].transpose(0, 1) for x in (q, k, v))
    wanted = attention(*flat, mask=causal(), layout=Packed(offsets_q, offsets_k))
    torch.testing.assert_close(out, wanted.transpose(0, 1)[None])


# A step of transformers 5 in which each request has one token: where its keys are is told by a block table.

PAGE, LAYERS = 4, 2


class Tables:
    """The cache of two layers, whose pages of keys and values alternate.

    Sequences of 1, 6 and 8 keys, of which the last one is new, and a request without keys that only fills up the batch.
    Memory that nothing uses is NaN.
    """

    def __init__(self, device, dtype, layer):
        self.k, self.v = (torch.randn(15, 2, 16, device=device, dtype=dtype) for _ in range(2))  # of all sequences
        self.lengths, self.blocks = (1, 6, 8, 0), ((5,), (2, 7), (3, 0), ())
        self.pages = torch.full((10, LAYERS, 2, PAGE, 2, 16), math.nan, device=device, dtype=dtype)
        self.layer, self.offsets = layer, [0, 1, 7, 15, 15]
        for at, page, row in self.places():
            for i, x in enumerate((self.k, self.v)):
                self.pages[page, layer, i, row] = x[at]
        self.full = self.pages.clone()
        for end in (1, 7, 15):  # not yet written
            _, page, row = self.places()[end - 1]
            self.pages[page, layer, :, row] = math.nan
        views = self.pages.view(-1, PAGE, 2, 16)[2 * layer :], self.pages.view(-1, PAGE, 2, 16)[2 * layer + 1 :]
        self.views = views[0][: len(views[1])], views[1]
        table = [[2 * LAYERS * page for page in pages] + [-1] * (3 - len(pages)) for pages in self.blocks]
        self.table = torch.tensor(table, dtype=torch.int32, device=device)
        self.layer_to_allocator = {0: SimpleNamespace(block_physical_stride=2 * LAYERS * PAGE, tokens_per_page=PAGE)}

    def places(self):
        """The number of each key, its page and its row there."""
        rows = (
            (pages[j // PAGE], j % PAGE) for n, pages in zip(self.lengths, self.blocks, strict=True) for j in range(n)
        )
        return [(at, *region) for at, region in enumerate(rows)]

    def update(self, key_states, value_states, layer_idx, kwargs):
        kwargs["cu_seq_lens_k"] = kwargs["cu_seq_lens_k"]["full_attention"]
        kwargs["block_table"] = kwargs["block_table"][0]
        kwargs["k_cache"], kwargs["v_cache"] = self.views
        return key_states, value_states

    def new(self, x):
        """(1, h, 4, d): the last row of each sequence, and one of none."""
        return torch.stack([x[0], x[6], x[14], torch.full_like(x[0], 7.0)], 1)[None]

    def keywords(self):
        device = self.pages.device
        offsets_k = torch.tensor(self.offsets, dtype=torch.int32, device=device)
        offsets_q = torch.tensor([0, 1, 2, 3, 3], dtype=torch.int32, device=device)
        keywords = {"cu_seq_lens_q": offsets_q, "cu_seq_lens_k": {"full_attention": offsets_k}}
        return {**keywords, "cache": self, "block_table": self.table[None], "read_index": [], "write_index": []}


@pytest.mark.parametrize("layer", range(LAYERS))
@pytest.mark.parametrize("keywords", [{}, {"sliding_window": 3}, {"softcap": 5.0}, {"s_aux": torch.ones(4)}], ids=str)
def test_block_tables(device, layer, keywords):
    dtype = torch.float16 if device == "cuda" else torch.float32
    tables, rows = Tables(device, dtype, layer), torch.randn(3, 4, 16, device=device, dtype=dtype)
    keywords = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in keywords.items()}
    before, new = tables.pages.clone(), (tables.new(tables.k), tables.new(tables.v))

    def function(q, k, v, *, return_lse=False, **given):
        tables.pages.copy_(before)
        of_none = torch.full_like(q[:1], 7.0)
        out = run(torch.cat([q, of_none]).transpose(0, 1)[None], *new, **tables.keywords(), **keywords)
        assert torch.equal(tables.pages.nan_to_num(9.0), tables.full.nan_to_num(9.0))
        assert not out[0, :, 3].any()
        out = out[0, :, :3].transpose(0, 1)
        return Partial(out, attention(q, k, v, return_lse=True, **given).lse) if return_lse else out

    offsets_q = torch.arange(4, dtype=torch.int32, device=device)
    layout = Packed(offsets_q, torch.tensor(tables.offsets[:-1], dtype=torch.int32, device=device))
    mask = window(2, 0) if "sliding_window" in keywords else causal()
    score = softcap(5.0) if "softcap" in keywords else None
    options = {"mask": mask, "layout": layout, "score_mod": score, "sink": keywords.get("s_aux")}
    check(rows, tables.k, tables.v, backward=False, function=function, **options).assert_ok()


@pytest.mark.gpu
def test_block_tables_in_a_graph():
    """Its replay reads the tables and lengths of that time."""
    tables = Tables("cuda", torch.float16, 0)
    q, keywords = torch.randn(1, 4, 4, 16, device="cuda", dtype=torch.float16), tables.keywords()
    new = tables.new(tables.k), tables.new(tables.v)
    wanted = run(q, *new, **keywords)
    pages, table, offsets = tables.pages.clone(), tables.table.clone(), keywords["cu_seq_lens_k"]["full_attention"]
    lengths = offsets.clone()
    tables.table.fill_(-1)
    offsets.zero_()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(q, *new, **keywords)
    tables.pages.fill_(math.nan)
    tables.pages.copy_(pages)
    tables.table.copy_(table)
    offsets.copy_(lengths)
    graph.replay()
    assert torch.equal(out, wanted)
    assert torch.equal(tables.pages.nan_to_num(9.0), tables.full.nan_to_num(9.0))


def test_block_tables_in_a_compiled_step():
    """With sizes as symbols, and a cache that the compiler does not look into, as transformers has both."""
    tables = Tables("cpu", torch.float32, 1)
    tables.update = torch.compiler.disable(tables.update)
    q, keywords, before = torch.randn(1, 4, 4, 16), tables.keywords(), tables.pages.clone()
    new = tables.new(tables.k), tables.new(tables.v)
    wanted, written = run(q, *new, **keywords), tables.pages.clone()
    tables.pages.copy_(before)
    torch._dynamo.reset()
    found = torch.compile(run, backend="aot_eager", dynamic=True)(q, *new, **keywords)
    torch.testing.assert_close(found, wanted)
    assert torch.equal(tables.pages.nan_to_num(9.0), written.nan_to_num(9.0))


def test_a_cache_or_a_block_table_alone():
    q, k, v = operands(3, 3, b=1)
    with pytest.raises(ValueError, match=r"cache \(CacheOf5\) is for sequences end to end: give cu_seq_lens_q"):
        run(q, k, v, cache=CacheOf5(k, v, None))
    with pytest.raises(ValueError, match="block_table says where the keys are in a cache"):
        run(q, k, v, block_table=torch.zeros(1, 1))
