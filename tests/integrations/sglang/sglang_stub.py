"""What SGLang 0.5.23 gives to a backend and asks of it: names and parameters, without what they do."""

import enum
from dataclasses import dataclass
from typing import Any


class ForwardMode(enum.IntEnum):
    EXTEND = 1
    DECODE = 2
    MIXED = 3
    IDLE = 4
    TARGET_VERIFY = 5

    def is_decode_or_idle(self):
        return self in (ForwardMode.DECODE, ForwardMode.IDLE)

    def is_decode(self):
        return self is ForwardMode.DECODE

    def is_idle(self):
        return self is ForwardMode.IDLE


class AttentionType(enum.Enum):
    DECODER = "decoder"
    DECODER_BIDIRECTIONAL = "decoder_bidirectional"
    ENCODER_ONLY = "encoder_only"


class RadixAttention:
    def __init__(self, num_heads, head_dim, scaling, num_kv_heads, layer_id, logit_cap=0.0, v_head_dim=-1):
        self.tp_q_head_num, self.qk_head_dim, self.v_head_dim, self.layer_id = num_heads, head_dim, v_head_dim, layer_id
        self.scaling, self.logit_cap, self.logit_capping_method = scaling, logit_cap, "tanh"
        self.sliding_window_size, self.xai_temperature_len, self.pos_encoding_mode = -1, -1, "NONE"
        self.is_cross_attention, self.attn_type = False, AttentionType.DECODER
        self.k_scale = self.v_scale = None


class AttentionBackend:
    needs_cpu_seq_lens = True

    def init_forward_metadata(self, forward_batch):
        self.init_forward_metadata_out_graph(forward_batch)
        self.init_forward_metadata_in_graph(forward_batch)

    def init_forward_metadata_out_graph(self, forward_batch, in_capture=False): ...

    def init_forward_metadata_in_graph(self, forward_batch): ...

    def init_cuda_graph_state(self, max_bs, max_num_tokens):
        raise NotImplementedError

    def get_cuda_graph_seq_len_fill_value(self):
        raise NotImplementedError

    def forward(self, q, k, v, layer, forward_batch, save_kv_cache=True, **kwargs):
        if forward_batch.forward_mode.is_idle():
            return q.new_empty(q.shape[0], layer.tp_q_head_num * layer.v_head_dim)
        run = self.forward_decode if forward_batch.forward_mode.is_decode() else self.forward_extend
        return run(q, k, v, layer, forward_batch, save_kv_cache=save_kv_cache, **kwargs)

    def forward_decode(self, q, k, v, layer, forward_batch, save_kv_cache=True, **kwargs): ...

    def forward_extend(self, q, k, v, layer, forward_batch, save_kv_cache=True, **kwargs): ...


@dataclass
class KVWriteLoc:
    loc: Any

    @classmethod
    def for_layer(cls, forward_batch, layer, *, swa_loc=None, full_loc=None):
        return cls(forward_batch.out_cache_loc)


def get_parallel(): ...


def get_exec(): ...


def get_spec(): ...


ATTENTION_BACKENDS = {}
ATTENTION_BACKEND_CHOICES = ["triton", "fa3"]
DETERMINISTIC_ATTENTION_BACKEND_CHOICES = ["triton", "fa3"]
RADIX_SUPPORTED_DETERMINISTIC_ATTENTION_BACKEND = ["triton", "fa3"]


def register_attention_backend(name):
    def decorator(made):
        ATTENTION_BACKENDS[name] = made
        return made

    return decorator
