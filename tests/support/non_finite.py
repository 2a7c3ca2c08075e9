"""Operands in which something is NaN or infinite, results that are so in the same places, and very low scores."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from saccade.api import attention
from saccade.masks import causal, mask_mod, window
from saccade.scores import bias, softcap

ROW, KEY, HEAD = 5, 3, 1
"""What is broken: a query row of head 1, or a key of head 0."""


def nan_row(q: Tensor, k: Tensor, v: Tensor) -> None:
    q[0, HEAD, min(ROW, q.shape[2] - 1), 2] = torch.nan


def nan_key(q: Tensor, k: Tensor, v: Tensor) -> None:
    k[0, 0, min(KEY, k.shape[2] - 1)] = torch.nan


def endless_key(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Scores of +inf, whose weights are NaN."""
    q.abs_()
    k[0, 0, min(KEY, k.shape[2] - 1)] = torch.inf


def hidden_key(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Scores of -inf, which are as masked."""
    q.abs_()
    k[0, 0, min(KEY, k.shape[2] - 1)] = -torch.inf


def hidden_keys(q: Tensor, k: Tensor, v: Tensor) -> None:
    """All of a head."""
    q.abs_()
    k[0, 0] = -torch.inf


BREAKS: dict[str, Callable[[Tensor, Tensor, Tensor], None]] = {
    f.__name__: f for f in (nan_row, nan_key, endless_key, hidden_key, hidden_keys)
}
CALLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"mask": causal()},
    "window": {"mask": window(2, 1)},
    "predicate": {"mask": mask_mod(lambda b, h, i, j: (i + j) % 3 != 0)},
    "softcap": {"score_mod": softcap(3.0)},
    "score": {"score_mod": lambda s, b, h, i, j: s + 0.1 * (i - j)},
    "squared": {"score_mod": lambda s, b, h, i, j: s * torch.where(i > j, 2.0, 1.0)},
    "sink": {"sink": torch.tensor([0.5, -1.0, 2.0, 0.0])},
}


def _beside(write: Callable[..., Any]) -> Callable[[int], tuple[Tensor, Callable[[Tensor], Any]]]:
    """A table (4, rows + 400), of which rows in use read the columns before `rows + 100`; and a function of it."""

    def made(rows: int) -> tuple[Tensor, Callable[[Tensor], Any]]:
        table = torch.randn(4, rows + 400)
        table[:, rows + 100 :] = torch.nan
        return table, lambda t: lambda s, b, h, i, j: write(s, t, h, i, j)

    return made


TABLES: dict[str, Callable[[int], tuple[Tensor, Callable[[Tensor], Any]]]] = {
    "rows": _beside(lambda s, t, h, i, j: s + t[h, i + 100]),
    "factors": _beside(lambda s, t, h, i, j: s * t[h, i + 100]),
    "places": _beside(lambda s, t, h, i, j: s + t[h, i + 100 + 0 * j] * t[h, j]),
    "distances": _beside(lambda s, t, h, i, j: s + t[h, i - j + 100]),
}
"""Captured tables with NaN, which only rows beyond the end would read: up to 100 keys."""


def table_results(table: str, given: list[Tensor], backend: str, **keywords: Any) -> list[Tensor]:
    """out and all gradients of a call with one of these, of rows as many as `given` has or fewer."""
    rows = int(keywords.pop("rows", given[0].shape[2]))
    torch.manual_seed(0)
    values, function = TABLES[table](rows)
    leaves = [x.detach().requires_grad_() for x in (*given, values.to(given[0].device))]
    out = attention(*leaves[:3], score_mod=function(leaves[3]), backend=backend, **keywords)
    return [out.detach(), *torch.autograd.grad(out.float().square().sum(), leaves)]


def assert_near(found: list[Tensor], exact: list[Tensor]) -> None:
    """All of these `table_results` are finite and near the exact ones. Their sizes are 1 and more, but for one: what is
    added to a whole row has no gradient, of which the roundings of such terms remain."""
    for x, y in zip(found, exact, strict=True):
        assert x.isfinite().all()
        assert float((x.cpu().float() - y).abs().amax()) <= 0.03 * max(float(y.abs().amax()), 1.0)


def operands(dtype: torch.dtype, device: str = "cpu", rows: int = 9, keys: int = 12, d: int = 8) -> list[Tensor]:
    """q (1, 4, rows, d), k and v (1, 2, keys, d), without zeros in q."""
    torch.manual_seed(0)
    return [torch.randn(1, h, s, d).to(device, dtype) for h, s in ((4, rows), (2, keys), (2, keys))]


def results(
    given: list[Tensor], backend: str = "auto", **keywords: Any
) -> tuple[list[Tensor | None], list[Tensor | None]]:
    """out, lse and max_scores of a backend, and of the reference in float64."""
    keywords = {name: x.to(given[0].device) if isinstance(x, Tensor) else x for name, x in keywords.items()}
    more: dict[str, Any] = {"return_lse": True, "return_max_scores": True}
    found: Any = attention(*given, backend=backend, **more, **keywords)
    wide = [x.double() for x in given]
    if "sink" in keywords:
        keywords["sink"] = keywords["sink"].double()
    return list(found), list(attention(*wide, backend="reference", **more, **keywords))


def assert_same_kind(found: Tensor | None, exact: Tensor | None) -> None:
    """NaN where the exact result is, infinite where that is, else finite."""
    assert found is not None
    assert exact is not None
    for kind in (torch.isnan, torch.isposinf, torch.isneginf):
        wrong = kind(found) != kind(exact)
        assert not bool(wrong.any()), f"{kind.__name__} is wrong first at {wrong.nonzero()[0].tolist()}"


def assert_endless_sink(given: list[Tensor], backend: str, gradients: bool = True, **keywords: Any) -> None:
    """With a sink of +inf for the first and the third of four heads, results are the reference's in float64: out and
    gradients are 0 there, and the LSE is +inf; what is NaN stays NaN."""
    sink = torch.tensor([torch.inf, 0.5, torch.inf, -1.0])
    sides = []
    for name, kind in ((backend, given[0].dtype), ("reference", torch.float64)):
        leaves = [x.detach().to(given[0].device, kind).requires_grad_(gradients) for x in (*given, sink)]
        found = attention(*leaves[:3], sink=leaves[3], backend=name, return_lse=True, **keywords)
        cotangents = [torch.ones_like(found.out), found.lse.detach().isfinite().to(found.lse.dtype)]
        more = torch.autograd.grad(found, leaves, cotangents) if gradients else ()
        sides.append([x.detach() for x in (*found, *more)])
    for x, y in zip(*sides, strict=True):
        assert_same_kind(x, y)
        if not x.numel():
            continue
        near = torch.where(y.isfinite(), x.double() - y, 0).abs()
        assert float(near.amax()) <= 0.05 * max(float(y.nan_to_num(0, 0, 0).abs().amax()), 1.0)
    assert sides[0][1].isposinf().any()
    assert not gradients or sides[0][5][::2].tolist() == [0.0, 0.0]


# Score functions that give all visible keys of a row one very low score, so that its weights are equal


VALUES = -2000.0, -1e4, -1e9, -1e30, torch.finfo(torch.float32).min
EVERY = 3
"""One row in three is affected."""


def filled(value: float) -> Callable[..., Tensor]:
    """In place of the scores."""
    return lambda score, b, h, q_idx, kv_idx: torch.where(q_idx % EVERY == 1, value, score)


def filled_from(value: float) -> Callable[..., Tensor]:
    """Keys from 5 on: a window may leave a row only those."""
    return lambda score, b, h, q_idx, kv_idx: torch.where((q_idx % EVERY == 1) & (kv_idx > 4), value, score)


def added(value: float, s_q: int, s_k: int, device: str = "cpu") -> Any:
    """A learned table, at most -1e30: even float64 loses the scores that are added to it."""
    assert value <= -1e30
    table = torch.zeros(s_q, s_k, device=device)
    table[1::EVERY] = value
    return bias(table.requires_grad_())
