"""FlashAttention-2's functions by saccade: the names, arguments and results of flash-attn 2.8, on CPUs too.

    from saccade.compat.flash_attn import flash_attn_func, flash_attn_varlen_func
    from saccade.compat.flash_attn.bert_padding import pad_input, unpad_input

More than there: float32 and float64, any head dim, gradients of the LSE and of ALiBi's slopes, dropout with softcap,
pages of any size. Source: https://github.com/Dao-AILab/flash-attention
"""

from saccade.compat.flash_attn.flash_attn_interface import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
)

__version__ = "2.8.4"
"""The version whose interface this is."""

__all__ = [
    "flash_attn_func", "flash_attn_kvpacked_func", "flash_attn_qkvpacked_func", "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func", "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]  # fmt: skip
