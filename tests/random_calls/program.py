"""The text of a call: a program that stands alone."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

import saccade

LONGEST = 25
"""Lines of a printed program."""


@dataclass(frozen=True)
class Sizes:
    """What masks and scores need to know of a call."""

    b: int
    h_q: int
    s_q: int
    s_k: int
    """Of sequences the longest's; of pages the room in a table."""
    of_bias: tuple[int, int]
    """Rows and columns of a bias."""
    bounds: tuple[str, ...]
    """The shapes that an interval's bounds may have, as text."""
    learns: bool
    """Whether captured tensors may need gradients."""


@dataclass
class Program:
    """Lines that draw a call, and what the call has, by the names of `catalogue.FEATURES`."""

    title: str
    layout: str
    number: int = 0
    lines: list[str] = field(default_factory=list)
    features: set[str] = field(default_factory=set)
    made: int = 0

    def add(self, line: str) -> None:
        self.lines.append(line)

    def tensor(self, made: str) -> str:
        """A line that makes a tensor, and the tensor's name."""
        name = f"t{self.made}"
        self.made += 1
        self.add(f"{name} = {made}")
        return name

    def captured(self, shape: str, learns: bool, change: str = "") -> str:
        """The name of a random tensor of this shape."""
        self.features |= {"gradient of a captured tensor"} if learns else set()
        return self.tensor(f"torch.randn({shape}, device=device){change}" + (".requires_grad_()" if learns else ""))

    @property
    def text(self) -> str:
        body = "\n".join(self.lines)
        names = sorted(name for name in saccade.__all__ if re.search(rf"\b{name}\(", body))
        needed = {
            "from dataclasses import replace": "replace(" in body,
            "import torch": True,
            f"from saccade import {', '.join(names)}": names,
            "from saccade.testing.accuracy import check": True,
            "from saccade.testing.cases import Case": True,
            "from saccade.testing.paged import spaced": "spaced(" in body,
            "from tests.random_calls import modes": "modes." in body,
            "from torch.nn.attention.flex_attention import create_block_mask": "create_block_mask(" in body,
        }
        imports = [line for line, used in needed.items() if used]
        body = "\n".join(self._packed(LONGEST - len(imports) - 2))
        return "\n".join([f"# {self.title}", *imports, "", body, ""])

    def _packed(self, most: int) -> list[str]:
        """The lines, with tensors side by side where they are too many."""
        lines = [*self.lines]
        while len(lines) > most:
            tensors = [bool(re.match(r"t\d+ = ", line)) for line in lines]
            pairs = [i for i in range(1, len(lines)) if tensors[i - 1] and tensors[i]]
            if not pairs:
                break
            i = min(pairs, key=lambda i: len(lines[i - 1] + lines[i]))
            lines[i - 1 : i + 1] = ["; ".join(lines[i - 1 : i + 1])]
        return lines
