"""FlexAttention, compiled, with its block mask made by a compiled function outside of the clock."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from benchmarks.harness.grids import Cell
from benchmarks.harness.providers.base import PeerInputs, Prepared, Provider, learned, prepared
from saccade.masks import And, Documents, Extent, KeyInterval, Mask, Or, Prefix, Window, Written
from saccade.scores import ScoreMod, Softcap
from saccade.testing.cases import Inputs

Predicate = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""(b, h, q_idx, kv_idx) -> bool"""


class Flex(Provider):
    name = "flex"
    module = "torch.nn.attention.flex_attention"
    scores = None

    def supports(self, cell: Cell, inputs: Inputs) -> str | None:
        if cell.call != "forward" and inputs.q.device.type == "cpu":
            return "FlexAttention has no backward on CPUs"
        return super().supports(cell, inputs)

    def prepare(self, cell: Cell, inputs: Inputs) -> Prepared:
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        # A compiled function counts its recompilations: without this the ninth shape would run uncompiled.
        torch._dynamo.reset()
        call, case = replace(PeerInputs.of(inputs, "bhsd"), learned=learned(inputs, cell.call)), cell.case
        compiled = torch.compile(flex_attention, dynamic=False)
        block_mask = None
        if call.mask is not None:
            rows = case.b if "b" in call.mask.indices else None
            seen = predicate(call.mask, case.s_k - case.s_q)
            shape: tuple[int | None, ...] = rows, None, case.s_q, case.s_k
            try:  # uncompiled it holds the whole mask
                block_mask = torch.compile(create_block_mask)(seen, *shape, device=call.q.device)
            except Exception:  # it is the same mask, and not what is timed
                block_mask = create_block_mask(seen, *shape, device=call.q.device)
        score = _score(call)

        def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out = compiled(q, k, v, score_mod=score, block_mask=block_mask, enable_gqa=call.group > 1)
            assert isinstance(out, Tensor)
            return out

        # Its backward writes into buffers of its forward, and so refuses a second one on the same graph.
        return prepared(function, cell, call, retains=False)


def predicate(mask: Mask, off: int) -> Predicate:
    """A mask as its users write it: constants inlined, ids captured.

    Raises:
        NotImplementedError: a kind of mask that this adapter does not know.
    """
    match mask:
        case And(parts=parts):
            return _joined([predicate(part, off) for part in parts], torch.logical_and)
        case Or(parts=parts):
            return _joined([predicate(part, off) for part in parts], torch.logical_or)
        case Window():
            return _window(mask, off)
        case Prefix(n=Tensor() as lengths):
            return lambda b, h, q_idx, kv_idx: (kv_idx < lengths[b]) | (kv_idx <= q_idx + off)
        case Prefix(n=int(length)):
            return lambda b, h, q_idx, kv_idx: (kv_idx < length) | (kv_idx <= q_idx + off)
        case Documents(ids=ids):
            return lambda b, h, q_idx, kv_idx: ids[b, q_idx] == ids[b, kv_idx]
        case KeyInterval():
            nowhere = Extent.of(0, 0, None, None, torch.device("cpu"))  # bounds do not depend on lengths
            return lambda b, h, q_idx, kv_idx: mask.sees(nowhere, b, h, q_idx, kv_idx)
        case Written(fn=fn):
            return fn
    raise NotImplementedError(f"this adapter has no {mask.kind} mask")


def _window(mask: Window, off: int) -> Predicate:
    sides: list[Predicate] = []
    if mask.left is not None:
        low = off - mask.left
        sides.append(lambda b, h, q_idx, kv_idx: kv_idx >= q_idx + low)
    if mask.right is not None:
        high = off + mask.right
        sides.append(lambda b, h, q_idx, kv_idx: kv_idx <= q_idx + high)
    return _joined(sides, torch.logical_and) if sides else lambda b, h, q_idx, kv_idx: q_idx >= 0


def _joined(parts: list[Predicate], join: Callable[[Tensor, Tensor], Tensor]) -> Predicate:
    def seen(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        found = parts[0](b, h, q_idx, kv_idx)
        for part in parts[1:]:
            found = join(found, part(b, h, q_idx, kv_idx))
        return found

    return seen


def _score(call: PeerInputs) -> Callable[..., Tensor] | None:
    """As its users write it: indices are single numbers, the table of T5 is one for every distance."""
    match call.score:
        case None:
            return None
        case Softcap(cap=cap):
            return lambda score, b, h, q_idx, kv_idx: cap * torch.tanh(score / cap)
        case ScoreMod(kind="alibi", tensors=(slopes,)):
            return lambda score, b, h, q_idx, kv_idx: score + slopes[h] * (kv_idx - q_idx)
        case ScoreMod(kind="relative_bias", tensors=(table,)):
            reach = table.shape[1] // 2
            return lambda score, b, h, q_idx, kv_idx: (
                score + table[h, torch.clamp(kv_idx - q_idx, -reach, reach) + reach]
            )
        case ScoreMod(kind="t5_bias", tensors=(table, buckets)):
            reach = buckets.shape[0] // 2
            return lambda score, b, h, q_idx, kv_idx: (
                score + table[buckets[torch.clamp(kv_idx - q_idx, -reach, reach) + reach], h]
            )
    raise NotImplementedError(f"this adapter has no score {call.score!r}")
