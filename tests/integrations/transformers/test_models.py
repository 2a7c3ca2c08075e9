"""Models of transformers, tiny ones with random weights, on saccade and on their own eager attention.

Logits and all gradients are compared, for every batch row and every token that is no padding. By default each task
runs on one model, drawn with a fixed seed; with `--everything` each runs on all of them.
"""

from __future__ import annotations

import random
from contextlib import nullcontext
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from saccade.integrations.transformers import FOR_BATCHES, NAME, StructuredMask, attention, register

transformers = pytest.importorskip("transformers")

FIVE = int(transformers.__version__.partition(".")[0]) >= 5
SIZES = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 4},
    "gemma2": {"sliding_window": 4, "attn_logit_softcapping": 2.0},
    "gemma3_text": {"sliding_window": 4},
    "qwen3": {},
    "gpt_oss": {"sliding_window": 4, "num_local_experts": 2, "num_experts_per_tok": 1},
    "llama4_text": {"num_local_experts": 2, "intermediate_size_mlp": 64, "attention_chunk_size": 4},
    "t5": {
        "d_model": 64,
        "d_kv": 16,
        "d_ff": 64,
        "num_layers": 2,
        "num_heads": 4,
        "decoder_start_token_id": 0,
        "dropout_rate": 0.0,
    },
}
TOKENS = torch.randint(3, 60, (3, 9), generator=torch.Generator().manual_seed(0))
PADDED = {
    "left": torch.tensor([[1] * 9, [0] * 3 + [1] * 6, [0] * 7 + [1] * 2]),
    "right": torch.tensor([[1] * 9, [1] * 5 + [0] * 4, [1] * 2 + [0] * 7]),
    "holes": torch.tensor([[1] * 9, [1, 1, 0, 0, 1, 1, 1, 0, 1], [1] * 8 + [0]]),
}


class Cell(NamedTuple):
    """A model and what it does."""

    model: str
    task: str


def trained(model, tokens=TOKENS, seen=None, call=None, **inputs):
    """The logits of the tokens that are seen, and the gradients of all parameters."""
    if model.config.is_encoder_decoder:
        inputs = {"attention_mask": seen, "decoder_input_ids": TOKENS[: len(tokens), :7], **inputs}
        seen = torch.ones(len(tokens), 7)
    elif seen is not None:
        inputs = {"attention_mask": seen, **inputs}
    model.zero_grad()
    logits = (model if call is None else call)(tokens, use_cache=False, **inputs).logits
    logits = logits if seen is None else logits[seen.bool()]
    logits.square().mean().backward()
    return logits.detach(), *(x.grad for x in model.parameters() if x.grad is not None)


def generated(model, seen=None, **options):
    options = {"max_new_tokens": 7, "do_sample": False, "min_new_tokens": 7, **options}
    with torch.no_grad():
        return (model.generate(TOKENS, attention_mask=PADDED["left"] if seen is None else seen, **options),)


def plain(model):
    return trained(model)


def left_padding(model):
    return trained(model, seen=PADDED["left"])


def right_padding(model):
    return trained(model, seen=PADDED["right"])


def holes(model):
    return trained(model, seen=PADDED["holes"])


def packed(model):
    """Several sequences in each batch row, told by their positions."""
    position_ids = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 5, 6, 0, 0], [0, 1, 2, 3, 4, 5, 6, 7, 8]])
    return trained(model, position_ids=position_ids)


def mask_4d(model):
    """Of the user, added to the scores; the encoder's is the decoder's too, so its rows see the same."""
    generator = torch.Generator().manual_seed(1)

    def added(s_q, s_k):
        seen = torch.rand(3, 1, s_q, s_k, generator=generator) > 0.4
        seen |= torch.eye(s_q, s_k, dtype=torch.bool)
        return torch.where(seen, 0.0, torch.finfo(torch.float32).min)

    if model.config.is_encoder_decoder:
        return trained(model, attention_mask=added(1, 9), decoder_attention_mask=added(7, 7))
    return trained(model, attention_mask=added(9, 9))


def checkpointing(model):
    model.train()
    model.gradient_checkpointing_enable()
    try:
        return trained(model, seen=PADDED["left"])
    finally:
        model.gradient_checkpointing_disable()
        model.eval()


def without_experts(model):
    """The host chooses GPT-OSS's experts in transformers 4, which no one graph can: they pass on what they get."""
    if model.config.model_type == "gpt_oss" and not FIVE:
        for layer in model.model.layers:
            layer.mlp.experts.forward = lambda hidden, **_: hidden


def fullgraph(model):
    """Masks are made in the compiled region."""
    torch._dynamo.reset()
    without_experts(model)
    eager = model.config._attn_implementation == "eager"
    call = model if eager else torch.compile(model, fullgraph=True, backend="aot_eager")
    return trained(model, seen=PADDED["left"], call=call)


def generate(model):
    return generated(model)


def static_cache(model):
    return generated(model, cache_implementation="static", disable_compile=True)


def static_cache_fullgraph(model):
    """As generation compiles it; masks are made outside."""
    torch._dynamo.reset()
    without_experts(model)
    if model.config._attn_implementation != "eager":
        model.forward = torch.compile(model.forward, fullgraph=True, backend="aot_eager")
    try:
        return static_cache(model)
    finally:
        vars(model).pop("forward", None)


def chunked_prefill(model):
    """The prompt in pieces, each after a cache that holds the ones before."""
    logits, seen, encoded = [], PADDED["left"], {}
    with torch.no_grad():
        if model.config.is_encoder_decoder:
            encoded = {"encoder_outputs": model.encoder(TOKENS, attention_mask=seen), "attention_mask": seen}
            cache = transformers.EncoderDecoderCache(transformers.DynamicCache(), transformers.DynamicCache())
        else:
            cache = transformers.DynamicCache(config=model.config)
        for start, stop in ((0, 4), (4, 5), (5, 9)):
            if encoded:
                inputs = {"decoder_input_ids": TOKENS[:, start:stop], **encoded}
            else:
                inputs = {"input_ids": TOKENS[:, start:stop], "attention_mask": seen[:, :stop]}
            logits.append(model(**inputs, past_key_values=cache).logits)
    whole = torch.cat(logits, 1)
    return (whole if encoded else whole[seen.bool()],)


PROMPTS = [[5, 6, 7, 8, 9], [10, 11, 12], [20, 21, 22, 23, 24, 25, 26, 27, 28]]


def generate_batch(model):
    """Continuous batching; what generate gives for each prompt alone, or transformers 4, which differs there under
    windows, for batches by its own attention."""
    config = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": -1, "pad_token_id": 0}
    eager = model.config._attn_implementation == "eager"
    if FIVE and eager:
        with torch.no_grad():
            alone = [model.generate(torch.tensor([x]), **config, min_new_tokens=5)[0, len(x) :] for x in PROMPTS]
        return (torch.stack(alone),)
    if FIVE:
        # A model may name the kernels that it takes alone.
        model._compatible_flash_implementations = [FOR_BATCHES]
    model.set_attn_implementation(FOR_BATCHES if FIVE else "eager_paged" if eager else NAME)
    results = batched(model, **config)
    by_prompt = {tuple(x.prompt_ids): torch.tensor(x.generated_tokens) for x in results.values()}
    return (torch.stack([by_prompt[tuple(x)] for x in PROMPTS]),)


def batched(model, **config):
    """The results by request; its cache is small."""
    memory, options = nullcontext(), {}
    if FIVE:
        pages = {"page_size": 4, "num_blocks": 64, "max_batch_tokens": 64}
        options["continuous_batching_config"] = transformers.ContinuousBatchingConfig(**pages)
    else:
        from transformers.generation.continuous_batching.cache import PagedAttentionMemoryHandler

        # It asks a GPU.
        memory = patch.object(PagedAttentionMemoryHandler, "get_available_memory", lambda *_: 1 << 24)
    with memory:
        config = transformers.GenerationConfig(**config)
        return model.generate_batch(inputs=PROMPTS, generation_config=config, **options)


def block_tables(model):
    """Continuous batching of transformers 5 as on a GPU: tokens after the prompt go by block tables."""
    from transformers.generation.continuous_batching import initialization

    tables, written = [], attention._written
    with (
        patch.object(initialization, "ensure_decode_fast_path_is_available", lambda *_: None),
        patch.object(attention, "_written", lambda *rest: tables.append(1) or written(*rest)),
    ):
        result = generate_batch(model)
    assert bool(tables) == (model.config._attn_implementation != "eager")
    return result


TASKS = {
    function.__name__: function
    for function in (
        plain, left_padding, right_padding, holes, packed, mask_4d, checkpointing, fullgraph, generate, static_cache,
        static_cache_fullgraph, chunked_prefill, generate_batch, block_tables,
    )
}  # fmt: skip
WITHOUT_WINDOWS = {"llama", "qwen3", "llama4_text"}
"""Transformers has block tables for models whose layers all see everything."""
WITHOUT_CHUNKS = {"llama4_text": {"layer_types": ["full_attention"] * 2, "attention_chunk_size": 64}}
"""Transformers has no chunks in continuous batching."""


def runs(cell):
    """Whether transformers has the task; what it has not is refused, see below."""
    if cell.model == "t5":  # without positions, and no decoder alone
        return FIVE and cell.task not in ("packed", "generate_batch", "block_tables")
    return cell.task != "block_tables" or (FIVE and cell.model in WITHOUT_WINDOWS)


def cells():
    return [cell for cell in (Cell(model, task) for model in MODELS for task in TASKS) if runs(cell)]


def pytest_generate_tests(metafunc):
    if "cell" in metafunc.fixturenames:
        chosen, draw = cells(), random.Random(0)
        if not metafunc.config.getoption("--everything"):
            by_task = [[cell for cell in chosen if cell.task == task] for task in TASKS]
            chosen = [draw.choice(group) for group in by_task if group]
        metafunc.parametrize("cell", chosen, ids="-".join)


@pytest.fixture
def made():
    """Makes a tiny model of a name, on its eager attention."""
    register()

    def make(name, attention="eager", **changes):
        torch.manual_seed(0)
        config = transformers.AutoConfig.for_model(name, **SIZES | MODELS[name] | changes)
        kind = transformers.AutoModelForSeq2SeqLM if name == "t5" else transformers.AutoModelForCausalLM
        model = kind.from_config(config, attn_implementation=attention).eval()
        for parameter in model.parameters():  # biases and sinks too
            torch.nn.init.normal_(parameter, std=0.2)
        return model

    return make


def test_like_eager(cell, made, monkeypatch):
    calls, plain_attention = [], attention.attention
    monkeypatch.setattr(attention, "attention", lambda *args, **kw: calls.append(1) or plain_attention(*args, **kw))
    changes = WITHOUT_CHUNKS.get(cell.model, {}) if cell.task in ("generate_batch", "block_tables") else {}
    model = made(cell.model, **changes)
    wanted = TASKS[cell.task](model)
    assert not calls
    model.set_attn_implementation(NAME)
    found = TASKS[cell.task](model)
    assert calls
    assert len(found) == len(wanted)
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_no_mask_of_rows_by_keys(made, monkeypatch):
    """At any length: masks hold intervals."""
    masks = []
    forward = attention._dense_mask
    monkeypatch.setattr(attention, "_dense_mask", lambda given, *rest: masks.append(given) or forward(given, *rest))
    for name in ("mistral", "llama4_text"):
        model = made(name)
        model.set_attn_implementation(NAME)
        left_padding(model)
    assert masks
    assert all(isinstance(mask, StructuredMask) and not mask.mask.block_sparse for mask in masks)


def test_chunks_have_no_continuous_batching(made):
    """Transformers refuses them: 5 raises, 4 reports it and has no results."""
    model = made("llama4_text", FOR_BATCHES if FIVE else NAME)
    with pytest.raises(ValueError, match="chunked_attention") if FIVE else nullcontext():
        assert not batched(model, max_new_tokens=2)


@pytest.mark.skipif(FIVE, reason="of transformers 4")
def test_t5_of_transformers_4(made):
    """Its attention is its own, whatever is asked: it says so when a model is switched, and computes the same."""
    model = made("t5")
    wanted = plain(model)
    model.set_attn_implementation(NAME)
    assert model.config._attn_implementation == "eager"
    for ours, theirs in zip(plain(made("t5", NAME)), wanted, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.skipif(not FIVE, reason="of transformers 5")
def test_t5_has_no_sequences_end_to_end(made):
    """A bias for each row and key says nothing of sequences, whether offsets or a cache bring them."""
    model = made("t5", NAME)
    with pytest.raises(ValueError, match="position_bias and cu_seq_lens_q do not go together"):
        trained(model, cu_seq_lens_q=torch.tensor([0, 9, 27]).int(), cu_seq_lens_k=torch.tensor([0, 9, 27]).int())
    with pytest.raises(ValueError, match="not supported for continuous batching"):
        batched(model, max_new_tokens=2)
    model.set_attn_implementation(FOR_BATCHES)
    results = batched(model, max_new_tokens=2).values()
    assert all("position_bias and cu_seq_lens_q do not go together" in x.error for x in results)


@pytest.mark.parametrize("way", ["call", "configuration"])
def test_weights_are_refused(made, way):
    model = made("llama")
    model.set_attn_implementation(NAME)
    ask = {
        "call": lambda: model(TOKENS, output_attentions=True),
        "configuration": lambda: setattr(model.config, "output_attentions", True),
    }[way]
    with pytest.raises(ValueError, match="output_attentions"):
        ask()


def test_offsets_of_a_collator(made):
    """DataCollatorWithFlattening with return_flash_attn_kwargs=True; a model without a cache finds the same sequences
    by their positions."""
    model = made("mistral")
    model.set_attn_implementation(NAME)
    examples = [{"input_ids": TOKENS[i, :n].tolist()} for i, n in enumerate((4, 9, 2))]
    collate = transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=True)
    batch = {name: x for name, x in collate(examples).items() if name != "labels"}
    assert "cu_seq_lens_q" in batch
    found = model(**batch, use_cache=False).logits[0]
    alone = [model(torch.tensor([x["input_ids"]])).logits[0] for x in examples]
    torch.testing.assert_close(found, torch.cat(alone))


def test_gradients_of_each_sample(made):
    """Numbers of a mask that vmap maps over cannot be read: each key is tested."""
    model = made("mistral", NAME)
    weights = {name: x.detach() for name, x in model.named_parameters()}

    def loss(weights, tokens, seen):
        found = torch.func.functional_call(
            model, weights, (tokens[None],), {"attention_mask": seen[None], "use_cache": False}
        )
        return (found.logits[0] * seen[:, None]).square().mean()

    seen = PADDED["left"]
    together = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))(weights, TOKENS, seen)
    for i, row in enumerate(seen):
        alone = torch.func.grad(loss)(weights, TOKENS[i], row)
        for name, x in alone.items():
            torch.testing.assert_close(together[name][i], x, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", ["fake", "meta"] if FIVE else ["fake"])  # transformers 4 itself runs no meta tensors
def test_shapes_alone(kind, made):
    """As estimators of memory run models."""
    model, seen = made("mistral", NAME), PADDED["left"]
    if kind == "meta":
        logits = model.to("meta")(TOKENS.to("meta"), attention_mask=seen.to("meta"), use_cache=False).logits
    else:
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            given = mode.from_tensor(TOKENS), mode.from_tensor(seen)
            logits = model(given[0], attention_mask=given[1], use_cache=False).logits
    assert logits.shape == (3, 9, 64)


def test_a_model_that_loses_the_mask(made, monkeypatch):
    """Doge passes a mask of its own, and leaves out transformers' where that is a BlockMask."""
    monkeypatch.setitem(MODELS, "doge", {})
    model = made("doge", NAME)
    with pytest.raises(ValueError, match=r'DogeAttention passes a mask of its own.*"sdpa" or "eager"'):
        model(TOKENS, use_cache=False)


@pytest.mark.skipif(not FIVE, reason="these models of transformers 4 make their own masks")
@pytest.mark.parametrize("name", ["bloom", "xglm"])
def test_models_that_work_on_the_mask_themselves(name, made, monkeypatch):
    monkeypatch.setitem(MODELS, name, {"d_model": 64, "attention_heads": 4} if name == "xglm" else {})
    with pytest.raises(NotImplementedError, match="this model works on its mask by itself"):
        made(name, NAME)(TOKENS, attention_mask=PADDED["left"], use_cache=False)


def test_saved_and_loaded_by_name(made, tmp_path):
    made("llama").save_pretrained(tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation=NAME)
    assert model.config._attn_implementation == NAME
    assert model(TOKENS).logits.isfinite().all()
