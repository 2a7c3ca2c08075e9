"""xformers' `memory_efficient_attention` and its biases by saccade: the names of xformers 0.0.35, on CPUs too.

    from saccade.compat.xformers import memory_efficient_attention
    from saccade.compat.xformers.attn_bias import BlockDiagonalCausalMask

Biases of an installed xformers work as well as these. More than there: float64, any head dim, gradients of every bias
that is a tensor, heads that share keys without `expand`. Source: https://github.com/facebookresearch/xformers
"""

from saccade.compat.xformers import attn_bias
from saccade.compat.xformers.attn_bias import AttentionBias, LowerTriangularMask
from saccade.compat.xformers.ops import (
    memory_efficient_attention,
    memory_efficient_attention_backward,
    memory_efficient_attention_forward,
    memory_efficient_attention_forward_requires_grad,
)

__version__ = "0.0.35"
"""The version whose interface this is."""

__all__ = [
    "AttentionBias", "LowerTriangularMask", "attn_bias", "memory_efficient_attention",
    "memory_efficient_attention_backward", "memory_efficient_attention_forward",
    "memory_efficient_attention_forward_requires_grad",
]  # fmt: skip
