"""Random score functions, as text: ready ones, and ones that are written, with what they capture."""

from __future__ import annotations

from collections.abc import Callable

from tests.random_calls.dice import Dice
from tests.random_calls.program import Program, Sizes

READY = ("softcap", "alibi", "relative_bias", "t5_bias", "bias", "temperature")
WRITTEN = ("written score", "captured in a score")
KINDS = ("no score", *READY, *WRITTEN, "composed")


def draw(dice: Dice, program: Program, sizes: Sizes) -> str | None:
    """The text of a score function of at most four parts, or None."""
    parts = []
    for _ in range(dice.balanced("score parts", [0, 0, 1, 1, 2, 2, 2, 3, 3, 3, 4, 4])):
        kind = dice.balanced("score", (*READY, *WRITTEN, *WRITTEN, "captured in a score"))
        program.features.add(kind)
        parts.append(one(kind, dice, program, sizes))
    if parts and dice.chance("hidden by a score", 0.15):  # last: what is computed of -inf may be NaN
        parts.append(f"lambda s, b, h, i, j: torch.where({hiding(dice)}, s, -torch.inf)")
    if len(parts) < 2:
        program.features |= set() if parts else {"no score"}
        return parts[0] if parts else None
    program.features.add("composed")
    return f"compose({', '.join(parts)})"


def one(kind: str, dice: Dice, program: Program, sizes: Sizes) -> str:
    h, learns = sizes.h_q, sizes.learns and dice.chance("learns", 0.8)
    match kind:
        case "softcap":
            return f"softcap({dice.among(1.5, 5.0, 30.0)})"
        case "alibi":
            return f"alibi({program.captured(f'{h}', learns, '.mul(0.1)')})"
        case "relative_bias":
            return f"relative_bias({program.captured(f'{dice.among(1, h)}, {2 * dice.number(0, 40) + 1}', learns)})"
        case "t5_bias":
            table = program.captured(f"{dice.among(8, 32)}, {h}", learns)
            return f"t5_bias({table}, {dice.among(True, False)}, {dice.among(20, 128)})"
        case "bias":
            shape = [dice.among(1, n, n) for n in (sizes.b, h, *sizes.of_bias)][dice.among(0, 0, 1, 2, 3) :]
            return f"bias({program.captured(', '.join(map(str, shape)), learns)})"
        case "temperature":
            return f"temperature({program.captured(f'{h}', learns, '.exp()')})"
    text, reads = "s", kind == "captured in a score"
    for _ in range(dice.among(1, 1, 1, 2)):
        text = wrapped(text, dice, lambda: term(dice, program, sizes, learns) if reads else plain(dice))
    if reads and not program.made:
        text = f"{text} + {term(dice, program, sizes, learns)}"
    return f"lambda s, b, h, i, j: {text}"


def wrapped(x: str, dice: Dice, other: Callable[[], str]) -> str:
    """A function of the score so far, and of other values."""
    n, y = dice.number(2, 7), other()
    return dice.among(
        f"torch.tanh({x}) * {dice.among(1.5, 4)} + {y}",
        f"torch.where((i + j) % {n} == 0, {x}, 0.5 * {x} + {y})",
        f"({x}).abs() - {y}",
        f"({x}).sigmoid() * 4 + {y}",
        f"torch.nn.functional.softplus({x}) + {y}",
        f"({x}) * {y}",
        f"({x}).clamp(-{n}, {n}) + {y}",
        f"({x}) / (1 + ({x}).abs()) * {y}",
        f"torch.maximum({x}, 0.2 * ({x}) + {y})",
        f"torch.where((i - j) * {y} > 0, {x}, 0.3 * ({x}))",
        f"0.1 * ({x}).clamp(-9, 9).square() - 0.5 * ({x}) * {y}",
        f"torch.erf({x}) + {y}",
        *[f"{x} + {y}"] * 4,
    )


def hiding(dice: Dice) -> str:
    """Which keys a score shows: by distances, which become a window, or otherwise."""
    n, m = dice.number(2, 7), dice.number(0, 60)
    return dice.among(
        f"(i - j).abs() % {n} != 1",
        f"(i - j).abs() <= {m}",
        f"(i >= j) & (i - j < {m + 1})",
        "i >= j",
        f"(h + j) % {n} != 0",
    )


def plain(dice: Dice) -> str:
    """A value that depends on indices alone."""
    n, c = dice.number(2, 9), round(dice.free.uniform(-1, 1), 2)
    return dice.among(
        f"{c}",
        f"{c} * (i - j) / {10 * n}",
        f"0.2 * ((3 * i + j) % {n})",
        f"(-(i - j).abs() / {10 * n}).exp()",
        f"torch.cos({c} * (j - i))",
        f"0.1 * (h + b) * {c}",
        f"((i - j).abs() + 1).log() * {c}",
        f"torch.where(j % {n} == 0, {c}, -0.5)",
    )


def term(dice: Dice, program: Program, sizes: Sizes, learns: bool) -> str:
    """A value that reads a captured tensor."""
    n, h = dice.number(1, 70), sizes.h_q
    # Torch adds the gradients of tensors of 16 bits up in 16 bits.
    dtype = "" if learns else dice.among("", "", ".bfloat16()", ".half()")

    def made(shape: str) -> str:
        return program.captured(shape, learns, dtype)

    match dice.number(0, 8):
        case 0:
            return f"{made(f'{h}')}[h]"
        case 1:
            return f"{made(f'{h}, {2 * n + 1}')}[h, (i - j).clamp(-{n}, {n}) + {n}]"
        case 2:
            return f"{made(f'{sizes.b}, {h}')}[b, h] * {made(f'{n}')}[j % {n}]"
        case 3:
            t = made(f"{n}, {dice.among(1, 3, 8)}")
            return f"0.2 * ({t}[i % {n}] - {t}[j % {n}]).square().sum(-1)"
        case 4:
            return f"{made(f'{n}')}.tanh()[i % {n}]"
        case 5:
            return f"{made('()')} * ((i + j) % 3)"
        case 6:
            n = dice.number(1, 16)
            return f"{made(f'{h}, {n}, {n}')}[h][i % {n}, j % {n}]"
        case 7:
            return f"{made(f'{n}')}[(j - i) % {n}].sigmoid()"
    return f"{made(f'{n}')}[j.clamp(0, {n - 1})]"
