"""Bool tensors and the BlockMasks of FlexAttention as masks."""

# Properties of masks are plain attributes of some, and computed by others.
# pyright: reportIncompatibleVariableOverride=false

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from saccade import arguments, scores
from saccade.bounded_cache import BoundedCache, versions
from saccade.kept_memory import capturing, keep
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
        return of_block_mask(mask)
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


class Blocks:
    """A mask by blocks of one size: each is visible, masked, or what a function says."""

    def __init__(self, states: Tensor, mod: Any, rows: int, keys: int) -> None:
        self.states, self.mod, self.rows, self.keys = states, mod, rows, keys
        self.batched, self.headed = states.shape[0] != 1, states.shape[1] != 1

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        batch, head = b if self.batched else torch.zeros_like(b), h if self.headed else torch.zeros_like(h)
        state = self.states[batch, head, q_idx // self.rows, kv_idx // self.keys]
        return (state == 2) | ((state == 1) & self.mod(b, h, q_idx, kv_idx))


_known: BoundedCache[Hashable, Mask] = BoundedCache(256)
"""What BlockMasks are as Masks, by their state."""
_LISTS = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")


def _state(block_mask: Any) -> tuple[Hashable | None, list[Any]]:
    """All that a BlockMask says, and what has to live meanwhile besides the function, which the Mask holds; None where
    writes to its lists are not counted."""
    lists = [x for name in _LISTS if (x := getattr(block_mask, name)) is not None]
    sizes = tuple(block_mask.seq_lengths), tuple(block_mask.BLOCK_SIZE)
    written = versions(lists)
    state = None if written is None else (id(block_mask), id(block_mask.mask_mod), *sizes, written)
    return state, [block_mask, *lists]


def remember(block_mask: Any, mask: Mask) -> None:
    """That a BlockMask is this Mask, until it changes."""
    state, owners = _state(block_mask)
    if state is not None and not capturing():  # what a graph writes is not there yet
        _known.put(state, mask, owners)


def of_block_mask(block_mask: Any) -> Mask:
    """Torch's BlockMask: blocks in the list of full ones are visible; the function decides in the other listed blocks;
    all others are masked."""
    if torch.compiler.is_compiling():
        return _of_lists(block_mask)
    state, owners = _state(block_mask)
    if state is None or capturing():  # a graph reads the lists in each replay
        return _of_lists(block_mask)
    return _known.get_or_make(state, lambda: keep(lambda: _of_lists(block_mask)), owners)


def _of_lists(block_mask: Any) -> Mask:
    rows, keys = block_mask.BLOCK_SIZE
    s_q, s_k = block_mask.seq_lengths
    shape = *block_mask.kv_num_blocks.shape[:2], -(-s_q // rows), -(-s_k // keys)
    states = torch.full(shape, EMPTY, dtype=torch.uint8, device=block_mask.kv_num_blocks.device)
    states = mark(states, block_mask.kv_num_blocks, block_mask.kv_indices, PARTIAL)
    if block_mask.full_kv_num_blocks is not None:
        states = mark(states, block_mask.full_kv_num_blocks, block_mask.full_kv_indices, FULL)
    fn = Blocks(states, block_mask.mask_mod, rows, keys)
    return Written(fn, scores.name_of(block_mask.mask_mod), (*shape[:2], s_q, s_k))


def mark(states: Tensor, count: Tensor, index: Tensor, value: int) -> Tensor:
    """The states with a value where lists of blocks, (b, h, rows) long and (b, h, rows, keys), have entries."""
    index = index[..., : states.shape[3]].long()
    listed = torch.arange(index.shape[3], device=index.device) < count[..., None]
    place = torch.where(listed, index, states.shape[3])  # after the end
    wider = torch.nn.functional.pad(states, (0, 1))
    return wider.scatter(3, place[:, :, : states.shape[2]], value)[..., :-1]


COMBINATIONS["mask"] = as_mask  # pyright: ignore[reportArgumentType] (of None alone it is None)
