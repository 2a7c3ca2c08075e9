"""Choices that are random and balanced."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from typing import TypeVar

T = TypeVar("T")


class Dice:
    """The choices of one call.

    `balanced` gives the `turn`-th of a shuffled pack of options, and a pack is used up before the next one is shuffled:
    calls whose turns follow one another have every option equally often, whichever process runs which of them.
    """

    def __init__(self, seed: int, deck: str, turn: int) -> None:
        self.seed, self.deck, self.turn = seed, deck, turn
        self.free = random.Random(f"{seed} {deck} {turn}")
        """For choices that need no balance."""
        self.asked: Counter[str] = Counter()

    def balanced(self, axis: str, options: Sequence[T]) -> T:
        """An option of an axis; each time that a call asks for one of the same axis it is from another pack."""
        self.asked[axis] += 1
        pack, place = divmod(self.turn, len(options))
        return options[_shuffled(f"{self.seed} {self.deck} {axis} {self.asked[axis]} {pack}", len(options))[place]]

    def chance(self, axis: str, share: float) -> bool:
        """True in this share of calls, to a twentieth."""
        return self.balanced(axis, [i < share * 20 for i in range(20)])

    def among(self, *options: T) -> T:
        return self.free.choice(options)

    def number(self, least: int, most: int) -> int:
        return self.free.randint(least, most)


@lru_cache(10_000)
def _shuffled(seed: str, n: int) -> list[int]:
    order = [*range(n)]
    random.Random(f"{seed} {n}").shuffle(order)
    return order
