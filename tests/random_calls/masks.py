"""Random trees of masks, as text."""

from __future__ import annotations

from tests.random_calls.dice import Dice
from tests.random_calls.program import Program, Sizes

PLACED = ("causal", "window", "prefix", "prefixes", "interval", "interval of tensors", "mask_mod", "captured in a mask")
"""Masks of positions, whatever these are."""
COUNTED = ("documents", "bool tensor", "block_mask", "BlockMask")
"""Masks that count from the first row and key."""
COMBINED = ("&", "|", "~")
LEAVES = (*PLACED, *COUNTED)
KINDS = ("no mask", *LEAVES, *COMBINED)
ALONE = "bool tensor", "BlockMask"
"""Masks that are no part of others."""


def choose(dice: Dice, possible: list[str]) -> list[str]:
    """The kinds of the leaves of a mask: none, one that stands alone, or up to five."""
    alone, parts = [x for x in possible if x in ALONE], [x for x in possible if x not in ALONE]
    first = dice.balanced("mask", [*["no mask", *alone] * 5, *parts * 2])
    if first == "no mask":
        return []
    more = 0 if first in ALONE else dice.balanced("more leaves", [0, 1, 2, 3, 4])
    return [first, *(dice.balanced("leaf", parts) for _ in range(more))]


def draw(dice: Dice, program: Program, sizes: Sizes, kinds: list[str]) -> str | None:
    """The text of a mask of these leaves, or None."""
    program.features |= {*kinds} or {"no mask"}
    text = ""
    for kind in kinds:
        one = leaf(kind, dice, program, sizes)
        if not text:
            text = one
            continue
        operator = dice.balanced("mask operator", "&|")
        program.features.add(operator)
        text = f"({text} {operator} {one})"
        if dice.chance("mask inverted", 0.25):
            text = f"~{text}"
            program.features.add("~")
    return text or None


def leaf(kind: str, dice: Dice, program: Program, sizes: Sizes) -> str:
    b, s_q, s_k = sizes.b, sizes.s_q, sizes.s_k
    near = [0, 1, dice.number(0, 9), dice.number(0, max(s_k, 1)), s_k + 3]
    match kind:
        case "window":
            left, right = (dice.among(None, *near) for _ in range(2))
            return f"window({left}, {right})"
        case "prefix":
            return f"prefix({dice.among(*near)})"
        case "prefixes":
            return f"prefix(torch.randint(0, {s_k + 2}, ({b},), device=device))"
        case "documents":
            ids = f"torch.randint(0, {dice.number(2, 5)}, ({dice.among(1, b)}, {s_q}), device=device)"
            return f"documents({ids}{dice.among('', '.sort(-1).values')})"
        case "interval":
            start, stop = dice.among(None, *near), dice.among(*near, s_k + 9)
            return f"interval({start}, {stop})"
        case "interval of tensors":
            return interval(dice, program, sizes)
        case "mask_mod":
            return f"mask_mod(lambda b, h, i, j: {predicate(dice)})"
        case "captured in a mask":
            return f"mask_mod(lambda b, h, i, j: {reading(dice, program, sizes)})"
        case "bool tensor":
            shape = [dice.among(1, n) for n in (b, sizes.h_q, s_q, s_k)][dice.among(0, 0, 1, 2) :]
            return program.tensor(f"torch.rand({shape}, device=device) < {dice.among(0.2, 0.8)}")
        case "block_mask":
            function = f"mask_mod(lambda b, h, i, j: {predicate(dice)})"
            return f"block_mask({function}, {b}, {sizes.h_q}, {s_q}, {s_k}, device)"
        case "BlockMask":
            shape = f"{dice.among(None, b)}, {dice.among(None, sizes.h_q)}, {s_q}, {s_k}"
            return f"create_block_mask(lambda b, h, i, j: {predicate(dice)}, {shape}, device, {dice.among(64, 128)})"
    return "causal()"


def interval(dice: Dice, program: Program, sizes: Sizes) -> str:
    shape, reach = dice.among(*sizes.bounds), sizes.s_k + 5
    dtype = dice.among("torch.int32", "torch.int64")
    start = program.tensor(f"torch.randint(-5, {reach}, {shape}, device=device, dtype={dtype})")
    match dice.number(0, 3):
        case 0:
            return f"interval(None, {start})"
        case 1:
            return f"interval({start}, {dice.number(0, reach)})"
    return f"interval({start}, {start} + {dice.number(-2, reach)})"


def predicate(dice: Dice) -> str:
    """A function of the indices alone, which hides some keys of most rows."""
    n, m = dice.number(2, 7), dice.number(1, 40)

    def one() -> str:
        return dice.among(
            f"(i + {dice.number(1, 3)} * j + b) % {n} != 0",
            f"j % {n} < {n - 1}",
            f"(i - j).abs() < {m}",
            f"i // {m} == j // {m}",
            f"(h + j) % {n} != 1",
            f"j <= i + {m}",
            f"(j < {m}) ^ (i % 2 == 0)",
            f"torch.where(i > {m}, j % 3 != 0, j > h)",
        )

    return dice.among(f"{one()}", f"({one()}) & ({one()})", f"({one()}) | ({one()})", f"~({one()}) | (j % {n} == 1)")


def reading(dice: Dice, program: Program, sizes: Sizes) -> str:
    """A function of the indices and of a tensor."""
    n = dice.number(3, 60)
    match dice.number(0, 3):
        case 0:
            t = program.tensor(f"torch.rand({n}, device=device) < 0.7")
            return f"{t}[j % {n}]"
        case 1:
            t = program.tensor(f"torch.randint(0, 4, ({n},), device=device)")
            return f"{t}[i % {n}] == {t}[j % {n}]"
        case 2:
            t = program.tensor(f"torch.randint(0, {sizes.s_k + 1}, ({sizes.b}, {sizes.h_q}), device=device)")
            return f"j <= {t}[b, h]"
    t = program.tensor(f"torch.randn({sizes.h_q}, {n}, device=device)")
    return f"({t}[h, i % {n}] < {t}[h, j % {n}]) | (i == j)"
