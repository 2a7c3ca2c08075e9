"""Megatron-core's attention by saccade: a class for `SelfAttentionSubmodules.core_attention`.

    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from saccade.integrations.megatron import CoreAttention

    spec = get_gpt_layer_local_spec()
    spec.submodules.self_attention.submodules.core_attention = CoreAttention

Source: https://docs.nvidia.com/megatron-core/developer-guide/latest/ (megatron-core 0.16).
"""

from __future__ import annotations

from contextlib import nullcontext
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from saccade.call.partial import Scored
from saccade.compat.transformer_engine import DotProductAttention
from saccade.util.arguments import Unsupported

__all__ = ["CoreAttention"]

_PACKED = (
    "qkv_format", "cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded", "max_seqlen_q",
    "max_seqlen_kv",
)  # fmt: skip
"""What a call reads of PackedSeqParams, besides the context parallel groups."""
_OF_SEQUENCES = {"causal": "padding_causal", "no_mask": "padding"}
"""Mask types of sequences end to end, whose lengths are theirs."""


class CoreAttention(DotProductAttention):
    """`softmax(mask(scale q k^T) + bias) v` of Megatron-core's layers, by
    `saccade.compat.transformer_engine.DotProductAttention`.

    Args:
        config: a TransformerConfig: heads, groups, kv_channels, dropout, window_size with window_attn_skip_freq,
            softmax_type, qk_clip, log_max_attention_logit, deterministic_mode. apply_query_key_layer_scaling is not
            read: it divides scores by a number and multiplies them by it again, which float32 has no need of.
        layer_number: from 1 on.
        attn_mask_type: an AttnMaskType.
        attention_type: "self" or "cross".
        attention_dropout: config's when None.
        softmax_scale: 1/sqrt(d) when None.
        k_channels: d, where it is not kv_channels; v_channels: d_v.
        num_splits: not read: keys of these calls are not split.
        cp_comm_type: not read.
        pg_collection: its `tp` is the tensor parallel group; Megatron's own when None.

    Forward takes what Megatron gives: query (s_q, b, h_q, d), key and value (s_k, b, h_k, d), or with PackedSeqParams
    of "thd" (t, h, d); an attention_mask that is True where an element is masked; an attention_bias that broadcasts to
    (b, h_q, s_q, s_k) and gets a gradient. It returns (s_q, b, h_q d_v) or (t, h_q d_v). `current_max_attn_logits`
    holds the largest score of each head, (h_q), where config asks for it.

    Raises:
        Unsupported: context parallelism, FP8; or no backend runs the call.
        ValueError: what `DotProductAttention` refuses.
    """

    def __init__(
        self, config: Any, layer_number: int, attn_mask_type: Any, attention_type: str,
        attention_dropout: float | None = None, softmax_scale: float | None = None, k_channels: int | None = None,
        v_channels: int | None = None, num_splits: int | None = None, cp_comm_type: str | None = "p2p",
        pg_collection: Any = None,
    ) -> None:  # fmt: skip
        if config.context_parallel_size > 1:
            raise Unsupported(
                f"CoreAttention: context_parallel_size={config.context_parallel_size}: context parallelism is not "
                "supported"
            )
        if getattr(config, "fp8_dot_product_attention", False):
            raise Unsupported("CoreAttention: fp8_dot_product_attention: FP8 is not supported")
        apart = k_channels is not None and v_channels is not None
        if pg_collection is None:
            state = import_module("megatron.core.parallel_state")
            tensor_parallel = state.get_tensor_model_parallel_group(check_initialized=False)
        else:
            tensor_parallel = pg_collection.tp
        super().__init__(
            num_attention_heads=config.num_attention_heads,
            kv_channels=(k_channels, v_channels) if apart else config.kv_channels,  # pyright: ignore[reportArgumentType]
            num_gqa_groups=config.num_query_groups,
            attention_dropout=config.attention_dropout if attention_dropout is None else attention_dropout,
            attn_mask_type=attn_mask_type.name,
            window_size=config.window_size if _has_window(config, layer_number) else None,
            sequence_parallel=config.sequence_parallel,
            tp_size=config.tensor_model_parallel_size,
            get_rng_state_tracker=_rng_tracker,
            tp_group=tensor_parallel,
            layer_number=layer_number,
            attention_type=attention_type,
            softmax_scale=softmax_scale,
            softmax_type=getattr(config, "softmax_type", "vanilla"),
            return_max_logit=any(getattr(config, name, False) for name in ("qk_clip", "log_max_attention_logit")),
        )
        self.config, self.tensor_parallel = config, tensor_parallel
        self.current_max_attn_logits: Tensor | None = None

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, attn_mask_type: Any = None,
        attention_bias: Tensor | None = None, packed_seq_params: Any = None, num_splits: int | None = None,
    ) -> Tensor:  # fmt: skip
        packed: dict[str, Any] = {}  # and the bias
        if packed_seq_params is not None:
            packed = {name: getattr(packed_seq_params, name, None) for name in _PACKED}
            group = getattr(packed_seq_params, "cp_group", None)
            if group is not self.cp_group:  # a module is slow to set
                self.set_context_parallel_group(group)
        mask = self.defaults.attn_mask_type if attn_mask_type is None else attn_mask_type.name
        if packed.get("qkv_format") == "thd":
            mask = _OF_SEQUENCES.get(mask, mask)
        elif mask == "no_mask" and self.config.window_size is not None and len(query) == 1:
            mask = "causal_bottom_right"  # a step of decoding, in which a window ends at the last key
        if attention_bias is not None:
            packed |= {"core_attention_bias_type": "post_scale_bias", "core_attention_bias": attention_bias}
        if mask is not None and "padding" not in mask and mask != "arbitrary":
            attention_mask = None  # which these do not read
        found = super().forward(query, key, value, attention_mask, attn_mask_type=mask, **packed)
        if isinstance(found, Tensor):
            return found
        out, largest = found
        before = self.current_max_attn_logits
        self.current_max_attn_logits = largest if before is None else torch.maximum(before, largest)
        return out

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, keywords: dict[str, Any]) -> Tensor | Scored:
        deterministic = True if self.config.deterministic_mode else None
        return super()._attend(q, k, v, keywords | {"deterministic": deterministic})

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> Any:
        """Megatron's checkpoint of the parameter `softmax_offset`, each rank with its own heads."""
        sharded = import_module("megatron.core.transformer.utils").make_sharded_tensors_for_checkpoint
        groups = {"tp_group": self.tensor_parallel, "dp_cp_group": (metadata or {}).get("dp_cp_group")}
        own = self.state_dict(prefix="", keep_vars=True)
        return sharded(own, prefix, {"softmax_offset": 0}, sharded_offsets, **groups)


def _has_window(config: Any, layer_number: int) -> bool:
    """Whether a layer, counted from 1, has config's window: all, all but each n-th, or those of a list."""
    every = getattr(config, "window_attn_skip_freq", None)
    if not config.window_size or every is None:
        return bool(config.window_size)
    return layer_number % every != 0 if isinstance(every, int) else bool(every[layer_number - 1])


def _rng_tracker() -> Any:
    """Megatron's states for dropout, one for each tensor parallel rank."""
    tracker = import_module("megatron.core.tensor_parallel").get_cuda_rng_tracker()
    return tracker if tracker.is_initialized() else SimpleNamespace(fork=nullcontext)
