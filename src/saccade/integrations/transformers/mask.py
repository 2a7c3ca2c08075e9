"""The mask that transformers makes once for all layers: a structure, where others make a tensor of rows by keys."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from saccade import masks
from saccade.layouts.validate import has_values
from saccade.masks import Mask
from saccade.util.kept_memory import capturing


class VisibleKeys(NamedTuple):
    """The keys that a row sees: those of `mask` from `start` up to `stop`. Where there is none, no bound."""

    mask: Mask | None = None
    start: Tensor | None = None
    """(b or 1, s_q or 1), and so is `stop`; counted from the first key."""
    stop: Tensor | None = None

    def __and__(self, other: VisibleKeys) -> VisibleKeys:
        return VisibleKeys(
            _both(self.mask, other.mask, Mask.__and__),
            _both(self.start, other.start, torch.maximum),
            _both(self.stop, other.stop, torch.minimum),
        )

    def as_mask(self) -> Mask | None:
        if self.start is None and self.stop is None:
            return self.mask
        start, stop = (None if x is None else x.to(torch.int32) for x in (self.start, self.stop))
        return _both(self.mask, masks.interval(start, stop), Mask.__and__)


def _both(one: Any, two: Any, join: Callable[[Any, Any], Any]) -> Any:
    return two if one is None else one if two is None else join(one, two)


@dataclass(frozen=True)
class Region:
    """Where rows and keys are in their sequences."""

    s_q: int
    s_k: int
    q_offset: int | Tensor
    """The position of the first row, and of the first key: integers, or tensors of one that the device reads."""
    kv_offset: int | Tensor
    device: torch.device | str | None
    positions: Tensor | None = None
    """(b, s_q): those within packed sequences, for functions that take these instead."""

    @property
    def at_the_end(self) -> bool:
        """Whether the host knows that the last row is at the last key."""
        if not isinstance(self.q_offset, int) or not isinstance(self.kv_offset, int):
            return False
        return self.q_offset + self.s_q == self.kv_offset + self.s_k

    @property
    def rows(self) -> Tensor:
        """(1, s_q): the position of each row."""
        return torch.arange(self.s_q, device=self.device)[None] + self.q_offset

    @property
    def reach(self) -> Tensor:
        """(1, s_q): where among the keys each row is."""
        return self.rows - self.kv_offset


def translated(function: Callable[..., Any], region: Region) -> VisibleKeys:
    """The keys that a mask function of transformers shows; any other function is tested for each row and key."""
    name = _name(function)
    known = _KNOWN.get(name)
    if known is not None and (name in _WITHOUT_VALUES or not torch.compiler.is_compiling()):
        result = known(region, **_captured(function))
        if result is not None:
            return result
    return VisibleKeys(masks.mask_mod(_shifted(function, region)))


def padding(attention_mask: Tensor, region: Region) -> VisibleKeys:
    """The keys that a mask (b, n) of tokens has from place's first key on; beyond its end there are none.

    Reads the mask, to know whether it is one interval in each row; compiled and captured code tests each key.
    """
    seen = _tokens(attention_mask, region)
    if _readable(seen) and bool(seen.all()):  # as in each step of generation without padding
        return VisibleKeys()
    index = torch.arange(region.s_k, device=seen.device)
    start = region.s_k - torch.where(seen, region.s_k - index, 0).amax(-1, keepdim=True)
    stop = torch.where(seen, index + 1, 0).amax(-1, keepdim=True)
    bounds = VisibleKeys(start=start, stop=stop)
    if _readable(seen) and torch.equal(seen.sum(-1, keepdim=True), (stop - start).clamp(min=0)):
        return bounds
    return bounds & VisibleKeys(masks.mask_mod(lambda b, h, q_idx, kv_idx: seen[b, kv_idx]))


def _tokens(attention_mask: Tensor, region: Region) -> Tensor:
    """(b, s_k): whether each key is a token."""
    length = attention_mask.shape[-1]
    if isinstance(region.kv_offset, int) and region.kv_offset == 0 and region.s_k <= length:
        return attention_mask[:, : region.s_k]
    at = torch.arange(region.s_k, device=attention_mask.device) + region.kv_offset
    return attention_mask[:, at.clamp(max=length - 1)] & (at < length)


def _readable(x: Tensor) -> bool:
    """Whether the host may read a tensor's values, which a CUDA graph's capture may not."""
    return has_values(x) and not capturing()


def _name(function: Any) -> str:
    """`causal_mask_function`, or `sliding_window_overlay` for what that returns; "" for what is not transformers'."""
    if getattr(function, "__module__", "") != "transformers.masking_utils":
        return ""
    return function.__code__.co_qualname.partition(".")[0]


def _captured(function: Any) -> dict[str, Any]:
    """The variables of a closure, by name."""
    names = function.__code__.co_freevars
    return {name: cell.cell_contents for name, cell in zip(names, function.__closure__, strict=True)} if names else {}


def _shifted(function: Callable[..., Any], region: Region) -> Callable[..., Any]:
    """The function of indices that count from the first row and key; as theirs it is of positions."""
    q_offset, kv_offset, positions = region.q_offset, region.kv_offset, region.positions
    if positions is not None:
        return lambda b, h, q_idx, kv_idx: function(b, h, positions[b, q_idx], positions[b, kv_idx])
    if isinstance(q_offset, int) and isinstance(kv_offset, int) and not q_offset and not kv_offset:
        return function
    return lambda b, h, q_idx, kv_idx: function(b, h, q_idx + q_offset, kv_idx + kv_offset)


# Each function's translation; its keywords are what the function captures. None: it is not known after all.


def _causal(region: Region) -> VisibleKeys:
    return VisibleKeys(masks.causal()) if region.at_the_end else VisibleKeys(stop=region.reach + 1)


def _window(region: Region, sliding_window: int) -> VisibleKeys:
    if region.at_the_end:
        return VisibleKeys(masks.window(sliding_window - 1, None))
    return VisibleKeys(start=region.reach - sliding_window + 1)


def _bidirectional_window(region: Region, sliding_window: int) -> VisibleKeys:
    if region.at_the_end:
        return VisibleKeys(masks.window(sliding_window, sliding_window))
    return VisibleKeys(start=region.reach - sliding_window, stop=region.reach + sliding_window + 1)


def _chunks(region: Region, chunk_size: int, left_padding: Tensor) -> VisibleKeys:
    positions = region.rows if region.positions is None else region.positions
    first = left_padding[:, None]
    start = region.reach - (positions - first) % chunk_size  # (b, s_q)
    return VisibleKeys(start=start, stop=start + chunk_size)


def _packed(region: Region, packed_sequence_mask: Tensor) -> VisibleKeys | None:
    if not (region.at_the_end and region.s_q == region.s_k):
        return None
    if _readable(packed_sequence_mask) and not bool(packed_sequence_mask[:, -1:].any()):  # numbered from 0
        return VisibleKeys()
    return VisibleKeys(masks.documents(packed_sequence_mask))


def _all(region: Region, mask_functions: tuple[Callable[..., Any], ...]) -> VisibleKeys | None:
    """Beside the mask of packed sequences others take positions within these, which differ as indices do."""
    packed = "packed_sequence_mask_function" in {_name(function) for function in mask_functions}
    result = VisibleKeys()
    for function in mask_functions:
        if _name(function) == "remap_positions_for_packed_sequence":
            if not packed:
                return None
            inner = _captured(function)
            result &= translated(inner["mask_function"], replace(region, positions=inner["position_ids"]))
        else:
            result &= translated(function, region)
    return result


def _any(region: Region, mask_functions: tuple[Callable[..., Any], ...]) -> VisibleKeys:
    parts = [translated(function, region).as_mask() for function in mask_functions]
    whole = [part for part in parts if part is not None]
    return VisibleKeys(reduce(Mask.__or__, whole)) if len(whole) == len(parts) else VisibleKeys()


_KNOWN: dict[str, Callable[..., VisibleKeys | None]] = {
    "causal_mask_function": _causal,
    "bidirectional_mask_function": lambda region: VisibleKeys(),
    "sliding_window_overlay": _window,
    "sliding_window_bidirectional_overlay": _bidirectional_window,
    "chunked_overlay": _chunks,
    "packed_sequence_mask_function": _packed,
    "and_masks": _all,
    "or_masks": _any,
}
_WITHOUT_VALUES = {"causal_mask_function", "bidirectional_mask_function"}
"""Those that capture nothing: torch.compile cannot read what a function captures that was made in its region."""


class StructuredMask(BlockMask):
    """What each row sees. A BlockMask to transformers, which passes BlockMasks and tensors alone to its layers."""

    def __init__(self, mask: Mask | None, size: tuple[int, int, int, int], padded: bool) -> None:
        self.mask = mask
        """None: everything."""
        self.size_of_mask = size
        """(b, 1, s_q, s_k)"""
        self.padded = padded
        """Whether some tokens are padding."""

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return self.size_of_mask

    @property
    def ndim(self) -> int:
        return 4

    def dim(self) -> int:
        return 4

    def contiguous(self) -> StructuredMask:
        return self

    def to(self, *arguments: Any, **options: Any) -> StructuredMask:
        """On another device; other arguments change nothing."""
        if self.mask is None or not self.mask.tensors:
            return self
        first = self.mask.tensors[0]
        device = torch.empty(0, dtype=first.dtype, device=first.device).to(*arguments, **options).device
        if device == first.device:
            return self
        tensors = [x.to(device) for x in self.mask.tensors]
        moved = masks.from_tensors(self.mask.identity, list(self.mask.ints), tensors, list(self.mask.floats))
        return StructuredMask(moved, self.size_of_mask, self.padded)

    def __getitem__(self, index: Any) -> Any:
        raise NotImplementedError(
            f"{self!r} is no tensor, but this model works on its mask by itself: use attn_implementation="
            '"sdpa" or "eager"'
        )

    __add__ = __radd__ = __mul__ = __rmul__ = __rsub__ = __getitem__

    def size(self, *arguments: Any) -> Any:
        return self[arguments]

    def __invert__(self) -> Any:
        return self[()]

    def __repr__(self) -> str:
        return f"StructuredMask({self.mask!r}, {self.size_of_mask})"


def attention_mask_of(
    batch_size: int, q_length: int | None = None, kv_length: int = 0, q_offset: int | Tensor = 0,
    kv_offset: int | Tensor = 0, mask_function: Any = None, attention_mask: Tensor | None = None,
    cache_position: Tensor | None = None, device: torch.device | str | None = None, **others: Any,
) -> StructuredMask:  # fmt: skip
    """The mask function that transformers calls once in a forward, for each kind of layer.

    Args:
        batch_size: b.
        q_length: s_q, and where the first row is, q_offset; transformers 4 passes the rows' positions, `cache_position`
            (s_q,), instead.
        kv_length: s_k, and where the first key is, kv_offset.
        q_offset: an integer, or a tensor of one for a static cache.
        kv_offset: the same.
        mask_function: `(b, h, q_idx, kv_idx) -> bool` of positions.
        attention_mask: (b, n) bool, which tokens are no padding.
        cache_position: see q_length.
        device: of the mask.
        others: what other implementations need.

    Raises:
        ValueError: an attention_mask of another shape.
    """
    if attention_mask is not None and (attention_mask.dim() != 2 or attention_mask.shape[0] != batch_size):
        wanted = f"({batch_size}, tokens), True where a token is no padding, or have four dimensions"
        raise ValueError(f"attention_mask must be {wanted}, got {tuple(attention_mask.shape)}")
    if cache_position is not None:
        q_length, device = cache_position.shape[0], cache_position.device
        whole = isinstance(kv_offset, int) and kv_offset == 0 and q_length == kv_length  # so the first row is at 0
        q_offset = 0 if whole else cache_position[0]
    assert q_length is not None
    if device is None and attention_mask is not None:
        device = attention_mask.device
    region = Region(q_length, kv_length, q_offset, kv_offset, device)
    seen, padded = translated(mask_function, region), False
    if attention_mask is not None:
        tokens = padding(attention_mask.to(torch.bool), region)
        seen, padded = seen & tokens, tokens != VisibleKeys()
    return StructuredMask(seen.as_mask(), (batch_size, 1, q_length, kv_length), padded)
