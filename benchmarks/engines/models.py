"""Models for engines: published shapes with fewer layers, and random weights for which attention matters."""

from __future__ import annotations

import math
import zlib
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

VOCABULARY = 32768
"""Of every model: a real one would take the share of time of many of the layers that are cut."""
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    # Llama-3.1-8B, Qwen3-14B, Gemma 2 9B, Gemma 3 12B, gpt-oss-20b, DeepSeek V3 (its dense layers)
    "llama": ("llama", {"layers": 8, "hidden": 4096, "inner": 14336, "heads": 32, "key_heads": 8, "d": 128}),
    "qwen3": ("qwen3", {"layers": 8, "hidden": 5120, "inner": 17408, "heads": 40, "key_heads": 8, "d": 128}),
    "gemma2": ("gemma2", {"layers": 8, "hidden": 3584, "inner": 14336, "heads": 16, "key_heads": 8, "d": 256}),
    "gemma3": ("gemma3_text", {"layers": 6, "hidden": 3840, "inner": 15360, "heads": 16, "key_heads": 8, "d": 256}),
    "gpt_oss": ("gpt_oss", {"layers": 4, "hidden": 2880, "inner": 2880, "heads": 64, "key_heads": 8, "d": 64}),
    "deepseek": ("deepseek_v3", {"layers": 4, "hidden": 7168, "inner": 18432, "heads": 128, "key_heads": 128, "d": 64}),
    "tiny": ("llama", {"layers": 2, "hidden": 256, "inner": 512, "heads": 4, "key_heads": 2, "d": 64}),
}
"""transformers' name of the model, and its sizes; windows, caps and sinks are those of transformers' defaults."""
WHOLE = {"llama": 32, "qwen3": 40, "gemma2": 42, "gemma3": 48, "gpt_oss": 24, "deepseek": 61}
"""Layers of the published models."""
LATENT_ROW: dict[str, int] = {"deepseek": 576}
"""Numbers of a token in a cache of latents."""


def config(name: str, layers: int | None = None) -> Any:
    """transformers' configuration of a model of `SHAPES`."""
    transformers: Any = import_module("transformers")
    kind, sizes = SHAPES[name]
    dense = {"first_k_dense_replace": layers or sizes["layers"]} if name in LATENT_ROW else {}
    return transformers.AutoConfig.for_model(
        kind,
        num_hidden_layers=layers or sizes["layers"],
        hidden_size=sizes["hidden"],
        intermediate_size=sizes["inner"],
        num_attention_heads=sizes["heads"],
        num_key_value_heads=sizes["key_heads"],
        head_dim=sizes["d"],
        vocab_size=VOCABULARY,
        max_position_embeddings=32768,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        **dense,
    )


def cache_bytes(name: str, layers: int | None, width: int) -> int:
    """What a token takes in a cache whose numbers have `width` bytes."""
    sizes = SHAPES[name][1]
    row = LATENT_ROW[name] if name in LATENT_ROW else sizes["key_heads"] * sizes["d"] * 2
    return (layers or sizes["layers"]) * row * width


def save(name: str, layers: int | None, folder: Path, device: str) -> None:
    """Writes the model, in bfloat16. Queries and keys are large enough that rows attend to few keys."""
    transformers: Any = import_module("transformers")
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(config(name, layers), dtype=torch.bfloat16)
    for parameter_name, parameter in model.named_parameters():
        if (std := _std(parameter_name, parameter, name)) is None:
            continue
        generator = torch.Generator(parameter.device).manual_seed(zlib.crc32(parameter_name.encode()))
        parameter.data.normal_(0, std, generator=generator)
    model.save_pretrained(folder)


def _std(parameter_name: str, parameter: Tensor, name: str) -> float | None:
    """None: as transformers made it, such as norms of one."""
    if "sinks" in parameter_name:
        return 1.0
    if parameter.dim() < 2:
        return None
    if "embed" in parameter_name:  # which Gemma multiplies by the root of the width
        return 1 / math.sqrt(parameter.shape[-1]) if "gemma" in name else 1.0
    if any(x in parameter_name for x in ("q_b_proj", "kv_b_proj")):
        return 0.04
    return 0.03 if any(x in parameter_name for x in ("q_proj", "k_proj", "v_proj")) else 0.02


class Exact:
    """Log-probabilities of tokens by transformers' eager attention in float32."""

    def __init__(self, folder: Path, device: str) -> None:
        transformers: Any = import_module("transformers")
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        )
        self.model = model.to(device).eval()

    @torch.no_grad()
    def __call__(self, tokens: list[int], start: int) -> list[float]:
        """Of the tokens from `start` on, each after those before it."""
        ids = torch.tensor([tokens], device=self.model.device)
        scores = self.model(ids, use_cache=False, logits_to_keep=len(tokens) - start + 1).logits[0, :-1].float()
        chosen = ids[0, start:, None]
        return scores.log_softmax(-1).gather(1, chosen)[:, 0].tolist()
