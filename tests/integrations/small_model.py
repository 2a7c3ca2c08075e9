"""A small model of transformers on disk, for engines on a CPU to load. Imports nothing before it is called: SGLang's
engine first makes packages that are not there."""

from __future__ import annotations

from importlib import import_module
from typing import Any

SIZES: dict[str, Any] = {
    "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 32,
    "num_key_value_heads": 2, "vocab_size": 512, "max_position_embeddings": 1024, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def saved(kind: str, folder: str, **changes: Any) -> Any:
    """The model of random weights that it saves in the folder. kind: transformers' name; changes: of `SIZES`."""
    torch, transformers = (import_module(x) for x in ("torch", "transformers"))
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **SIZES | changes)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    for name, parameter in model.named_parameters():  # so that rows attend to few keys
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.2 if "q_proj" in name or "k_proj" in name else 0.08)
    model.save_pretrained(folder)
    return model
