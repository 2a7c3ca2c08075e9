"""Named problems, shared by tests, benchmarks, tuning and the command line."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from saccade import masks, scores
from saccade.call.spec import TORCH_DTYPES
from saccade.layouts import Dense, Layout
from saccade.masks import UNBOUNDED, Mask
from saccade.testing import callbacks, gallery, packed, paged


@dataclass(frozen=True, eq=False)
class Inputs:
    """The tensors of a Case: `attention(i.q, i.k, i.v, **i.keywords)`, with gradients for its results."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    """Of out's shape, in q's order and dtype. Empty, as is dlse, for a paged cache, which has no gradients."""
    dlse: Tensor
    """(b, h_q, s_q), or (h_q, t_q) packed, float32 or float64."""
    keywords: dict[str, Any]
    """mask, score_mod, sink, layout and dropout_p, where the Case has them."""


Drawn = tuple[list[Tensor], Tensor, Tensor, Layout]
"""q, k, v and dout in float32, the gradient of the LSE, a sink, and the layout."""


@dataclass(frozen=True)
class Case:
    """A problem by name; `inputs` draws its tensors."""

    name: str
    dtype: str = "bf16"
    """As in a Spec."""
    b: int = 2
    h_q: int = 2
    h_k: int = 2
    s_q: int = 64
    s_k: int = 64
    d: int = 64
    d_v: int = 0
    """0 means d_v = d, and is replaced by it."""
    mask: str = "none"
    """As masks print: `causal`, `window(1023,0)`, `prefix(5)`, `prefixes` (a drawn one for each batch row), `documents`
    (drawn ids), `&`, `|` and parentheses; `interval_rows` and `interval_stops` have drawn bounds, or stops alone. Or a
    name of `saccade.testing.gallery`."""
    score: str = "none"
    """`none`, `softcap(50)`, `alibi`, `relative_bias(128)` (its reach), `t5_bias`, `bias`, `temperature`, with drawn
    tensors; joined by `+`, applied from the left. `callback(causal)`: one of `saccade.testing.callbacks`."""
    sink: bool = False
    order: str = "bhsd"
    """`thd`: packed sequences of drawn lengths up to s_q and s_k (equal if `s_q = s_k`), or of `lengths`. `paged`: a
    cache of drawn lengths up to s_k; q is a batch or, with `lengths` or a `tail`, sequences end to end."""
    lengths: tuple[int, ...] = ()
    """Packed and paged: lengths of q, and of packed k where s_q = s_k; () draws them."""
    used: str = "all"
    """`all` rows and keys, or drawn lengths, at most s, of `q`, `k` or `qk`."""
    tail: int = 0
    """Packed and paged: rows after the last sequence."""
    ranges: bool = False
    """Packed: the keys are drawn ranges, which overlap and leave gaps; `used` has no k."""
    page_size: int = 16
    """Paged: rows of a page."""
    cache: str = "apart"
    """Paged: how the caches lie: see `paged.CACHES`."""
    splits: int = 0
    """Paged: num_splits; 0 for None."""
    dropout_p: float = 0.0
    ids: str = "packed"
    """Document ids: `packed`, about four runs in a row; runs of about so many tokens, such as `1300`; `scattered`."""

    def __post_init__(self) -> None:
        if not self.d_v:
            object.__setattr__(self, "d_v", self.d)

    def __str__(self) -> str:
        return self.name

    def describe(self) -> str:
        """The call that builds this Case, for the message of a failing draw."""
        usual = vars(_DEFAULT) | {"d_v": self.d}
        words = [f"{name}={value!r}" for name, value in vars(self).items() if value != usual[name]]
        return f"Case({', '.join(words)})"

    def replace(self, **changes: Any) -> Case:
        return replace(self, **changes)

    def smaller(self, s: int) -> Case:
        """At most `s` queries and keys, all lengths and bounds of the mask shrunk by one factor."""
        longest = max(self.s_q, self.s_k)
        if longest <= s:
            return self

        def shrunk(n: int) -> int:
            return math.ceil(n * s / longest)

        mask = re.sub(r"\d+", lambda found: str(shrunk(int(found[0]))), self.mask)
        return replace(self, s_q=shrunk(self.s_q), s_k=shrunk(self.s_k), mask=mask)

    def inputs(self, device: torch.device | str = "cpu", seed: int = 0, requires_grad: bool = False) -> Inputs:
        """The same numbers on every device and, up to rounding and order, for every dtype and order.

        Rows beyond the used lengths are NaN: nothing may read them.
        """
        generator = torch.Generator().manual_seed(seed)
        if self.order == "paged":
            return self._paged(generator, device)
        draw = self._packed if self.order == "thd" else self._dense
        tensors, dlse, sink, layout = draw(generator, device)
        keywords = self.keywords(generator, device, layout, sink, requires_grad)
        dtype = TORCH_DTYPES[self.dtype]
        q, k, v, dout = (x.to(device, dtype).contiguous() for x in tensors)
        for x in (q, k, v):
            x.requires_grad_(requires_grad)
        dlse = dlse.to(device, torch.float64 if dtype == torch.float64 else torch.float32)
        return Inputs(q, k, v, dout, dlse, keywords)

    def _operands(self) -> tuple[tuple[int, int, int], ...]:
        """The side (0: queries, 1: keys), heads and head dim of q, k, v and dout."""
        return (0, self.h_q, self.d), (1, self.h_k, self.d), (1, self.h_k, self.d_v), (0, self.h_q, self.d_v)

    def _dense(self, generator: torch.Generator, device: torch.device | str) -> Drawn:
        def lengths(s: int) -> Tensor:  # the longest there is, and any others
            drawn = torch.randint(0, s + 1, (self.b,), generator=generator, dtype=torch.int32)
            drawn[:1] = s
            return drawn

        s = self.s_q, self.s_k
        tensors = [torch.randn(self.b, h, s[side], d, generator=generator) for side, h, d in self._operands()]
        dlse = torch.randn(self.b, self.h_q, self.s_q, generator=generator)
        sink = torch.randn(self.h_q, generator=generator)
        used = [lengths(s[side]) if word in self.used else None for side, word in enumerate("qk")]
        for x, (side, _, _) in zip(tensors, self._operands(), strict=True):
            if (in_use := used[side]) is not None:
                x.masked_fill_((torch.arange(s[side]) >= in_use[:, None])[:, None, :, None], math.nan)
        layout = Dense(self.order, *(None if x is None else x.to(device) for x in used))
        return [layout.ordered(x) for x in tensors], dlse, sink, layout

    def _packed(self, generator: torch.Generator, device: torch.device | str) -> Drawn:
        sides = packed.sides(self, generator)
        tensors = [
            torch.randn(sides[side].unused.numel(), h, d, generator=generator) for side, h, d in self._operands()
        ]
        for x, (side, _, _) in zip(tensors, self._operands(), strict=True):
            x.masked_fill_(sides[side].unused[:, None, None], math.nan)
        dlse = torch.randn(self.h_q, len(tensors[0]), generator=generator)
        sink = torch.randn(self.h_q, generator=generator)
        return tensors, dlse, sink, packed.layout(*sides, device, self.ranges)

    def _paged(self, generator: torch.Generator, device: torch.device | str) -> Inputs:
        *tensors, layout = paged.operands(self, generator)
        q, *caches = (x.to(device, TORCH_DTYPES[self.dtype]) for x in tensors)
        sink = torch.randn(self.h_q, generator=generator)
        gradients = q.new_empty(0)
        keywords = self.keywords(generator, device, paged.moved(layout, device), sink)
        return Inputs(q, *paged.stored(self.cache, *caches), gradients, gradients, keywords)

    def keywords(
        self,
        generator: torch.Generator,
        device: torch.device | str,
        layout: Layout,
        sink: Tensor | None = None,
        requires_grad: bool = False,
    ) -> dict[str, Any]:
        """The keywords of `attention`, drawn in this order: mask, score."""
        keywords: dict[str, Any] = {
            "mask": self._mask(generator, device),
            "score_mod": self._score(generator, device, requires_grad),
            "sink": sink.to(device).requires_grad_(requires_grad) if self.sink and sink is not None else None,
            "dropout_p": self.dropout_p or None,
            "layout": layout,
        }
        return {name: value for name, value in keywords.items() if value is not None}

    def _mask(self, generator: torch.Generator, device: torch.device | str) -> Mask | None:
        if self.mask in gallery.NAMES:
            return gallery.made(self.mask, self.s_q, device, self.s_k if self.order == "paged" else None)
        bounds = [bound for call in re.findall(r"\(([\w,]+)\)", self.mask) for bound in call.split(",")]
        numbers = [bound for bound in bounds if bound == "None" or bound.isdigit()]
        kind = re.sub(r"\((?:\d|None)[\w,]*\)", "", self.mask)
        tensors: list[Tensor] = []
        for leaf in re.findall(r"[a-z_]+", kind):
            if leaf == "documents":
                tensors += masks.documents(self._ids(generator).to(device)).tensors
            elif leaf == "prefixes":
                tensors.append(torch.randint(0, self.s_k + 1, (self.b,), generator=generator).to(device))
            elif leaf.startswith("interval_"):
                tensors += [x.to(device) for x in self._bounds(generator, starts=leaf == "interval_rows")]
        return masks.from_tensors(kind, [UNBOUNDED if n == "None" else int(n) for n in numbers], tensors)

    def _bounds(self, generator: torch.Generator, starts: bool) -> list[Tensor]:
        """Intervals of keys in no order, one for each row, or each sequence: empty ones, and beyond the keys."""
        shape = self.b, 1 if self.order in ("thd", "paged") else self.s_q
        start = torch.randint(-5, self.s_k + 5, shape, generator=generator)
        stop = start + torch.randint(-5, self.s_k + 5, shape, generator=generator)
        return [start, stop] if starts else [stop]

    def _ids(self, generator: torch.Generator) -> Tensor:
        """About four documents in a row."""
        shape = self.b, self.s_q
        if self.ids == "scattered":
            return torch.randint(0, 4, shape, generator=generator)
        tokens, documents = (max(self.s_q, 1), 3) if self.ids == "packed" else (int(self.ids), 1)
        return (torch.rand(shape, generator=generator) * tokens < documents).cumsum(1)

    def _score(
        self, generator: torch.Generator, device: torch.device | str, requires_grad: bool
    ) -> Callable[..., Tensor] | None:
        if self.score == "none":
            return None

        def one(word: str) -> Callable[..., Tensor]:
            kind, number = re.fullmatch(r"(\w+)(?:\(([\w.]+)\))?", word).groups()  # pyright: ignore[reportOptionalMemberAccess]
            if kind == "callback":
                callback = callbacks.case(number, self.h_q, self.s_q, self.s_k, device, self.b)
                return callback.learned(requires_grad).score()
            if kind == "softcap":
                return scores.softcap(float(number))
            shape = {
                "alibi": (self.h_q,),
                "relative_bias": (self.h_q, 2 * int(number or 128) + 1),
                "t5_bias": (32, self.h_q),
                "bias": (self.h_q, 1, self.s_k),
                "temperature": (self.h_q,),
            }[kind]
            t = torch.randn(shape, generator=generator)
            if kind == "alibi":  # as its paper has them
                t = 2.0 ** (-8 * torch.arange(1, self.h_q + 1) / max(self.h_q, 1))
            elif kind == "temperature":
                t = t.exp()
            return getattr(scores, kind)(t.to(device).requires_grad_(requires_grad))

        mods = [one(word) for word in self.score.split("+")]
        return mods[0] if len(mods) == 1 else scores.compose(*mods)


_DEFAULT = Case("")

# Layers of real models, as they train or prefill: what users run, and what is timed.
MODELS = [
    Case("llama3-8b", b=1, h_q=32, h_k=8, s_q=8192, s_k=8192, d=128, mask="causal"),
    Case("gemma2-9b", b=1, h_q=16, h_k=8, s_q=8192, s_k=8192, d=256, mask="window(4095,0)", score="softcap(50)"),
    Case("gpt-oss-120b", b=1, h_q=64, h_k=8, s_q=8192, s_k=8192, d=64, mask="window(127,0)", sink=True),
    Case("packed-documents", b=2, h_q=16, h_k=4, s_q=8192, s_k=8192, d=128, mask="documents&causal"),
]

# Each covers one feature or edge, at lengths that no tile size divides: small enough for every dtype and backend.
# fmt: off
SMALL = [
    Case("plain", s_q=67, s_k=67),
    # masks
    Case("causal", s_q=129, s_k=129, mask="causal"),
    Case("window", s_q=150, s_k=150, mask="window(17,5)"),
    Case("window-causal", s_q=130, s_k=130, mask="window(33,0)"),
    Case("window-left-open", s_q=65, s_k=70, mask="window(None,7)"),
    Case("window-right-open", s_q=65, s_k=70, mask="window(7,None)"),
    Case("window-diagonal", s_q=65, s_k=65, mask="window(0,0)"),
    Case("prefix", s_q=100, s_k=100, mask="prefix(37)"),
    Case("prefix-beyond", s_q=33, s_k=33, mask="prefix(50)"),
    Case("prefixes", b=3, s_q=70, s_k=90, mask="prefixes"),
    Case("intervals", b=3, h_q=4, h_k=2, s_q=150, s_k=190, mask="interval_rows"),
    Case("intervals-stops", b=2, s_q=190, s_k=150, mask="interval_stops"),
    Case("intervals-window", b=2, s_q=150, s_k=150, mask="interval_rows&window(60,3)", score="alibi", sink=True),
    Case("intervals-or-causal", b=2, s_q=90, s_k=120, mask="interval_rows|causal"),
    Case("ragged-intervals", b=4, s_q=150, s_k=170, mask="interval_rows&causal", used="qk"),
    Case("prefix-window", s_q=80, s_k=80, mask="prefix(20)&window(9,9)"),
    Case("prefix-or-window", s_q=140, s_k=140, mask="prefix(11)|window(5,3)"),
    Case("documents", s_q=130, s_k=130, mask="documents"),
    Case("documents-causal", s_q=190, s_k=190, mask="documents&causal"),
    Case("documents-window", s_q=140, s_k=140, mask="documents&window(20,0)"),
    Case("documents-scattered", s_q=90, s_k=90, mask="documents&causal", ids="scattered"),
    Case("documents-or-window", s_q=75, s_k=75, mask="documents|window(4,4)", ids="scattered"),
    Case("documents-prefix", s_q=75, s_k=75, mask="documents&prefix(30)"),
    Case("union-in-window", s_q=96, s_k=96, mask="documents&(prefix(9)|window(3,3))&causal"),
    # heads and head dims
    Case("group3", h_q=6, s_q=50, s_k=50, mask="causal"),
    Case("group5", h_q=5, h_k=1, s_q=50, s_k=50, mask="causal"),
    Case("group7", h_q=14, s_q=20, s_k=45, mask="causal"),
    Case("mqa", h_q=16, h_k=1, s_q=33, s_k=65),
    Case("d1", s_q=40, s_k=40, d=1, mask="causal"), Case("d72", s_q=40, s_k=40, d=72, mask="causal"),
    Case("d80", s_q=40, s_k=40, d=80), Case("d96", s_q=40, s_k=40, d=96, mask="causal"),
    Case("d111", s_q=40, s_k=40, d=111),
    Case("d192-128", s_q=70, s_k=70, d=192, d_v=128, mask="causal"),
    Case("d64-256", s_q=40, s_k=40, d=64, d_v=256),
    Case("d256", s_q=70, s_k=70, d=256, mask="window(20,0)"),
    Case("d512", b=1, s_q=70, s_k=90, d=512, mask="causal"),
    Case("d320", b=1, s_q=70, s_k=40, d=320, mask="window(20,0)", sink=True, dropout_p=0.3),
    Case("d64-384", b=1, s_q=40, s_k=90, d=64, d_v=384, score="softcap(9)"),
    Case("d512-192", h_q=4, s_q=40, s_k=40, d=512, d_v=192, mask="documents&causal", used="qk"),
    # what changes scores
    Case("softcap", s_q=65, s_k=65, mask="causal", score="softcap(2.5)"),
    Case("sink", s_q=65, s_k=65, mask="window(9,0)", sink=True),
    Case("softcap-sink", h_q=8, s_q=65, s_k=65, mask="causal", score="softcap(20)", sink=True),
    Case("alibi", s_q=65, s_k=65, mask="causal", score="alibi"),
    Case("relative-bias", h_q=4, s_q=70, s_k=90, mask="causal", score="relative_bias(20)"),
    Case("t5-bias", h_q=4, s_q=65, s_k=65, score="t5_bias"),
    Case("bias-sink", h_q=4, s_q=40, s_k=70, mask="window(30,9)", score="bias", sink=True, used="k"),
    Case("composed", h_q=4, s_q=66, s_k=66, d=72, score="temperature+alibi+softcap(9)", mask="documents&causal"),
    Case("dropout", s_q=65, s_k=70, mask="causal", dropout_p=0.3),
    Case("dropout-plain", h_q=4, s_q=66, s_k=66, dropout_p=0.5, order="bshd"),
    Case("dropout-wide", h_q=4, s_q=66, s_k=130, d=192, d_v=128, mask="window(50,9)", dropout_p=0.1),
    Case("dropout-everything", b=3, h_q=6, s_q=70, s_k=70, d=40, d_v=24, mask="documents&window(30,0)",
         score="temperature+relative_bias(9)+softcap(9)", sink=True, order="sbhd", used="qk", dropout_p=0.2),
    # where the rows are
    Case("bshd", h_q=4, s_q=66, s_k=66, mask="causal", order="bshd"),
    Case("sbhd", h_q=4, s_q=66, s_k=66, mask="causal", order="sbhd"),
    Case("everything", b=3, h_q=6, s_q=70, s_k=70, d=40, d_v=24, mask="documents&window(30,0)", score="softcap(9)",
         sink=True, order="bshd", used="k"),
    Case("ragged", b=4, s_q=70, s_k=90, mask="causal", used="qk"),
    Case("ragged-keys", b=4, s_q=30, s_k=90, used="k"),
    Case("ragged-queries", b=4, s_q=90, s_k=30, mask="window(10,10)", used="q", order="sbhd"),
    Case("ragged-sink", b=4, h_q=4, s_q=50, s_k=70, mask="causal", sink=True, used="qk", order="bshd"),
    Case("ragged-prefixes", b=4, s_q=50, s_k=70, mask="prefixes", used="qk"),
    # lengths
    Case("few-queries", s_q=5, s_k=200, mask="causal"),
    Case("few-keys", s_q=200, s_k=5, mask="causal"),  # most rows see none
    Case("few-keys-sink", s_q=40, s_k=5, mask="causal", sink=True),
    Case("few-keys-window", s_q=100, s_k=40, mask="window(10,0)", score="softcap(5)"),
    Case("one-query", h_q=8, s_q=1, s_k=77, mask="causal"),
    Case("one-key", s_q=9, s_k=1), Case("one-token", b=1, s_q=1, s_k=1, mask="causal"),
    Case("no-queries", s_q=0, s_k=8, mask="causal"), Case("no-keys", s_q=8, s_k=0, mask="causal"),
    Case("no-keys-sink", s_q=8, s_k=0, sink=True),
    Case("no-tokens", s_q=0, s_k=0, mask="documents"), Case("no-batch", b=0, s_q=8, s_k=8, mask="causal"),
    Case("no-heads", h_q=0, h_k=0, s_q=8, s_k=8),
    Case("longest-rows", b=1, h_q=3, h_k=1, s_q=70, s_k=20000, d=8, mask="prefix(99)|window(9000,0)", sink=True),
    Case("long-rows", b=1, h_q=1, h_k=1, s_q=700, s_k=2100, d=16, mask="causal"),
    # sequences of different lengths, end to end
    Case("packed", b=5, s_q=90, s_k=90, mask="causal", order="thd"),
    Case("packed-plain", b=4, h_q=4, s_q=150, s_k=150, d=128, order="thd", tail=7),
    Case("packed-cross", b=5, h_q=4, s_q=70, s_k=140, mask="causal", order="thd", tail=40),
    Case("packed-fewer-keys", b=5, s_q=140, s_k=50, mask="window(40,3)", order="thd", sink=True),
    Case("packed-used", b=6, h_q=6, s_q=100, s_k=130, d=40, d_v=24, mask="window(30,0)", score="softcap(9)", sink=True,
         used="qk", order="thd", tail=3),
    Case("packed-intervals", b=4, s_q=100, s_k=100, mask="interval_rows", order="thd"),
    Case("packed-prefixes", b=4, s_q=100, s_k=100, mask="prefixes", order="thd"),
    Case("packed-union", b=4, s_q=140, s_k=140, mask="prefix(11)|window(5,3)", order="thd"),
    Case("packed-alibi", b=4, h_q=4, s_q=70, s_k=90, mask="causal", score="alibi", order="thd"),
    Case("packed-bias-sink", b=4, h_q=4, s_q=40, s_k=70, mask="window(30,9)", score="bias", sink=True, used="k",
         order="thd"),
    Case("packed-dropout", b=4, h_q=4, s_q=70, s_k=130, mask="causal", score="alibi", sink=True, dropout_p=0.3,
         order="thd"),
    Case("packed-d192-128", b=3, s_q=100, s_k=100, d=192, d_v=128, mask="causal", order="thd"),
    Case("packed-d256", b=4, s_q=90, s_k=150, d=256, mask="window(40,0)", order="thd"),
    Case("packed-d512", b=3, s_q=70, s_k=90, d=512, d_v=320, mask="causal", order="thd"),
    Case("packed-one-token", b=4, s_q=1, s_k=60, h_q=8, mask="causal", order="thd"),
    Case("packed-empty", b=3, lengths=(0, 0, 0), order="thd", tail=5),
    Case("packed-nothing", b=0, order="thd"),
]
# fmt: on

NAMED = {case.name: case for case in [*MODELS, *SMALL]}
