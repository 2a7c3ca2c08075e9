"""Latent attention over listed keys through vLLM's classes, or stubs of them."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch

from saccade import LatentCache, Paged, Unsupported, append_kv, attention
from saccade.integrations import vllm as integration
from saccade.testing import check
from saccade.testing.accuracy import random

SCALE, PAGES, SIZE = 0.1, 9, 16


@pytest.fixture
def layer(lists):
    """A layer, without what vLLM's base class asks of a whole engine."""
    made = object.__new__(lists.SparseMLALayer)
    made.scale, made.kv_lora_rank, made.kv_cache_dtype = SCALE, 512, "auto"
    return made


def drawn(rows, n, apart, device):
    """Slots in blocks that are `apart` rows from one to the next, some of no key, and how many of them count."""
    keys = torch.rand(rows, PAGES * SIZE, device=device).argsort(-1)[:, :n]
    slots = (keys // SIZE * apart + keys % SIZE).int()
    slots[:, ::5] = -1
    return slots, torch.arange(rows, device=device, dtype=torch.int32) * n // (rows - 1)


@pytest.fixture
def run_of(layer):
    """Makes a function as `check` calls it: by the layer over vLLM's cache, or what also has the LSE, by attention."""

    def make(cache, slots, counts, is_decode, parts):
        words = {"layer": None, "block_size": SIZE, "is_decode": is_decode}

        def run(q, k, v, *, return_lse=False, **given):
            if return_lse:
                return attention(q, k, v, return_lse=True, **given)
            found, lse = layer._forward_mqa_kernel(q.split(parts, -1) if parts else q, cache, slots, counts, **words)
            assert lse is None
            return found

        return run

    return make


@pytest.mark.parametrize("apart", [SIZE, 3 * SIZE], ids=["", "blocks of other layers between"])
@pytest.mark.parametrize("is_decode", [True, False])
@pytest.mark.parametrize("h_q", [2, 32])
def test_listed_keys(h_q, is_decode, apart, run_of, device):
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    memory = random((PAGES, apart, 576), dtype, device, seed=1)
    memory[:, SIZE:] = torch.nan  # another layer's
    slots, counts = drawn(6, 40, apart, device)
    q = random((6, h_q, 576), dtype, device, seed=2)
    rows = memory.flatten(0, 1)[: (PAGES - 1) * apart + SIZE, None, None]
    words = {"layout": Paged(slots=slots, seqused_k=counts), "scale": SCALE, "backward": False}
    for parts in (None, (512, 64)):
        run = run_of(memory[:, :SIZE], slots, counts, is_decode, parts)
        check(q, rows, rows[..., :512], function=run, **words).assert_ok()


@pytest.mark.parametrize("is_decode", [True, False])
def test_records(is_decode, run_of, layer, device):
    layer.kv_cache_dtype = "fp8_ds_mla"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    cache = torch.zeros(PAGES, SIZE, 656, dtype=torch.uint8, device=device)
    records = LatentCache(cache, "v3.2")
    rows = random((PAGES * SIZE, 1, 576), dtype, device, seed=1)
    append_kv(records, records, None, rows, None, slot_mapping=torch.arange(PAGES * SIZE, device=device))
    kept = records.rows(None, dtype)[:, None, None]
    slots, counts = drawn(6, 40, SIZE, device)
    q = random((6, 16, 576), dtype, device, seed=2)
    words = {"layout": Paged(slots=slots, seqused_k=counts), "scale": SCALE, "backward": False}
    run = run_of(cache, slots, counts, is_decode, None)
    check(q, kept, kept[..., :512], function=run, **words).assert_ok()


def test_what_it_takes(vllm, lists, monkeypatch):
    with pytest.raises(Unsupported, match="takes no sliding_window"):
        lists.SparseMLALayer(sliding_window=128, alibi_slopes=None)
    backend = lists.SparseMLABackend
    model = SimpleNamespace(use_mla=True, hf_text_config=SimpleNamespace(index_topk=2048))
    config = sys.modules["vllm.config"]
    monkeypatch.setattr(config, "get_current_vllm_config_or_none", lambda: SimpleNamespace(model_config=model))
    assert integration.Backend is backend
    assert backend.is_sparse()
    assert backend.supports_kv_cache_dtype("fp8_ds_mla")
    assert not vllm.latents.MLABackend.supports_kv_cache_dtype("fp8_ds_mla")
    assert backend.get_impl_cls() is lists.SparseMLALayer
    assert backend.get_builder_cls() is lists.SparseMLAMetadataBuilder
