"""vLLM's classes of latent attention, for DeepSeek's models and others of their kind: see `saccade.integrations.vllm`.

Weights, their absorption into queries and the context of chunks stay vLLM's. Here are the attention over the cache of
latents, `forward_mqa`, and, as the prefill backend `CUSTOM`, that of prompts over keys and values of all heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any, ClassVar

import torch
from torch import Tensor

from saccade.api import attention
from saccade.call.partial import Partial
from saccade.integrations.engine_layers import differences, refuse_differences
from saccade.integrations.vllm import TESTED
from saccade.integrations.vllm.backend import refusal
from saccade.layouts import Packed, Paged
from saccade.masks import Mask, causal
from saccade.ops.kv_cache import append_kv
from saccade.util.arguments import Unsupported

_vllm = import_module("vllm.v1.attention.backend")
_envs = import_module("vllm.envs")
_mla = import_module("vllm.model_executor.layers.attention.mla_attention")
_prefill = import_module("vllm.v1.attention.backends.mla.prefill.base")

DTYPES = [torch.float16, torch.bfloat16, torch.float32]
VALUES = 512
"""Columns of a latent row, which are values too; the rest are rotated."""
MOST_ROWS = 64
"""The most tokens of a request that read latents. More of a prompt read keys and values of all heads, which vLLM makes
of the latents: 34 MFLOP for each key, where a row's scores and sums take 0.28 with latents and 0.08 with these."""


class MLABackend(_mla.MLACommonBackend):
    """Latent rows of 512 values and up to 64 more columns, in pages of any size, in the model's dtype. Not: FP8 caches,
    windows, context parallelism."""

    supported_dtypes: ClassVar[list[torch.dtype]] = DTYPES
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto", "float16", "bfloat16"]

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[MLALayer]:
        return MLALayer

    @staticmethod
    def get_builder_cls() -> type[MLAMetadataBuilder]:
        return MLAMetadataBuilder

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return True

    @classmethod
    def get_preferred_block_size(cls, default_block_size: int) -> int:
        """The rows of a tile on Hopper, which one copy then brings."""
        return max(64, default_block_size)

    @classmethod
    def supports_combination(
        cls, head_size: int, dtype: torch.dtype, kv_cache_dtype: str | None, block_size: int | None, use_mla: bool,
        has_sink: bool, use_sparse: bool, use_mm_prefix: bool, device_capability: Any,
    ) -> str | None:  # fmt: skip
        return refusal(dtype, head_size, device_capability, d_v=VALUES, latent=True)


@dataclass
class MLADecode(_mla.MLACommonDecodeMetadata):
    """A step's requests that read latents, for all layers of a group."""

    layout: Paged
    """The first requests, of equally many tokens."""
    first_rows: int = 0
    """Their tokens, where there are others."""
    rest: Paged | None = None
    """The others, whose tokens lie end to end behind those."""


class MLAMetadataBuilder(_mla.MLACommonMetadataBuilder):
    """Requests of equally many tokens, such as drafts, in one call: only the device reads their lengths, so that a CUDA
    graph replays any other requests. Those of other numbers, such as what is left of prompts whose beginning is cached,
    have a second call."""

    _cudagraph_support: ClassVar[Any] = _vllm.AttentionCGSupport.UNIFORM_BATCH
    query_len_support: ClassVar[Any] = _mla.QueryLenSupport.VARLEN

    def __init__(self, *given: Any, **words: Any) -> None:
        # Which kernel computes a row must not depend on how its prompt was cut, where its bits must not.
        self.reorder_batch_threshold = 1 if _envs.VLLM_BATCH_INVARIANT else MOST_ROWS
        super().__init__(*given, **words)

    def _build_decode(self, **given: Any) -> MLADecode:
        common = vars(super()._build_decode(**given))
        table, used = common["block_table"], common["seq_lens"]
        num_splits = 1 if _envs.VLLM_BATCH_INVARIANT else None
        starts = given["query_start_loc_cpu"]
        lengths = starts.diff()
        others = ((lengths != lengths[0]) & (lengths != 0)).nonzero()  # a graph's padding has no tokens
        if not len(others):
            return MLADecode(**common, layout=Paged(table, used, num_splits=num_splits))
        n = int(others[0])
        rows = int(starts[n])
        offsets = given["query_start_loc_device"][n:] - rows
        first, rest = Paged(table[:n], used[:n], num_splits=num_splits), Paged(table[n:], used[n:], offsets, num_splits)
        return MLADecode(**common, layout=first, first_rows=rows, rest=rest)


class LatentLayer:
    """What layers over all latents and over listed ones have in common; vLLM's base class comes after it. Raises
    Unsupported for a layer with slopes, a window or a soft cap."""

    can_return_lse_for_decode: bool = False
    supports_pcp: bool = False

    def __init__(self, **words: Any) -> None:
        changed = ("alibi_slopes", "sliding_window", "logits_soft_cap")
        if given := [name for name in changed if words.get(name) is not None]:
            raise Unsupported(f"saccade's MLA backend of vLLM takes no {', '.join(given)}: choose another one")
        super().__init__(**words)
        self.supports_quant_query_input = False


class MLALayer(LatentLayer, _mla.MLACommonImpl):
    """One layer: `out = softmax(scale q k^T) v` over latent rows k, whose first columns are v."""

    def forward_mqa(
        self, q: Tensor | tuple[Tensor, Tensor], kv_c_and_k_pe_cache: Tensor, attn_metadata: Any, layer: Any
    ) -> tuple[Tensor, None]:
        """(tokens, h_q, values), of queries (tokens, h_q, d) or their two parts over a cache (pages, page_size, d)."""
        first, rest = attn_metadata.decode.layout, attn_metadata.decode.rest
        whole = joined(q)
        keys = kv_c_and_k_pe_cache[:, :, None]
        cache = keys, keys[..., : self.kv_lora_rank]
        words: dict[str, Any] = {"mask": causal(), "scale": self.scale}
        requests = len(first.seqused_k)
        if rest is None:
            return attention(whole.unflatten(0, (requests, -1)), *cache, layout=first, **words).flatten(0, 1), None
        rows = attn_metadata.decode.first_rows
        out = whole.new_empty(*whole.shape[:2], self.kv_lora_rank)
        one, two = (x[:rows].unflatten(0, (requests, -1)) for x in (whole, out))
        attention(one, *cache, layout=first, out=two, **words)
        attention(whole[rows:], *cache, layout=rest, out=out[rows:], **words)
        return out, None

    def do_kv_cache_update(
        self, kv_c_normed: Tensor, k_pe: Tensor, kv_cache: Tensor, slot_mapping: Tensor, kv_cache_dtype: str,
        k_scale: Tensor, skip_scale: bool = False,
    ) -> None:  # fmt: skip
        """Writes latents (tokens, values) and rotated columns (tokens, 1, d - values) to their slots."""
        if not kv_cache.numel():
            return
        keys, slots = kv_cache[:, :, None], slot_mapping.flatten()
        rows = len(slots)
        rotated, latents = k_pe[:rows].view(rows, 1, -1), kv_c_normed[:rows, None]
        append_kv(
            keys[..., self.kv_lora_rank :],
            keys[..., : self.kv_lora_rank],
            None,
            rotated.to(keys.dtype),
            latents.to(keys.dtype),
            slot_mapping=slots,
        )


def joined(q: Tensor | tuple[Tensor, ...]) -> Tensor:
    """The parts of queries side by side. By 16 bytes: a part that is a view of wider rows is copied element by element,
    which took 41 us of a layer at 128 tokens of 128 heads."""
    if not isinstance(q, tuple):
        return q
    try:
        return torch.cat([x.view(torch.complex128) for x in q], -1).view(q[0].dtype)
    except RuntimeError:  # rows that do not begin at multiples of 16 bytes
        return torch.cat(q, -1)


class MLAPrefill(_prefill.MLAPrefillBackend):
    """Prompts end to end: q and k (t, h, d), v (t, h, d_v)."""

    supported_dtypes: ClassVar[list[torch.dtype]] = DTYPES

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    def run_prefill_new_tokens(
        self, q: Tensor, k: Tensor, v: Tensor, return_softmax_lse: bool, out: Tensor | None = None,
        output_scale: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
        """out (t, h, d_v), and with `return_softmax_lse` the LSE (h, t) too."""
        if output_scale is not None:
            raise Unsupported("saccade's MLA backend of vLLM does not quantize its output: output_scale must be None")
        found = self._over(Packed(self._prefill_metadata.query_start_loc), (q, k, v), causal(), out)
        return (found.out, found.lse) if return_softmax_lse else found.out

    def run_prefill_context_chunk(
        self, chunk: Any, q: Tensor, k: Tensor, v: Tensor, out: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Over keys that are before all rows."""
        found = self._over(Packed(chunk.query_start_loc, chunk.cu_seq_lens), (q, k, v), None, out)
        return found.out, found.lse

    def _over(self, layout: Packed, qkv: tuple[Tensor, ...], mask: Mask | None, out: Tensor | None) -> Partial:
        return attention(*qkv, mask=mask, layout=layout, scale=self.scale, return_lse=True, out=out)


_PAIRS = ((MLABackend, _mla.MLACommonBackend), (MLALayer, _mla.MLACommonImpl), (MLAPrefill, _prefill.MLAPrefillBackend))
refuse_differences("vllm", "vLLM", TESTED, [text for pair in _PAIRS for text in differences(*pair)])
