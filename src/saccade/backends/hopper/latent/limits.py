"""Which calls the kernel for latent attention runs."""

from __future__ import annotations

from saccade.backends.key_lists import row_lists_obstacle
from saccade.call import Call
from saccade.call.spec import RECORDS
from saccade.layouts import SlotRows

DIMS = 576, 512
"""d and d_v: what DeepSeek's models keep of a token."""
LEAST_ROWS = 17
"""Query rows of a sequence and a key head. Up to 16 memory bandwidth decides, and `triton` has more programs under way;
above, these tiles of 64 rows are faster than its, even half empty (notes/gluon_latent.md)."""


LEAST_LISTS = 1024
"""Rows of slots from which few heads are worth it: neighbouring rows share tiles."""


def applies(call: Call) -> bool:
    """Whether this kernel, of those of this backend, runs the call: the values are the first columns of keys that
    pages or lists name, and are too wide for the forward's kernel."""
    return call.latent and max(call.q.shape[3], call.v.shape[3]) > 256


def has_lists(call: Call) -> bool:
    """Whether each row has its own list of keys, which are gathered."""
    return isinstance(call.layout, SlotRows) or row_lists_obstacle(call) is None


def refusals(call: Call) -> list[str]:
    """Returns the reasons why the kernel does not run a call for which `applies` is true."""
    layout, (d, d_v), records = call.layout, DIMS, call.spec.kv == RECORDS
    reasons = []
    if (call.q.shape[3], call.v.shape[3]) != DIMS:
        reasons.append(f"takes head dims {d}/{d_v} for latent attention, not {call.q.shape[3]}/{call.v.shape[3]}")
    if call.k.element_size() != 2 and not records:
        reasons.append(f"takes 16-bit operands for latent attention, not {call.k.dtype}")
    if layout.cu_seqlens_q is not None:
        reasons.append(
            "takes latent attention of equally many queries for each sequence, (b, s, h, d), not of packed ones"
        )
    if layout.has_pages and layout.num_splits is not None:
        reasons.append(f"splits the keys of latent attention by itself: not with num_splits={layout.num_splits}")
    if call.dropout is not None:
        reasons.append("has no dropout for latent attention")
    if not layout.has_pages and (lacking := row_lists_obstacle(call)) is not None:
        reasons.append(f"takes latent attention without pages for {lacking}")
    rows, slots = call.q.shape[2] * call.group, isinstance(layout, SlotRows)
    if rows < LEAST_ROWS and not records and (layout.sequences < LEAST_LISTS if slots else not has_lists(call)):
        wanted = f"{LEAST_ROWS} query rows and more for each sequence and key head"
        wanted += f", or {LEAST_LISTS} rows of slots" if slots else ""
        reasons.append(f"takes latent attention of {wanted}, not {rows}")
    return reasons
