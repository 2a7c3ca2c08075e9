"""What became of a call, and of all calls."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field

from saccade import Unsupported
from tests.random_calls.calls import FEATURES, LAYOUTS, impossible
from tests.random_calls.modes import ALL as ALL_MODES
from tests.random_calls.program import LONGEST, Program

DOCUMENTED: tuple[tuple[str, str], ...] = ()
"""Refusals by ValueError that docs name: what their text matches, and a word for them. Unsupported is always one."""
REFUSED = 0.05
"""The share of calls that may be refused."""
LEAST = 100
"""One call in so many has each feature, beside each layout."""


@dataclass(frozen=True)
class Outcome:
    number: int
    kind: str
    """`right`, `refused`, `wrong`, `error`, `hang` or `crash`."""
    message: str = ""
    backend: str = ""
    compiled: bool = False
    """Whether the call met a kernel that no earlier call compiled."""
    seconds: float = 0.0
    lost: bool = False
    """Whether the process can run no more calls."""


@dataclass
class Tally:
    """Counts of outcomes, and the programs of failures."""

    kinds: Counter[str] = field(default_factory=Counter)
    cells: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Calls that were right, by layout and feature."""
    backends: Counter[str] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    slowest: tuple[float, int] = (0.0, 0)
    compiled: int = 0

    def add(self, program: Program, outcome: Outcome) -> str | None:
        """Counts a call; the text of its program if it failed."""
        self.kinds[outcome.kind] += 1
        self.compiled += outcome.compiled
        self.slowest = max(self.slowest, (outcome.seconds, outcome.number))
        if outcome.kind == "right":
            self.cells.update((program.layout, name) for name in program.features)
            self.cells[program.layout, "all"] += 1
            self.backends[outcome.backend] += 1
        elif outcome.kind == "refused":
            self.refusals[outcome.message] += 1
        else:
            self.failures.append(failing(program, outcome))
            return self.failures[-1]
        return None

    @property
    def calls(self) -> int:
        return self.kinds.total()

    def missing(self) -> list[str]:
        """Pairs of a layout and a feature that too few calls had."""
        least = self.calls // LEAST
        pairs = [(x, y) for x in LAYOUTS for y in FEATURES if not impossible(x, y)]
        return [f"{x} x {y}: {self.cells[x, y]} of {least}" for x, y in pairs if self.cells[x, y] < least]

    def failed(self) -> bool:
        return bool(self.failures) or self.kinds["refused"] > max(1, REFUSED * self.calls) or not self.calls

    def modes(self) -> list[str]:
        """Those in which calls ran."""
        return sorted({name for _, name in self.cells} & {*ALL_MODES})

    def table(self) -> str:
        def count(layout: str, feature: str) -> str:
            n = self.cells[layout, feature]
            return "·" if not n and impossible(layout, feature) else str(n)

        width = max(map(len, LAYOUTS)) + 1
        rows = [(name, [count(layout, name) for layout in LAYOUTS]) for name in ("all", *FEATURES, *self.modes())]
        return "\n".join(f"{name:30}" + "".join(f"{x:>{width}}" for x in row) for name, row in [("", LAYOUTS), *rows])

    def report(self, seconds: float) -> str:
        kinds = ("right", "refused", "wrong", "error", "hang", "crash")
        lines = [self.table(), ""]
        lines += [f"refused {n} times: {reason}" for reason, n in self.refusals.most_common()]
        lines += [f"too few right calls of {pair}" for pair in self.missing()]
        lines += [
            f"slowest: call {self.slowest[1]}, {self.slowest[0]:.1f} s; right calls by backend: "
            + ", ".join(f"{name} {n}" for name, n in self.backends.most_common()),
            f"{self.calls} calls in {seconds:.0f} s, {self.compiled} with a kernel that no earlier call compiled: "
            + ", ".join(f"{self.kinds[kind]} {kind}" for kind in kinds),
        ]
        return "\n".join(lines)


def failing(program: Program, outcome: Outcome) -> str:
    """The program with what it did, in few lines."""
    text = program.text.rstrip().splitlines()
    told = [f"# {outcome.kind}: {line.strip()[:220]}" for line in outcome.message.splitlines() if line.strip()]
    return "\n".join([*told[: max(1, LONGEST - len(text))], *text])


def refusal(error: BaseException) -> str | None:
    """The documented kind of a refusal, without its numbers, or None for an error that is none."""
    if isinstance(error, Unsupported):
        return "; ".join(re.sub(r"\d+", "n", line.strip()) for line in str(error).splitlines()[1:])[:300]
    if not isinstance(error, ValueError):
        return None
    return next((word for pattern, word in DOCUMENTED if re.search(pattern, str(error))), None)
