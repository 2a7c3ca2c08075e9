"""What users import stands where it stood."""

from __future__ import annotations

import importlib

import pytest

PUBLIC = {
    "saccade": "attention explain causal window prefix documents interval mask_mod block_mask selected "
    "selected_blocks alibi softcap "
    "relative_bias t5_bias bias temperature compose Dense Packed Paged Descale Partial Scored merge append_kv "
    "quantize Unsupported",
    "saccade.nn": "Attention",
    "saccade.distributed": "plan ContextPlan Piece sharding estimates",
    "saccade.testing": "check Case Inputs Report",
    "saccade.testing.accuracy": "check",
    "saccade.testing.cases": "Case NAMED MODELS",
    "saccade.testing.selfcheck": "main",
    "saccade.compat.sdpa": "scaled_dot_product_attention",
    "saccade.compat.flex": "flex_attention create_block_mask",
    "saccade.compat.torch_varlen": "varlen_attn varlen_attn_out AuxRequest",
    "saccade.compat.flash_mla": "flash_mla_sparse_fwd flash_mla_with_kvcache get_mla_metadata",
    "saccade.compat.install": "install",
    "saccade.compat.cudnn": "",
    "saccade.compat.flash_attn": "flash_attn_func",
    "saccade.compat.flash_attn.flash_attn_interface": "",
    "saccade.compat.flash_attn.bert_padding": "",
    "saccade.compat.flash_attn_interface": "flash_attn_func flash_attn_with_kvcache",
    "saccade.compat.flash_attn_cute": "flash_attn_func flash_attn_varlen_func",
    "saccade.compat.transformer_engine": "DotProductAttention InferenceParams get_attention_backend CallArguments",
    "saccade.compat.xformers": "memory_efficient_attention",
    "saccade.compat.xformers.attn_bias": "LowerTriangularMask BlockDiagonalCausalMask AttentionBias",
    "saccade.integrations.torch": "activate restore",
    "saccade.integrations.transformers": "register attention_forward attention_mask_of StructuredMask",
    "saccade.integrations.megatron": "CoreAttention",
    "saccade.integrations.vllm": "plugin register",
    "saccade.integrations.sglang": "plugin register",
}
"""Modules that the docs name, and what they name in them."""
ENGINES = {"saccade.integrations.transformers": "transformers"}
"""What a module imports at once."""


@pytest.mark.parametrize("module", PUBLIC)
def test_it_is_there(module: str) -> None:
    if library := ENGINES.get(module):
        pytest.importorskip(library)
    found = importlib.import_module(module)
    lacking = [name for name in PUBLIC[module].split() if not hasattr(found, name)]
    assert not lacking


def test_errors_have_the_name_that_users_import() -> None:
    import saccade

    assert f"{saccade.Unsupported.__module__}.{saccade.Unsupported.__qualname__}" == "saccade.Unsupported"
