"""Steps of vLLM through its own classes where vLLM 0.33.0 is installed, else tested against stubs of them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from saccade import Unsupported, alibi, causal, compose, softcap, window
from saccade.compat.flash_attn.call import alibi as alibi_by_distance

# The orders of memory that vLLM has, of (pages, heads, rows, content): HND and NHD, and heads outermost.
ORDERS = {"LBHNC": (0, 1, 2, 3), "LBNHC": (0, 2, 1, 3), "LHBNC": (1, 0, 2, 3)}


def meant(**meaning):
    return {"mask": causal(), "scale": 0.3, **meaning}


@pytest.mark.sample
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("page_size", [16, 64, 1])
def test_serving(served, page_size, order, device, requests_of, layer_of):
    """Prompts, chunks and single tokens in one batch; requests without rows; padding after them."""
    requests = requests_of(len(served[0]), page_size, device)
    layer = layer_of(requests, ORDERS[order])
    with torch.inference_mode():
        for i, lengths in enumerate(served):
            step = requests.step(lengths, padding=3 * (i % 2), idle=2 * (i % 2))
            layer.update(step)
            step.assert_right(layer.run(layer.metadata(step)), **meant())


@pytest.mark.parametrize(
    ("arguments", "meaning"),
    [
        ({"sliding_window": 9}, {"mask": window(8, 0)}),
        ({"sliding_window": 1}, {"mask": window(0, 0)}),
        ({"logits_soft_cap": 2.0}, {"score_mod": softcap(2.0)}),
        ({"logits_soft_cap": 0.0}, {}),
        ({"num_kv_heads": None}, {}),
    ],
    ids=str,
)
def test_layers(arguments, meaning, device, requests_of, layer_of):
    heads = {"k": 4} if "num_kv_heads" in arguments else {}
    requests = requests_of(3, 16, device, **heads)
    arguments = {name: value for name, value in arguments.items() if name != "num_kv_heads"}
    layer = layer_of(requests, **arguments)
    for lengths in ([40, 0, 7], [1, 20, 1]):
        step = requests.step(lengths, padding=2)
        layer.update(step)
        step.assert_right(layer.run(layer.metadata(step)), **meant(**meaning))


@pytest.mark.parametrize("cap", [None, 3.0])
def test_alibi(cap, device, requests_of, layer_of):
    slopes = [0.5, 0.25, 0.125, 0.0]
    requests = requests_of(3, 16, device)
    with torch.device(device):  # as vLLM builds its layers
        layer = layer_of(requests, alibi_slopes=slopes, logits_soft_cap=cap)
    for lengths in ([40, 0, 7], [1, 20, 1]):
        step = requests.step(lengths)
        layer.update(step)
        offsets = (step.used - step.offsets.diff()).to(device)
        bias = alibi_by_distance(torch.tensor(slopes, device=device), offsets, causal=True)
        score = bias if cap is None else compose(softcap(cap), bias)
        step.assert_right(layer.run(layer.metadata(step)), **meant(score_mod=score))


def test_alibi_is_ours(requests_of, layer_of):
    """Their slopes are ours: one call through both."""
    slopes = [0.5, 0.25, 0.125, 0.0]
    requests = requests_of(1, 16, "cpu")
    layer = layer_of(requests, alibi_slopes=slopes)
    step = requests.step([20])
    layer.update(step)
    step.assert_right(layer.run(layer.metadata(step)), **meant(score_mod=alibi(torch.tensor(slopes))))


def test_sinks(device, requests_of, layer_of):
    sinks = torch.tensor([0.5, -1.0, 3.0, 0.0], device=device)
    requests = requests_of(3, 16, device)
    layer = layer_of(requests, sinks=sinks, sliding_window=12)
    for lengths in ([40, 0, 7], [1, 20, 1]):
        step = requests.step(lengths, padding=2)
        layer.update(step)
        step.assert_right(layer.run(layer.metadata(step)), **meant(mask=window(11, 0), sink=sinks))


@pytest.mark.parametrize(("left", "mask"), [(None, None), (9, window(8, 8))])
def test_layers_that_see_all_keys(left, mask, device, requests_of, layer_of):
    requests = requests_of(2, 16, device)
    layer = layer_of(requests, sliding_window=left)
    step = requests.step([30, 7])
    layer.update(step)
    step.assert_right(layer.run(layer.metadata(step, causal=False)), mask=mask, scale=0.3)


def test_values_of_another_head_dim(device, requests_of, layer_of):
    requests = requests_of(2, 16, device, d_v=16)
    layer = layer_of(requests)
    step = requests.step([30, 7])
    layer.update(step)
    step.assert_right(layer.run(layer.metadata(step)), **meant())


def test_pages_with_padding_between(device, requests_of, layer_of):
    """Pages as far apart as those of a layer with larger ones."""
    requests = requests_of(2, 16, device)
    layer = layer_of(requests)
    pages, h_k, rows, content = layer.cache.shape
    apart = h_k * rows * content + 40
    memory = torch.full((pages * apart,), torch.nan, device=device, dtype=requests.dtype)
    layer.cache = memory.as_strided(layer.cache.shape, (apart, *layer.cache.stride()[1:]))
    step = requests.step([30, 7])
    layer.update(step)
    step.assert_right(layer.run(layer.metadata(step)), **meant())


def test_slots_for_the_batchs_rows_alone(device, requests_of, layer_of):
    """vLLM pads rows, and not always their slots."""
    requests = requests_of(2, 16, device)
    layer = layer_of(requests)
    step = requests.step([30, 7], padding=5)
    layer.update(step, step.slots[: step.rows])
    step.assert_right(layer.run(layer.metadata(step, actual=len(step.q))), **meant())


def test_groups_share_a_batch(device, requests_of, layer_of):
    """Another group's pages in the place of the first's."""
    requests = requests_of(2, 16, device)
    layer = layer_of(requests)
    step = requests.step([30, 7])
    first = layer.metadata(step)
    first.noted = "by a builder that is derived from ours"
    requests.tables = torch.randperm(requests.pages)[: requests.tables.numel()].view_as(requests.tables)
    requests.cached = [0, 0]
    step = requests.step([30, 7])
    layer.update(step)
    metadata = layer.builder.update_block_table(first, step.table, step.slots)
    assert metadata.block_table is step.table
    assert metadata.slot_mapping is step.slots
    assert first.block_table is not step.table
    assert metadata.noted == first.noted
    step.assert_right(layer.run(metadata), **meant())


def test_batch_invariance(vllm, monkeypatch, requests_of, layer_of):
    monkeypatch.setattr(vllm.ours._envs, "VLLM_BATCH_INVARIANT", True, raising=False)
    layer = layer_of(requests := requests_of(2, 16, "cpu"))
    assert layer.metadata(requests.step([3, 1])).layout.num_splits == 1


def test_metadata_holds_vllms_tensors(requests_of, layer_of):
    """A replay of a graph reads what vLLM writes there."""
    step = (requests := requests_of(2, 16, "cpu")).step([3, 1])
    layer = layer_of(requests)
    metadata = layer.builder.build_for_cudagraph_capture(layer.common(step))
    assert metadata.query_start_loc is step.offsets
    assert metadata.seq_lens is step.used
    assert metadata.block_table is step.table
    layer.builder.update_draft_decode_metadata(metadata)


def test_while_vllm_measures_memory(requests_of, layer_of):
    layer = layer_of(requests := requests_of(2, 16, "cpu"))
    step = requests.step([3, 1])
    metadata = layer.metadata(step)
    for cache, given in ((torch.tensor([]), None), (layer.cache, None), (torch.tensor([]), metadata)):
        layer.cache = cache
        out = layer.run(given)(step.q, torch.full_like(step.q, torch.nan))
        assert not out.any()
    layer.update(step)


@pytest.mark.parametrize("scale", [torch.tensor(0.02), torch.tensor([0.02]), torch.tensor([0.02, 0.03])], ids=str)
@pytest.mark.parametrize("word", ["fp8", "fp8_e4m3", "fp8_e5m2"])
def test_8_bit_caches(word, scale, vllm, device, requests_of, layer_of):
    """In vLLM's cache of uint8. Out is that of a layer whose keys and values are what the bytes stand for; bytes
    that are not in use are NaN."""
    kind = vllm.ours.CACHE_DTYPES[word]
    requests = requests_of(3, 16, device)
    layer, exact = layer_of(requests, kv_cache_dtype=word), layer_of(requests)
    layer.cache = torch.full_like(layer.cache, 0x7F, dtype=torch.uint8)
    scales = SimpleNamespace(_k_scale=scale.to(device), _v_scale=2 * scale.to(device))
    both = [(x if x.dim() and len(x) > 1 else x.expand(2))[:, None] for x in (scales._k_scale, scales._v_scale)]
    for lengths in ([40, 0, 7], [1, 20, 1]):
        step = requests.step(lengths, padding=2)
        layer.impl.do_kv_cache_update(scales, step.k_new, step.v_new, layer.cache, step.slots)
        rows = [((x / y).to(kind).float() * y).to(x) for x, y in zip((step.k_new, step.v_new), both, strict=True)]
        exact.impl.do_kv_cache_update(None, *rows, exact.cache, step.slots)
        found, wanted = (torch.zeros(len(step.q), 4, rows[1].shape[-1], device=device).to(step.q) for _ in range(2))
        layer.impl.forward(scales, step.q, None, None, layer.cache, layer.metadata(step), found)
        exact.impl.forward(None, step.q, None, None, exact.cache, exact.metadata(step), wanted)
        torch.testing.assert_close(found, wanted, atol=2e-2, rtol=2e-2)
        assert found.any()


def test_8_bit_queries(device, requests_of, layer_of):
    """As vLLM rounds them, by the layer's scale."""
    requests = requests_of(3, 16, device, torch.bfloat16)
    layer = layer_of(requests, kv_cache_dtype="fp8")
    layer.cache = torch.full_like(layer.cache, 0x7F, dtype=torch.uint8)
    scales = [torch.tensor(x, device=device) for x in (0.03, 0.02, 0.04)]
    scales = SimpleNamespace(**dict(zip(("_q_scale", "_k_scale", "_v_scale"), scales, strict=True)))
    for lengths in ([40, 0, 7], [1, 20, 1]):
        step = requests.step(lengths, padding=2)
        layer.impl.do_kv_cache_update(scales, step.k_new, step.v_new, layer.cache, step.slots)
        query = (step.q / scales._q_scale).to(torch.float8_e4m3fn)
        rounded = (query.float() * scales._q_scale).to(step.q)
        found, wanted = (torch.zeros(len(step.q), 4, 32, device=device).to(step.q) for _ in range(2))
        metadata = layer.metadata(step)
        layer.impl.forward(scales, query, None, None, layer.cache, metadata, found)
        layer.impl.forward(scales, rounded, None, None, layer.cache, metadata, wanted)
        torch.testing.assert_close(found, wanted, atol=5e-2, rtol=5e-2)
        assert found.any()


@pytest.mark.parametrize(
    ("word", "gpu", "dtype", "rounds"),
    [
        ("fp8", "sm90", torch.bfloat16, True), ("fp8", "sm90", torch.float32, False),
        ("fp8_e5m2", "sm90", torch.bfloat16, False), ("fp8", "sm80", torch.bfloat16, False),
    ],
)  # fmt: skip
def test_where_vllm_rounds_queries(word, gpu, dtype, rounds, vllm, monkeypatch, requests_of, layer_of):
    monkeypatch.setattr(vllm.ours.hardware, "name", lambda _: gpu)
    monkeypatch.setattr(torch, "get_default_dtype", lambda: dtype)  # the model's, while vLLM builds its layers
    assert layer_of(requests_of(1, 16, "cpu"), kv_cache_dtype=word).impl.supports_quant_query_input is rounds


@pytest.mark.parametrize("word", ["nvfp4", "fp8_per_token_head"])
def test_caches_of_other_dtypes_are_refused(word, vllm, requests_of, layer_of):
    assert not vllm.ours.VLLMBackend.supports_kv_cache_dtype(word)
    with pytest.raises(Unsupported, match=f"takes kv_cache_dtype auto, .*, fp8_e4m3, fp8_e5m2, not '{word}'"):
        layer_of(requests_of(1, 16, "cpu"), kv_cache_dtype=word)


@pytest.mark.parametrize("kind", ["ENCODER", "ENCODER_ONLY", "ENCODER_DECODER"])
def test_encoders_are_refused(kind, vllm, requests_of, layer_of):
    kind = vllm.theirs.AttentionType[kind]
    assert not vllm.ours.VLLMBackend.supports_attn_type(kind)
    with pytest.raises(Unsupported, match=f"runs decoder attention, not '{kind.value}'"):
        layer_of(requests_of(1, 16, "cpu"), attn_type=kind)


def test_what_else_is_refused(requests_of, layer_of):
    layer = layer_of(requests := requests_of(2, 16, "cpu"))
    step = requests.step([3, 1])
    with pytest.raises(Unsupported, match=r"one `causal` for a batch, not one for each request: \(2,\)"):
        layer.metadata(step, causal=torch.ones(2, dtype=torch.int32))
    with pytest.raises(Unsupported, match="does not quantize its output"):
        layer.impl.forward(None, step.q, None, None, layer.cache, None, step.q, torch.ones(1))
    layer.update(step)
    with pytest.raises(ValueError, match=r"out.*\(4, 4, 32\)"):
        layer.run(layer.metadata(step))(step.q, torch.empty(3, 4, 32))
