"""Vectors of lengths and offsets: their errors, what they are made from, and what is counted from them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import get_unwrapped, is_batchedtensor, is_functorch_wrapped_tensor
from torch._subclasses.fake_tensor import is_fake

from saccade.masks import FARTHEST, Blocked, Documents, KeyInterval, Mask, Positions, Selected, TensorMask
from saccade.scores import LONGEST, Sizes
from saccade.util import arguments


def check_vector(name: str, x: object, shape: str) -> None:
    if not isinstance(x, Tensor) or x.dim() != 1 or x.dtype not in (torch.int32, torch.int64):
        raise arguments.refusal(x, f"{name} must be an int32 or int64 tensor of shape {shape}, got {described(x)}")


def check_offsets(name: str, offsets: list[int], t: int) -> list[int]:
    """The lengths of the sequences."""
    lengths = [stop - start for start, stop in pairwise(offsets)]
    if offsets[0] != 0 or min(lengths, default=0) < 0 or offsets[-1] > t:
        raise ValueError(
            f"{name} must begin at 0, never decrease, and not end beyond the tensor's {t} rows, "
            f"got {shortened(offsets)}"
        )
    return lengths


def has_values(x: Tensor) -> bool:
    """Whether the numbers of a tensor can be read at all: not in compiled code, and those that vmap maps over are many
    at once."""
    if torch.compiler.is_compiling():
        return False
    return not is_fake(x) and x.device.type != "meta" and not _is_mapped(x)


def _is_mapped(x: Tensor) -> bool:
    while is_functorch_wrapped_tensor(x):
        if is_batchedtensor(x):
            return True
        x = get_unwrapped(x)
    return False


def same_vector(a: Tensor | None, b: Tensor | None) -> bool:
    """Whether both are one vector, as far as the host knows without reading it."""
    if a is None or b is None:
        return a is b
    return a is b or ((a.data_ptr(), a.dtype, a.shape) == (b.data_ptr(), b.dtype, b.shape) and a.stride() == b.stride())


def shortened(numbers: list[int]) -> str:
    return str(numbers) if len(numbers) <= 12 else f"[{', '.join(map(str, numbers[:12]))}, …]"


def described(value: object) -> str:
    return f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)


def offsets_of_lengths(
    name: str, lengths: Sequence[int] | Tensor, device: torch.device | str | None
) -> tuple[Tensor, int | None]:
    """The offsets (b + 1), and the longest length, unless a tensor holds it."""
    if isinstance(lengths, Tensor):
        check_vector(name, lengths, "(b,)")
        if device is not None:
            lengths = lengths.to(device, non_blocking=True)
        return torch.nn.functional.pad(lengths.cumsum(0, dtype=lengths.dtype), (1, 0)), None
    if not isinstance(lengths, Sequence):
        raise TypeError(f"{name} must be integers from 0 on, or an integer tensor of shape (b,), got {lengths!r}")
    numbers = [arguments.integer(f"each of {name}", n) for n in lengths]
    ends = [*accumulate(numbers, initial=0)]
    dtype = torch.int32 if ends[-1] < 1 << 31 else torch.int64
    device = torch.get_default_device() if device is None else device
    # A copy that does not wait for what the device still has to do.
    offsets = torch.tensor(ends, dtype=dtype, device="cpu").to(device, non_blocking=True)
    return offsets, max(numbers, default=0)


def offsets_of_position_ids(ids: Tensor, max_sequences: int | None) -> Tensor:
    """int32 (b + 1): where the sequences of `ids` begin, and empty ones after them."""
    if not isinstance(ids, Tensor) or ids.dim() not in (1, 2) or ids.dtype not in (torch.int32, torch.int64):
        wanted = "an int32 or int64 tensor of shape (t,) or (b, s)"
        raise arguments.refusal(ids, f"ids must be {wanted}, got {described(ids)}")
    if max_sequences is not None:
        max_sequences = arguments.integer("max_sequences", max_sequences, 1, ", or None")
    starts = ids == 0
    starts[..., :1] = True
    numbers = starts.flatten().cumsum(0)  # of each token its sequence, from 1 on
    if max_sequences is None or (ids.device.type == "cpu" and has_values(ids)):
        count = int(numbers[-1]) if numbers.numel() else 0
        if max_sequences is not None and count > max_sequences:
            raise ValueError(
                f"the ids {tuple(ids.shape)} begin {count} sequences, and max_sequences is {max_sequences}"
            )
        max_sequences = count if max_sequences is None else max_sequences
    wanted = torch.arange(1, max_sequences + 2, device=ids.device)
    return torch.searchsorted(numbers, wanted, out_int32=True)


# What is wrong with the shapes of a call, its mask and its positions, in words: the error's text, or None.


def operand_error(q: torch.Size, k: torch.Size, v: torch.Size, h: int, s: int) -> str | None:
    """The error in operands with dimensions h (heads) and s (rows), or None."""
    if k[h] != v[h] or k[s] != v[s]:
        return "k and v must have the same heads and length"
    return head_error(q, k, v, h)


def head_error(q: torch.Size, k: torch.Size, v: torch.Size, h: int) -> str | None:
    """The error in heads, which are dimension h, and head dims, or None."""
    if q[-1] != k[-1]:
        return "q and k must have one head dim"
    if q[-1] == 0 or v[-1] == 0:
        return "head dims must be at least 1"
    if (q[h] % k[h] if k[h] else q[h]) or (k[h] and not q[h]):
        return f"the query heads must be a multiple of the key heads, got {q[h]} and {k[h]}"
    return None


def cache_error(k: torch.Size, v: torch.Size) -> str | None:
    """The error in the caches (pages, page_size, h, d), or None."""
    if k[:3] != v[:3]:
        return "both caches must have the same pages, page size and heads"
    if not k[0] or not k[1]:
        return "a paged cache needs at least one page of one row"
    return None


def sink_error(sink: Tensor, h_q: int, device: torch.device) -> str | None:
    wanted = f"sink must be a float tensor ({h_q},), one logit per query head"
    if not isinstance(sink, Tensor) or sink.shape != (h_q,) or not sink.is_floating_point():
        return f"{wanted}, got {described(sink)}"
    if sink.layout != torch.strided:
        return f"{wanted}, with plain memory, got {sink.layout}"
    if sink.device != device:
        return f"sink must be on q's device {device}, got {sink.device}"
    return None


def sequence_mask_error(mask: Mask | None, sizes: Sizes, no_documents: str) -> str | None:
    """The error in a mask over separate sequences, or None; `no_documents` says why documents are refused."""
    if isinstance(mask, Blocked):
        return "block_mask is for dense calls alone: pass the mask itself"
    for leaf in mask.leaves() if mask is not None else ():
        if isinstance(leaf, Documents):
            return no_documents
        if leaf.kind == "prefixes" and leaf.tensors[0].shape != (sizes.b,):
            got = tuple(leaf.tensors[0].shape)
            return f"prefix lengths must have shape ({sizes.b},), one for each sequence, got {got}"
        if leaf.block_sparse and (error := leaf.shape_error(sizes)):
            return error
    return None


def counts_from_first(mask: Mask) -> bool:
    """Whether a mask is of the call's first row and key on, wherever they stand."""
    return mask.of_shape or isinstance(mask, (Blocked, Documents, TensorMask))


def rows_error(mask: Mask | None, sizes: Sizes, h_k: int, rows: int, end_to_end: bool = False) -> str | None:
    """The error in intervals and lists that are tensors, or None; `rows`: of a sequence, or of all sequences."""
    if mask is None or not mask.bounds_per_row:
        return None
    for leaf in mask.leaves():
        error = None
        if isinstance(leaf, KeyInterval):
            error = leaf.bounds_error(sizes.b, rows, end_to_end)
        elif isinstance(leaf, Selected):
            error = leaf.lists_error(sizes, h_k, rows, end_to_end)
        if error:
            return error
    return None


Offset = int | Tensor


def check_offset(name: str, x: Any) -> None:
    """Raises ValueError for a tensor that is not an int32 or int64 one of one or two dimensions, or an int beyond
    FARTHEST, and TypeError for what is neither an int, a tensor nor None."""
    if x is None:
        return
    if isinstance(x, Tensor):
        if x.dtype not in (torch.int32, torch.int64) or not 1 <= x.dim() <= 2:
            rows = ", or a position for each row" if name == "q_offset" else ""
            raise ValueError(f"{name} must be an int, or an int32 or int64 tensor (b,){rows}, got {described(x)}")
        return
    arguments.integer(name, x, least=None)
    if not -FARTHEST <= x <= FARTHEST:
        raise ValueError(f"{name} must be from {-FARTHEST} to {FARTHEST}, got {x}")


def positions_of(q_offset: Offset | None, k_offset: Offset | None, flat_rows: int | None) -> Positions | None:
    """The Positions of checked offsets; None where neither is given. `flat_rows`: how many rows there are of queries
    end to end."""
    if q_offset is None and k_offset is None:
        return None
    q, k, per_row = 0 if q_offset is None else q_offset, 0 if k_offset is None else k_offset, False
    if isinstance(q, Tensor):
        per_row = q.shape[-1] == flat_rows if q.dim() == 1 else q.shape[1] != 1
        if q.dim() == 1 and not per_row:
            q = q[:, None]
        elif per_row and flat_rows is not None:
            q = q.flatten()
    return Positions(q, k[:, None] if isinstance(k, Tensor) and k.dim() == 1 else k, per_row)


def of_sequence(positions: Positions, i: int, rows: slice) -> tuple[Offset, Offset]:
    """`q_offset` and `k_offset` of one sequence as a Dense batch of one row; `rows` are its of queries end to end."""

    def own(x: Offset) -> Offset:
        if not isinstance(x, Tensor):
            return x
        if x.dim() == 1:
            return x[None, rows]
        return x[i : i + 1] if x.shape[0] > 1 else x

    return own(positions.q), own(positions.k)


def offset_error(q: Offset | None, k: Offset | None, b: int, rows: int, end_to_end: bool) -> str | None:
    """Why shapes of offsets are wrong, for b batch rows of so many rows, or b sequences of so many in all, or None."""
    if isinstance(k, Tensor) and not arguments.is_one_of(k.shape, (b,), (b, 1)):
        return f"k_offset must have shape ({b},), got {tuple(k.shape)}"
    if not isinstance(q, Tensor):
        return None
    shape = tuple(q.shape)
    if not end_to_end:
        if arguments.is_one_of(shape, (b,), (b, 1), (b, rows), (1, rows)):
            return None
        wanted = f"({b},), an offset for each batch row, or ({b}, {rows}) or (1, {rows}), a position for each row"
        return f"q_offset must be {wanted}; got {shape}"
    if arguments.is_one_of(shape, (b,)) and b == rows != 1:
        return (
            f"q_offset {shape} could be an offset for each of {b} sequences or a position for each of {rows} rows: "
            "pass q_offset[:, None] for sequences, or q_offset[None] for rows"
        )
    if arguments.is_one_of(shape, (b,), (b, 1), (rows,), (1, rows)):
        return None
    wanted = f"({b},) or ({b}, 1), an offset for each sequence, or ({rows},) or (1, {rows}), a position for each row"
    return f"q_offset must be {wanted}; got {shape}"


def reach_error(name: str, x: Offset | None, s: int) -> str | None:
    """Why functions do not take the positions of s rows or keys, of an offset that is a number."""
    if x is None or isinstance(x, Tensor) or (x >= -LONGEST and x + s <= LONGEST):
        return None
    return f"functions take positions from {-LONGEST} to {LONGEST - 1}, got {name} {x} with {s} rows or keys"


def check_positions(name: str, x: Offset | None, s: int, functions: bool) -> None:
    """Reads an offset of s rows or keys that is a tensor; `functions` take nearer positions. Raises ValueError for one
    that is too far from 0."""
    least, most = (-LONGEST, LONGEST - s) if functions else (-FARTHEST, FARTHEST)
    if isinstance(x, Tensor) and has_values(x) and bool(((x > most) | (x < least)).any()):
        raise ValueError(f"{name} must be from {least} to {most}, got {shortened(x.flatten().tolist())}")
