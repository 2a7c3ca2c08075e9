"""PyTorch's `varlen_attn`, with the kernels that it chooses itself."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

from saccade.bench.grids import Cell
from saccade.bench.providers.base import PeerInputs, Prepared, Provider, prepared
from saccade.masks import Window
from saccade.testing.cases import Inputs


class TorchVarlen(Provider):
    """Its arguments are those of the PyTorch that is here: causal is `is_causal` in the first versions, and a window
    later."""

    name = "torch-varlen"

    def available(self, device: torch.device) -> str | None:
        if device.type != "cuda":
            return "runs on CUDA GPUs"
        try:
            from torch.nn.attention.varlen import varlen_attn  # noqa: F401
        except ImportError as missing:
            return str(missing)
        return None

    def supports(self, cell: Cell, inputs: Inputs) -> str | None:
        case, mask = cell.case, inputs.keywords.get("mask")
        if case.order != "thd":
            return "takes packed sequences alone"
        if case.dtype not in ("bf16", "fp16"):
            return f"takes bf16 and fp16, not {case.dtype}"
        if case.score != "none" or case.sink or case.used != "all":
            return "has no scores, no sinks, and no used lengths with gradients"
        if mask is not None and not isinstance(mask, Window):
            return f"has no {mask.kind} mask"
        if cell.deterministic:
            return "this adapter does not ask it for deterministic gradients"
        return None

    def prepare(self, cell: Cell, inputs: Inputs) -> Prepared:
        from torch.nn.attention.varlen import varlen_attn

        call = PeerInputs.of(inputs, "bshd")
        lengths, given = call.lengths(), options(varlen_attn, call)

        def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out = varlen_attn(q, k, v, *lengths, **given)
            assert isinstance(out, Tensor)
            return out

        return prepared(function, cell.mode, call)


def options(varlen_attn: Any, call: PeerInputs) -> dict[str, Any]:
    """The call's mask and groups as this version of the function spells them.

    Raises:
        NotImplementedError: a window, where it has none.
    """
    names, given = inspect.signature(varlen_attn).parameters, {}
    if isinstance(call.mask, Window):
        if "window_size" in names:
            bounds = (call.mask.left, call.mask.right)
            given["window_size"] = tuple(-1 if bound is None else bound for bound in bounds)
        elif call.mask.kind == "causal":
            given["is_causal"] = True
        else:
            raise NotImplementedError(f"this varlen_attn has no {call.mask.kind} mask")
    if call.group > 1 and "enable_gqa" in names:
        given["enable_gqa"] = True
    return given
