"""Whole models of transformers on a GPU: training beside eager attention in float32, and generation.

In bfloat16 a model on saccade may be as far from float32 as eager attention in bfloat16 is, by half more. In float32 it
generates eager attention's tokens. `test_models.py` has the same work on a CPU.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from saccade.integrations.transformers import FOR_BATCHES, NAME, register

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.gpu

DEVICE = "cuda"
FIVE = int(transformers.__version__.partition(".")[0]) >= 5
SIZES = {
    "vocab_size": 512, "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 1024, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
BOTH_KINDS = {"sliding_window": 32, "layer_types": ["sliding_attention", "full_attention"]}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {},
    "mistral": {"sliding_window": 32},
    "gemma3_text": BOTH_KINDS,
    "gpt_oss": BOTH_KINDS | {"num_local_experts": 2, "num_experts_per_tok": 2},  # none is chosen by a rounded score
    "t5": {
        "d_model": 256, "d_kv": 64, "d_ff": 256, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0,
        "dropout_rate": 0.0,
    },
}  # fmt: skip
DECODERS = [name for name in MODELS if name != "t5"]
LENGTHS = 40, 7, 65, 30
"""Of packed sequences."""


def model_of(name: str, implementation: str = "eager", dtype: torch.dtype = torch.float32) -> Any:
    register()
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(name, **SIZES | MODELS[name])
    kind = transformers.AutoModelForSeq2SeqLM if name == "t5" else transformers.AutoModelForCausalLM
    model = kind.from_config(config, attn_implementation=implementation)
    for parameter in model.parameters():  # queries and keys, so that attention is no average; sinks and biases too
        torch.nn.init.normal_(parameter, std=0.08)
    return model.to(DEVICE, dtype).train()


def tokens_of(b: int, s: int) -> Tensor:
    return torch.randint(3, 512, (b, s), generator=torch.Generator().manual_seed(1)).to(DEVICE)


def plain(model: Any) -> dict[str, Any]:
    return {"input_ids": tokens_of(3, 142)}


def left_padded(model: Any) -> dict[str, Any]:
    given = plain(model)
    seen = torch.ones_like(given["input_ids"])
    seen[1, :37], seen[2, :100] = 0, 0
    return given | {"attention_mask": seen}


def right_padded(model: Any) -> dict[str, Any]:
    given = left_padded(model)
    return given | {"attention_mask": given["attention_mask"].flip(1)}


def by_positions(model: Any) -> dict[str, Any]:
    positions = torch.cat([torch.arange(n) for n in LENGTHS])[None]
    return {"input_ids": tokens_of(1, sum(LENGTHS)), "position_ids": positions.to(DEVICE)}


def by_offsets(model: Any) -> dict[str, Any]:
    """As DataCollatorWithFlattening tells them."""
    ends = torch.tensor([0, *LENGTHS]).cumsum(0).int().to(DEVICE)
    offsets = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": 65, "max_length_k": 65}
    return by_positions(model) | offsets


def checkpointed(model: Any) -> dict[str, Any]:
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return left_padded(model)


def compiled(model: Any) -> dict[str, Any]:
    """Masks are made in the compiled region."""
    if model.config._attn_implementation == NAME:
        torch._dynamo.reset()
        model.forward = torch.compile(model.forward, fullgraph=FIVE or model.config.model_type != "gpt_oss")
    return left_padded(model)


TRAINED = {f.__name__: f for f in (plain, left_padded, right_padded, by_positions, by_offsets, checkpointed, compiled)}


def trained(model: Any, inputs: dict[str, Any]) -> dict[str, Tensor]:
    """Logits of the tokens that are seen, and the gradients of all parameters. Eager attention computes packed
    sequences one by one."""
    seen = inputs.get("attention_mask")
    if model.config.is_encoder_decoder:
        inputs, seen = inputs | {"decoder_input_ids": tokens_of(3, 50)}, None
    if "position_ids" in inputs and model.config._attn_implementation == "eager":
        alone = inputs["input_ids"].split(LENGTHS, 1)
        logits = torch.cat([model(x, use_cache=False).logits for x in alone], 1)
    else:
        logits = model(**inputs, use_cache=False).logits
    logits = logits if seen is None else logits[seen.bool()]
    logits.float().square().mean().backward()
    named = model.named_parameters()  # of experts, sums over many tokens or few would be compared
    gradients = {name: p.grad for name, p in named if p.grad is not None and "experts" not in name}
    return {"logits": logits.detach()} | gradients


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("task", TRAINED)
def test_training_is_as_near_to_float32_as_eager_attention(name: str, task: str) -> None:
    if name == "t5" and (task in ("by_positions", "by_offsets") or not FIVE):
        pytest.skip("no positions, and in transformers 4 no attention but its own")
    if name == "gpt_oss" and task == "by_positions":
        pytest.skip("transformers' model tells no mask of the positions, and its sequences see one another")
    cases = ("eager", torch.float32), ("eager", torch.bfloat16), (NAME, torch.bfloat16)
    exact, theirs, ours = (trained(x, TRAINED[task](x)) for x in (model_of(name, *case) for case in cases))
    assert ours.keys() == theirs.keys() == exact.keys()

    def apart(found: dict[str, Tensor], key: str) -> float:
        return (found[key].float() - exact[key]).square().mean().sqrt().item()

    for key, right in exact.items():
        rounding = torch.finfo(torch.bfloat16).eps / 2 * right.square().mean().sqrt().item()
        assert apart(ours, key) <= 1.5 * (apart(theirs, key) + rounding), key


def generated(model: Any, **options: Any) -> Tensor:
    """Of prompts that are padded at their left."""
    inputs = {name: x[:, -60:] for name, x in left_padded(model).items()}
    words = {"max_new_tokens": 24, "min_new_tokens": 24, "do_sample": False} | options
    return model.eval().generate(**inputs, **words)


def replayed(model: Any) -> Tensor:
    """Into a static cache, whose steps transformers compiles with mode="reduce-overhead": again, by the same graphs."""
    generated(model, cache_implementation="static")
    return generated(model, cache_implementation="static")


def drafted(model: Any, prompt: Tensor, **options: Any) -> Tensor:
    return model.eval().generate(prompt, max_new_tokens=24, do_sample=False, **options)


def assisted(model: Any) -> Tensor:
    """Drafts of a model that agrees now and then; of one prompt, as transformers asks for."""
    assistant = model_of("llama", model.config._attn_implementation).eval()
    return drafted(model, tokens_of(1, 60), assistant_model=assistant)


def looked_up(model: Any) -> Tensor:
    """Drafts out of the prompt."""
    return drafted(model, tokens_of(1, 20).repeat(1, 3), prompt_lookup_num_tokens=4)


GENERATED: dict[str, Callable[[Any], Tensor]] = {
    "dynamic cache": generated,
    "static cache": replayed,
    "static cache, not compiled": lambda model: generated(model, cache_implementation="static", disable_compile=True),
    "beams": lambda model: generated(model, num_beams=3),
    "assisted": assisted,
    "looked up": looked_up,
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("task", GENERATED)
def test_tokens_are_those_of_eager_attention(name: str, task: str) -> None:
    if name == "t5" and task in ("assisted", "looked up"):
        pytest.skip("the assistant is a decoder")
    with torch.no_grad():
        right = GENERATED[task](model_of(name))
        torch._dynamo.reset()
        found = GENERATED[task](model_of(name, NAME))
    torch.testing.assert_close(found, right)


@pytest.mark.skipif(not FIVE, reason="compiled steps and block tables are of transformers 5")
@pytest.mark.parametrize("level", [0, 1], ids=["eager", "compiled"])
@pytest.mark.parametrize("name", DECODERS)
def test_continuous_batching(name: str, level: int) -> None:
    """Prompts of many lengths; where no layer has a window, later tokens go by block tables."""
    prompts = [tokens_of(1, n)[0].tolist() for n in (5, 40, 150, 33, 1, 64)]
    words = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": -1, "pad_token_id": 0}
    model = model_of(name).eval()
    with torch.no_grad():
        alone = [model.generate(tokens_of(1, len(x)), **words)[0, len(x) :].tolist() for x in prompts]
    model._compatible_flash_implementations = [FOR_BATCHES]
    model.set_attn_implementation(FOR_BATCHES)
    torch._dynamo.reset()
    options = {"num_blocks": 64, "max_batch_tokens": 128, "max_requests_per_batch": 8, "default_compile_level": level}
    options |= dict.fromkeys(("page_size", "block_size"), 32)  # one name for it in newer versions, one in older ones
    if name == "gpt_oss":  # transformers' loop over its experts reads which are hit, which no capture may
        options["use_cuda_graph"] = False
    config = transformers.ContinuousBatchingConfig
    taken = inspect.signature(config).parameters
    results = model.generate_batch(
        inputs=prompts,
        generation_config=transformers.GenerationConfig(**words),
        continuous_batching_config=config(**{name: x for name, x in options.items() if name in taken}),
    )
    found = {tuple(x.prompt_ids): list(x.generated_tokens) for x in results.values()}
    assert [found[tuple(x)] for x in prompts] == alone, [x.error for x in results.values()]


def test_a_trainer_with_a_flattening_collator(tmp_path: Any) -> None:
    """Its offsets on saccade, its positions on eager attention: the same losses."""
    pytest.importorskip("accelerate")
    examples = [{"input_ids": tokens_of(1, n)[0].tolist()} for n in LENGTHS * 6]

    def losses(implementation: str) -> list[float]:
        model = model_of("mistral", implementation)
        model.config.use_cache = False
        offsets = implementation == NAME
        trainer = transformers.Trainer(
            model,
            transformers.TrainingArguments(
                output_dir=str(tmp_path), per_device_train_batch_size=4, max_steps=6, logging_steps=1, report_to=[],
                learning_rate=1e-3, save_strategy="no", disable_tqdm=True,
            ),
            data_collator=transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=offsets),
            train_dataset=copy.deepcopy(examples),
        )  # fmt: skip
        trainer.train()
        return [row["loss"] for row in trainer.state.log_history if "loss" in row]

    right, found = losses("eager"), losses(NAME)
    assert len(found) == 6
    assert found == pytest.approx(right, rel=1e-4)
