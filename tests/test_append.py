"""New keys and values in the pages of a cache."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor

from saccade import Dense, Paged, append_kv

PAGES, SIZE, H, D, D_V = 9, 4, 2, 12, 8
TABLE = torch.tensor([[3, 0, 7], [5, -1, 1 << 30], [1, 2, 6]], dtype=torch.int32)
USED = torch.tensor([3, 2, 11])


def turned(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """One row (d) by its angles (pairs), element by element."""
    made, pairs = x.clone(), len(cos)
    for i in range(pairs):
        one, two = (2 * i, 2 * i + 1) if interleaved else (i, pairs + i)
        made[one] = x[one] * cos[i] - x[two] * sin[i]
        made[two] = x[two] * cos[i] + x[one] * sin[i]
    return made


ROTARY = {"plain": (None, False), "halves": (4, False), "interleaved": (6, True)}


@pytest.mark.parametrize("rotary", ROTARY)
@pytest.mark.parametrize("lengths", [None, (4, 3, 0), (0, 5, 4)], ids=str)
def test_rows_are_where_they_belong(lengths, rotary, device):
    """Nothing else is touched: not the pages of others, not what is beyond the table or has no page."""
    both = torch.randn(PAGES, SIZE, H, D + D_V, device=device)
    caches, wanted = both.split([D, D_V], dim=-1), both.clone().cpu().split([D, D_V], dim=-1)
    lengths = (4, 4, 4) if lengths is None else lengths
    offsets = torch.tensor([0, *lengths]).cumsum(0).int()
    rows = int(offsets[-1]) + 2
    packed = lengths != (4, 4, 4)
    layout = Paged(TABLE.to(device), USED.to(device), offsets.to(device) if packed else None)
    new = [torch.randn(rows, H, d) for d in (D, D_V)] if packed else [torch.randn(3, 4, H, d) for d in (D, D_V)]
    pairs, interleaved = ROTARY[rotary]
    angles = torch.randn(12, pairs or 1)
    tables = None if pairs is None else (angles.cos().to(device), angles.sin().to(device))
    append_kv(*caches, layout, *(x.to(device) for x in new), rotary=tables, interleaved=interleaved)
    for b, n in enumerate(lengths):
        for i in range(n):
            position = int(USED[b]) + i
            page = int(TABLE[b, position // SIZE]) if position < 3 * SIZE else -1
            if not 0 <= page < PAGES:
                continue
            for which, (cache, x) in enumerate(zip(wanted, new, strict=True)):
                row = x[offsets[b] + i] if packed else x[b, i]
                if which == 0 and pairs is not None:
                    angle = angles[min(position, 11)]
                    row = torch.stack([turned(part, angle.cos(), angle.sin(), interleaved) for part in row])
                cache[page, position % SIZE] = row
    for found, right in zip(caches, wanted, strict=True):
        torch.testing.assert_close(found.cpu(), right)


def given(**changes):
    found = {
        "k_cache": torch.zeros(PAGES, SIZE, H, D),
        "v_cache": torch.zeros(PAGES, SIZE, H, D_V),
        "layout": Paged(TABLE, USED),
        "k_new": torch.randn(3, 1, H, D),
        "v_new": torch.randn(3, 1, H, D_V),
    }
    return found | changes


def test_the_operator():
    from torch.library import opcheck

    tensors = list(given().values())
    arguments = (
        *tensors[:2],
        *tensors[3:],
        tensors[2].records,
        tensors[2].text,
        [torch.ones(9, 2), torch.ones(9, 2)],
        True,
    )
    opcheck(torch.ops.saccade.append_kv.default, arguments, test_utils=("test_schema", "test_faketensor"))
    compiled, plain = given(), given()
    plain["k_new"], plain["v_new"] = compiled["k_new"], compiled["v_new"]

    @torch.compile(backend="aot_eager", fullgraph=True)
    def call(k_cache, v_cache, table, used, k_new, v_new):
        append_kv(k_cache, v_cache, Paged(table, used), k_new, v_new)
        return k_cache.sum()

    append_kv(**plain)
    total = call(compiled["k_cache"], compiled["v_cache"], TABLE, USED, compiled["k_new"], compiled["v_new"])
    assert torch.equal(compiled["k_cache"], plain["k_cache"])
    assert torch.equal(compiled["v_cache"], plain["v_cache"])
    assert torch.equal(total, plain["k_cache"].sum())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"k_new": torch.randn(2, 1, H, D)}, "k_new must have the batch size of block_table (3, 3)"),
        ({"k_new": torch.randn(3, H, D)}, "k_new is (b, s, h, d)"),
        ({"k_new": torch.randn(3, 1, 4, D), "v_new": torch.randn(3, 1, 4, D_V)}, "the cache's heads"),
        ({"v_new": torch.randn(3, 2, H, D_V)}, "the same rows and heads"),
        ({"k_new": torch.randn(3, 1, H, D).half()}, "share one dtype, got torch.float32, torch.float32, torch.float16"),
        ({"rotary": (torch.ones(9, 7), torch.ones(9, 7))}, "2 pairs <= 12, got cos (9, 7)"),
        ({"rotary": (torch.ones(9, 3), torch.ones(9, 3).half())}, "one float dtype"),
        ({"k_cache": torch.zeros(PAGES, SIZE, D, H).mT}, "contiguous, got strides"),
        ({"k_new": torch.randn(3, 1, H, D, requires_grad=True)}, "append_kv has no gradients"),
    ],
)
def test_errors(changes, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        append_kv(**given(**changes))


def test_another_layout_is_refused():
    with pytest.raises(TypeError, match="needs a Paged layout"):
        append_kv(**given(layout=Dense()))
