"""PyTorch's `scaled_dot_product_attention`: as it chooses itself, one kernel by name, and with the mask as a tensor.

And its `varlen_attn`.
"""

from __future__ import annotations

import inspect
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from saccade.bench.cost import visible_keys
from saccade.bench.grids import Cell
from saccade.bench.providers.base import PeerInputs, Prepared, Provider, prepared
from saccade.bench.providers.saccade import Padding
from saccade.layouts import Dense
from saccade.masks import Extent, Window
from saccade.testing.cases import Inputs


class Sdpa(Provider):
    """No mask, or a causal one by its flag."""

    def __init__(self, name: str = "sdpa", kernel: SDPBackend | None = None) -> None:
        self.name, self.kernel, self.needs_cuda = name, kernel, kernel == SDPBackend.CUDNN_ATTENTION

    def supports(self, cell: Cell, inputs: Inputs) -> str | None:
        case = cell.case
        if case.mask not in ("none", "causal") or cell.layout != "dense":
            return "SDPA takes other masks than causal as a tensor only: sdpa-padded"
        if case.mask == "causal" and case.s_q != case.s_k:
            return "SDPA's causal mask is aligned top-left"
        return super().supports(cell, inputs)

    def prepare(self, cell: Cell, inputs: Inputs) -> Prepared:
        call = PeerInputs.of(inputs, "bhsd")
        causal, gqa, kernel = cell.case.mask == "causal", call.group > 1, self.kernel

        def context() -> AbstractContextManager[object]:
            return nullcontext() if kernel is None else sdpa_kernel(kernel)

        def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            with context():
                return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=gqa)

        return prepared(function, cell.call, call)


class SdpaPadded(Provider):
    """Any mask and any lengths, as one bool tensor; packed sequences as a padded batch. Both are made untimed."""

    name = "sdpa-padded"
    layouts = "dense", "padded", "packed"

    def supports(self, cell: Cell, inputs: Inputs) -> str | None:
        pairs = cell.case.b * cell.case.s_q * cell.case.s_k
        if pairs > 1 << 31:
            return f"its mask would have {pairs:.1e} elements"
        return super().supports(cell, inputs)

    def prepare(self, cell: Cell, inputs: Inputs) -> Prepared:
        padding = None
        if inputs.keywords.get("layout", Dense()).ragged_keys:
            padding = Padding.of(inputs)
            inputs = padding.inputs(inputs)
        call = PeerInputs.of(inputs, "bhsd")
        mask, group = visible_mask(call, cell.case.b), call.group
        if padding is not None:  # rows of padding see the keys in use: their results are ignored, and kernels need some
            mask = mask | padding.unseen()

        def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            if group > 1:  # as model code does: fused kernels with a mask tensor have no grouped heads
                k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

        ready = prepared(function, cell.call, call)
        return ready if padding is None else padding.undone(ready)


def visible_mask(call: PeerInputs, b: int) -> Tensor:
    """(b or 1, 1, s_q, s_k) bool, True where a query may attend."""
    used = call.layout.seqused_q, call.layout.seqused_k
    extent = Extent.of(call.q.shape[2], call.k.shape[2], *used, call.q.device)
    same = not call.layout.tensors and (call.mask is None or not call.mask.tensors)
    return visible_keys(call.mask, extent, 1 if same else b, extent.q_idx().T)[:, None]


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
