"""Bool tensors and the BlockMasks of FlexAttention as masks."""

# Properties of masks are plain attributes of some, and computed by others.
# pyright: reportIncompatibleVariableOverride=false

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from saccade import arguments, scores
from saccade.bounded_cache import derived_from_values
from saccade.kept_memory import apart
from saccade.masks.base import COMBINATIONS, Mask, PredicateMask
from saccade.masks.blocked import EMPTY, FULL, PARTIAL
from saccade.masks.hull import Extent
from saccade.masks.mask_mod import Written, sequences_shape_error
from saccade.scores.recording.compile_constant import compile_constant


def as_mask(mask: Any) -> Mask | None:
    """What `attention` takes as its mask: a Mask, a bool tensor, or a BlockMask of torch.

    Raises:
        TypeError: anything else.
    """
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
    return scores.recorded_predicate(partial(read, t=t, own=own), "tensor").program


def of_tensor(t: Tensor) -> Mask:
    """A bool tensor as a mask.

    Raises:
        TypeError: not bool.
        ValueError: more than four dimensions.
    """
    if t.dtype != torch.bool:
        raise TypeError(
            f"a mask tensor must be bool, True where a query sees a key, got {t.dtype} {tuple(t.shape)}; to add a "
            "tensor to the scores, use score_mod=bias(t)"
        )
    if t.dim() > 4:
        raise ValueError(f"a mask tensor must broadcast to (b, h_q, s_q, s_k), got {tuple(t.shape)}")
    return TensorMask(t if t.dim() else t[None])


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
    listed = torch.arange(index.shape[3], device=index.device) < count[:, :, :rows, None]
    states.scatter_(3, torch.where(listed, index, last).long(), value)


COMBINATIONS["mask"] = as_mask  # pyright: ignore[reportArgumentType] (of None alone it is None)
