"""Masks of which no interval says all: functions of the indices, bool tensors, torch's BlockMasks, states of tiles."""

# Properties of masks are plain attributes of some, and computed by others.
# pyright: reportIncompatibleVariableOverride=false

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from saccade import scores
from saccade.masks.base import COMBINATIONS, Extent, Mask, PredicateMask, WrappedMask
from saccade.util import arguments
from saccade.util.caches import compile_constant, derived_from_values
from saccade.util.kept_memory import apart

TILE = 64
"""Query rows and keys of a tile that has a state."""
EMPTY, PARTIAL, FULL = 0, 1, 2


@dataclass(frozen=True, eq=False, repr=False)
class Blocked(WrappedMask):
    """A mask with the states of its tiles, computed beforehand for calls of one shape. Combined, it is a mask again."""

    MARK: ClassVar[str] = "@"
    states: Tensor
    """uint8 (b or 1, h_q or 1, tiles of rows, tiles of keys): EMPTY, PARTIAL or FULL"""
    lengths: tuple[int, int] | None = None
    """s_q and s_k, where they are known: tiles alone do not say where the last ones end"""
    kept: bool = True
    """Whether calls take the states: not those of compiled code, where torch counts no writes to a mask's tensors"""

    @property
    def identity(self) -> str:
        return (self.MARK if self.kept else "") + self.mask.identity

    @property
    def tensors(self) -> list[Tensor]:
        return [*self.mask.tensors, *([self.states] if self.kept else [])]

    def leaves(self) -> Iterator[Mask]:
        return self.mask.leaves()

    def unblocked(self) -> Mask:
        return self.mask

    def shape_error(self, sizes: scores.Sizes) -> str | None:
        b, h, s_q, s_k, _ = sizes
        blocks, tiles = tuple(self.states.shape), (-(-s_q // TILE), -(-s_k // TILE))
        if not (arguments.broadcasts(blocks[:2], (b, h)) and blocks[2:] == tiles):
            return f"a block mask of {blocks} tiles is for another shape than (b, h_q, s_q, s_k) = {(b, h, s_q, s_k)}"
        if self.lengths is not None and self.lengths != (s_q, s_k):
            return f"a block mask for (s_q, s_k) = {self.lengths} is for another shape than {(s_q, s_k)}"
        return self.mask.shape_error(sizes)

    def sparsity(self) -> float:
        """The share of tiles that are empty."""
        return float((self.states == EMPTY).float().mean())


Function = Callable[..., Tensor]
"""(b, h, q_idx, kv_idx) -> bool"""


@dataclass(frozen=True, eq=False)
class MaskMod(PredicateMask):
    """A predicate as it is in one call."""

    predicate: scores.Traced
    """The function as a graph, with what it captured."""
    form: tuple[int, int, int, int] | None
    """(b or 1, h_q or 1, s_q, s_k) of a BlockMask, which is for calls of one shape, all of whose rows are in use."""

    @property
    def of_shape(self) -> bool:
        return self.form is not None

    @property
    def identity(self) -> str:
        return f"mask_mod[{self.predicate.identity}]"

    @property
    def indices(self) -> frozenset[str]:
        return self.predicate.indices

    def flat(self, of: type) -> list[Any]:
        predicate = self.predicate
        return [*(predicate.ints if of is int else predicate.floats if of is float else predicate.tensors)]

    def shape_error(self, sizes: scores.Sizes) -> str | None:
        b, h, s_q, s_k, exact = sizes
        form = self.form
        if form is not None and not exact and (error := sequences_shape_error("the BlockMask", form, sizes)):
            return error
        if form is not None and exact and not (arguments.broadcasts(form[:2], (b, h)) and form[2:] == (s_q, s_k)):
            return f"the BlockMask is for (b, h_q, s_q, s_k) = {form}, and the call has {(b, h, s_q, s_k)}"
        if max(s_q, s_k) > scores.LONGEST:
            return f"mask functions take lengths up to {scores.LONGEST}, got {s_q} and {s_k}"
        return scores.short(self.predicate.identity, self.predicate.tensors, sizes)

    def sees(self, extent: Extent, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return self.predicate.holds(b, h, extent.q_position(b, q_idx), extent.k_position(b, kv_idx))

    def __repr__(self) -> str:
        return f"mask_mod({self.predicate.kind})"


def sequences_shape_error(
    name: str, shape: tuple[int, ...], sizes: scores.Sizes, broadcast: bool = False
) -> str | None:
    """Why the shape of a mask does not fit sequences, or None."""
    b, h, s_q, s_k, _ = sizes
    long_enough = (n >= m or (n == 1 and broadcast) for n, m in zip(shape[2:], (s_q, s_k), strict=True))
    if arguments.broadcasts(shape[:2], (b, h)) and all(long_enough):
        return None
    hint = "; compiled code reads no offsets: give max_seqlen_q= and max_seqlen_k="
    return (
        f"{name} over sequences has a row for each query of the longest one, and a column for each of its keys: at "
        f"least (sequences, h_q, queries, keys) = {(b, h, s_q, s_k)}, where sequences and heads may be 1; got {shape}"
        f"{hint if torch.compiler.is_compiling() else ''}"
    )


class Written(MaskMod):
    """A predicate as it was written: each call traces it anew."""

    def __init__(self, fn: Function, name: str | None = None, form: tuple[int, int, int, int] | None = None) -> None:
        for field, value in (("fn", fn), ("name", name), ("form", form)):
            object.__setattr__(self, field, value)

    fn: Function
    name: str | None

    @property
    def predicate(self) -> Any:
        """The mask with its function traced now."""
        return scores.predicate(self.fn, self.name)

    def bound(self) -> Mask:
        return MaskMod(self.predicate, self.form)

    def sees(self, extent: Extent, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        """Whether a query sees a key, by the user's function."""
        return scores.evaluated(self.fn, b, h, extent.q_position(b, q_idx), extent.k_position(b, kv_idx))

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and other.fn == self.fn

    def __hash__(self) -> int:
        return hash(self.fn)

    def __repr__(self) -> str:
        return f"mask_mod({self.name or scores.name_of(self.fn)})"

    def __reduce__(self) -> Any:
        return Written, (self.fn, self.name, self.form)


def mask_mod(fn: Function) -> Mask:
    """Row i sees key j where `fn(b, h, q_idx, kv_idx)` is true: any predicate of pointwise torch operations.

    Each call of attention uses the function as it is at that call, with its numbers and tensors. Tiles without a
    visible key are skipped. Tiles whose keys are all visible are not tested. q's device finds both, and finds them
    again if the function, its numbers or its tensors have changed. Where intervals mask keys, as in `causal() &
    mask_mod(fn)`, the function is not evaluated. Torch does not count writes through `.data`, numpy or dlpack: call
    `mask.refresh()` after them.

    Args:
        fn: a function of four integer tensors that broadcast to a tile: batch row, query head, query, key. It
            returns bools, as torch's `flex_attention` wants them too. Rows and keys count from the first one, without
            alignment at the bottom right. Captured tensors are on q's device.

    Raises:
        TypeError: fn is not callable.
        ValueError: a function that returns integers or floats, or that cannot be traced, with what to write; see
            `ScoreMod`.

    >>> print(mask_mod(lambda b, h, q_idx, kv_idx: (q_idx - kv_idx) % 2 == 0).draw(4))
    mask_mod(lambda)
    ■ · ■ ·
    · ■ · ■
    ■ · ■ ·
    · ■ · ■
    """
    if not callable(fn):
        raise TypeError(f"mask_mod needs a function of (b, h, q_idx, kv_idx), got {fn!r}")
    mask = Written(fn)
    if not torch.compiler.is_compiling():
        mask.bound()  # says what is wrong with a function here
    return mask


@dataclass(frozen=True, eq=False, repr=False)
class OfRow(WrappedMask):
    """A predicate as one batch row sees it, which counts itself as number 0."""

    b: int

    @property
    def indices(self) -> frozenset[str]:
        return self.mask.indices - {"b"}

    def flat(self, of: type) -> list[Any]:
        inner = [x for leaf in self.mask.leaves() for x in leaf.flat(of)]
        return [self.b, *inner] if of is int else inner

    def sees(self, extent: Extent, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return self.mask.sees(extent, b + self.b, h, q_idx, kv_idx)


def as_mask(mask: Any) -> Mask | None:
    """The Mask of what `attention` takes as one: a Mask, a bool tensor, or torch's BlockMask. Raises TypeError for
    anything else."""
    if mask is None or isinstance(mask, Mask):
        return mask
    if isinstance(mask, Tensor):
        return of_tensor(mask)
    if is_block_mask(mask):
        return OfBlockMask(mask)
    hint = "; for a function (b, h, q_idx, kv_idx) -> bool use mask_mod(fn)" if callable(mask) else ""
    raise TypeError(
        "mask must be a saccade mask, such as causal() & window(1023, None), a bool tensor or torch's BlockMask, got "
        f"{type(mask).__name__}{hint}"
    )


@dataclass(frozen=True, eq=False)
class TensorMask(PredicateMask):
    """Row i sees key j where `t[b, h, i, j]` is true; any shape that broadcasts to (b, h_q, s_q, s_k)."""

    t: Tensor

    @property
    def own(self) -> tuple[bool, ...]:
        """Which of the last dimensions are more than one element."""
        many = [i for i, n in enumerate(self.t.shape) if n != 1]  # of a symbol torch.compile knows conditions alone
        return tuple([i in many for i in range(self.t.dim())])

    @property
    def identity(self) -> str:
        return f"mask_tensor[{_identity(self.own)}]"

    @property
    def predicate(self) -> scores.Traced:
        return scores.Traced(scores.program_of(_identity(self.own)), [self.t], [])

    @property
    def indices(self) -> frozenset[str]:
        return self.predicate.indices

    def flat(self, of: type) -> list[Any]:
        return [self.t] if of is Tensor else []

    def shape_error(self, sizes: scores.Sizes) -> str | None:
        call, shape = tuple(sizes[:4]), tuple(self.t.shape)
        if not sizes.exact:
            return sequences_shape_error("a mask tensor", (1,) * (4 - len(shape)) + shape, sizes, broadcast=True)
        if not arguments.broadcasts(shape, call):
            return f"a mask tensor must broadcast to (b, h_q, s_q, s_k) = {call}, got {shape}"
        return None

    def sees(self, extent: Extent, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return read(b, h, q_idx, kv_idx, self.t, self.own)

    def __repr__(self) -> str:
        return f"mask{list(self.t.shape)}"


def read(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor, t: Tensor, own: tuple[bool, ...]) -> Tensor:
    """The elements of a tensor, broadcast where it has one."""
    at = (b, h, q_idx, kv_idx)[4 - len(own) :]
    return t[tuple(i if mine else torch.zeros_like(i) for i, mine in zip(at, own, strict=True))]


@compile_constant
def _identity(own: tuple[bool, ...]) -> str:
    return _program(own).identity


@cache
def _program(own: tuple[bool, ...]) -> Any:
    """The program of all tensors that have one element in the same dimensions; kept for ever, as there are few."""
    t = torch.zeros((), dtype=torch.bool, device="cpu").expand([7 if mine else 1 for mine in own])
    return scores.traced_predicate(partial(read, t=t, own=own), "tensor").program


def of_tensor(t: Tensor) -> Mask:
    """A bool tensor as a mask. Raises TypeError for another dtype, and ValueError for more than four dimensions."""
    if t.dtype != torch.bool:
        raise TypeError(
            f"a mask tensor must be bool, True where a query sees a key, got {t.dtype} {tuple(t.shape)}; to add a "
            "tensor to the scores, use score_mod=bias(t)"
        )
    if t.dim() > 4:
        raise ValueError(f"a mask tensor must broadcast to (b, h_q, s_q, s_k), got {tuple(t.shape)}")
    return TensorMask(t)


def is_block_mask(value: Any) -> bool:
    """Whether it is torch's BlockMask, which is not imported to find out."""
    return arguments.of_torch("BlockMask", value)


class OfBlockMask(Written):
    """Torch's BlockMask, whose lists each call reads: blocks in the list of full ones are visible; the function decides
    in the other listed blocks; all others are masked."""

    def __init__(self, block_mask: Any) -> None:
        object.__setattr__(self, "block_mask", block_mask)

    block_mask: Any

    @property
    def fn(self) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _by_blocks(_states(self.block_mask), self.block_mask.mask_mod, *self.block_mask.BLOCK_SIZE)

    @property
    def name(self) -> str:
        return scores.name_of(self.block_mask.mask_mod)

    @property
    def form(self) -> Any:
        return *self.block_mask.kv_num_blocks.shape[:2], *self.block_mask.seq_lengths

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and other.block_mask is self.block_mask

    def __hash__(self) -> int:
        return id(self.block_mask)

    def __reduce__(self) -> Any:
        return OfBlockMask, (self.block_mask,)


def _by_blocks(states: Tensor, mod: Any, rows: int, keys: int) -> Any:
    """A function that says what a mask by blocks of one size lets a query see."""
    batched, headed = states.shape[0] != 1, states.shape[1] != 1

    def sees(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        batch, head = b if batched else torch.zeros_like(b), h if headed else torch.zeros_like(h)
        state = states[batch, head, q_idx // rows, kv_idx // keys]
        return (state == 2) | ((state == 1) & mod(b, h, q_idx, kv_idx))

    return sees


def _states(block_mask: Any) -> Tensor:
    """The states of a BlockMask's blocks, (b or 1, h_q or 1, blocks of rows, blocks of keys), as its lists are now."""
    (rows, keys), (s_q, s_k) = block_mask.BLOCK_SIZE, block_mask.seq_lengths
    lists = [(block_mask.kv_num_blocks, block_mask.kv_indices, PARTIAL)]
    if block_mask.full_kv_num_blocks is not None:
        lists.append((block_mask.full_kv_num_blocks, block_mask.full_kv_indices, FULL))
    shape = *block_mask.kv_num_blocks.shape[:2], -(-s_q // rows), -(-s_k // keys)

    def make() -> Tensor:
        device = block_mask.kv_num_blocks.device
        states = torch.full((*shape[:3], shape[3] + 1), EMPTY, dtype=torch.uint8, device=device)
        for count, index, value in lists:
            _mark(states, count, index, value)
        return states[..., :-1]

    if torch.compiler.is_compiling():
        return make()
    with apart():
        return derived_from_values(("blocks", shape), [x for *pair, _ in lists for x in pair], make)


def _mark(states: Tensor, count: Tensor, index: Tensor, value: int) -> None:
    """Writes a value where lists of blocks, (b, h, rows) long and (b, h, rows, keys), have entries. The last column is
    for all that is not listed."""
    rows, last = states.shape[2], states.shape[3] - 1
    index = index[:, :, :rows, :last]
    kept = torch.arange(index.shape[3], device=index.device) < count[:, :, :rows, None]
    states.scatter_(3, torch.where(kept, index, last).long(), value)


COMBINATIONS["mask"] = as_mask  # pyright: ignore[reportArgumentType] (of None alone it is None)
