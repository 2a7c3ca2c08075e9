"""Which calls need gradients, and why those of 8 bits have none."""

from __future__ import annotations

import torch
from torch import Tensor


def needs_gradient(*tensors: Tensor | None) -> bool:
    if torch.is_grad_enabled():
        for x in tensors:
            if x is not None and x.requires_grad:
                return True
    return False


def eight_bit_gradients(q: Tensor, k: Tensor, v: Tensor) -> str:
    """Why a call of 8-bit operands has no gradients, and what has."""
    got = ", ".join(f"{name} {x.dtype} {tuple(x.shape)}" for name, x in (("q", q), ("k", k), ("v", v)))
    return (
        "attention over 8-bit k and v has no gradients: call it inside torch.no_grad(); pass Descale(…, "
        "backward='dequantized') for those of wider q, the sink and captured tensors; or pass the dequantised values, "
        f"such as k.to(torch.bfloat16) * descale; got {got}"
    )
