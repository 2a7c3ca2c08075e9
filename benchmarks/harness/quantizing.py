"""`quantize` as the bench times it: the calls, and the bytes that they must move."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.harness.cost import Cost
from saccade.ops.quantization import PER
from saccade.testing.cases import Case, Inputs

_FLAGS = {"smooth": {"smooth_k": True}, "rotate": {"rotate": True}, "keys": {"v_order": "keys"}}
_EVERYWHERE = "block", "head", "block smooth", "block rotate"
_ALSO = "tensor", "head rotate", "block keys", "block smooth rotate keys"


def calls() -> Iterator[tuple[Case, str]]:
    """16k rows, without shared heads and with eight query heads on one of keys; the words are `options`."""
    for d in (128, 64, 256):
        for h_q, h_k in ((8192 // d, 1024 // d), (4096 // d, 4096 // d)):
            for words in _EVERYWHERE + (_ALSO if d == 128 else ()):
                yield Case("", b=1, h_q=h_q, h_k=h_k, s_q=16384, s_k=16384, d=d), f"quantize {words}"


def options(mode: str) -> dict[str, Any]:
    """
    >>> options("quantize block smooth rotate")
    {'per': 'block', 'smooth_k': True, 'rotate': True}
    """
    _, per, *words = mode.split()
    if per not in PER:
        raise ValueError(f"{mode!r} does not say one of {', '.join(PER)} first")
    return {"per": per} | {name: value for word in words for name, value in _FLAGS[word].items()}


def cost(inputs: Inputs, mode: str) -> Cost:
    """Each operand read once, and written in 8 bits; read twice where all of a head or tensor share a factor, whose
    maximum comes first; the mean of keys reads k once more."""
    given = options(mode)
    reads = 1 if given["per"] == "block" else 2
    size = sum(x.numel() * (reads * x.element_size() + 1) for x in (inputs.q, inputs.k, inputs.v))
    return Cost(0, size + (inputs.k.numel() * inputs.k.element_size() if "smooth_k" in given else 0))
