"""Calls over ranks, drawn at random from what docs/distributed.md promises, beside the same calls in one process."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from saccade import Dense, Packed, ScoreMod, attention, causal, mask_mod, prefix, window
from saccade.distributed import plan
from tests.support.ranks import mesh_of

HERE = str(Path(__file__))
EQUAL = 1e-12
LONGEST = 90
CALLS = 2
"""Layers of a step, whose masks and scores differ."""

MASKS: dict[str, Callable[[random.Random], Any]] = {
    "none": lambda dice: None,
    "causal": lambda dice: causal(),
    "window": lambda dice: window(dice.randrange(30), dice.choice([0, 0, 7])),
    "causal&window": lambda dice: causal() & window(dice.randrange(40), None),
    "prefix": lambda dice: prefix(dice.randrange(20)),
    "holes": lambda dice: causal() & mask_mod(lambda b, h, i, j: (i + 2 * j) % 5 != 1),
    "either": lambda dice: window(5, 2) | mask_mod(lambda b, h, i, j: j % 7 == 0),
    "documents": lambda dice: causal() & mask_mod(lambda b, h, i, j: (b + j) % 4 != 0),
    "heads": lambda dice: causal() & mask_mod(lambda b, h, i, j: (i - j) % (h + 2) != 1),
}
WITHIN_CAUSAL = {"causal", "causal&window", "holes", "documents", "heads"}
SCORES: dict[str, Callable[[Tensor, Tensor, Tensor], Any]] = {
    "none": lambda heads, near, places: None,
    "slopes": lambda heads, near, places: lambda s, b, h, i, j: s - heads[h] * (i - j).abs() * 0.1,
    "near": lambda heads, near, places: lambda s, b, h, i, j: s + near[h, (i - j).clamp(-9, 9) + 9],
    "places": lambda heads, near, places: lambda s, b, h, i, j: s + (places[i] * places[j]).sum(-1) * 0.3,
    "gates": lambda heads, near, places: (
        lambda s, b, h, i, j: torch.where(j % 3 == 0, s * heads[h].sigmoid(), (s + places[j, 1]).tanh() * 2)
    ),
    "documents": lambda heads, near, places: lambda s, b, h, i, j: s * (1 + 0.1 * (b % 3)) + places[b % 5, h % 4],
    "given": lambda heads, near, places: ScoreMod(lambda s, b, h, i, j, t: s + t[h] * near[0, j % 19], heads),
}


class Drawn(NamedTuple):
    """What a seed stands for."""

    ranks: int
    mesh: tuple[int, int] | None
    documents: list[int] | tuple[int, int]
    order: str
    heads: tuple[int, int]
    dims: tuple[int, int]
    settings: dict[str, Any]
    masks: list[str]
    scores: list[str]
    everything: bool
    """Whether the plan brings every key, also where no call needs it."""
    sink: bool
    dropout_p: float
    scale: float | None
    recomputed: bool


def drawn(seed: int) -> Drawn:
    dice = random.Random(seed)
    ranks = dice.choice([1, 2, 3, 5, 8])
    mesh = dice.choice([None, None, (4, 2), (2, 4)]) if ranks == 8 else None
    way = "mesh" if mesh else dice.choice(["gather", "gather", "ulysses", "auto"])
    divided = mesh[1] if mesh else ranks if way == "ulysses" else 1
    h_k = dice.choice([n for n in (1, 2, 3, 4, 5, 6, 8, 10, 16) if n % divided == 0 or divided % n == 0])
    h_q = h_k * dice.choice([n for n in range(1, 17) if h_k * n % divided == 0 and h_k * n <= 40])
    rows = dice.choice(["balanced", "balanced", "equal", "number", "pairs"])
    if rows == "pairs" and (way in ("mesh", "ulysses")):
        rows = "equal"
    step = 2 * ranks if rows == "pairs" else 1
    lengths = [n - n % step for n in (dice.choice([0, 1, 5, 17, 40, LONGEST]) for _ in range(dice.randint(1, 6)))]
    documents = lengths if dice.random() < 0.7 else (dice.randint(1, 3), lengths[0])
    order = "thd" if isinstance(documents, list) else dice.choice(["bhsd", "bshd", "sbhd"])
    plain = dice.random() < 0.3  # of what a call may take pieces as sequences for
    allowed = ["causal", "causal&window"] if plain else [x for x in MASKS if x != "heads" or divided == 1]
    masks = [dice.choice(allowed) for _ in range(CALLS)]
    power = (h_q // divided) & (h_q // divided - 1) == 0
    most = -(-sum(lengths) // ranks) + 40 if mesh is None else sum(lengths)  # parts of a mesh may differ by more
    return Drawn(
        ranks, mesh, documents, order, (h_q, h_k), dice.choice([(16, 16), (8, 24), (32, 16)]),
        {"rows": most if rows == "number" else rows, "debug": dice.random() < 0.3}
        | ({} if mesh else {"method": way}),
        masks, ["none" if plain else dice.choice(list(SCORES)) for _ in range(CALLS)],
        dice.random() < 0.5, dice.random() < 0.5,
        dice.choice([0.0, 0.0, 0.3]) if power and not plain else 0.0, dice.choice([None, 0.7]), dice.random() < 0.3,
    )  # fmt: skip


class Tensors(NamedTuple):
    """Of all rows, and of all ranks: equal in every process."""

    rows: list[Tensor]
    """for each layer q, k, v and the gradient of out"""
    shared: list[Tensor]
    """for each layer a sink and tables of heads, of distances and of places"""

    @staticmethod
    def of(config: Drawn, seed: int) -> Tensors:
        torch.manual_seed(seed)
        (h_q, h_k), (d, d_v), documents = config.heads, config.dims, config.documents
        found, shared = [], []
        for _ in range(CALLS):
            for h, width in ((h_q, d), (h_k, d), (h_k, d_v), (h_q, d_v)):
                if isinstance(documents, list):
                    shape = {"t": sum(documents), "h": h, "d": width}
                else:
                    shape = {"b": documents[0], "s": documents[1], "h": h, "d": width}
                found.append(torch.randn([shape[x] for x in config.order], dtype=torch.float64))
            sizes = (h_q,), (h_q,), (h_q, 19), (LONGEST + 5, 4)
            shared += [torch.randn(size, dtype=torch.float64, requires_grad=True) for size in sizes]
        return Tensors(found, shared)


def step(config: Drawn, seed: int, rows: list[Tensor], shared: list[Tensor], **where: Any) -> list[Tensor]:
    """out and LSE of all layers, the gradients of their rows, and those of what is shared."""
    dice = random.Random(seed)
    leaves = [x.detach().requires_grad_() for x in rows]
    results, gradients = [], []
    for i in range(CALLS):
        q, k, v, _ = leaves[4 * i : 4 * i + 4]
        sink, *tables = shared[4 * i : 4 * i + 4]
        keywords = where | {"mask": MASKS[config.masks[i]](dice), "score_mod": SCORES[config.scores[i]](*tables)}
        keywords |= {"sink": sink if config.sink else None, "dropout_p": config.dropout_p, "scale": config.scale}

        def layer(q: Tensor, k: Tensor, v: Tensor, keywords: dict[str, Any] = keywords) -> Any:
            return tuple(attention(q, k, v, return_lse=True, **keywords))

        out, lse = checkpoint(layer, q, k, v, use_reentrant=False) if config.recomputed else layer(q, k, v)
        results += [out, lse]
        gradients += [rows[4 * i + 3], torch.where(lse.isinf(), 0, lse.detach().sin())]
    of = [x for i, x in enumerate(leaves) if i % 4 < 3]
    found = torch.autograd.grad(results, [*of, *shared], gradients, allow_unused=True)
    return [
        *(x.detach() for x in results),
        *(torch.zeros_like(x) if y is None else y for x, y in zip([*of, *shared], found, strict=True)),
    ]


def part(group: Any, seed: int, sharing: str = "gather") -> tuple[Tensor, list[Tensor]]:
    """One rank's rows of a step; `sharing` in the place of "gather"."""
    config = drawn(seed)
    if config.settings.get("method") == "gather":
        config.settings["method"] = sharing
    tensors = Tensors.of(config, seed)
    widest = causal() if not config.everything and {*config.masks} <= WITHIN_CAUSAL else None
    made = plan(config.documents, mesh_of(config.mesh) if config.mesh else group, mask=widest, **config.settings)
    dim = 0 if config.order == "thd" else config.order.index("s")
    layout = {} if config.order == "thd" else {"layout": Dense(config.order)}
    rows = [made.shard(x, dim, fill=torch.nan) for x in tensors.rows]
    torch.manual_seed(seed + made.rank)
    found = step(config, seed, rows, tensors.shared, context=made, **layout)
    dims = [dim, 1 if config.order == "thd" else 2] * CALLS + [dim] * 3 * CALLS
    for i, at in enumerate(dims):
        found[i] = found[i].narrow(at, 0, len(made.row_indices))
    return made.row_indices, found


def difference(pool: Any, seed: int, work: tuple[str, str] = (HERE, "part"), *arguments: Any) -> float:
    """The largest of a step over ranks and in one process, relative to the largest element of each tensor."""
    config = drawn(seed)
    parts = pool.run(work, config.ranks, *arguments, seed)
    tensors = Tensors.of(config, seed)
    layout = Packed.from_lengths(config.documents) if config.order == "thd" else Dense(config.order)
    torch.manual_seed(seed)
    one = step(config, seed, tensors.rows, tensors.shared, layout=layout)
    dim = 0 if config.order == "thd" else config.order.index("s")
    dims = [dim, 1 if config.order == "thd" else 2] * CALLS + [dim] * 3 * CALLS
    worst = 0.0
    for i, y in enumerate(one):
        if i < len(dims):
            x = torch.full_like(y, torch.nan)
            for rows, found in parts:
                x.index_copy_(dims[i], rows, found[i])
        else:
            x = torch.stack([found[i] for _, found in parts]).sum(0)
        error = torch.where(x == y, 0, (x - y).abs()).nan_to_num(nan=torch.inf)
        if y.numel():
            worst = max(worst, float(error.amax() / y.masked_fill(y.isinf(), 0).abs().amax().clamp(min=1)))
    return worst


def pytest_generate_tests(metafunc):
    """Some seeds, and many by --everything."""
    if "seed" in metafunc.fixturenames:
        metafunc.parametrize("seed", range(400 if metafunc.config.getoption("--everything") else 12))


@pytest.mark.sample
def test_random_steps(pool, seed):
    assert difference(pool, seed) <= EQUAL, drawn(seed)
