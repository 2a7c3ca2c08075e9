"""Calls that have no gradients, where operands require them: they run, and a backward through them is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from saccade.call import needs_gradient
from saccade.errors import Unsupported
from saccade.partial import Partial


def without_gradients(run: Callable[[], Tensor | Partial], *operands: Tensor | None) -> Tensor | Partial:
    """`run()`, which reads a cache. FlashAttention runs such calls outside `torch.no_grad()` too.

    Its results then have no gradients, silently. Here they require one if an operand does.

    Raises:
        Unsupported: in the backward; under torch.compile in the call, which has its backward made beforehand.
    """
    if torch.compiler.is_compiling() or not needs_gradient(*operands):
        return run()
    result: Any = _Refused.apply(run, *operands)
    return Partial(*result) if isinstance(result, tuple) else result


class _Refused(torch.autograd.Function):
    @staticmethod
    def forward(run: Callable[[], Any], *_: Any) -> Any:
        return run()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """torch.func wants it; nothing is kept."""

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise Unsupported(
            "attention to a cache of keys has no gradients: call it inside torch.no_grad(), or pass keys and values "
            "without pages to flash_attn_func or flash_attn_varlen_func"
        )
