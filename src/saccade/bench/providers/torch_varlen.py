"""PyTorch's `varlen_attn`, with the kernels that it chooses itself."""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor

from saccade.bench.grids import Cell
from saccade.bench.providers.base import PeerInputs, Prepared, Provider, prepared
from saccade.masks import Window
from saccade.testing.cases import Inputs


class TorchVarlen(Provider):
    """Its arguments are those of the installed PyTorch: causal is `is_causal` in the first versions, a window later."""

    name = "torch-varlen"
    module = "torch.nn.attention.varlen"
    layouts = ("packed",)
    dtypes = "bf16", "fp16"
    masks = Window
    needs_cuda = True

    def prepare(self, cell: Cell, inputs: Inputs) -> Prepared:
        from torch.nn.attention.varlen import varlen_attn

        call = PeerInputs.of(inputs, "bshd")
        lengths, keywords = call.lengths(), options(varlen_attn, call)

        def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out = varlen_attn(q, k, v, *lengths, **keywords)
            assert isinstance(out, Tensor)
            return out

        return prepared(function, cell.call, call)


def options(varlen_attn: Any, call: PeerInputs) -> dict[str, Any]:
    """The call's mask and groups, as keywords of this version of the function.

    Raises:
        NotImplementedError: this version has no windows.
    """
    names, keywords = inspect.signature(varlen_attn).parameters, {}
    if isinstance(call.mask, Window):
        if "window_size" in names:
            bounds = (call.mask.left, call.mask.right)
            keywords["window_size"] = tuple(-1 if bound is None else bound for bound in bounds)
        elif call.mask.kind == "causal":
            keywords["is_causal"] = True
        else:
            raise NotImplementedError(f"this varlen_attn has no {call.mask.kind} mask")
    if call.group > 1 and "enable_gqa" in names:
        keywords["enable_gqa"] = True
    return keywords
