"""What vLLM 0.33.0 gives to a backend and asks of it: names, parameters and fields, without what they do."""

import enum
from dataclasses import dataclass
from typing import Any


class AttentionType(enum.StrEnum):
    DECODER = "decoder"
    ENCODER = "encoder"
    ENCODER_ONLY = "encoder_only"
    ENCODER_DECODER = "encoder_decoder"


class AttentionCGSupport(enum.Enum):
    ALWAYS = 3
    UNIFORM_BATCH = 2
    UNIFORM_SINGLE_TOKEN_DECODE = 1
    NEVER = 0


class AttentionBackend:
    supported_kv_cache_dtypes = ()

    @staticmethod
    def get_name(): ...

    @staticmethod
    def get_impl_cls(): ...

    @staticmethod
    def get_builder_cls(): ...

    @classmethod
    def supports_head_size(cls, head_size): ...

    @classmethod
    def supports_kv_cache_dtype(cls, kv_cache_dtype):
        return kv_cache_dtype in cls.supported_kv_cache_dtypes

    @classmethod
    def supports_attn_type(cls, attn_type):
        return attn_type == AttentionType.DECODER

    @classmethod
    def supports_sink(cls): ...

    @classmethod
    def supports_sliding_window(cls): ...

    @classmethod
    def supports_non_causal(cls): ...

    @classmethod
    def supports_batch_invariance(cls): ...

    @classmethod
    def supports_combination(
        cls, head_size, dtype, kv_cache_dtype, block_size, use_mla, has_sink, use_sparse, use_mm_prefix,
        device_capability,
    ): ...  # fmt: skip


class AttentionMetadata: ...


@dataclass
class CommonAttentionMetadata:
    query_start_loc: Any
    query_start_loc_cpu: Any
    seq_lens: Any
    num_reqs: int
    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    block_table_tensor: Any
    slot_mapping: Any
    causal: Any = True


class AttentionMetadataBuilder:
    def __init__(self, kv_cache_spec, layer_names, vllm_config, device): ...

    def build(self, common_prefix_len, common_attn_metadata, fast_build=False): ...

    def update_block_table(self, metadata, blk_table, slot_mapping): ...

    def build_for_cudagraph_capture(self, common_attn_metadata):
        return self.build(0, common_attn_metadata)

    def update_draft_decode_metadata(self, metadata): ...


class AttentionImpl:
    def __init__(
        self, num_heads, head_size, scale, num_kv_heads=None, alibi_slopes=None, sliding_window=None,
        kv_cache_dtype="auto", logits_soft_cap=None, attn_type=AttentionType.DECODER,
        kv_sharing_target_layer_name=None,
    ): ...  # fmt: skip

    def forward(
        self, layer, query, key, value, kv_cache, attn_metadata, output, output_scale=None, output_block_scale=None
    ): ...


class AttentionBackendEnum(enum.Enum):
    FLASH_ATTN = "vllm.v1.attention.backends.flash_attn.FlashAttentionBackend"
    CUSTOM = None

    def is_overridden(self):
        return self in OVERRIDES

    def get_path(self):
        return OVERRIDES[self]

    def clear_override(self):
        OVERRIDES.pop(self, None)


OVERRIDES = {}


def register_backend(backend, class_path=None, is_mamba=False):
    OVERRIDES[backend] = class_path


class MLAPrefillBackendEnum(enum.Enum):
    CUSTOM = None


PREFILL_OVERRIDES = {}


def register_mla_prefill_backend(backend, class_path=None):
    PREFILL_OVERRIDES[backend] = class_path


def get_current_vllm_config_or_none(): ...


class QueryLenSupport(enum.Enum):
    UNIFORM = "uniform"
    VARLEN = "varlen"


class MLACommonBackend(AttentionBackend): ...


@dataclass
class MLACommonDecodeMetadata:
    block_table: Any
    seq_lens: Any
    dcp_tot_seq_lens: Any


class MLACommonMetadataBuilder(AttentionMetadataBuilder):
    def _build_decode(
        self, block_table_tensor, seq_lens_device, max_seq_len, query_start_loc_cpu, query_start_loc_device,
        num_decode_tokens, max_query_len, dcp_tot_seq_lens_device,
    ):  # fmt: skip
        return MLACommonDecodeMetadata(block_table_tensor, seq_lens_device, dcp_tot_seq_lens_device)


class MLACommonImpl:
    def __init__(
        self, num_heads, head_size, scale, num_kv_heads, alibi_slopes, sliding_window, kv_cache_dtype, logits_soft_cap,
        attn_type, kv_sharing_target_layer_name, q_lora_rank, kv_lora_rank, qk_nope_head_dim, qk_rope_head_dim,
        qk_head_dim, v_head_dim, kv_b_proj, indexer=None, q_pad_num_heads=None,
    ): ...  # fmt: skip

    def forward_mqa(self, q, kv_c_and_k_pe_cache, attn_metadata, layer): ...

    def do_kv_cache_update(
        self, kv_c_normed, k_pe, kv_cache, slot_mapping, kv_cache_dtype, k_scale, skip_scale=False
    ): ...


class SparseMLACommonMetadata(AttentionMetadata): ...


class SparseMLACommonMetadataBuilder(AttentionMetadataBuilder):
    def _init_reorder_batch_threshold(
        self, reorder_batch_threshold=1, supports_spec_as_decode=False, supports_dcp_with_varlen=False
    ):
        self.reorder_batch_threshold = reorder_batch_threshold


class SparseMLACommonImpl:
    def __init__(self, **words): ...

    def _forward_mqa_kernel(self, q, kv_cache, topk_indices, valid_counts, *, layer, block_size, is_decode): ...


def align_blocks_to_rows(spec, rows=1): ...


def flat_kv_row_view(kv_cache, block_size):
    """All rows of memory from the first page's first row to the last page's last one, and rows from page to page."""
    apart = kv_cache.stride(0) // kv_cache.shape[-1]
    rows = (len(kv_cache) - 1) * apart + block_size, kv_cache.shape[-1]
    return kv_cache.as_strided(rows, (rows[1], 1)), apart


class MLAPrefillBackend:
    def run_prefill_new_tokens(self, q, k, v, return_softmax_lse, out=None, output_scale=None): ...

    def run_prefill_context_chunk(self, chunk, q, k, v, out=None): ...
