"""PyTorch's own attention by saccade, through PyTorch's registry of flash attention implementations.

    from saccade.integrations.torch import activate, restore

Source: https://docs.pytorch.org/docs/stable/nn.attention.html
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention import (
    SDPBackend,
    activate_flash_attention_impl,
    current_flash_attention_impl,
    register_flash_attention_impl,
    restore_flash_attention_impl,
)

from saccade.integrations import torch_operators
from saccade.util.arguments import Unsupported

__all__ = ["NAME", "activate", "restore"]

NAME = "saccade"
"""The implementation's name in PyTorch's registry."""


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
            for name, run, keys in torch_operators.OPERATORS:
                if not hasattr(torch.ops.aten, name):
                    if name in torch_operators.SINCE_2_12:
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
