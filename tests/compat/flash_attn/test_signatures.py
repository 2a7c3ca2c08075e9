"""Names, order and defaults of flash-attn's functions, written down from flash-attn 2.8.4, 3 and 4.0.0b36."""

from __future__ import annotations

import inspect

import pytest

from saccade.compat import flash_attn
from saccade.compat import flash_attn_cute as version_4
from saccade.compat import flash_attn_interface as version_3
from saccade.compat.flash_attn import bert_padding, flash_attn_interface

TAIL = (
    "dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, "
    "deterministic=False, return_attn_probs=False"
)
LENGTHS = "cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k"
SHARED = "dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes"
GRADIENTS = "dout, q, k, v, out, softmax_lse, dq, dk, dv"
PUBLIC = {
    "flash_attn_func": f"q, k, v, {TAIL}",
    "flash_attn_qkvpacked_func": f"qkv, {TAIL}",
    "flash_attn_kvpacked_func": f"q, kv, {TAIL}",
    "flash_attn_varlen_func": f"q, k, v, {LENGTHS}, {TAIL}, block_table=None",
    "flash_attn_varlen_qkvpacked_func": f"qkv, cu_seqlens, max_seqlen, {TAIL}",
    "flash_attn_varlen_kvpacked_func": f"q, kv, {LENGTHS}, {TAIL}",
    "flash_attn_with_kvcache": (
        "q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None, "
        "cache_batch_idx=None, cache_leftpad=None, block_table=None, softmax_scale=None, causal=False, "
        "window_size=(-1, -1), softcap=0.0, rotary_interleaved=True, alibi_slopes=None, num_splits=0, "
        "return_softmax_lse=False"
    ),
}
PRIVATE = {
    "_flash_attn_forward": f"q, k, v, {SHARED}, return_softmax",
    "_flash_attn_varlen_forward": (
        f"q, k, v, {LENGTHS}, dropout_p, softmax_scale, causal, window_size_left=-1, window_size_right=-1, "
        "softcap=0.0, alibi_slopes=None, return_softmax=False, block_table=None, leftpad_k=None, seqused_k=None, "
        "zero_tensors=False, num_splits=0"
    ),
    "_flash_attn_backward": f"{GRADIENTS}, {SHARED}, deterministic, rng_state=None",
    "_flash_attn_varlen_backward": (
        f"{GRADIENTS}, {LENGTHS}, {SHARED}, deterministic, rng_state=None, zero_tensors=False"
    ),
}
PADDING = {
    "index_first_axis": "input, indices",
    "index_put_first_axis": "values, indices, first_axis_dim",
    "index_first_axis_residual": "input, indices",
    "unpad_input": "hidden_states, attention_mask, unused_mask=None",
    "unpad_input_for_concatenated_sequences": "hidden_states, attention_mask_in_length",
    "pad_input": "hidden_states, indices, batch, seqlen",
}
DESCALES = "q_descale=None, k_descale=None, v_descale=None"
AHEAD = f"softmax_scale=None, causal=False, qv=None, {DESCALES}, window_size=(-1, -1), attention_chunk=0, softcap=0.0"
TUNING = "num_splits=1, pack_gqa=None, deterministic=False, sm_margin=0, return_attn_probs=False"
VERSION_3 = {
    "flash_attn_func": f"q, k, v, {AHEAD}, {TUNING}",
    "flash_attn_varlen_func": f"q, k, v, {LENGTHS}, seqused_q=None, seqused_k=None, {AHEAD}, {TUNING}",
    "flash_attn_qkvpacked_func": (
        f"qkv, softmax_scale=None, causal=False, {DESCALES}, window_size=(-1, -1), attention_chunk=0, softcap=0.0, "
        "deterministic=False, num_heads_q=None, sm_margin=0, return_attn_probs=False"
    ),
    "flash_attn_with_kvcache": (
        "q, k_cache, v_cache, k=None, v=None, qv=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None, "
        "cache_batch_idx=None, cache_leftpad=None, page_table=None, cu_seqlens_q=None, cu_seqlens_k_new=None, "
        f"max_seqlen_q=None, rotary_seqlens=None, {DESCALES}, softmax_scale=None, causal=False, window_size=(-1, -1), "
        "attention_chunk=0, softcap=0.0, rotary_interleaved=True, scheduler_metadata=None, num_splits=0, "
        "pack_gqa=None, sm_margin=0, return_softmax_lse=False"
    ),
    "flash_attn_combine": "out_partial, lse_partial, out=None, out_dtype=None",
    "get_scheduler_metadata": (
        "batch_size, max_seqlen_q, max_seqlen_k, num_heads_q, num_heads_kv, headdim, cache_seqlens, "
        "qkv_dtype=torch.bfloat16, headdim_v=None, cu_seqlens_q=None, cu_seqlens_k_new=None, cache_leftpad=None, "
        "page_size=None, max_seqlen_k_new=0, causal=False, window_size=(-1, -1), attention_chunk=0, has_softcap=False, "
        "num_splits=0, pack_gqa=None, sm_margin=0"
    ),
}
ASKED = "softmax_scale=None, causal=False, window_size=(None, None), learnable_sink=None, softcap=0.0"
FUNCTIONS = "pack_gqa=None, deterministic=False, score_mod=None, score_mod_bwd=None, mask_mod=None"
GATHERED = "gather_bwd_recompute_p=False, gather_bwd_token_chunk=None"
VERSION_4 = {
    "flash_attn_func": (
        f"q, k, v, qv=None, gather_kv_indices=None, {ASKED}, num_splits=1, {FUNCTIONS}, aux_tensors=None, "
        f"aux_scalars=None, block_sparse_tensors=None, block_sparse_tensors_bwd=None, return_lse=False, {GATHERED}"
    ),
    "flash_attn_varlen_func": (
        "q, k, v, qv=None, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None, "
        f"min_seqlen_k=None, seqused_q=None, seqused_k=None, gather_kv_indices=None, page_table=None, {ASKED}, "
        f"num_splits=1, {FUNCTIONS}, block_sparse_tensors=None, aux_tensors=None, aux_scalars=None, return_lse=False, "
        f"scheduler_metadata=None, seqlen_k_per_split=None, disable_scheduler_metadata=False, {GATHERED}"
    ),
}


def told(function):
    """The parameters without their annotations."""
    parameters = inspect.signature(function).parameters.values()
    assert all(parameter.kind == parameter.POSITIONAL_OR_KEYWORD for parameter in parameters)
    return ", ".join(str(parameter.replace(annotation=parameter.empty)) for parameter in parameters)


@pytest.mark.parametrize(
    ("module", "name", "wanted"),
    [
        *((flash_attn, *item) for item in PUBLIC.items()),
        *((flash_attn_interface, *item) for item in (PUBLIC | PRIVATE).items()),
        *((version_3, *item) for item in VERSION_3.items()),
        *((version_4, *item) for item in VERSION_4.items()),
        *((bert_padding, *item) for item in PADDING.items()),
    ],
    ids=lambda value: getattr(value, "__name__", value).rsplit(".", 1)[-1] if not isinstance(value, str) else value,
)
def test_signature(module, name, wanted):
    assert told(getattr(module, name)) == wanted


def test_exports():
    assert set(flash_attn.__all__) == set(PUBLIC)
    assert set(version_3.__all__) == set(VERSION_3)
    assert set(version_4.__all__) == set(VERSION_4)
    assert set(flash_attn_interface.__all__) == set(PUBLIC | PRIVATE)
    assert flash_attn.__version__ == "2.8.4"
