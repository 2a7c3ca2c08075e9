"""vLLM's classes of an attention backend, over pages: see `saccade.integrations.vllm`. Importing it imports vLLM."""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any, ClassVar

import torch
from torch import Tensor

from saccade.api import attention
from saccade.call.descale import EIGHT_BITS, Descale
from saccade.call.spec import DTYPES, Spec
from saccade.integrations.engine_layers import differences, refuse_differences, score_mod, visible
from saccade.integrations.vllm import TESTED
from saccade.layouts import Paged
from saccade.ops import dispatch
from saccade.ops.kv_cache import append_kv
from saccade.util import hardware
from saccade.util.arguments import Unsupported

_vllm = import_module("vllm.v1.attention.backend")
_envs = import_module("vllm.envs")

CACHE_DTYPES = {
    "auto": None,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}
"""vLLM's words for what a cache holds. Queries have a 16-bit cache's dtype. Beside 8 bits the layer has the scales
`_q_scale`, `_k_scale` and `_v_scale`, and queries have the model's dtype, or 8 bits where vLLM rounds them."""
ALIGNMENT = 8
"""Elements that fill 16 bytes: values begin behind their key's head dim, and rows are read by 16 bytes."""


class VLLMBackend(_vllm.AttentionBackend):
    """What vLLM asks before it takes the backend, and its classes.

    Pages have any size and any of vLLM's layouts. Sliding windows, soft caps, ALiBi, sinks, layers that see all keys,
    shared caches, any head dims up to 512 that are multiples of 8, FP8 caches, and batch invariance, by `num_splits=1`.
    Not: encoders, cross attention, MLA, context parallelism, ranges of images, R-SWA.
    """

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[str]] = list(CACHE_DTYPES)
    forward_includes_kv_cache_update: bool = False

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[VLLMLayer]:
        return VLLMLayer

    @staticmethod
    def get_builder_cls() -> type[VLLMMetadataBuilder]:
        return VLLMMetadataBuilder

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return head_size % ALIGNMENT == 0

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_non_causal(cls) -> bool:
        return True

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return True

    @classmethod
    def supports_combination(
        cls, head_size: int, dtype: torch.dtype, kv_cache_dtype: str | None, block_size: int | None, use_mla: bool,
        has_sink: bool, use_sparse: bool, use_mm_prefix: bool, device_capability: Any,
    ) -> str | None:  # fmt: skip
        """Why no kernel runs such layers, one line for each backend; None where one does. No device is asked, since
        vLLM starts its processes after this."""
        cached = CACHE_DTYPES.get(kv_cache_dtype or "auto")
        eight_bits = cached in EIGHT_BITS
        if not eight_bits and cached not in (None, dtype):
            return f"saccade needs a cache of the model's dtype {dtype} or of 8 bits, not {kv_cache_dtype}"
        layer: dict[str, Any] = {"mask": "causal", "sink": has_sink}
        if cached is not None and eight_bits:
            layer |= {"kv": DTYPES[cached], "aligned": head_size % 16 == 0}
        return refusal(dtype, head_size, device_capability, **layer)


def refusal(dtype: torch.dtype, d: int, device_capability: Any, **given: Any) -> str | None:
    """Why no kernel runs layers over pages, one line for each backend; None where one does, or where vLLM names no
    device that a Spec knows."""
    if device_capability is None or torch.version.hip is not None or dtype not in DTYPES:
        return None
    device = f"sm{device_capability.major}{device_capability.minor}"
    layer: dict[str, Any] = {"aligned": True, **given}
    spec = Spec(DTYPES[dtype], d, layout="paged", device=device, **layer)
    reasons = {name: dispatch.Plan(spec, name).module.SUPPORT.reasons(spec) for name in dispatch.BACKENDS}
    return dispatch.refusal(spec, reasons) if all(reasons.values()) else None


@dataclass
class VLLMMetadata(_vllm.AttentionMetadata):
    """A step's batch, for all layers of a group."""

    layout: Paged
    """Requests and the pages of their keys. Rows of q after the last request are padding, and are not computed."""
    causal: bool
    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    slot_mapping: Tensor

    @property
    def query_start_loc(self) -> Tensor | None:
        return self.layout.cu_seqlens_q

    @property
    def seq_lens(self) -> Tensor:
        return self.layout.seqused_k

    @property
    def block_table(self) -> Tensor:
        return self.layout.block_table


class VLLMMetadataBuilder(_vllm.AttentionMetadataBuilder):
    """Batches of any mixture of prompts, chunks and single tokens, in any order: the device alone reads their lengths,
    so that one CUDA graph replays all of them, and nothing here depends on how many requests there are."""

    _cudagraph_support: ClassVar[Any] = _vllm.AttentionCGSupport.ALWAYS
    reorder_batch_threshold: int | None = None
    supports_update_block_table: bool = True
    supports_draft_decode_metadata_update: bool = True

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.num_splits = 1 if _envs.VLLM_BATCH_INVARIANT else None

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> VLLMMetadata:
        """A shared prefix is read by each of its requests, as any other keys."""
        given = common_attn_metadata
        if isinstance(given.causal, Tensor):
            raise Unsupported(
                f"saccade's vLLM backend takes one `causal` for a batch, not one for each request: "
                f"{tuple(given.causal.shape)} of them"
            )
        layout = Paged(given.block_table_tensor, given.seq_lens, given.query_start_loc, self.num_splits)
        return VLLMMetadata(
            layout=layout, causal=given.causal, num_actual_tokens=given.num_actual_tokens,
            max_query_len=given.max_query_len, max_seq_len=given.max_seq_len, slot_mapping=given.slot_mapping,
        )  # fmt: skip

    def update_block_table(self, metadata: Any, blk_table: Tensor, slot_mapping: Tensor) -> VLLMMetadata:
        """The same batch over another group's pages, with whatever vLLM has noted on it."""
        other = copy(metadata)
        other.layout, other.slot_mapping = replace(metadata.layout, block_table=blk_table), slot_mapping
        return other

    def update_draft_decode_metadata(self, metadata: Any) -> None:
        """Nothing: the metadata holds vLLM's own tensors, and kernels read them in each replay."""


class VLLMLayer(_vllm.AttentionImpl):
    """One layer: `out = softmax(mask(score_mod(scale q k^T)), with sink) v`, keys and values from pages. Raises
    Unsupported for attention types other than decoders', and caches of other dtypes than `CACHE_DTYPES`."""

    def __init__(
        self, num_heads: int, head_size: int, scale: float, num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None, sliding_window: int | None = None, kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None, attn_type: str = _vllm.AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None, sinks: Tensor | None = None,
    ) -> None:  # fmt: skip
        if attn_type != _vllm.AttentionType.DECODER:
            kind = getattr(attn_type, "value", attn_type)
            raise Unsupported(f"saccade's vLLM backend runs decoder attention, not {kind!r}")
        if kv_cache_dtype not in CACHE_DTYPES:
            known = ", ".join(CACHE_DTYPES)
            raise Unsupported(f"saccade's vLLM backend takes kv_cache_dtype {known}, not {kv_cache_dtype!r}")
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.kv_cache_dtype, self.attn_type, self.sinks = kv_cache_dtype, attn_type, sinks
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        cached = CACHE_DTYPES[kv_cache_dtype]
        self.eight_bits = cached if cached in EIGHT_BITS else None
        # As for its FlashAttention-3, vLLM rounds queries to e4m3 then: Hopper's kernels for prompts take 8 bits alone.
        hopper = hardware.name(torch.get_default_device()) == "sm90" and torch.get_default_dtype().itemsize == 2
        self.supports_quant_query_input = hopper and cached is torch.float8_e4m3fn and head_size <= 256
        self.sliding_window = None if sliding_window is None else sliding_window - 1
        floats = {"dtype": torch.float32, "device": torch.get_default_device()}
        slopes = None if alibi_slopes is None else torch.tensor(alibi_slopes, **floats)
        self.alibi_slopes, self.logits_soft_cap = slopes, logits_soft_cap
        self.meaning: dict[bool, dict[str, Any]] = {
            causal: {
                "mask": visible(self.sliding_window, causal),
                "score_mod": score_mod(logits_soft_cap, slopes, causal),
                "scale": self.scale,
                "sink": sinks,
            }
            for causal in (True, False)
        }

    def forward(
        self, layer: Any, query: Tensor, key: Tensor | None, value: Tensor | None, kv_cache: Tensor,
        attn_metadata: VLLMMetadata | None, output: Tensor, output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Writes the requests' rows to `output`, (tokens, h_q, d_v), and no others.

        Args:
            layer: its `_k_scale` and `_v_scale` are what the bytes of an FP8 cache are to be multiplied by, and
                `_q_scale` those of 8-bit queries; float32 tensors, one number or one for each key head.
            query: (tokens, h_q, d); the batch's rows, then padding.
            key: not read, as is value: they are in the cache.
            kv_cache: (pages, h_k, page_size, d + d_v), any strides, uint8 for FP8; empty while vLLM measures memory.
            attn_metadata: None while vLLM measures memory: output is zero then.
        """
        if output_scale is not None or output_block_scale is not None:
            raise Unsupported("saccade's vLLM backend does not quantize its output: output_scale must be None")
        if attn_metadata is None or not kv_cache.numel():
            return output.fill_(0)
        k, v = self._caches(kv_cache)
        layout, meaning = attn_metadata.layout, self.meaning[attn_metadata.causal]
        attention(query, k, v, layout=layout, out=output, descale=self._descale(layer, query), **meaning)
        return output

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Writes the new rows, (tokens, h_k, d) and (tokens, h_k, d_v), to their slots; others are padding."""
        if not kv_cache.numel():
            return
        k, v = self._caches(kv_cache)
        rows = len(slot_mapping)
        if rows != len(key):
            key, value = key[:rows], value[:rows]
        append_kv(k, v, None, key, value, slot_mapping=slot_mapping, descale=self._descale(layer))

    def _descale(self, layer: Any, query: Tensor | None = None) -> Descale | None:
        """What an FP8 cache's bytes stand for."""
        if self.eight_bits is None:
            return None
        of_q = None if query is None or query.dtype not in EIGHT_BITS else _factor(layer._q_scale)
        return Descale(of_q, _factor(layer._k_scale), _factor(layer._v_scale))

    def _caches(self, kv_cache: Tensor) -> tuple[Tensor, Tensor]:
        """(pages, page_size, h_k, d) and (pages, page_size, h_k, d_v) views."""
        if self.eight_bits is not None:
            kv_cache = kv_cache.view(self.eight_bits)
        pages = kv_cache.transpose(1, 2)
        return pages[..., : self.head_size], pages[..., self.head_size :]


def _factor(scale: Tensor) -> Tensor:
    """() or (h_k,), of what a layer has."""
    return scale.reshape(()) if scale.numel() == 1 else scale.flatten()


_PAIRS = (
    (VLLMBackend, _vllm.AttentionBackend),
    (VLLMMetadataBuilder, _vllm.AttentionMetadataBuilder),
    (VLLMLayer, _vllm.AttentionImpl),
)
refuse_differences("vllm", "vLLM", TESTED, [text for pair in _PAIRS for text in differences(*pair)])
