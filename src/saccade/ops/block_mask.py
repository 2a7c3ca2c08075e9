"""Block masks: which tiles of a mask are empty, partial and full, computed before the calls that use it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from saccade import ops
from saccade.backends.block_sparsity import compute_states, states_shape, with_states
from saccade.call import SCHEMA, Call, flatten, operator, unflatten
from saccade.masks import Blocked, Mask, as_mask
from saccade.scores import Sizes
from saccade.util import arguments, hardware


def block_mask(mask: Any, b: int, h: int, s_q: int, s_k: int, device: torch.device | str | None = None) -> Mask:
    """The mask, with the states of its tiles. Each tile of 64 rows and 64 keys is empty, partial or full.

    `attention` computes the states itself, and keeps them until the tensors that the mask captures are written to.
    Torch counts no writes to tensors made in inference mode, so their states hold for one call. Compute the states here
    for CUDA graphs, which otherwise compute them in every replay, or to spend that time elsewhere. They take one byte
    for each tile, and for each batch row and head if the mask depends on these.

    Args:
        mask: what `attention` takes: a mask, a bool tensor, or torch's BlockMask.
        b: batch rows.
        h: query heads.
        s_q: rows, all of them in use.
        s_k: keys.
        device: of q; that of the mask's tensors when None, or else torch's default.

    Returns:
        A mask for calls of this shape, without used lengths. A call computes the states again if the function of the
        mask, its numbers or its tensors have changed, or the lists of a BlockMask. Of a BlockMask on a GPU all calls
        compute them, because torch does not count all writes to its lists: pass `mask_mod` of its function instead. A
        mask of intervals alone needs no states and is returned unchanged. A combination with another mask has no
        states. If compiled code makes the mask, calls compute the states themselves.

    Raises:
        TypeError: no mask, or sizes that are not integers.
        ValueError: a mask for another shape, an interval with tensors as bounds, negative sizes, or an unknown device.

    >>> mask = block_mask(mask_mod(lambda b, h, q_idx, kv_idx: q_idx // 256 == kv_idx // 256), 1, 8, 1024, 1024)
    >>> mask.sparsity()
    0.75
    """
    for name, n in (("b", b), ("h", h), ("s_q", s_q), ("s_k", s_k)):
        arguments.integer(name, n)
    device = arguments.device_of(device)
    mask = as_mask(mask)
    if mask is None:
        raise TypeError("block_mask needs a mask, got None")
    mask = mask.unblocked()
    bound = mask.bound()
    if error := bound.shape_error(Sizes(b, h, s_q, s_k)):
        raise ValueError(error)
    if not mask.block_sparse:
        return mask
    if mask.bounds_per_row:
        raise ValueError(
            f"block_mask cannot keep the tiles of {mask!r}: each call reads its tensors anew; pass the mask itself"
        )
    device_of_mask = (
        bound.tensors[0].device if bound.tensors and device is None else torch.empty(0, device=device).device
    )
    q, k = (torch.empty(1, device=device_of_mask).expand(b, h, s, 1) for s in (s_q, s_k))
    call = Call(q, k, k, mask=bound)
    if torch.compiler.is_compiling():
        flat = flatten(call, "auto")
        states = operator("tile_states", flat)(*flat)
        return Blocked(mask, states, (s_q, s_k), kept=False)
    return with_states(mask, _states(call), (s_q, s_k))


def _states(call: Call) -> Tensor:
    if call.q.is_cuda and hardware.triton_obstacle() is None:
        from saccade.backends.device import block_lists

        return block_lists.states(call, {})
    return compute_states(call)


def _of_flat(*flat: Any) -> Tensor:
    return _states(unflatten(*flat)[0])


def _fake_states(*flat: Any) -> Tensor:
    call, _ = unflatten(*flat)
    return call.q.new_empty(states_shape(call), dtype=torch.uint8)


for _overload, _tags in ops.OVERLOADS.items():
    ops.library.define(f"tile_states{_overload}({SCHEMA}) -> Tensor", tags=_tags)
    ops.library.impl("tile_states" + _overload, _of_flat, "CompositeExplicitAutograd")
    torch.library.register_fake("saccade::tile_states" + _overload, _fake_states, lib=ops.library)
