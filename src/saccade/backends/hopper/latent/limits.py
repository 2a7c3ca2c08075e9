"""Which calls the kernel for latent attention takes."""

from __future__ import annotations

from saccade.backends.key_lists import one_list
from saccade.call import Call
from saccade.layouts import SlotRows
from saccade.layouts.slots import rows_apart
from saccade.scores import Traced

DIMS = 576, 512
"""d and d_v: what DeepSeek's models keep of a token."""
LEAST_ROWS = 17
"""Query rows of a sequence and a key head. Up to 16 memory bandwidth decides, and `triton` has more programs under way;
above, these tiles of 64 rows are faster than its, even half empty (notes/gluon_latent.md)."""


LEAST_LISTS = 1024
"""Rows of slots from which few heads are worth it: neighbouring rows share tiles."""
MOST_ENTRIES = 1 << 30
"""Of the table of slots that lists of keys become: 4 GB."""


def applies(call: Call) -> bool:
    """Whether a call is this kernel's, if it is one of this backend's: values are the first columns of keys that pages
    or lists name, and too many for the forward's kernel."""
    return call.latent and max(call.q.shape[3], call.v.shape[3]) > 256


def listed(call: Call) -> bool:
    """Whether each row has its own list of keys, which are gathered."""
    return isinstance(call.layout, SlotRows) or not _unlisted(call)


def _unlisted(call: Call) -> str | None:
    """Why keys are not gathered by lists, or None."""
    found = one_list(call)
    if found is None:
        return "one list of keys, beside other masks by &"
    lists, others = found
    entries = call.q.shape[0] * call.q.shape[2] * lists.lists.shape[-1] * lists.keys
    if lists.end_to_end or call.layout.cu_seqlens_q is not None:
        return "lists of keys for equally many queries of each sequence, not end to end"
    if lists.lists.shape[1] != 1 or (others is not None and "h" in others.indices):
        return "lists of keys that all heads share"
    if isinstance(call.score, Traced) and "kv_idx" in call.score.program.inputs:
        return "lists of keys with functions of scores that do not depend on kv_idx"
    if entries > MOST_ENTRIES:
        return f"lists of up to {MOST_ENTRIES} entries in all, not {entries}"
    return None if rows_apart(call.k.transpose(1, 2)) is not None else "keys whose batch rows are whole rows apart"


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
    if layout.has_pages and layout.num_splits is not None:
        reasons.append(f"splits the keys of latent attention by itself: not with num_splits={layout.num_splits}")
    if call.dropout is not None:
        reasons.append("has no dropout for latent attention")
    if not layout.has_pages and (lacking := _unlisted(call)) is not None:
        reasons.append(f"takes latent attention without pages for {lacking}")
    rows, slots = call.q.shape[2] * call.group, isinstance(layout, SlotRows)
    if rows < LEAST_ROWS and (layout.sequences < LEAST_LISTS if slots else not listed(call)):
        wanted = f"{LEAST_ROWS} query rows and more for each sequence and key head"
        wanted += f", or {LEAST_LISTS} rows of slots" if slots else ""
        reasons.append(f"takes latent attention of {wanted}, not {rows}")
    return reasons
