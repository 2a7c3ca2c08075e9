"""PyTorch's `scaled_dot_product_attention`: as it chooses itself, one kernel by name, and with the mask as a tensor."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from saccade.bench.cost import visible_keys
from saccade.bench.grids import Cell
from saccade.bench.providers.base import PeerInputs, Prepared, Provider, prepared
from saccade.bench.providers.padding import Padding
from saccade.layouts import Dense
from saccade.masks import Extent
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
