"""Models of transformers that decode into static caches, whose steps it compiles with mode="reduce-overhead"."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from saccade.integrations.transformers import NAME, register

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.gpu

SIZES = {
    "vocab_size": 256, "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 512, "pad_token_id": 0,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "gemma3_text": {"sliding_window": 32},
    "gpt_oss": {"sliding_window": 32, "num_local_experts": 2, "num_experts_per_tok": 1},
}


def model_of(name: str, implementation: str) -> Any:
    register()
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(name, **SIZES, **MODELS[name])
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=implementation)
    return model.to("cuda", torch.float32).eval()


@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("name", MODELS)
def test_tokens_are_those_of_eager_attention(name: str, padded: bool) -> None:
    """Prompt and steps, twice: the second time every graph is a replay."""
    tokens = torch.randint(1, 256, (3, 40), device="cuda")
    seen = torch.ones_like(tokens)
    if padded:
        seen[1, :7] = 0
    keywords: Any = {"attention_mask": seen, "max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False}
    right = model_of(name, "eager").generate(tokens, **keywords)
    model = model_of(name, NAME)
    for _ in range(2):
        torch.testing.assert_close(model.generate(tokens, cache_implementation="static", **keywords), right)
