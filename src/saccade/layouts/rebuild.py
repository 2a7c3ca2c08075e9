"""Layouts from their text and tensors, the form in which they pass through a registered operator."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from saccade.layouts.base import Layout
from saccade.layouts.dense import PLAIN, Dense
from saccade.layouts.packed import Packed
from saccade.layouts.paged import Paged
from saccade.layouts.slots import SlotRows


def from_tensors(text: str, tensors: list[Tensor], ints: list[int], t_q: int = 0, t_k: int = 0) -> Layout:
    """The inverse of `text`, `tensors` and `ints`; takes what it needs from the front of the lists. A packed layout is
    bounded by the rows of its operands."""
    if text in PLAIN:
        return PLAIN[text]
    word, *words = text.split(",")
    fields = Layout.unflattened(words, tensors, ints)
    if word == "packed":
        return Packed(max_seqlen_q=t_q, max_seqlen_k=t_k, **fields)
    return _PAGED[word](**fields) if word in _PAGED else Dense(word, **fields)


@lru_cache(maxsize=512)
def view_layout(text: str) -> Layout:
    """A layout of this text's order, for its views alone."""
    word, *names = text.split(",")
    if word == "slots":
        s_q = next((int(name[4:]) for name in names if name.startswith("s_q=")), 0)
        return SlotRows(_TABLE, _NONE, _OFFSETS if "cu_seqlens_q" in names else None, s_q=s_q)
    return PLAIN.get(word) or _WITHOUT_SEQUENCES[word, word == "paged" and "cu_seqlens_q" in names]


_PAGED = {"paged": Paged, "slots": SlotRows}
_OFFSETS, _TABLE = torch.zeros(1, dtype=torch.int32, device="cpu"), torch.zeros(0, 0, dtype=torch.int32, device="cpu")
_NONE = _OFFSETS[1:]
_WITHOUT_SEQUENCES: dict[tuple[str, bool], Layout] = {
    ("packed", False): Packed(_OFFSETS, _OFFSETS, 0, 0),
    ("paged", False): Paged(_TABLE, _NONE),
    ("paged", True): Paged(_TABLE, _NONE, _OFFSETS),
}
