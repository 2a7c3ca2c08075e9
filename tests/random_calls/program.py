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
        lines = [*self.lines]
        while len(lines) > LONGEST - 8:  # tensors side by side
            made = [i for i, line in enumerate(lines[1:], 1) if line[0] == "t" and lines[i - 1][0] == "t"]
            if not made:
                break
            shortest = min(made, key=lambda i: len(lines[i - 1] + lines[i]))
            lines[shortest - 1 : shortest + 1] = ["; ".join(lines[shortest - 1 : shortest + 1])]
        body = "\n".join(lines)
        names = sorted(name for name in saccade.__all__ if re.search(rf"\b{name}\(", body))
        imports = [
            "import torch",
            *([f"from saccade import {', '.join(names)}"] if names else []),
            "from saccade.testing.accuracy import check",
            "from saccade.testing.cases import Case",
        ]
        if "replace(" in body:
            imports.insert(0, "from dataclasses import replace")
        if "spaced(" in body:  # rows of a cache start at multiples of 16 bytes
            imports.append("from saccade.testing.paged import spaced")
        if "modes." in body:
            imports.append("from tests.random_calls import modes")
        if "create_block_mask(" in body:
            imports.append("from torch.nn.attention.flex_attention import create_block_mask")
        return "\n".join([f"# {self.title}", *imports, "", body, ""])
