"""Rows of latents that list their keys in the portable kernels: forward, and gradients from tables of these keys."""

from __future__ import annotations

import pytest
import torch

from saccade import Dense, attention, causal, explain, mask_mod, selected, selected_blocks, softcap, window
from saccade.backends import key_lists
from saccade.backends.device.records import runtime_int
from saccade.backends.triton import token_lists
from saccade.call import Call
from saccade.testing.accuracy import check
from tests.masks.test_selected import lists

B = 2


def operands(h=16, s_q=3, s_k=80, h_k=1, d=576, d_v=512):
    q, k = torch.randn(B, h, s_q, d).half(), torch.randn(B, h_k, s_k, d).half()
    return q, k, k[..., :d_v]


def listed(s_q=3, n=70, s_k=80, b=B, **keywords):
    return selected(lists(b, 1, s_q, n, blocks=s_k), **keywords)


CASES = {
    "two tiles of keys": (operands, lambda: {"mask": listed()}),
    "many heads": (lambda: operands(130, 2), lambda: {"mask": listed(2), "sink": torch.randn(130)}),
    "lengths": (lambda: operands(20), lambda: {"mask": listed(lengths=torch.randint(0, 71, (B, 1, 3)))}),
    "two key heads": (lambda: operands(6, h_k=2), lambda: {"mask": listed(b=1), "score_mod": softcap(3.0)}),
    "causal": (lambda: operands(4, 9), lambda: {"mask": listed(9) & causal(), "dlse": torch.randn(B, 4, 9)}),
    "window": (lambda: operands(4, 9), lambda: {"mask": listed(9) & window(20, 3), "return_max_scores": True}),
    "predicate": (lambda: operands(4), lambda: {"mask": listed() & mask_mod(lambda b, h, i, j: (i + j + b) % 3 > 0)}),
    "rows": (lambda: operands(4, 5), lambda: {"mask": listed(3, rows=2)}),
    "v4": (lambda: operands(4, d=512), lambda: {"mask": listed()}),
    "few values": (lambda: operands(4, d_v=448), lambda: {"mask": listed()}),
    "narrow": (lambda: operands(4, d=320, d_v=256), lambda: {"mask": listed()}),
    "no entry": (lambda: operands(4), lambda: {"mask": listed(n=0), "sink": torch.randn(4)}),
    "no key": (lambda: operands(4), lambda: {"mask": selected(torch.full((1, 1, 3, 5), -1))}),
    "hot": (lambda: operands(4, 9), lambda: {"mask": selected(torch.tensor([5, -1, 99]).expand(1, 1, 9, 3))}),
    "positions": (lambda: operands(4, 9), lambda: {"mask": listed(9) & causal(), "layout": Dense(q_offset=50)}),
    "padded": (
        lambda: operands(4),
        lambda: {"mask": listed(), "sink": torch.randn(4), "layout": Dense("bhsd", *torch.tensor([[2, 3], [80, 33]]))},
    ),
}


@pytest.mark.parametrize("memory", [token_lists.MOST_BYTES, 1 << 20], ids=["at once", "row by row"])
@pytest.mark.parametrize("name", CASES)
def test_latents(name, memory, monkeypatch):
    monkeypatch.setattr(token_lists, "MOST_BYTES", memory)
    given, keywords = (made() for made in CASES[name])
    assert "a program gathers those of a row" in explain(*given, backend="triton", mask=keywords["mask"]).lists
    check(*given, backend="triton", **keywords).assert_ok()


NARROW = {
    "keys": lambda: selected(lists(B, 2, 9, 20)),
    "shared by heads": lambda: selected(lists(1, 1, 9, 20, dtype=torch.int32), torch.tensor([20, 3])) & window(50, 0),
    "of query heads": lambda: selected(lists(B, 6, 3, 20), rows=3),
    "short blocks": lambda: selected_blocks(lists(B, 2, 9, 3, blocks=9), 8) & causal(),
}


@pytest.mark.parametrize("name", NARROW)
def test_gradients_of_few_keys(name, monkeypatch):
    """Of two key heads, whose values are tensors of their own; a score function may know where keys are."""
    monkeypatch.setattr(key_lists, "FEW", 0)
    monkeypatch.setattr(token_lists, "MOST_BYTES", 1 << 16)
    q, k, v = (torch.randn(B, h, s, d).half() for h, s, d in ((6, 9, 16), (2, 70, 16), (2, 70, 24)))
    mask = NARROW[name]()
    assert explain(q, k, v, mask=mask, backend="triton").lists.endswith("gradients too")
    dlse, sink = torch.randn(B, 6, 9), torch.randn(6)
    given = {"dlse": dlse, "sink": sink, "score_mod": lambda s, b, h, i, j: s * torch.where(i > j, 0.5, 1.0)}
    check(q, k, v, mask=mask, backend="triton", **given).assert_ok()
    layout = Dense("bhsd", torch.tensor([9, 4]), torch.tensor([70, 33]))
    check(q, k, v, mask=mask, layout=layout, backend="triton").assert_ok()


def test_inverted_lists():
    """Each key has the parts of the rows that list it, in their order, from the first of some rows on."""
    entries = lists(B, 1, 9, 20, blocks=30)
    entries[:, :, 1] = -1
    q, k, v = operands(8, 9, 30)
    work, tables = work_of(Call(q, k, v, mask=selected(entries)))
    sums = torch.zeros(B, 1, 30, work.columns)
    for first, rows in ((0, 18), (3, 4), (12, 6), (7, 5)):
        target, order, starts = token_lists.inverted(work, tables, sums, first, rows)
        for key in range(len(target)):
            b, kv_idx = first // 9 + key // 30, key % 30
            found = order[starts[key] : starts[key + 1]]
            wanted = [r for r in range(first, first + rows) if r // 9 == b and kv_idx in entries[b, 0, r % 9].tolist()]
            assert [first + number // work.room for number in found.tolist()] == wanted
            for number in found.tolist():
                row = first + number // work.room
                assert tables[0][row // 9, 0, row % 9, number % work.room] == kv_idx


def work_of(call):
    tables = token_lists.keys_of_rows(call, {})
    return token_lists.TokenWork.of(call, {}, tables[0].shape[1], tables[0].shape[3]), tables


def test_the_same_bits():
    """However many rows are there at a time: sums have one order."""
    given = [x.requires_grad_() for x in operands(4, 9)]
    found = []
    for memory in (token_lists.MOST_BYTES, 1 << 20):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(token_lists, "MOST_BYTES", memory)
            torch.manual_seed(0)
            out = attention(*given, mask=listed(9), backend="triton")
            found.append(torch.autograd.grad(out.sum(), given))
    assert all(torch.equal(x, y) for x, y in zip(*found, strict=True))


@pytest.mark.parametrize(
    ("mask", "keywords", "reason"),
    [
        (lambda: listed() | causal(), {}, "one list of keys, beside other masks by &"),
        (lambda: selected(lists(B, 4, 3, 20)), {}, "lists of keys that all heads share"),
        (listed, {"dropout_p": 0.1}, "lists of keys without dropout"),
        (
            listed,
            {"score_mod": lambda s, b, h, i, j: s - j},
            "lists of keys with functions of scores that do not depend on kv_idx",
        ),
    ],
)
def test_refusals(mask, keywords, reason):
    told = explain(*operands(4), mask=mask(), backend="triton", **keywords)
    assert f"takes head dims above 512 without pages for {reason}" in "; ".join(told.reasons["triton"])


MADE, INVERTED, KEYS = token_lists.TokenWork.made, token_lists.inverted, token_lists.keys_of_rows


def _wrong_launch(number, change):
    """Of the launches of weights, of dq, and of parts of dk and of dv, one with other arguments."""

    def made(self, given, keys, rows):
        for i, (launch, arguments) in enumerate(MADE(self, given, keys, rows)):
            yield launch, tuple(change(list(arguments))) if i == number else arguments

    return {"TokenWork.made": made}


def _replaced(place, change):
    def changed(arguments):
        arguments[place] = change(arguments[place])
        return arguments

    return changed


def _wrong_tables(change):
    return {"keys_of_rows": lambda *given: change(*KEYS(*given))}


def _wrong_inverse(change):
    return {"inverted": lambda *given: change(*INVERTED(*given))}


WRONG = {
    "the last key is left out": lambda: _wrong_tables(lambda table, used: (table, used - 1)),
    "keys of the neighbour": lambda: _wrong_tables(lambda table, used: (table.roll(1, 2), used.roll(1, 2))),
    "keys of batch row 0": lambda: _wrong_tables(lambda table, used: (table[:1].expand_as(table).clone(), used)),
    "no key is 0": lambda: _wrong_tables(lambda table, used: (table.clamp(min=1), used)),
    "parts of dk from weights": lambda: _wrong_launch(2, _replaced(2, lambda which: runtime_int(0))),
    "parts of dv from ds": lambda: _wrong_launch(3, _replaced(2, lambda which: runtime_int(1))),
    "dk without the scale": lambda: _wrong_launch(2, _replaced(5, lambda factor: 1.0)),
    "dv in the columns of dk": lambda: _wrong_launch(3, _replaced(3, lambda first: runtime_int(0))),
    "the first rows always": lambda: _wrong_launch(0, _replaced(6, lambda keys: keys._replace(first=runtime_int(0)))),
    "dq of the first rows": lambda: _wrong_launch(1, _replaced(2, lambda keys: keys._replace(first=runtime_int(0)))),
    "dq without the scale": lambda: _wrong_launch(1, _replaced(5, lambda scale: 1.0)),
    "a key's last part is lost": lambda: _wrong_inverse(
        lambda sums, order, first: (sums, order, first - (first > 0).int())
    ),
    "parts of the neighbour": lambda: _wrong_inverse(lambda sums, order, first: (sums, order.roll(1), first)),
    "sums of one batch row": lambda: _wrong_inverse(lambda sums, order, first: (sums[:80], order, first)),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_kernels_are_rejected(name, monkeypatch):
    monkeypatch.setattr(token_lists, "MOST_BYTES", 2 << 20)  # a few rows at a time
    given = operands(4, 5)
    for place, wrong in WRONG[name]().items():
        monkeypatch.setattr(f"saccade.backends.triton.token_lists.{place}", wrong)
    with pytest.raises(AssertionError):
        check(*given, mask=listed(5), backend="triton").assert_ok()
