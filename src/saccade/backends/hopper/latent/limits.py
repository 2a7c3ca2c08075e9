"""Which calls the kernel for latent attention takes."""

from __future__ import annotations

from saccade.call import Call

DIMS = 576, 512
"""d and d_v: what DeepSeek's models keep of a token."""
LEAST_ROWS = 17
"""Query rows of a sequence and a key head. Up to 16 memory bandwidth decides, and `triton` has more programs under way;
above, these tiles of 64 rows are faster than its, even half empty (notes/gluon_latent.md)."""


def applies(call: Call) -> bool:
    """Whether a call is this kernel's, if it is one of this backend's: values are the first columns of keys in pages,
    and too many for the forward's kernel."""
    return call.latent and max(call.q.shape[3], call.v.shape[3]) > 256


def refusals(call: Call) -> list[str]:
    """Why the kernel does not take a call that is its."""
    layout, (d, d_v) = call.layout, DIMS
    reasons = []
    if (call.q.shape[3], call.v.shape[3]) != DIMS:
        reasons.append(f"takes head dims {d}/{d_v} for latent attention, not {call.q.shape[3]}/{call.v.shape[3]}")
    if call.k.element_size() != 2:
        reasons.append("takes latent attention of 16-bit operands")
    if layout.cu_seqlens_q is not None:
        reasons.append("takes latent attention of equally many queries for each sequence, (b, s, h, d), not end to end")
    if layout.num_splits is not None:
        reasons.append(f"splits the keys of latent attention by itself: not with num_splits={layout.num_splits}")
    if call.dropout is not None or call.max_scores:
        reasons.append("has no dropout and no max_scores for latent attention")
    rows = call.q.shape[2] * call.group
    if rows < LEAST_ROWS:
        reasons.append(
            f"takes latent attention of {LEAST_ROWS} query rows and more for each sequence and key head, not {rows}"
        )
    return reasons
