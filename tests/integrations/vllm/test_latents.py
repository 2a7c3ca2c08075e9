"""Latent attention through vLLM's classes, or stubs of them: decoding and drafts over pages, and prompts end to end."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch

from saccade import Packed, Unsupported, causal
from saccade.call.partial import Partial
from saccade.integrations import vllm as integration
from saccade.testing import check
from saccade.testing.accuracy import random

SCALE = 0.2


@pytest.fixture
def layer(vllm):
    """A layer, without what vLLM's base class asks of a whole engine."""
    made = object.__new__(vllm.latents.MLALayer)
    made.scale = SCALE
    return made


def metadata(vllm, step):
    builder = object.__new__(vllm.latents.MLAMetadataBuilder)
    decode = builder._build_decode(
        block_table_tensor=step.table,
        seq_lens_device=step.used,
        max_seq_len=130,
        query_start_loc_cpu=step.offsets.cpu(),
        query_start_loc_device=step.offsets,
        num_decode_tokens=step.rows,
        max_query_len=step.longest,
        dcp_tot_seq_lens_device=None,
    )
    return SimpleNamespace(decode=decode)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize(("d", "d_v"), [(48, 32), (576, 512)])
def test_decoding_and_drafts(d, d_v, rows, vllm, layer, device, requests_of):
    layer.kv_lora_rank = d_v
    requests = requests_of(3, 16, device, q=16, k=1, d=d, d_v=d_v)
    requests.v = requests.k[..., :d_v]
    cache = torch.full((requests.pages, 16, d), torch.nan, device=device, dtype=requests.dtype)
    for i, lengths in enumerate(([40, 7, 90], [rows] * 3, [rows] * 3)):
        step = requests.step(lengths, idle=0 if rows > 1 else 1)
        latents, rotated = step.v_new[:, 0], step.k_new[..., d_v:]
        layer.do_kv_cache_update(latents, rotated, cache, step.slots, "auto", torch.ones(()))
        if i == 0:
            continue
        with torch.inference_mode():
            common = metadata(vllm, step)

            def run(q, out, step=step, common=common):
                live = len(step.used) * rows  # idle requests have as many rows as others
                padded = torch.cat([q, q.new_zeros(live - len(q), *q.shape[1:])])
                for given in (padded, (padded[..., :d_v], padded[..., d_v:])):
                    found, lse = layer.forward_mqa(given, cache, common, None)
                    assert lse is None
                    out[: len(q)] = found[: len(q)]
                return out

            step.assert_right(run, mask=causal(), scale=SCALE)


@pytest.mark.parametrize("lengths", [(1, 1, 5), (4, 1, 4), (1, 30, 2), (2, 2, 0)])
def test_what_is_left_of_prompts(lengths, vllm, layer, device, requests_of):
    """Requests of several numbers of tokens: the first that have equally many, and the others."""
    layer.kv_lora_rank = 32
    requests = requests_of(3, 16, device, q=16, k=1, d=48, d_v=32)
    requests.v = requests.k[..., :32]
    cache = torch.full((requests.pages, 16, 48), torch.nan, device=device, dtype=requests.dtype)
    for counts in ((40, 7, 90), lengths):
        step = requests.step(list(counts))
        latents, rotated = step.v_new[:, 0], step.k_new[..., 32:]
        layer.do_kv_cache_update(latents, rotated, cache, step.slots, "auto", torch.ones(()))
    common = metadata(vllm, step)
    assert (common.decode.rest is None) == (lengths == (2, 2, 0))
    if common.decode.rest is None:  # as a graph's padding has tokens
        return

    def run(q, out):
        return out.copy_(layer.forward_mqa((q[..., :32], q[..., 32:]), cache, common, None)[0])

    with torch.inference_mode():
        step.assert_right(run, mask=causal(), scale=SCALE)


def test_rows_of_a_batch_that_is_invariant_go_one_way(vllm, monkeypatch):
    monkeypatch.setattr(vllm.latents._mla.MLACommonMetadataBuilder, "__init__", lambda self, *_, **__: None)
    for invariant, most in ((False, vllm.latents.MOST_ROWS), (True, 1)):
        monkeypatch.setattr(vllm.latents._envs, "VLLM_BATCH_INVARIANT", invariant, raising=False)
        assert vllm.latents.MLAMetadataBuilder().reorder_batch_threshold == most


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("start", [0, 128, 3])
def test_parts_of_queries(start, dtype, vllm, device):
    """Bit by bit, also of views of wider rows, at any place."""
    wide = random((5, 4, 200), dtype, device)
    wide[1, 2, start + 1] = torch.nan
    parts = random((5, 4, 512), dtype, device, seed=1), wide[..., start : start + 64]
    bits = torch.int16 if dtype == torch.bfloat16 else torch.int32
    found = vllm.latents.joined(parts)
    assert found.dtype == dtype
    assert torch.equal(found.view(bits), torch.cat(parts, -1).view(bits))
    assert vllm.latents.joined(found) is found


def test_prompts_and_context(vllm, device):
    prefill = object.__new__(vllm.latents.MLAPrefill)
    prefill.scale = SCALE
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    q, k = (random((60, 4, 96), dtype, device, seed=i) for i in (1, 2))
    v = random((60, 4, 128), dtype, device, seed=3)[..., 64:]  # a part of wider rows, as vLLM has them
    rows, keys = (torch.tensor(x, dtype=torch.int32, device=device) for x in ([0, 25, 26, 60], [0, 9, 50, 60]))
    prefill._prefill_metadata = SimpleNamespace(query_start_loc=rows)
    chunk = SimpleNamespace(query_start_loc=rows, cu_seq_lens=keys)

    def new_tokens(q, k, v, *, return_lse=False, **_):
        found = prefill.run_prefill_new_tokens(q, k, v, return_lse)
        return Partial(*found) if return_lse else found

    def context(q, k, v, *, return_lse=False, **_):
        found = Partial(*prefill.run_prefill_context_chunk(chunk, q, k, v))
        return found if return_lse else found.out

    check(q, k, v, function=new_tokens, backward=False, layout=Packed(rows), mask=causal(), scale=SCALE).assert_ok()
    check(q, k, v, function=context, backward=False, layout=Packed(rows, keys), scale=SCALE).assert_ok()


def test_what_is_refused(vllm):
    prefill = object.__new__(vllm.latents.MLAPrefill)
    with pytest.raises(Unsupported, match="output_scale must be None"):
        prefill.run_prefill_new_tokens(None, None, None, False, None, torch.ones(1))


def test_which_shapes_run(vllm):
    capability = SimpleNamespace(major=9, minor=0)
    asked = [torch.bfloat16, "auto", 64, True, False, False, False]
    assert vllm.latents.MLABackend.supports_combination(576, *asked, capability) is None
    assert "takes head dims up to 576/512, not 640/512" in vllm.latents.MLABackend.supports_combination(
        640, *asked, capability
    )


def test_the_name_stands_for_latents_where_the_model_has_them(vllm, monkeypatch):
    config = sys.modules["vllm.config"]
    for use_mla, wanted in ((False, vllm.ours.VLLMBackend), (True, vllm.latents.MLABackend)):
        current = SimpleNamespace(model_config=SimpleNamespace(use_mla=use_mla, hf_text_config=None))
        monkeypatch.setattr(config, "get_current_vllm_config_or_none", lambda current=current: current)
        assert integration.Backend is wanted
        assert wanted.get_name() == "CUSTOM"
    with pytest.raises(AttributeError, match="has no attribute 'Other'"):
        _ = integration.Other
