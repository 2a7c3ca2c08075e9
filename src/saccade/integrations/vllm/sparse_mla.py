"""vLLM's classes of latent attention over listed keys, for models with an indexer, such as DeepSeek V3.2 and GLM-5: see
`saccade.integrations.vllm`.

The indexer, and the way from its lists to slots of the cache, stay vLLM's. Here is the attention over these slots.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any, ClassVar

import torch
from torch import Tensor

from saccade.api import attention
from saccade.integrations.engine_layers import differences, refuse_differences
from saccade.integrations.vllm import TESTED
from saccade.integrations.vllm.mla import LatentLayer, MLABackend, joined
from saccade.layouts import LatentCache, Paged

_vllm = import_module("vllm.v1.attention.backend")
_sparse = import_module("vllm.model_executor.layers.attention.sparse_mla_attention")
_slots = import_module("vllm.v1.attention.backends.mla.sparse_utils")

RECORDS = "fp8_ds_mla"
"""vLLM's word for a cache of FP8 records, `LatentCache(…, "v3.2")`."""


class SparseMLABackend(MLABackend):
    """As `MLABackend`, over the keys that an indexer lists, and over FP8 records too."""

    supported_kv_cache_dtypes: ClassVar[list[str]] = [*MLABackend.supported_kv_cache_dtypes, RECORDS]

    @staticmethod
    def get_impl_cls() -> type[SparseMLALayer]:
        return SparseMLALayer

    @staticmethod
    def get_builder_cls() -> type[SparseMLAMetadataBuilder]:
        return SparseMLAMetadataBuilder

    @classmethod
    def is_sparse(cls) -> bool:
        return True

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        """Blocks are whole rows apart, since a slot counts rows."""
        return _slots.align_blocks_to_rows(spec)


class SparseMLAMetadataBuilder(_sparse.SparseMLACommonMetadataBuilder):
    """vLLM's own. Attention reads the lists alone, so that a CUDA graph replays any other requests of as many rows."""

    metadata_cls = _sparse.SparseMLACommonMetadata
    _cudagraph_support: ClassVar[Any] = _vllm.AttentionCGSupport.UNIFORM_BATCH

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=True)


class SparseMLALayer(LatentLayer, _sparse.SparseMLACommonImpl):
    """One layer: `out = softmax(scale q k^T) v` over the listed latent rows k, whose first columns are v."""

    def _forward_mqa_kernel(
        self, q: Tensor | tuple[Tensor, Tensor], kv_cache: Tensor, topk_indices: Tensor, valid_counts: Tensor, *,
        layer: Any, block_size: int, is_decode: bool,
    ) -> tuple[Tensor, None]:  # fmt: skip
        """(tokens, h_q, values).

        Args:
            q: (tokens, h_q, d), or its two parts.
            kv_cache: (pages, page_size, d), or bytes of records.
            topk_indices: (tokens, n) int32: slots, of which the first `valid_counts` (tokens,) count.
            layer: not read.
            block_size: rows of a page.
            is_decode: whether all are steps of decoding; rows of prompts stand together, since neighbours share keys.
        """
        whole = joined(q)
        rows, _ = _slots.flat_kv_row_view(kv_cache, block_size)
        pages = rows[:, None, None]  # of one row
        records = self.kv_cache_dtype == RECORDS
        keys, values = [LatentCache(pages, "v3.2")] * 2 if records else (pages, pages[..., : self.kv_lora_rank])
        at = 1 if is_decode else 0  # (tokens, 1, …) or (1, tokens, …)
        layout = Paged(slots=topk_indices.unsqueeze(at), seqused_k=valid_counts.unsqueeze(at))
        return attention(whole.unsqueeze(at), keys, values, layout=layout, scale=self.scale).squeeze(at), None


refuse_differences("vllm", "vLLM", TESTED, [*differences(SparseMLALayer, _sparse.SparseMLACommonImpl)])
