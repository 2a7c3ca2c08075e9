"""PyTorch's own attention by saccade, through PyTorch's registry of flash attention implementations.

    from saccade.integrations.torch import activate, restore

Source: https://docs.pytorch.org/docs/stable/nn.attention.html
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import (
    SDPBackend,
    activate_flash_attention_impl,
    current_flash_attention_impl,
    register_flash_attention_impl,
    restore_flash_attention_impl,
)

from saccade import masks, ops
from saccade.api import attention
from saccade.call import check_call
from saccade.compat.torch_varlen import layout_of
from saccade.layouts import Dense, Layout
from saccade.masks import Mask
from saccade.util import hardware
from saccade.util.arguments import Unsupported

__all__ = ["NAME", "activate", "restore"]

NAME = "saccade"
"""The implementation's name in PyTorch's registry."""

# PyTorch's operators of flash attention: their arguments and results, by saccade.
#
# Below autograd: each operator has another for its gradients. What saccade leaves to PyTorch's kernel is Unsupported.
# An operator and its backward refuse the same calls, by what both can see.


_BHSD, _BSHD = Dense(), Dense("bshd")


def sdpa_forward(
    query: Tensor, key: Tensor, value: Tensor, dropout_p: float = 0.0, is_causal: bool = False,
    return_debug_mask: bool = False, *, scale: float | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    """out (b, h_q, s_q, d), lse (b, h_q, s_q), offsets, lengths, two states of the generator, and a debug mask."""
    _refuse(dropout_p, return_debug_mask=return_debug_mask)
    out, lse = _forward(query, key, value, _BHSD, _mask(is_causal), scale)
    return out, lse, None, None, query.shape[2], key.shape[2], *_unused(query)


def sdpa_backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor,
    cum_seq_q: Tensor | None, cum_seq_k: Tensor | None, max_q: int, max_k: int, dropout_p: float, is_causal: bool,
    philox_seed: Tensor, philox_offset: Tensor, *, scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    _refuse(dropout_p)
    return _backward(grad_out, query, key, value, out, logsumexp, _BHSD, _mask(is_causal), scale)


def flash_forward(
    query: Tensor, key: Tensor, value: Tensor, cum_seq_q: Tensor | None, cum_seq_k: Tensor | None, max_q: int,
    max_k: int, dropout_p: float, is_causal: bool, return_debug_mask: bool, *, scale: float | None = None,
    window_size_left: int | None = None, window_size_right: int | None = None, seqused_k: Tensor | None = None,
    block_table: Tensor | None = None, num_splits: int | None = None, out: Tensor | None = None, **others: Any,
) -> tuple[Any, ...]:  # fmt: skip
    """Sequences end to end: out (t_q, h_q, d), lse (h_q, t_q); without offsets (b, s_q, h_q, d), (b, h_q, s_q)."""
    _refuse(dropout_p, return_debug_mask=return_debug_mask, **others)
    layout = _layout(cum_seq_q, cum_seq_k, max_q, max_k, seqused_k, block_table, num_splits)
    mask = _mask(is_causal, window_size_left, window_size_right)
    out, lse = _forward(query, key, value, layout, mask, scale, out)
    return out, lse, *_unused(query)


def flash_forward_inplace(out: Tensor, *arguments: Any, **options: Any) -> Tensor:
    """`flash_forward` to `out`; the LSE alone."""
    return flash_forward(*arguments, out=out, **options)[1]


def flash_backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor,
    cum_seq_q: Tensor | None, cum_seq_k: Tensor | None, max_q: int, max_k: int, dropout_p: float, is_causal: bool,
    rng_state: Tensor, unused: Tensor, *, scale: float | None = None, window_size_left: int | None = None,
    window_size_right: int | None = None, **others: Any,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    _refuse(dropout_p, **others)
    layout = _layout(cum_seq_q, cum_seq_k, max_q, max_k)
    mask = _mask(is_causal, window_size_left, window_size_right)
    return _backward(grad_out, query, key, value, out, logsumexp, layout, mask, scale)


def cpu_forward(
    query: Tensor, key: Tensor, value: Tensor, dropout_p: float = 0.0, is_causal: bool = False, *,
    attn_mask: Tensor | None = None, scale: float | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """out (b, h_q, s_q, d) and lse (b, h_q, s_q), whose memory is (b, s_q, h_q)."""
    _refuse_on_cpu(query, key, dropout_p, is_causal, attn_mask)
    out, lse = _forward(query, key, value, _BHSD, _mask(is_causal), scale)
    return out, _with_heads_inside(lse)


def cpu_backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor, dropout_p: float,
    is_causal: bool, *, attn_mask: Tensor | None = None, scale: float | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """The gradients, whose memory is (b, s, h, d)."""
    _refuse_on_cpu(query, key, dropout_p, is_causal, attn_mask)
    gradients = _backward(grad_out, query, key, value, out, logsumexp, _BHSD, _mask(is_causal), scale)
    return tuple(_with_heads_inside(x) for x in gradients)


_BOTH = ("CPU", "CUDA")
OPERATORS = (
    ("_scaled_dot_product_flash_attention", sdpa_forward, _BOTH),
    ("_scaled_dot_product_flash_attention_backward", sdpa_backward, _BOTH),
    ("_flash_attention_forward", flash_forward, _BOTH),
    ("_flash_attention_forward_no_dropout_inplace", flash_forward_inplace, _BOTH),
    ("_flash_attention_backward", flash_backward, _BOTH),
    ("_scaled_dot_product_flash_attention_for_cpu", cpu_forward, ("CPU",)),
    ("_scaled_dot_product_flash_attention_for_cpu_backward", cpu_backward, ("CPU",)),
)
"""Each operator's name, what runs it, and for which devices."""

SINCE_2_12 = {"_flash_attention_forward_no_dropout_inplace"}


def _forward(
    q: Tensor, k: Tensor, v: Tensor, layout: Layout, mask: Mask | None, scale: float | None, out: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    result, lse = attention(q, k, v, mask=mask, layout=layout, scale=scale, return_lse=True, out=out)
    assert lse is not None
    return result, lse


def _backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, layout: Layout, mask: Mask | None,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    call = check_call(q, k, v, mask=mask, layout=layout, scale=scale, return_lse=True)
    return ops.gradients(call, "auto", dout, None, out, lse)


def _refuse(dropout_p: float, **others: Any) -> None:
    """Dropout has the random numbers of PyTorch's kernel; the others are for it alone."""
    given = [name for name, value in others.items() if value is not None and value is not False]
    if dropout_p or given:
        raise Unsupported(f"{' and '.join([*(['dropout'] if dropout_p else []), *given])} run PyTorch's kernel")


def _refuse_on_cpu(q: Tensor, k: Tensor, dropout_p: float, is_causal: bool, attn_mask: Tensor | None) -> None:
    """Anything but bfloat16 where our tiles are the faster way: for the rest the cpu backend calls PyTorch's kernel."""
    if q.dtype != torch.bfloat16 or hardware.cpu_bf16() != "avx512_bf16":
        raise Unsupported("PyTorch's CPU kernel is the fastest here")
    if is_causal and q.shape[2] != k.shape[2]:
        raise Unsupported("a CPU's causal mask is aligned at the top left")
    _refuse(dropout_p, attn_mask=attn_mask)


def _layout(
    cum_seq_q: Tensor | None, cum_seq_k: Tensor | None, max_q: int, max_k: int, seqused_k: Tensor | None = None,
    block_table: Tensor | None = None, num_splits: int | None = None,
) -> Layout:  # fmt: skip
    if cum_seq_q is not None:
        return layout_of(cum_seq_q, cum_seq_k, max_q, max_k, seqused_k, block_table, num_splits)
    if cum_seq_k is not None or block_table is not None:
        raise Unsupported("keys end to end or in pages, and queries that are not")
    return _BSHD if seqused_k is None else Dense("bshd", seqused_k=seqused_k)


def _mask(is_causal: bool, left: int | None = None, right: int | None = None) -> Mask | None:
    """Aligned at the bottom right; a negative bound is none."""
    left = None if left is None or left < 0 else left
    right = 0 if is_causal else None if right is None or right < 0 else right
    return None if left is None and right is None else masks.window(left, right)


def _with_heads_inside(x: Tensor) -> Tensor:
    """(b, h, s, …) in the memory order (b, s, h, …)."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def _unused(q: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The generator's states, which a call without dropout does not use, and no debug mask."""
    if torch.version.hip:
        return q.new_empty((), dtype=torch.long), q.new_empty((), dtype=torch.long), q.new_empty(0)
    return q.new_empty(2, dtype=torch.uint64), q.new_empty((), dtype=torch.uint64), q.new_empty(0)


# The registry.


def activate() -> None:
    """From now on `torch.nn.functional.scaled_dot_product_attention` and `torch.nn.attention.varlen` run
    `out = softmax(mask(scale q k^T)) v` here, forward and backward.

    It replaces the kernels of PyTorch's flash attention, so every library that calls these functions has it, without a
    change. `torch.nn.attention.activate_flash_attention_impl("saccade")` does the same once this module is imported.

    - On a GPU: what PyTorch gives to flash attention, which it is told to prefer to cuDNN's. Calls with an `attn_mask`
      stay with its other kernels.
    - On a CPU: bfloat16 where saccade's kernels are faster, and `varlen_attn`, which PyTorch lacks there.
    - Calls with dropout, ALiBi slopes or a debug mask, and those that saccade has no backend for, run PyTorch's kernel,
      as before.

    Activate before `torch.compile` traces a model: it chooses PyTorch's operator while it traces.

    Raises:
        RuntimeError: a PyTorch that lacks an operator of this registry.

    >>> import torch
    >>> activate()
    >>> x = torch.randn(1, 2, 16, 8)
    >>> torch.nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True).shape
    torch.Size([1, 2, 16, 8])
    >>> restore()
    """
    activate_flash_attention_impl(NAME)


def restore() -> None:
    """PyTorch's own kernels again, and its order of them. Nothing happens where saccade is not active."""
    if current_flash_attention_impl() == NAME:
        restore_flash_attention_impl()


class _Active:
    """What `activate` changed; PyTorch's registry calls `remove` when another implementation takes its place."""

    def __init__(self) -> None:
        self.order = _prefer_flash()
        # Without PyTorch's reference to it, a library takes its kernels back.
        self.library: torch.library.Library | None = torch.library.Library("aten", "IMPL")
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="(?s).*Overriding a previously registered kernel")
            for name, run, keys in OPERATORS:
                if not hasattr(torch.ops.aten, name):
                    if name in SINCE_2_12:
                        continue
                    raise RuntimeError(f"PyTorch {torch.__version__} has no operator aten::{name}")
                for key in keys:
                    kernel = _with_below(run, _kernel(name, key), f"aten::{name} on {key}")
                    self.library.impl(name, kernel, key, with_keyset=True)

    def remove(self) -> None:
        self.library = None
        if self.order is not None:
            torch._C._set_sdp_priority_order(self.order)


def _kernel(name: str, key: str) -> Any:
    """PyTorch's own kernel, or None where it has none."""
    if not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", key):
        return None
    return torch.library.get_kernel(f"aten::{name}", key)


def _with_below(run: Callable[..., Any], below: Any, name: str) -> Callable[..., Any]:
    """`run`, and the kernel below for the calls that it refuses."""

    def kernel(keys: torch.DispatchKeySet, *arguments: Any, **options: Any) -> Any:
        try:
            with torch.no_grad():  # autograd is above: it calls the backward's operator
                return run(*arguments, **options)
        except Unsupported as error:
            if below is None:
                raise Unsupported(f"{name}: PyTorch has no kernel for what saccade refuses: {error}") from error
        return below.call_boxed(keys, *arguments, **options)

    return kernel


def _prefer_flash() -> list[int] | None:
    """Puts flash attention before cuDNN's, which PyTorch prefers on Hopper and Blackwell; the order before."""
    if not torch.cuda.is_available():
        return None
    x = torch.empty(1, 1, 1, 8, dtype=torch.float16, device="cuda")
    torch.ops.aten._fused_sdp_choice(x, x, x)  # in its first call PyTorch overwrites whatever order was set
    before = torch._C._get_sdp_priority_order()
    flash = int(SDPBackend.FLASH_ATTENTION)  # pyright: ignore[reportArgumentType]
    torch._C._set_sdp_priority_order([flash, *(x for x in before if x != flash)])
    return before


register_flash_attention_impl(NAME, register_fn=_Active)
