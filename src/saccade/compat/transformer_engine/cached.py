"""Calls with inference parameters: masks that a cache has, and what it cannot."""

from __future__ import annotations

from torch import Tensor

from saccade.compat.transformer_engine.call import Call, WrongCall
from saccade.compat.transformer_engine.inference import InferenceParams
from saccade.compat.transformer_engine.step import Step
from saccade.compat.transformer_engine.visibility import Visible, bounds
from saccade.dispatch import Unsupported
from saccade.masks import window

MASK_TYPES = "padding", "padding_causal", "padding_causal_bottom_right"


def cached(call: Call, layer: int | None, q: Tensor, k: Tensor) -> tuple[Step, Visible]:
    """What a call with inference_params does.

    Raises:
        WrongCall: masks, lengths and shapes that do not fit one another.
        Unsupported: windows that are aligned at the top left.
    """
    params, kind = call.inference_params, call.attn_mask_type
    if not isinstance(params, InferenceParams):
        raise WrongCall(
            "inference_params must be a saccade.compat.transformer_engine.InferenceParams, got "
            f"{type(params).__module__}.{type(params).__qualname__}"
        )
    if kind not in MASK_TYPES:
        raise WrongCall(f"inference_params needs an attn_mask_type of {', '.join(MASK_TYPES)}, got {kind!r}")
    aligned = call.window_size or call.core_attention_bias_type == "alibi"
    if kind == "padding" and call.bottom_right_diagonal is False and aligned:
        raise Unsupported(
            "DotProductAttention: bottom_right_diagonal=False with inference_params: beside a cache, windows and ALiBi "
            "are aligned at the bottom right; leave it away"
        )
    for name in ("q", "kv"):
        padded = getattr(call, f"cu_seqlens_{name}_padded")
        if padded is not None and padded is not getattr(call, f"cu_seqlens_{name}"):
            raise Unsupported(
                f"DotProductAttention: cu_seqlens_{name}_padded with inference_params: a step's sequences stand end to "
                "end in thd; put tokens that are not in use behind the last one, or give bshd"
            )
    if q.shape[:-2] != k.shape[:-2]:
        raise WrongCall(
            f"queries and new keys of a step must be the same tokens, got {tuple(q.shape)}, {tuple(k.shape)}"
        )
    sequences = None if call.cu_seqlens_q is None else len(call.cu_seqlens_q) - 1
    made = Step(params, layer, call.order, q.shape, sequences, call.num_splits or None)
    left, right = bounds(kind, call.window_size)
    mask = None if left is None and right is None else window(left, right)
    longest = made.s or call.max_seqlen_q or max(made.lengths)
    shape = made.b, longest, params.max_sequence_length
    return made, Visible(made.layout, mask, None, None, made.before.seqused_k, right == 0, True, shape)
