"""saccade: fused attention for PyTorch, in pure Python.

>>> import torch, saccade
>>> q, k, v = torch.randn(1, 8, 256, 64), torch.randn(1, 2, 256, 64), torch.randn(1, 2, 256, 64)
>>> saccade.attention(q, k, v, mask=saccade.causal()).shape
torch.Size([1, 8, 256, 64])
"""

from saccade.api import Explanation, attention, explain, plan
from saccade.call.descale import Descale
from saccade.call.partial import Partial, Scored, merge
from saccade.call.spec import Spec
from saccade.layouts import Dense, LatentCache, Packed, Paged
from saccade.masks import Mask, causal, documents, interval, mask_mod, prefix, selected, selected_blocks, window
from saccade.ops.block_mask import block_mask
from saccade.ops.dispatch import Plan, Unsupported
from saccade.ops.kv_cache import append_kv
from saccade.ops.quantization import Quantized, quantize
from saccade.scores import (
    CacheInfo,
    ScoreMod,
    alibi,
    bias,
    cache_info,
    compose,
    relative_bias,
    softcap,
    t5_bias,
    temperature,
)

__version__ = "0.1.0"

__all__ = [
    "CacheInfo", "Dense", "Descale", "Explanation", "LatentCache", "Mask", "Packed", "Paged", "Partial", "Plan",
    "Quantized", "ScoreMod", "Scored", "Spec", "Unsupported", "alibi", "append_kv", "attention", "bias", "block_mask",
    "cache_info", "causal", "compose", "documents", "explain", "interval", "mask_mod", "merge", "plan", "prefix",
    "quantize", "relative_bias", "selected", "selected_blocks", "softcap", "t5_bias", "temperature", "window",
]  # fmt: skip
