"""Which calls need gradients, and why those of 8 bits have none."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import FrozenInstanceError
from typing import Any, NamedTuple

import torch
from torch import Tensor

from saccade import masks, scores
from saccade.call.descale import EIGHT_BITS, Factors
from saccade.call.dropout import Dropout
from saccade.call.spec import DTYPES, RECORDS, Spec
from saccade.layouts import Dense, Layout, dense_of, empty_like_rows
from saccade.masks import Extent, Mask, Positions
from saccade.scores import Score
from saccade.util import hardware
from saccade.util.memory_layout import ALIGNMENT, address


def needs_gradient(*tensors: Tensor | None) -> bool:
    if torch.is_grad_enabled():
        for x in tensors:
            if x is not None and x.requires_grad:
                return True
    return False


def eight_bit_gradients(q: Tensor, k: Tensor, v: Tensor) -> str:
    """Why a call of 8-bit operands has no gradients, and what has."""
    got = ", ".join(f"{name} {x.dtype} {tuple(x.shape)}" for name, x in (("q", q), ("k", k), ("v", v)))
    return (
        "attention over 8-bit k and v has no gradients: call it inside torch.no_grad(); pass Descale(…, "
        "backward='dequantized') for those of wider q, the sink and captured tensors; or pass the dequantised values, "
        f"such as k.to(torch.bfloat16) * descale; got {got}"
    )


# One call: its arguments, checked, and what follows from them.


_BHSD = Dense()
_VIEWS = "q", "k", "v", "out"
_OF_VIEWS = {*_VIEWS, "layout"}


class Call:
    """`out = dropout(softmax(mask(score_mod(scale q k^T)), with sink)) v`: one call of `attention`, checked. Frozen:
    what it derives from its fields it computes when first asked."""

    given: tuple[Tensor, Tensor, Tensor, Tensor | None]
    """q, k, v and out, as the user has them"""
    layout: Layout
    mask: Mask | None
    score: Score | None
    sink: Tensor | None
    """(h_q)"""
    scale: float
    deterministic: bool
    dropout: Dropout | None
    max_scores: bool
    """Whether the forward is asked for the largest score of each row."""
    descale: Factors | None
    """The factors of 8-bit operands; None for wider k and v."""
    first_b: int
    """The index of the first batch row, for scores and dropout."""

    q: Tensor
    """(b, h_q, s_q, d), a view of the user's tensor; packed sequences are one row of t_q"""
    k: Tensor
    """(b, h_k, s_k, d); of a paged cache (pages, h_k, page_size, d)"""
    v: Tensor
    """(b, h_k, s_k, d_v); of a paged cache (pages, h_k, page_size, d_v)"""
    out: Tensor | None
    """(b, h_q, s_q, d_v): where the caller wants the result. A backend writes there, or returns another tensor."""

    key: tuple[Hashable, ...]
    """Everything but values: Calls of one key have one Spec and run the same kernels on the same grid."""
    spec: Spec
    """The fields that have a text form."""
    latent: bool
    """Whether values are read with the keys that pages or lists name."""
    extent: Extent
    positions: Positions | None
    """The positions of rows and keys, or None."""

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, *, layout: Layout | None = None, mask: Mask | None = None,
        score: Score | None = None, sink: Tensor | None = None, scale: float = 1.0, deterministic: bool = False,
        dropout: Dropout | None = None, max_scores: bool = False, descale: Factors | None = None,
        out: Tensor | None = None,
    ) -> None:  # fmt: skip
        """q, k, v and out as the user has them."""
        layout = _BHSD if layout is None else layout  # no default: Dynamo takes objects from globals
        fields = {
            "given": (q, k, v, out), "layout": layout, "mask": mask, "score": score, "sink": sink, "scale": scale,
            "deterministic": deterministic, "dropout": dropout, "max_scores": max_scores, "descale": descale,
            "first_b": 0,
        }  # fmt: skip
        for name, x in fields.items():
            object.__setattr__(self, name, x)

    def __setattr__(self, name: str, x: Any) -> None:
        raise FrozenInstanceError(f"a Call is frozen: call.replace({name}=…)")

    @staticmethod
    def of_views(q: Tensor, k: Tensor, v: Tensor, layout: Layout, **fields: Any) -> Call:
        """The call of operands that are (b, h, s, d) already."""
        return Call(layout.ordered(q), layout.ordered_keys(k), layout.ordered_keys(v), layout=layout, **fields)

    def __getattr__(self, name: str) -> Any:
        """Derives a field when it is first asked for."""
        own = self.__dict__
        if name in _VIEWS:
            (q, k, v, out), view = self.given, self.layout.canonical
            own["q"], own["k"], own["v"], own["out"] = view(q), view(k), view(v), None if out is None else view(out)
        elif name in _DERIVED:
            own[name] = _DERIVED[name](self)
        else:
            raise AttributeError(f"a Call has no {name!r}")
        return own[name]

    def replace(self, **changes: Any) -> Call:
        """The same call with other fields. Views (q, k, v, out) stay as they are unless they, or `given`, change. One
        with views or a layout of its own has no `given`: it stands for no user's operands."""
        if "given" not in changes:
            views = {name: getattr(self, name) for name in _VIEWS}
            changes = views | ({} if changes.keys().isdisjoint(_OF_VIEWS) else {"given": None}) | changes
        call = object.__new__(Call)
        call.__dict__.update({name: x for name, x in self.__dict__.items() if name not in _COMPUTED}, **changes)
        return call

    def differentiable(self) -> tuple[Tensor | None, ...]:
        """The tensors that may need gradients, as the user has them."""
        operands = *self.given[:3], self.sink
        return operands if self.score is None else (*operands, *self.score.tensors)

    def _key(self) -> tuple[Hashable, ...]:
        q, k, v, layout, mask, score, out = self.q, self.k, self.v, self.layout, self.mask, self.score, self.out
        tensors = layout.tensors if mask is None else (*layout.tensors, *mask.tensors)
        if self.sink is not None:
            tensors = *tensors, self.sink
        at = _addresses(q, k, v, *tensors)
        key: tuple[Hashable, ...] = (
            *(q.dtype, k.dtype, q.device, None if self.descale is None else self.descale.key),
            *(q.shape, k.shape, v.shape[3], q.stride(), k.stride(), v.stride()),
            *[x % ALIGNMENT for x in at],
            (layout.has_pages or (mask is not None and mask.bounds_per_row)) and self.latent,
            *(layout.text, None if mask is None else (mask.identity, mask.has_lower_bound), score and score.identity),
            *(self.sink is None, self.deterministic, self.dropout is None, self.max_scores),
            None if out is None else (out.dtype, out.stride(), address(out) % ALIGNMENT),
        )
        if tensors:
            key += tuple([(x.dtype, x.shape, x.stride()) for x in tensors])
        if mask is not None and mask.block_sparse:
            key += tuple([abs(n) > scores.LONGEST for n in mask.ints])
            key += tuple([(x.rows, x.block_size) for x in mask.leaves() if isinstance(x, masks.Selected)])
        if score is not None:
            key += tuple([abs(n) > scores.LONGEST for n in score.ints])
            key += tuple([(x.dtype, x.dim(), _span(x) >> 31, address(x) % ALIGNMENT) for x in score.tensors])
            key += (score.units,)
        return key

    @property
    def group(self) -> int:
        """Query heads per key head."""
        return self.q.shape[1] // self.k.shape[1] if self.k.shape[1] else 1

    def _latent(self) -> bool:
        """Whether values are read with the keys that pages or lists name: v is the first columns of k, by being their
        view. Of one address, and of equal strides and dtype, equal indices are equal bytes."""
        k, v, mask = self.k, self.v, self.mask
        lists = mask is not None and mask.bounds_per_row and any(isinstance(x, masks.Selected) for x in mask.leaves())
        if not lists and not self.layout.has_pages:
            return False
        if v.shape[3] > k.shape[3] or v.dtype != k.dtype or v.stride() != k.stride():
            return False
        at_k, at_v = _addresses(k, v)
        return at_v == at_k != 0

    def sequences(self) -> Iterator[Sequence]:
        """Each sequence as a Call of one batch row; reads the offsets."""
        layout = self.layout
        k, v = layout.gathered(self.k), layout.gathered(self.v)
        for sequence in layout.sequence_slices(self.q, k):
            i = sequence.number
            q_at, k_at = (sequence.batch_q, slice(None), sequence.rows), (sequence.batch_k, slice(None), sequence.keys)
            mask = None if self.mask is None else masks.of_batch_row(masks.of_rows(self.mask, sequence.rows), i)
            operands: dict[str, Any] = {"q": self.q[q_at], "k": k[k_at], "v": v[k_at]}
            if self.descale is not None:
                operands["descale"] = self.descale.of_sequence(i)
            dense = dense_of(layout, sequence, self.q.shape[2])
            call = self.replace(**operands, mask=mask, layout=dense, first_b=i, out=None)
            yield Sequence(sequence.rows, sequence.keys, call)

    def _extent(self) -> Extent:
        return self.layout.extent(self.q, self.k)._replace(heads=self.q.shape[1])

    def _positions(self) -> Positions | None:
        return self.layout.positions(self.q.shape[2])

    @property
    def bounds_per_row(self) -> bool:
        """Whether tensors give each row its keys: see `Mask.bounds_per_row`."""
        if self.mask is None:
            return False
        return self.mask.bounds_per_row or (self.positions is not None and self.positions.per_row)

    @property
    def scoreless(self) -> bool:
        """Whether there are no rows, no keys or no sequences: tables may be empty, so no kernel may read them."""
        none = self.layout.ragged_keys and not self.layout.sequences
        return none or not self.q.numel() or not self.k.numel()

    @property
    def keeps_tail(self) -> bool:
        """Whether rows after the last sequence stay as they are in the caller's out: over pages, as servers pad."""
        return self.out is not None and self.layout.has_pages and self.layout.cu_seqlens_q is not None

    @property
    def out_dtype(self) -> torch.dtype:
        """q's; of 8-bit queries the dtype of the caller's out, or bfloat16."""
        if self.q.dtype not in EIGHT_BITS:
            return self.q.dtype
        return torch.bfloat16 if self.out is None else self.out.dtype

    def dequantized(self, dtype: torch.dtype | None = None) -> Call:
        """The same call of what 8-bit operands stand for, in another dtype, or in float32 or float64; not of pages."""
        descale, dtype, layout = self.descale, dtype or self.lse_dtype(), self.layout
        if descale is None:
            return self
        sides = ("q", layout.cu_seqlens_q), ("k", layout.cu_seqlens_k), ("v", layout.cu_seqlens_k)
        q, k, v = (descale.values(name, getattr(self, name), dtype, starts) for name, starts in sides)
        return self.replace(q=q, k=k, v=v, out=None, descale=None)

    def empty_out(self) -> Tensor:
        """Memory for the result, (b, h_q, s_q, d_v): the caller's, or new, in q's order."""
        return empty_like_rows(self.q, self.v.shape[3], self.out_dtype) if self.out is None else self.out

    def _spec(self) -> Spec:
        return Spec(
            dtype=DTYPES[self.q.dtype],
            kv="" if self.k.dtype == self.q.dtype else DTYPES.get(self.k.dtype, RECORDS),
            d=self.q.shape[3],
            d_v=self.v.shape[3],
            group=self.group,
            layout=self.layout.kind,
            mask="none" if self.mask is None else self.mask.kind,
            score=self.score.kind if self.score else "none",
            sink=self.sink is not None,
            dropout=self.dropout is not None,
            deterministic=self.deterministic,
            max_scores=self.max_scores,
            offsets=self.positions is not None,
            block_scales=self.descale is not None and self.descale.blocked,
            latent=self.latent,
            aligned=all(map(aligned, self.layout.in_place(self.q, self.k, self.v))),
            device=hardware.name(self.q.device),
        )

    def lse_dtype(self) -> torch.dtype:
        return torch.float64 if self.q.dtype == torch.float64 else torch.float32


_DERIVED: dict[str, Callable[[Call], Any]] = {
    "key": Call._key, "spec": Call._spec, "latent": Call._latent, "extent": Call._extent, "positions": Call._positions,
}  # fmt: skip
_COMPUTED = {*_VIEWS, *_DERIVED}


class Sequence(NamedTuple):
    """One sequence of a Call, and its rows and keys there."""

    rows: slice
    keys: slice
    call: Call


def _addresses(*tensors: Tensor) -> list[int]:
    try:
        return [*map(Tensor.data_ptr, tensors)]
    except RuntimeError:  # tensors without memory
        return [*map(address, tensors)]


def aligned(x: Tensor) -> bool:
    """Whether every row of a (b, h, s, d) tensor is contiguous and starts at a multiple of 16 bytes."""
    stride_b, stride_h, stride_s, stride_d = (
        strides(x.shape, x.stride(), x.element_size()) if 1 in x.shape else x.stride()
    )
    return stride_d == 1 and ((stride_b | stride_h | stride_s) * x.element_size() | address(x)) % ALIGNMENT == 0


def strides(shape: Iterable[int], steps: Iterable[int], size: int) -> list[int]:
    """A tensor's strides as bulk copies take them, of elements of `size` bytes. No address depends on that of a
    dimension of one element, so it may be anything, as in the views of a server whose rank has one key head: one that
    is not aligned is 0 here."""
    *found, (_, last) = zip(shape, steps, strict=True)
    return [*[0 if n == 1 and m * size % ALIGNMENT else m for n, m in found], last]


def _span(x: Tensor) -> int:
    """Numbers that decide between 32 and 64 bits: elements, and elements of memory from the first to the last."""
    return max(x.numel(), sum((n - 1) * abs(m) for n, m in zip(x.shape, x.stride(), strict=True))) + (1 << 24)


# Keys and values that come while a call runs, in the order in which kernels take them: sequences with most keys first,
# and of each one key head after the other.


class ArrivalArgs(NamedTuple):
    """The arguments of a kernel that waits for keys; packed."""

    done: Tensor
    """int32 (1): how many steps of the copies are done"""
    steps: Tensor
    """int32 (sequences + 1, h_k): how many bring all keys of a head of a sequence that come"""
    coming: Tensor
    """int32 (sequences + 1): how many keys of a sequence come, its first ones"""


class Arrivals(NamedTuple):
    """The keys of one call that come while it runs. A backend with `WAITS_FOR_KEYS` waits for them in its kernel.
    Others begin when all have come."""

    args: ArrivalArgs
    come: Callable[[], None]
    """The current stream waits for all."""
