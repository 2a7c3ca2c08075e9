"""What transformers' models call in each layer, with saccade's name."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from torch import Tensor

from benchmarks.harness.grids import Cell
from benchmarks.harness.providers.base import PeerInputs, Prepared, Provider, prepared
from saccade.masks import Window
from saccade.scores import Softcap
from saccade.testing.cases import Inputs


class Transformers(Provider):
    """`saccade.integrations.transformers`: what its attention function costs beside the own call of `auto`.

    A layer as Llama's has it: operands (b, h, s, d) that are views of (b, s, h, d), the mask that the model makes once
    for all layers, a scale, and a result (b, s, h, d). Sequences end to end are one batch row with offsets.
    The function itself needs no transformers.
    """

    name = "transformers"
    role = "saccade"
    layouts = "dense", "packed"
    masks = Window
    scores = ("softcap",)
    sinks = True

    def supports(self, cell: Cell, inputs: Inputs) -> str | None:
        mask = inputs.keywords.get("mask")
        if cell.layout == "packed" and isinstance(mask, Window) and mask.right != 0:
            return "sequences end to end have causal masks and windows that end at the row, or none"
        return super().supports(cell, inputs)

    def prepare(self, cell: Cell, inputs: Inputs) -> Prepared:
        from saccade.integrations.transformers import attention_forward

        call = PeerInputs.of(inputs, "bshd")
        layer: Any = SimpleNamespace(is_causal=True, layer_idx=0)
        options: dict[str, Any] = {"scaling": call.q.shape[-1] ** -0.5, "s_aux": call.sink}
        if isinstance(call.score, Softcap):
            options["softcap"] = call.score.cap
        if call.layout.ragged_keys:
            mask, options = None, options | _sequences(call)
        else:
            mask = _mask(call)
            options["is_causal"] = mask is not None

        def dense(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
            return attention_forward(layer, q, k, v, mask, **options)[0]

        def packed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return dense(q[None], k[None], v[None])[0]

        return prepared(packed if call.layout.ragged_keys else dense, cell, call)


def _mask(call: PeerInputs) -> Any:
    """What the model's mask function would have made."""
    from saccade.integrations.transformers import StructuredMask

    if call.mask is None:
        return None
    b, s_q, s_k = *call.q.shape[:2], call.k.shape[1]
    return StructuredMask(call.mask, (b, 1, s_q, s_k), False)


def _sequences(call: PeerInputs) -> dict[str, Any]:
    """Offsets and what else tells the mask of sequences end to end."""
    names = "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"
    told: dict[str, Any] = dict(zip(names, call.lengths(), strict=True))
    left = None if call.mask is None else cast("Window", call.mask).left
    return told | {"is_causal": call.mask is not None, "sliding_window": None if left is None else left + 1}
