"""Calls whose sequences the ranks of a cp_group share, as TransformerEngine's loaders lay them: of 2 R chunks of each
sequence rank r has number r and number 2 R - 1 - r."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from saccade.compat.transformer_engine.call import CallArguments, WrongCall
from saccade.layouts import Dense, Layout, Packed
from saccade.ops.dispatch import Unsupported
from saccade.scores import Softcap

TYPES = "p2p", "all_gather", "a2a", "a2a+p2p"
"""TransformerEngine's `cp_comm_type`: how it moves what ranks exchange; rows lie alike for all of them."""


class RanksCall(NamedTuple):
    """What becomes of a call."""

    operands: tuple[Tensor, Tensor, Tensor]
    keywords: dict[str, Any]
    rows: Tensor | None
    """(t, 1, 1) bool: which rows are no padding; None where none is."""


def ranks_of(group: Any) -> int:
    if group is None:
        return 1
    return math.prod(torch.distributed.get_world_size(x) for x in (group if isinstance(group, list) else [group]))


def self_attention(call: CallArguments) -> CallArguments:
    """With the same tensors for both sides of sequences end to end, where the numbers are equal."""
    if call.order != "thd":
        return call
    sides = (call.cu_seqlens_q, call.cu_seqlens_kv), (call.cu_seqlens_q_padded, call.cu_seqlens_kv_padded)
    for q, k in sides:
        if (q is None) != (k is None) or (q is not None and k is not None and q is not k and not torch.equal(q, k)):
            raise Unsupported(
                "DotProductAttention: over a cp_group sequences end to end are self-attention: cu_seqlens_q and "
                "cu_seqlens_kv are equal, with padding and without"
            )
    return call._replace(cu_seqlens_kv=call.cu_seqlens_q, cu_seqlens_kv_padded=call.cu_seqlens_q_padded)


def shared(group: Any, operands: tuple[Tensor, Tensor, Tensor], layout: Layout, given: dict[str, Any]) -> RanksCall:
    """
    Raises:
        Unsupported: what no rank can compute of its rows.
        WrongCall: sequences that are not 2 R chunks.
    """
    from saccade import distributed  # for who needs it

    q, k, _ = operands
    score_mod, ranks = given["score_mod"], ranks_of(group)
    subject = f"DotProductAttention: over a cp_group of {ranks} ranks"
    if isinstance(group, list):
        raise Unsupported(f"{subject}, in two groups: pass one group of them all")
    if not (isinstance(layout, Packed) or (isinstance(layout, Dense) and layout.plain)) or q.shape[:-2] != k.shape[:-2]:
        raise Unsupported(
            f"{subject} calls are self-attention, in sbhd and bshd without padding, got q {tuple(q.shape)} and k "
            f"{tuple(k.shape)} with {layout!r}: saccade.attention(…, context=plan) takes documents of any lengths"
        )
    if not (score_mod is None or isinstance(score_mod, Softcap)):
        raise Unsupported(f"{subject} there are no biases and score functions, got {score_mod!r}")
    if given["return_max_scores"]:
        raise Unsupported(f"{subject} there is no return_max_logit: set it to False")
    if isinstance(layout, Dense):
        b, s = (q.shape[layout.order.index(name)] for name in "bs")
        plan = distributed.plan((b, s * ranks), group, mask=given["mask"], rows="pairs")
        return RanksCall(operands, given | {"context": plan}, None)
    plan = _of_sequences(group, ranks, layout, given["mask"], subject)
    keywords = {name: x for name, x in given.items() if name != "layout"} | {"context": plan}
    if q.shape[0] != plan.rows:
        raise WrongCall(
            f"{subject} offsets are those of whole sequences: with {sum(plan.lengths)} rows in all a rank has "
            f"{plan.rows}, got q {tuple(q.shape)}"
        )
    if layout.seqused_q is None:
        return RanksCall(operands, keywords, None)
    rows = (plan.position_ids < layout.seqused_q[plan.document_ids])[:, None, None]
    q, k, v = (torch.where(rows, x, 0) for x in operands)  # padding may hold anything
    return RanksCall((q, k, v), keywords, rows)


def _of_sequences(group: Any, ranks: int, layout: Packed, mask: Any, subject: str) -> Any:
    from saccade import distributed
    from saccade.distributed.sharding import reach_of

    if layout.seqused_q is not None and reach_of(mask).right != 0:
        raise Unsupported(
            f"{subject} sequences with padding between them are causal, so that no row sees padding, got {mask!r}: "
            "give attn_mask_type='padding_causal', or sequences without cu_seqlens_q_padded"
        )
    try:
        return distributed.plan(layout.cu_seqlens_q, group, mask=mask, rows="pairs")
    except ValueError as error:
        raise WrongCall(f"{subject} each sequence is in {2 * ranks} equal chunks, padding included: {error}") from error
