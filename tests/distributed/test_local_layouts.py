"""The calls of all ranks, one after the other on one device, by the one tolerance: rows with positions, and rows of
padding that hold NaN."""

from __future__ import annotations

import pytest
import torch

from saccade import Dense, attention
from saccade.call.partial import Partial
from saccade.distributed import plan
from saccade.testing import Case, check

LENGTHS = (150, 5, 300, 1, 0, 70)


def packed(name, **fields):
    given = {"b": len(LENGTHS), "h_q": 8, "h_k": 2, "d": 64, "order": "thd", "lengths": LENGTHS, "s_q": 300, "s_k": 300}
    return Case(name, **(given | fields))


CASES = [
    packed("causal", mask="causal", sink=True),
    packed("window", mask="window(60,0)", d=128),
    packed("softcap", mask="causal", score="softcap(9)"),
    Case("dense", b=2, h_q=4, h_k=2, s_q=311, s_k=311, d=64, mask="causal", order="bshd"),
    Case("dense-bhsd", b=2, h_q=4, h_k=2, s_q=311, s_k=311, d=128, mask="window(60,0)"),
]


def one_after_the_other(plans, case):
    """`attention` of whole tensors, by the ranks' layouts."""
    rows, of_lse = (0, 1) if case.order == "thd" else (case.order.index("s"), 2)

    def function(q, k, v, layout, return_lse=False, **keywords):
        parts, of_parts, places = [], [], []
        for mine in plans:
            firsts = [0, *torch.tensor(mine.lengths).cumsum(0).tolist()]
            spans = mine.sharding.keys[mine.rank]
            needed = [torch.arange(firsts[i] + start, firsts[i] + stop) for i, start, stop in spans]
            needed = torch.cat([torch.empty(0, dtype=torch.int64), *needed]).to(q.device)
            where = mine.layout(q.device, layout.order if isinstance(layout, Dense) else "bhsd")
            keys = [x.index_select(rows, needed) for x in (k, v)]
            own = mine.shard(q, rows, torch.nan)
            found = attention(own, *keys, layout=where, return_lse=True, **keywords)
            assert (found.out.movedim(rows, 0)[mine.used_rows :] == 0).all()
            parts.append(found.out.narrow(rows, 0, mine.used_rows))
            of_parts.append(found.lse.narrow(of_lse, 0, mine.used_rows))
            places.append(mine.row_indices)
        order = torch.cat(places).argsort().to(q.device)
        out = torch.cat(parts, rows).index_select(rows, order)
        return Partial(out, torch.cat(of_parts, of_lse).index_select(of_lse, order)) if return_lse else out

    return function


@pytest.mark.parametrize("rows", ["equal", 200])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_by_the_one_tolerance(torch_device, case, rows):
    case = case.replace(dtype="bf16" if torch_device == "cuda" else "fp32")
    made = case.inputs(torch_device)
    of = list(LENGTHS) if case.order == "thd" else (case.b, case.s_q)
    plans = [plan(of, 3, rank=i, mask=made.keywords["mask"], rows=rows) for i in range(3)]
    function = one_after_the_other(plans, case)
    check(made.q, made.k, made.v, dout=made.dout, dlse=made.dlse, function=function, **made.keywords).assert_ok()
