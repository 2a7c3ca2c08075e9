"""Steps of SGLang through its own classes where SGLang 0.5.23 is installed, else tested against stubs of them."""

from __future__ import annotations

import pytest
import torch

from saccade import Unsupported, attention, causal, softcap, window


def meant(**meaning):
    return {"mask": causal(), "scale": 0.3, **meaning}


@pytest.mark.parametrize("hnd", [False, True])
@pytest.mark.parametrize("page_size", [16, 64, 1])
def test_serving(served, page_size, hnd, device, requests_of, engine_of):
    """Prompts, chunks and single tokens in one batch; requests without rows; padding after them."""
    requests = requests_of(len(served[0]), page_size, device)
    engine = engine_of(requests, hnd=hnd)
    with torch.inference_mode():
        for i, lengths in enumerate(served):
            step = requests.step(lengths, padding=3 * (i % 2) * (max(lengths) > 1), idle=2 * (max(lengths) > 1))
            batch = engine.batch(step, seq_lens_cpu=step.used.cpu() if i % 2 else None)
            engine.backend.init_forward_metadata(batch)
            step.assert_right(engine.run(step, batch), **meant())


@pytest.mark.parametrize("page_size", [16, 1])
def test_graphs(served, page_size, device, requests_of, engine_of):
    """Memory that stays, filled before each replay."""
    requests = requests_of(len(served[0]), page_size, device)
    engine = engine_of(requests)
    engine.backend.init_cuda_graph_state(8, 8)
    tokens, prompts, addresses = {}, {}, set()
    for lengths in served:
        step = requests.step(lengths)
        batch = engine.batch(step)
        seen = tokens if batch.forward_mode.is_decode_or_idle() else prompts
        engine.backend.init_forward_metadata_out_graph(batch, in_capture=not seen)
        engine.backend.init_forward_metadata_in_graph(batch)
        layout = engine.backend.forward_metadata
        seen.setdefault("at", [x.data_ptr() for x in layout.tensors])
        assert seen["at"] == [x.data_ptr() for x in layout.tensors]
        addresses.add(layout.block_table.data_ptr())
        step.assert_right(engine.run(step, batch), **meant())
    assert len(addresses) == bool(tokens) + bool(prompts)
    assert engine.backend.get_cuda_graph_seq_len_fill_value() == 1


def test_graphs_that_were_not_prepared_are_refused(requests_of, engine_of):
    engine = engine_of(requests := requests_of(3, 16, "cpu"))
    with pytest.raises(ValueError, match="no CUDA graph was prepared for 3 requests, but for up to 0"):
        engine.backend.init_forward_metadata_out_graph(engine.batch(requests.step([3, 2, 1])))
    engine.backend.init_cuda_graph_state(2, 2)
    with pytest.raises(ValueError, match="no CUDA graph was prepared for 3 requests, but for up to 2"):
        engine.backend.init_forward_metadata_out_graph(engine.batch(requests.step([1, 1, 1])), in_capture=True)


@pytest.mark.parametrize(
    ("layer", "meaning"),
    [
        ({"sliding_window_size": 8}, {"mask": window(8, 0)}),
        ({"sliding_window_size": None}, {}),
        ({"logit_cap": 2.0}, {"score_mod": softcap(2.0)}),
    ],
    ids=str,
)
def test_layers(layer, meaning, device, requests_of, engine_of):
    requests = requests_of(3, 16, device)
    engine = engine_of(requests, layer=layer)
    for lengths in ([40, 2, 7], [1, 20, 1], [1, 1, 1]):
        step = requests.step(lengths)
        batch = engine.batch(step)
        engine.backend.init_forward_metadata(batch)
        step.assert_right(engine.run(step, batch), **meant(**meaning))


@pytest.mark.parametrize(("left", "mask"), [(-1, None), (8, window(8, 8))])
def test_layers_that_see_all_keys(left, mask, device, sglang, requests_of, engine_of):
    requests = requests_of(2, 16, device)
    kind = sglang.layers.AttentionType.DECODER_BIDIRECTIONAL
    engine = engine_of(requests, layer={"sliding_window_size": left, "attn_type": kind})
    step = requests.step([30, 7])
    batch = engine.batch(step)
    engine.backend.init_forward_metadata(batch)
    step.assert_right(engine.run(step, batch), mask=mask, scale=0.3)


def test_sinks_and_values_of_another_head_dim(device, requests_of, engine_of):
    sinks = torch.tensor([0.5, -1.0, 3.0, 0.0], device=device)
    requests = requests_of(2, 16, device, d_v=16)
    engine = engine_of(requests)
    for lengths in ([30, 7], [1, 1]):
        step = requests.step(lengths)
        batch = engine.batch(step)
        engine.backend.init_forward_metadata(batch)
        step.assert_right(engine.run(step, batch, sinks=sinks, q_rope=None), **meant(sink=sinks))


def test_keys_of_another_layer(requests_of, engine_of):
    """Written before, by that layer, or by an operator that fuses the write."""
    requests = requests_of(2, 16, "cpu")
    engine = engine_of(requests)
    step = requests.step([30, 7])
    batch = engine.batch(step)
    engine.backend.init_forward_metadata(batch)
    step.assert_right(engine.run(step, batch), **meant())
    step.k_new.fill_(torch.nan)
    step.assert_right(engine.run(step, batch, save=False), **meant())
    step.assert_right(engine.run(step, batch, save_kv_cache=False), **meant())


@pytest.mark.parametrize("lengths", [[30, 7], [1, 1]])
def test_lse(lengths, requests_of, engine_of):
    requests = requests_of(2, 16, "cpu")
    engine = engine_of(requests)
    step = requests.step(lengths)
    batch = engine.batch(step)
    engine.backend.init_forward_metadata(batch)
    given = step.q, step.k_new, step.v_new
    out, lse = engine.backend.forward(*given, engine.layer, batch, return_lse=True)
    wanted = attention(step.q, step.keys, step.values, layout=step.layout(), return_lse=True, **meant())
    assert out.shape == (sum(lengths), 4, 32)
    assert lse.shape == (sum(lengths), 4)
    assert torch.allclose(lse, wanted.lse.T, atol=1e-5)


def test_deterministic_inference(sglang, requests_of, engine_of):
    """The same bits for a chunk as for single tokens."""
    sglang.server.exact = True
    found = []
    for steps in ([[9, 4]], [[7, 3], [1, 1], [1, 0]]):
        requests = requests_of(2, 16, "cpu")
        torch.manual_seed(0)
        q = torch.randn(2, 9, 4, 32)
        engine = engine_of(requests)
        rows: list[list[torch.Tensor]] = [[], []]
        for lengths in steps:
            before = [*requests.cached]
            step = requests.step(lengths)
            given = torch.cat([x[start : start + n] for x, start, n in zip(q, before, lengths, strict=True)])
            batch = engine.batch(step)
            engine.backend.init_forward_metadata(batch)
            assert engine.backend.forward_metadata.num_splits == 1
            out = engine.backend.forward(given, step.k_new, step.v_new, engine.layer, batch)
            for i, part in enumerate(out.split(lengths)):
                rows[i].append(part)
        found.append(torch.cat([*rows[0], *rows[1]]))
    assert torch.equal(*found)


def test_idle_batches(requests_of, engine_of):
    engine = engine_of(requests := requests_of(2, 16, "cpu"))
    step = requests.step([0, 0])
    nobody = {"batch_size": 0, "req_pool_indices": torch.zeros(0).long(), "seq_lens": torch.zeros(0).long()}
    batch = engine.batch(step, "IDLE", **nobody)
    engine.backend.init_forward_metadata(batch)
    assert engine.backend.forward(step.q.flatten(1), None, None, engine.layer, batch).shape == (0, 128)


SERVERS = {
    "MLA": {"use_mla_backend": True},
    "a cache of torch.float8_e4m3fn for a model of torch.float32": {"kv_cache_dtype": torch.float8_e4m3fn},
    "a unified pool": {"kv_index_translator": type("Translator", (), {"is_translating": True})},
    "a pool of its own for windows (pass --disable-hybrid-swa-memory)": {
        "token_to_kv_pool": type("SWAKVPool", (), {"swa_layer_nums": 3})
    },
}


@pytest.mark.parametrize("words", SERVERS)
def test_servers_that_are_refused(words, requests_of, engine_of):
    with pytest.raises(Unsupported) as raised:
        engine_of(requests_of(1, 16, "cpu"), **SERVERS[words])
    assert f"saccade's SGLang backend does not run {words}" in str(raised.value)


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("cp", 2, "context parallelism"), ("dcp", True, "context parallelism"),
        ("speculation", "EAGLE", "speculative decoding"),
    ],
)  # fmt: skip
def test_arguments_that_are_refused(field, value, words, sglang, requests_of, engine_of):
    setattr(sglang.server, field, value)
    with pytest.raises(Unsupported, match=words):
        engine_of(requests_of(1, 16, "cpu"))


@pytest.mark.parametrize(
    ("layer", "words"),
    [
        ({"is_cross_attention": True}, "cross attention"),
        ({"attn_type": "ENCODER_ONLY"}, "encoders' attention"),
        ({"logit_cap": 3.0, "logit_capping_method": "sigmoid"}, "logit_capping_method='sigmoid'"),
        ({"pos_encoding_mode": "ALIBI"}, "pos_encoding_mode='ALIBI'"),
        ({"xai_temperature_len": 8}, "xai_temperature_len"),
    ],
    ids=str,
)
def test_layers_that_are_refused(layer, words, sglang, requests_of, engine_of):
    if "attn_type" in layer:
        layer = {"attn_type": sglang.layers.AttentionType[layer["attn_type"]]}
    engine = engine_of(requests := requests_of(1, 16, "cpu"), layer=layer)
    step = requests.step([3])
    batch = engine.batch(step)
    engine.backend.init_forward_metadata(batch)
    with pytest.raises(Unsupported, match=f"does not run {words}.* of layer 5"):
        engine.backend.forward(step.q, step.k_new, step.v_new, engine.layer, batch)


def test_what_else_is_refused(requests_of, engine_of):
    engine = engine_of(requests := requests_of(1, 16, "cpu"))
    step = requests.step([3])
    with pytest.raises(Unsupported, match="not TARGET_VERIFY"):
        engine.backend.init_forward_metadata(engine.batch(step, "TARGET_VERIFY"))
    with pytest.raises(Unsupported, match="without speculation, not EXTEND"):
        engine.backend.init_forward_metadata(engine.batch(step, spec_info=object()))
    engine.backend.init_forward_metadata(batch := engine.batch(step))
    with pytest.raises(Unsupported, match="does not know k_rope, score_mod of layer 5"):
        engine.backend.forward(
            step.q, step.k_new, step.v_new, engine.layer, batch, k_rope=step.q, score_mod=len, sinks=None
        )
