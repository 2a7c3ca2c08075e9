"""Paged calls over a common prefix: `Paged(…, shared_pages=n)`.

One call reads the pages that all sequences begin with, once, and the rows of all sequences are rows of one sequence
there. Another reads each sequence's own pages. Their results merge by the LSE. Backends see two plain paged calls.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from saccade import masks
from saccade.backends import Outputs
from saccade.call import Call
from saccade.call.descale import BLOCK, Factors
from saccade.layouts import Paged, empty_like_rows
from saccade.layouts.validate import counts_from_first
from saccade.masks import KeyInterval, MaskMod, Selected, Window
from saccade.ops import dispatch
from saccade.scores import Traced

MOST_ROWS, LEAST_KEYS, LEAST_SAVED = 16, 1024, 100_000_000
"""On a GPU a prefix of at least so many keys is shared where a key head has at most so many query rows of a sequence,
and where at least so many bytes of keys and values need not be read again (notes/triton.md)."""


def obstacle(call: Call) -> str | None:
    """Why the plain call runs in the place of two, or None.

    The rows of all sequences become rows of one, so nothing in the call may tell sequences apart but lengths and
    bounds of rows, which go along with their rows.
    """
    layout, mask, score, descale = call.layout, call.mask, call.score, call.descale
    if layout.sequences < 2:
        return "1 sequence shares nothing" if layout.sequences else "there is no sequence"
    if layout.num_splits == 1:
        return "num_splits=1 promises bits that depend on nothing else in the call"
    leaves = [] if mask is None else [*mask.leaves()]
    if any(leaf.of_shape or counts_from_first(leaf) or isinstance(leaf, Selected) for leaf in leaves):
        return "the mask counts rows and keys of the call"
    if any(isinstance(leaf, MaskMod) and leaf.predicate.program.by_batch_row for leaf in leaves):
        return "mask_mod depends on the batch row"
    if isinstance(score, Traced) and score.program.by_batch_row:
        return "the score function depends on the batch row"
    if isinstance(layout.k_offset, Tensor):
        return "k_offset is a tensor: the keys of the prefix stand elsewhere in each sequence"
    if descale is not None and (reason := _descale_obstacle(descale, _shared_keys(call))) is not None:
        return reason
    return _cost(call) if call.q.device.type == "cuda" else None


def _cost(call: Call) -> str | None:
    """Why one call is faster than two on a GPU, by shapes alone, as lengths are on the device; or None."""
    layout = call.layout
    if (rows := -(-call.q.shape[0] * call.q.shape[2] * call.group // layout.sequences)) > MOST_ROWS:
        return f"{rows} query rows of a sequence for each key head are limited by products, more than {MOST_ROWS}"
    keys, saved = _shared_keys(call), _saved(call)
    if keys < LEAST_KEYS or saved < LEAST_SAVED:
        return (
            f"two would read {saved / 1e6:.1f} MB of keys and values less, of a prefix of {keys} keys, which pays from "
            f"{LEAST_SAVED / 1e6:.0f} MB and {LEAST_KEYS} keys on"
        )
    return None


def _saved(call: Call) -> int:
    """Bytes of keys and values that are read once, not once for each sequence."""
    k, v = call.k, call.v
    row = k.shape[1] * (k.shape[3] * k.element_size() + v.shape[3] * v.element_size())
    return (call.layout.sequences - 1) * _shared_keys(call) * row


def _descale_obstacle(descale: Factors, keys: int) -> str | None:
    if any(x.shape[0] > 1 and x.stride(0) for x in descale.tensors):
        return "a factor of descale is by sequence: pass (), (h_k,), or blocks expanded from one sequence's"
    if descale.q is not None and descale.q.shape[2] > 1:
        return "the descale of q is by blocks of a sequence's rows"
    if keys % BLOCK and descale.blocked:
        return f"a descale by blocks of {BLOCK} keys needs a prefix of a multiple of them, not {keys} keys"
    return None


Part = tuple[dispatch.Plan, Call]


def parts(call: Call, backend: str) -> list[Part] | None:
    """The two calls that stand for this one, planned; None where the plain call runs, as where no backend takes a part.
    The reference is the definition, and takes the whole."""
    if not call.layout.shared_pages or backend == "reference" or obstacle(call) is not None:
        return None
    try:
        return [dispatch.planned(part, backend) for part in split(call)]
    except dispatch.Unsupported:
        return None


def _shared_keys(call: Call) -> int:
    return call.layout.shared_pages * call.k.shape[2]


def split(call: Call) -> tuple[Call, Call]:
    """The call over the common pages, whose rows are those of one sequence, and the one over each sequence's own."""
    prefix, own = (None, None) if call.descale is None else _factors(call.descale, _shared_keys(call))
    return _over_prefix(call, prefix), _over_own_pages(call, own)


def _over_prefix(call: Call, descale: Factors | None) -> Call:
    layout, mask = call.layout, call.mask
    assert isinstance(layout, Paged)
    table, used, starts, k_first = layout.block_table, layout.seqused_k, layout.cu_seqlens_q, layout.k_offset or 0
    b, _, s_q, _ = call.q.shape
    sequence = None if starts is None else _sequence_of_rows(starts, s_q)
    q_offset = None
    aligned = layout.q_offset is None and mask is not None and mask.kind == "causal"
    if aligned and sequence is None and s_q == 1:
        mask = None  # it shows the only row all keys
    if aligned and mask is not None and not _takes_positions(call):
        mask = _before(_positions_of_rows(call, sequence) + 1)  # which is at most the number of keys
    else:
        stop = used + k_first if k_first else used
        stop = stop[:, None].expand(b, s_q).reshape(1, -1) if sequence is None else stop[sequence]
        # A sequence that ends inside of the prefix sees no further.
        limit = _before(stop)
        if layout.positioned or mask is not None or _takes_positions(call):
            q_offset = _positions_of_rows(call, sequence)
        mask = limit if mask is None else masks.of_one_sequence(mask, sequence, (b, s_q)) & limit
    # Rows that no sequence uses may hold NaN: the longest sequence ends the prefix too.
    longest = used.amax(0, keepdim=True)
    starts = None if starts is None else starts[:: layout.sequences].contiguous()
    k_offset = None if q_offset is None else k_first
    common = Paged(table[:1, : layout.shared_pages], longest, starts, layout.num_splits, q_offset, k_offset)
    q = call.q if starts is not None else call.q.transpose(0, 1).flatten(1, 2)[None]
    return call.replace(q=q, layout=common, mask=mask, sink=None, out=_buffer(call, q), descale=descale)


def _over_own_pages(call: Call, descale: Factors | None) -> Call:
    layout, keys = call.layout, _shared_keys(call)
    assert isinstance(layout, Paged)
    table, used, starts = layout.block_table, layout.seqused_k, layout.cu_seqlens_q
    q_offset, k_offset = layout.q_offset, layout.k_offset
    if layout.positioned:
        k_offset = (k_offset or 0) + keys
    elif _takes_positions(call):  # masks that compare rows with keys stay aligned at the last key
        q_offset, k_offset = (used - (call.q.shape[2] if starts is None else starts.diff()))[:, None], keys
    # Where there are no further pages, no length below is positive, and none is read.
    own = table[:, layout.shared_pages :] if layout.shared_pages < table.shape[1] else table[:, :1]
    layout = Paged(own, used - keys, starts, layout.num_splits, q_offset, k_offset)
    return call.replace(layout=layout, out=_buffer(call, call.q), descale=descale)


def _buffer(call: Call, q: Tensor) -> Tensor | None:
    """Memory for a part, where a backend would give it another dtype than the result's."""
    other = call.out is not None and call.out_dtype != call.replace(out=None).out_dtype
    return empty_like_rows(q, call.v.shape[3], call.out_dtype) if other else None


def _before(stop: Tensor) -> KeyInterval:
    return KeyInterval(stop, stop, open_start=True)


def _takes_positions(call: Call) -> bool:
    """Whether the call depends on where rows and keys stand, beyond their distance."""
    leaves = () if call.mask is None else call.mask.leaves()
    return isinstance(call.score, Traced) or not all(isinstance(leaf, Window) for leaf in leaves)


def _sequence_of_rows(starts: Tensor, t_q: int) -> Tensor:
    """(t_q,): the sequence of each row of queries end to end; of rows after the last any."""
    rows = torch.arange(t_q, device=starts.device, dtype=starts.dtype)
    return torch.bucketize(rows, starts[1:], right=True).clamp_(max=starts.shape[0] - 2)


def _positions_of_rows(call: Call, sequence: Tensor | None) -> Tensor:
    """The position of each row: (1, b s_q) of a batch, (t_q,) of queries end to end."""
    layout, positions, s_q = call.layout, call.positions, call.q.shape[2]
    row = torch.arange(s_q, device=call.q.device, dtype=torch.int32)
    starts = layout.cu_seqlens_q
    if starts is None or sequence is None:
        first = layout.seqused_k[:, None] - s_q if positions is None else positions.q
        p = first if positions is not None and positions.per_row else first + row
        assert isinstance(p, Tensor)
        return p.expand(layout.sequences, s_q).reshape(1, -1)
    if positions is None:
        return (layout.seqused_k - starts[1:])[sequence] + row
    if positions.per_row and isinstance(positions.q, Tensor):
        return positions.q
    first = positions.q[:, 0] if isinstance(positions.q, Tensor) else positions.q
    return (first - starts[:-1])[sequence] + row


def _factors(descale: Factors, keys: int) -> tuple[Factors, Factors]:
    """The two calls: over the prefix, and over each sequence's own keys."""
    blocks = keys // BLOCK

    def first(x: Tensor) -> Tensor:
        return x[:1] if x.shape[2] == 1 else x[:1, :, :blocks]

    def rest(x: Tensor) -> Tensor:
        return x if x.shape[2] == 1 else x[:, :, min(blocks, x.shape[2] - 1) :]

    return descale.mapped(first), descale.mapped(rest)


def forward(call: Call, planned: list[Part], lse: bool) -> Outputs:
    """The results of the plain call, computed by its `parts`."""
    module = planned[0][0].module
    together = getattr(module, "run_parts", None) if all(plan.module is module for plan, _ in planned) else None
    if together is not None:
        # The prefix last: it leaves more to add up, which is read again soon.
        return together(call, [(part, plan.launches) for plan, part in reversed(planned)], lse)
    results: Any = [plan.module.run_forward(part, plan.launches, True) for plan, part in planned]
    (a, lse_a, top_a), (b, lse_b, top_b) = results
    if call.layout.cu_seqlens_q is None:
        shape = call.q.shape[0], call.q.shape[2]
        a, lse_a = (x[0].unflatten(1, shape).transpose(0, 1) for x in (a, lse_a))
        top_a = None if top_a is None else top_a[0].unflatten(1, shape).transpose(0, 1)
    # exp(lse_a - lse); where neither sees a key both results are zero, and -inf - -inf is no share of anything.
    share = torch.sigmoid(lse_a.clamp(min=torch.finfo(lse_a.dtype).min) - lse_b)[..., None]
    target = call.empty_out() if not call.keeps_tail else empty_like_rows(a, a.shape[3], a.dtype)
    out = torch.add(a * share, b * (1 - share), out=target)
    top = None if top_a is None or top_b is None else torch.maximum(top_a, top_b)
    return out, torch.logaddexp(lse_a, lse_b), top


def explanation(call: Call, backend: str) -> str:
    """One line on what a call with `shared_pages` does."""
    if (reason := obstacle(call)) is not None:
        return f"shared pages: the plain call runs, {reason}"
    n, layout, saved = call.layout.shared_pages, call.layout, _saved(call) / 1e6
    planned = parts(call, backend)
    if planned is None:
        return "shared pages: the plain call runs, no backend takes both of its parts"
    common, own = (plan.backend for plan, _ in planned)
    return (
        f"shared pages: {common} reads the first {n} pages once for all {layout.sequences} sequences, and {own} those "
        f"after them: up to {saved:.1f} MB of keys and values less to read, for one more call"
    )
