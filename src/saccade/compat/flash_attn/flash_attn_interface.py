"""Everything that `flash_attn.flash_attn_interface` has, the private functions too."""

from saccade.compat.flash_attn.func import flash_attn_func, flash_attn_kvpacked_func, flash_attn_qkvpacked_func
from saccade.compat.flash_attn.kv_cache import flash_attn_with_kvcache
from saccade.compat.flash_attn.private import (
    _flash_attn_backward,
    _flash_attn_forward,
    _flash_attn_varlen_backward,
    _flash_attn_varlen_forward,
)
from saccade.compat.flash_attn.varlen import (
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)

__all__ = [
    "_flash_attn_backward", "_flash_attn_forward", "_flash_attn_varlen_backward", "_flash_attn_varlen_forward",
    "flash_attn_func", "flash_attn_kvpacked_func", "flash_attn_qkvpacked_func", "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func", "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]  # fmt: skip
