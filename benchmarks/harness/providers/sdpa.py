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

from benchmarks.harness.grids import Cell
from benchmarks.harness.providers.base import PeerInputs, Prepared, Provider, prepared
from benchmarks.harness.providers.saccade import packed_again
from saccade.masks import Window
from saccade.testing.cases import Inputs
from saccade.testing.sdpa import LARGEST, masked, with_mask


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

        return prepared(function, cell, call)


class SdpaPadded(Provider):
    """Any mask and any lengths, as one bool tensor; packed sequences as a padded batch. Both are made untimed."""

    name = "sdpa-padded"
    layouts = "dense", "padded", "packed"

    def supports(self, cell: Cell, inputs: Inputs) -> str | None:
        pairs = cell.case.b * cell.case.s_q * cell.case.s_k
        if pairs > LARGEST:
            return f"its mask would have {pairs:.1e} elements"
        return super().supports(cell, inputs)

    def prepare(self, cell: Cell, inputs: Inputs) -> Prepared:
        mask, inputs, padding = with_mask(inputs, cell.case.b)
        ready = prepared(lambda q, k, v: masked(q, k, v, mask), cell, PeerInputs.of(inputs, "bhsd"))
        return ready if padding is None else packed_again(padding, ready)


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

        return prepared(function, cell, call)


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
