"""The protocol `Backend`. Each backend is a module below; they never import one another."""

from __future__ import annotations

import importlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from saccade.call import Call
from saccade.call.descale import Factors
from saccade.call.spec import FLAGS, Spec
from saccade.layouts import CacheSlots, Paged
from saccade.masks import KINDS as MASKS

ANY_SCORE = "any function"
"""In `Support.scores`: whatever can be traced."""

CALLBACKS = "cuDNN's callbacks"
"""In `Support.scores`: those of `score_callback`. Their word in a Spec is `score(name)`, as that of any function:
`refusals` tells them apart."""


@dataclass(frozen=True)
class Support:
    """The calls that a backend runs. The README's support table is made from these."""

    devices: tuple[str, ...]
    """Device words as in a Spec; a trailing `+` reads "this one and newer" (`sm80+`)."""
    dtypes: tuple[str, ...]
    layouts: tuple[str, ...]
    masks: tuple[str, ...]
    """Mask leaves; any combination of them runs."""
    scores: tuple[str, ...]
    """Words of a Spec, ANY_SCORE, or CALLBACKS."""
    flags: tuple[str, ...]
    max_d: int
    kv: tuple[str, ...] = ()
    """8-bit dtypes of k and v that go with a wider q."""
    wider: tuple[tuple[str, int, int], ...] = ()
    """A word of a Spec, and the d and d_v up to which head dims go with it."""
    multiple_of: int = 1
    """Head dims are multiples of it."""
    needs: tuple[str, ...] = ()
    """Flags that have to be set."""
    needs_with: tuple[tuple[str, str], ...] = ()
    """A word of a Spec, and a flag that has to be set with it."""
    apart: tuple[tuple[str, str], ...] = (("paged", "dropout"),)
    """Words of a Spec that do not go together yet; `score` stands for any."""

    def reasons(self, spec: Spec) -> list[str]:
        """Why not; empty when it runs."""
        reasons = []
        if not any(_on(spec.device, device) for device in self.devices):
            reasons.append(f"runs on {', '.join(self.devices)}, not on {spec.device}")
        if spec.dtype not in self.dtypes:
            reasons.append(f"takes {', '.join(self.dtypes)}, not {spec.dtype}")
        if spec.kv and spec.kv not in self.kv:
            reasons.append(f"takes k and v of q's dtype, not {spec.kv}")
        if spec.layout not in self.layouts:
            reasons.append(f"has no {spec.layout} layout")
        d, d_v = self.widest(spec)
        if spec.d > d or spec.d_v > d_v:
            limit, dims = (d, max(spec.d, spec.d_v)) if d == d_v else (f"{d}/{d_v}", f"{spec.d}/{spec.d_v}")
            reasons.append(f"takes head dims up to {limit}, not {dims}")
        if (spec.d | spec.d_v) % self.multiple_of:
            reasons.append(f"takes head dims that are multiples of {self.multiple_of}, not {spec.d} and {spec.d_v}")
        words = {spec.score, ANY_SCORE, *([CALLBACKS] if spec.score.startswith("score(") else [])}
        if spec.score != "none" and not words & set(self.scores):
            reasons.append(f"has no score {spec.score}")
        leaves = set(re.findall(r"[a-z_]+", spec.mask)) - {"none"}
        reasons += [f"has no mask {leaf}" for leaf in sorted(leaves - set(self.masks))]
        if "~" in spec.mask and "mask_mod" not in self.masks:  # what is not in an interval
            reasons.append("has no mask ~")
        reasons += [f"has no {flag}" for flag in FLAGS if getattr(spec, flag) and flag not in self.flags]
        words = {spec.layout, *leaves, *re.findall("~", spec.mask), *(flag for flag in FLAGS if getattr(spec, flag))}
        if spec.score != "none":
            words.add("score")
        reasons += [f"has no {two} with {one}" for one, two in self.apart if {one, two} <= words]
        # Such as rows that are not aligned because the head dim is odd: said only where nothing else is.
        needs = *self.needs, *(flag for word, flag in self.needs_with if word in words)
        return reasons or [_NEEDS[flag] for flag in needs if not getattr(spec, flag)]

    def widest(self, spec: Spec) -> tuple[int, int]:
        """d and d_v up to which head dims go with the words of a Spec."""
        limits = [(d, d_v) for word, d, d_v in self.wider if word == spec.layout or getattr(spec, word, False)]
        return limits[0] if limits else (self.max_d, self.max_d)

    def plainest(self, device: str) -> Spec:
        """The plainest call that is declared here: what is left against it is the device."""
        flags: dict[str, Any] = dict.fromkeys(self.needs, True)
        return Spec(self.dtypes[0], d=64, device=device, **flags)


EVERYTHING = Support(
    devices=("any",), dtypes=("fp16", "bf16", "fp32", "fp64", "fp8_e4m3", "fp8_e5m2"), kv=("fp8_e4m3", "fp8_e5m2"),
    layouts=("dense", "padded", "packed", "ranges", "paged"), masks=MASKS, scores=(ANY_SCORE,),
    flags=("sink", "dropout", "deterministic", "max_scores", "offsets", "block_scales", "latent", "aligned"),
    max_d=1 << 20,
)  # fmt: skip
"""The calls that a backend of plain PyTorch operations runs."""


_NEEDS = {"aligned": "takes aligned rows: pointers and strides of q, k and v at multiples of 16 bytes"}


@dataclass(frozen=True, eq=False)
class Saved:
    """The tensors that a backward needs besides the Call; (b, h_q, s_q, …) views."""

    dout: Tensor
    dlse: Tensor | None
    out: Tensor
    lse: Tensor
    wanted: tuple[bool, ...] = ()
    """Which of the score's tensors need a gradient."""


Launches = dict[Any, Any]
"""The things that a Plan keeps for Calls of one key, such as compiled kernels and grids; no tensors."""
Part = tuple[Call, Launches]
Outputs = tuple[Tensor, Tensor | None, Tensor | None]
"""out (b, h_q, s_q, d_v); lse (b, h_q, s_q), which a backend may give unasked; and the largest score of each row,
(b, h_q, s_q), where `call.max_scores` asks for it."""
Gradients = tuple[Tensor, Tensor, Tensor, Tensor | None, Sequence[Tensor | None]]
"""dq, dk, dv, dsink, and those of the score's tensors, as far as they are wanted."""


class Rotary(NamedTuple):
    """Which pairs of a row's first elements are turned by its position's angles; products in float32."""

    cos: Tensor
    """(positions, pairs), contiguous"""
    sin: Tensor
    interleaved: bool
    """Pairs are (0, 1), (2, 3), …; else (0, pairs), (1, pairs + 1), …"""


class Append(NamedTuple):
    """New rows for a cache, as a backend sees them: tensors in the layout's own order."""

    k_cache: Tensor
    """(pages, page_size, h_k, d)"""
    v_cache: Tensor
    k_new: Tensor
    """(b, s, h_k, d), or (t, h_k, d)"""
    v_new: Tensor
    layout: Paged | CacheSlots
    """with the lengths before"""
    rotary: Rotary | None
    q: Tensor | None = None
    """(b, s, h_q, d), or (t, h_q, d), to be rotated as well"""
    descale: Factors = Factors()
    """of 8-bit caches, (sequences, h_k, n); slots are of one sequence"""

    @property
    def quantizes(self) -> bool:
        """Whether wider rows become 8-bit numbers."""
        return self.k_cache.dtype != self.k_new.dtype


class Quantization(NamedTuple):
    """One operand that becomes 8-bit numbers, as a backend sees it."""

    x: Tensor
    """(b, h, s, d); sequences end to end are one batch row"""
    h_k: int
    """key heads; h is a multiple, and heads that share a key head share its factor"""
    starts: Tensor | None = None
    """(sequences + 1,): where each sequence begins; None where each is a batch row"""
    used: Tensor | None = None
    """(sequences,): how many rows of each are in use, or None for all"""
    mean: Tensor | None = None
    """(sequences, h_k, d) float32: what is subtracted from keys, or what queries are multiplied by for the shift"""
    subtracts: bool = False
    per: str = "tensor"
    dtype: torch.dtype = torch.float8_e4m3fn
    blocks: int = 1
    """of a sequence; rows after the last block become NaN"""
    rotate: bool = False
    keys_first: bool = False
    """whether the rows of a head are neighbours in memory, not the elements of a row"""

    @property
    def sequences(self) -> int:
        return self.x.shape[0] if self.starts is None else self.starts.shape[0] - 1

    @property
    def descale_shape(self) -> tuple[int, ...]:
        heads = self.sequences, self.h_k
        return {"tensor": (), "head": heads, "block": (*heads, self.blocks)}[self.per]


def rotated_elements(d: int) -> int:
    """How many neighbouring elements of a row of `d` a Hadamard matrix mixes: the largest power of two that divides d.

    >>> [rotated_elements(d) for d in (128, 96, 80, 63)]
    [128, 32, 16, 1]
    """
    return d & -d


class Backend(Protocol):
    """The functions and constants of a module under `backends/`."""

    SUPPORT: Support
    GRADIENT: Support | None
    """The calls that its backward runs. None: it has no `run_backward`, and another backend's runs."""

    def obstacle(self) -> str | None:
        """Why the backend cannot run on this machine, or None."""
        ...

    # One that depends on what no Spec holds, such as lengths and the operations of a score function, has besides:
    # def refusals(self, call: Call, gradient: bool) -> list[str], by what the Call's key holds.

    # One that is slower at some calls, or their backward, than a later one has besides:
    # def slower_than_next(self, call: Call, gradient: bool) -> str | None, why "auto" leaves it to that, by what the
    # Call's key holds.

    # One that adds up calls over disjoint keys better than their results can be merged has besides:
    # def run_parts(self, call: Call, parts: Sequence[Part], lse: bool) -> Outputs: see shared_pages.

    # One whose kernel can wait for keys has WAITS_FOR_KEYS, and a keyword `arrivals` of run_forward.

    def workspace(self, spec: Spec) -> str:
        """One line on the memory that a call needs besides its outputs."""
        ...

    def run_forward(self, call: Call, launches: Launches, lse: bool) -> Outputs: ...

    def run_backward(self, call: Call, launches: Launches, saved: Saved) -> Gradients: ...


def score_workspace(spec: Spec) -> str:
    """The memory that gradients with a score function take on a GPU besides."""
    if spec.score in ("none", "softcap"):
        return ""
    repeatable = ", and 8 for every element of captured tensors that get a gradient" if spec.deterministic else ""
    return f", a copy of dout{repeatable}"


def _on(device: str, supported: str) -> bool:
    """
    >>> _on("sm90", "sm80+"), _on("sm75", "sm80+"), _on("cpu", "any")
    (True, False, True)
    """
    if supported in ("any", device):
        return True
    family = supported.rstrip("+").rstrip("0123456789")
    if not supported.endswith("+") or not device.startswith(family):
        return False
    number = device.removeprefix(family)
    return number.isdigit() and int(number) >= int(supported.removeprefix(family).rstrip("+"))


_FOLDERS = {"gluon": "hopper"}
"""Folders whose name is not that of their backend."""


@cache
def backend_module(name: str, part: str = "") -> Any:
    """The module of a backend, or one of its folder; it is imported when it is first asked for."""
    folder = f"saccade.backends.{_FOLDERS.get(name, name)}"
    return importlib.import_module(f"{folder}.{part}" if part else folder)
