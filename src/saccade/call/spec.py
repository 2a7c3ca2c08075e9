"""Everything static about a call, in one frozen record with one text form."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from typing import Any

import torch

from saccade import masks, scores

DTYPES = {
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.float8_e4m3fn: "fp8_e4m3",
    torch.float8_e5m2: "fp8_e5m2",
}
TORCH_DTYPES = {word: dtype for dtype, word in DTYPES.items()}
RECORDS = "records"
"""The word of k and v that are bytes of records."""
EIGHT_BIT_WORDS = tuple(word for word in TORCH_DTYPES if word.startswith("fp8"))


@dataclass(frozen=True)
class Spec:
    """The properties that a kernel is compiled and chosen for. Lengths, batch and head counts, window bounds and scale
    are not here.

    The text form is the cache key, the test id, the benchmark row and the header of an error:

    >>> print(Spec("bf16", d=128, group=4, mask="causal", score="softcap", device="sm90"))
    bf16 group4 d128 dense causal softcap sm90
    >>> Spec.parse("bf16 group4 d128 causal sm90") == Spec("bf16", d=128, group=4, mask="causal", device="sm90")
    True
    """

    dtype: str
    """of q"""
    d: int
    d_v: int = 0
    """0 stands for d_v = d and is replaced by it."""
    group: int = 1
    """Query heads per key head."""
    layout: str = "dense"
    """`dense`; `padded`: dense with used lengths per batch row; `packed`; `ranges`: packed with `starts_k`; `paged`."""
    mask: str = "none"
    score: str = "none"
    sink: bool = False
    dropout: bool = False
    deterministic: bool = False
    max_scores: bool = False
    """The largest score of each row is asked for."""
    kv: str = ""
    """The dtype of k and v where it is not q's: 8 bits, printed as `kv_fp8_e4m3`, or records."""
    block_scales: bool = False
    """A `Descale` goes by blocks of rows."""
    offsets: bool = False
    """Rows and keys have positions, `q_offset` and `k_offset`."""
    latent: bool = False
    """Values are the first columns of the keys that pages or lists name, by being a view of them."""
    aligned: bool = False
    """Pointers and strides of q, k and v are multiples of 16 bytes, as bulk copies need them."""
    device: str = "cpu"

    def __post_init__(self) -> None:
        if not self.d_v:
            object.__setattr__(self, "d_v", self.d)

    def __str__(self) -> str:
        words = [self.dtype]
        if self.group != 1:
            words.append(f"group{self.group}")
        if self.kv:
            words.append(f"kv_{self.kv}")
        words.append(f"d{self.d}" if self.d == self.d_v else f"d{self.d}/{self.d_v}")
        words.append(self.layout)
        words += [word for word in (self.mask, self.score) if word != "none"]
        words += [flag for flag in FLAGS if getattr(self, flag)]
        return " ".join([*words, self.device])

    @staticmethod
    def parse(text: str) -> Spec:
        """The Spec that prints as `text`; words may come in any order, and all but dtype and d have defaults.

        Raises:
            ValueError: an unknown word: no dtype, size, layout, mask, score, flag or device; two words for one field; a
                missing dtype or d.
        """
        words: dict[str, str] = {}
        parsed: dict[str, Any] = {}
        for word in text.split():
            name, value = _field(word)
            if name is None:
                raise ValueError(
                    f"unknown word {word!r} in the spec {text!r}; a spec reads like "
                    "'bf16 group4 d128 dense documents&causal softcap sink cpu': a dtype "
                    f"({', '.join(TORCH_DTYPES)}), groupN, dN or dN/M, a layout ({', '.join(LAYOUTS)}), a mask of "
                    f"{', '.join(masks.KINDS)} with & and |, a score ({', '.join(scores.KINDS)}, score(name)), "
                    f"{', '.join(FLAGS)}, a device (cpu, sm90, …)"
                )
            if name in words:
                raise ValueError(
                    f"the spec {text!r} says {name} twice: {words[name]!r} and {word!r}; a spec is of one kind of call"
                    + (f", and masks combine in one word: '{words[name]}&{word}'" if name == "mask" else "")
                )
            words[name], parsed[name] = word, value
        if missing := [name for name in ("dtype", "d") if name not in parsed]:
            raise ValueError(
                f"the spec {text!r} lacks {' and '.join(missing)}; the shortest spec reads like 'bf16 d128'"
            )
        d, d_v = parsed.pop("d")
        return Spec(d=d, d_v=d_v, **parsed)


def _field(word: str) -> tuple[str | None, Any]:
    """The field of a Spec that a word is about, and its value."""
    if word in TORCH_DTYPES:
        return "dtype", word
    if word.removeprefix("kv_") in EIGHT_BIT_WORDS or word == f"kv_{RECORDS}":
        return "kv", word.removeprefix("kv_")
    if match := re.fullmatch(r"group([1-9]\d*)", word):
        return "group", int(match[1])
    if match := re.fullmatch(r"d([1-9]\d*)(?:/([1-9]\d*))?", word):
        return "d", (int(match[1]), int(match[2] or match[1]))
    if word in FLAGS:
        return word, True
    kinds = (
        ("layout", word in LAYOUTS),
        ("score", scores.is_kind(word)),
        ("device", re.fullmatch(r"cpu|cuda|mps|xpu|meta|sm\d+|gfx\w+", word)),
        ("mask", masks.is_kind(word)),
    )
    return next((name for name, is_one in kinds if is_one), None), word


LAYOUTS = ("dense", "padded", "packed", "ranges", "paged")
FLAGS = tuple(field.name for field in fields(Spec) if field.type == "bool")
