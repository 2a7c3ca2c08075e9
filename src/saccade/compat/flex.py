"""`torch.nn.attention.flex_attention`, with its backward on CPUs and without `torch.compile`.

    from saccade.compat.flex import create_block_mask, flex_attention

Signatures and meaning are those of PyTorch 2.15. BlockMask, AuxRequest, AuxOutput, and_masks, or_masks and noop_mask
are torch's own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as torch_flex
from torch.nn.attention.flex_attention import AuxOutput, AuxRequest, BlockMask, and_masks, noop_mask, or_masks

from saccade.api import ScoreFunction, attention
from saccade.masks import FULL, PARTIAL, TILE, as_mask, is_block_mask, mask_mod
from saccade.ops.block_mask import block_mask as with_states
from saccade.util import arguments

__all__ = [
    "AuxOutput", "AuxRequest", "BlockMask", "and_masks", "create_block_mask", "flex_attention", "noop_mask", "or_masks",
]  # fmt: skip

_WHOLE = 1 << 30
"""The block size of torch's block mask that masks nothing."""


def flex_attention(
    query: Tensor, key: Tensor, value: Tensor, score_mod: ScoreFunction | None = None,
    block_mask: BlockMask | None = None, scale: float | None = None, enable_gqa: bool = False, return_lse: bool = False,
    kernel_options: dict[str, Any] | None = None, *, return_aux: AuxRequest | None = None,
) -> Any:  # fmt: skip
    """`softmax(mask(score_mod(scale q k^T))) v`, as `torch.nn.attention.flex_attention.flex_attention` computes it.

    Args:
        query: (b, h_q, s_q, d).
        key: (b or 1, h_k, s_k, d); one batch row for all needs a block mask, as it does in torch.
        value: (b or 1, h_k, s_k, d_v).
        score_mod: `score_mod(score, b, h, q_idx, kv_idx) -> score`. Tensors that it captures get gradients.
        block_mask: from `create_block_mask`, here or in torch, or from `BlockMask.from_kv_blocks`.
        scale: factor on q k^T; 1/sqrt(d) when None.
        enable_gqa: h_q may be a multiple of h_k.
        return_lse: deprecated in torch; return (out, lse).
        kernel_options: for torch's kernels; not read.
        return_aux: `AuxRequest(lse, max_scores)`: return (out, AuxOutput).

    Returns:
        out (b, h_q, s_q, d_v), and on request lse, natural log, differentiable, and max_scores, the largest modified
        score that a row sees, not differentiable, both (b, h_q, s_q) float32. A row that sees no key has `out = 0` and
        -inf in both.

    Raises:
        ValueError: shapes that do not fit one another, or a block mask for another shape.

    >>> q, k, v = (torch.randn(1, 2, 128, 16) for _ in range(3))
    >>> causal = create_block_mask(lambda b, h, q_idx, kv_idx: q_idx >= kv_idx, None, None, 128, 128, device="cpu")
    >>> out, aux = flex_attention(q, k, v, block_mask=causal, return_aux=AuxRequest(lse=True))
    >>> out.shape, aux.lse.shape
    (torch.Size([1, 2, 128, 16]), torch.Size([1, 2, 128]))
    """
    arguments.tensors(query=query, key=key, value=value)
    arguments.flags(enable_gqa=enable_gqa, return_lse=return_lse)
    if block_mask is not None and not is_block_mask(block_mask):
        raise TypeError(f"block_mask must be a BlockMask, got {arguments.describe(block_mask)}")
    if return_aux is not None and not (hasattr(return_aux, "lse") and hasattr(return_aux, "max_scores")):
        raise TypeError(f"return_aux must be an AuxRequest, got {arguments.describe(return_aux)}")
    if not query.dim() == key.dim() == value.dim() == 4:
        raise NotImplementedError("query, key and value must be 4-dimensional")
    if not enable_gqa and query.shape[1] != key.shape[1]:
        raise ValueError(
            f"query has {query.shape[1]} heads and key {key.shape[1]}: heads that share keys need enable_gqa=True"
        )
    if return_lse and return_aux is not None:
        raise ValueError("return_lse is deprecated: pass return_aux=AuxRequest(lse=True) alone")
    if query.shape[0] != key.shape[0]:
        if block_mask is None or key.shape[0] != 1:
            raise ValueError(
                f"query has {query.shape[0]} batch rows and key {key.shape[0]}; one row of keys for all needs a mask"
            )
        key, value = (x.expand(query.shape[0], -1, -1, -1) for x in (key, value))
    mask = None if block_mask is None or block_mask.BLOCK_SIZE[0] == _WHOLE else as_mask(block_mask)
    want_lse = return_lse or (return_aux is not None and return_aux.lse)
    keywords: dict[str, Any] = {"mask": mask, "score_mod": score_mod, "scale": scale}
    if return_aux is not None and return_aux.max_scores:
        result = attention(query, key, value, return_lse=want_lse, return_max_scores=True, **keywords)
        return result.out, AuxOutput(result.lse, result.max_scores)
    out, lse = attention(query, key, value, return_lse=True, **keywords)
    if return_aux is not None:
        return out, AuxOutput(lse if want_lse else None, None)
    return (out, lse) if want_lse else out


def create_block_mask(
    mask_mod: Any, B: int | None, H: int | None, Q_LEN: int, KV_LEN: int, device: Any = None,
    BLOCK_SIZE: int | tuple[int, int] = 128, _compile: bool = False, separate_full_blocks: bool = True,
    compute_dq_write_order: bool = False, dq_kv_order: bool = True,
) -> BlockMask:  # fmt: skip
    """Torch's BlockMask of a function (b, h, q_idx, kv_idx) -> bool; the mask itself is never in memory.

    Args:
        mask_mod: the function.
        B: batch rows; None or 1 if they are all alike.
        H: query heads; None or 1 if they are all alike.
        Q_LEN: rows.
        KV_LEN: keys.
        device: of the block mask; torch's default, or its accelerator, when None.
        BLOCK_SIZE: rows and keys of a block. One kernel finds blocks of multiples of 64; others go to torch's function.
        _compile: not needed.
        separate_full_blocks: list fully visible blocks apart from those whose elements are tested.
        compute_dq_write_order: for torch's own kernels, by torch's function.
        dq_kv_order: the same.

    >>> create_block_mask(lambda b, h, q_idx, kv_idx: q_idx >= kv_idx, None, None, 256, 256, device="cpu").sparsity()
    25.0
    """
    for name, n in (("B", B), ("H", H), ("Q_LEN", Q_LEN), ("KV_LEN", KV_LEN)):
        if n is not None or name.endswith("LEN"):
            arguments.integer(name, n)
    arguments.flags(separate_full_blocks=separate_full_blocks, compute_dq_write_order=compute_dq_write_order)
    sizes = BLOCK_SIZE if isinstance(BLOCK_SIZE, (tuple, list)) else (BLOCK_SIZE, BLOCK_SIZE)
    if len(sizes) != 2:
        raise ValueError(f"BLOCK_SIZE is one integer, or two for rows and keys, got {BLOCK_SIZE!r}")
    sizes = arguments.integer("BLOCK_SIZE", sizes[0], 1), arguments.integer("BLOCK_SIZE", sizes[1], 1)
    if device is None:
        device = torch.accelerator.current_accelerator() or torch.device("cpu")
    if compute_dq_write_order or any(size % TILE for size in sizes):
        more: dict[str, Any] = {"separate_full_blocks": False} if not separate_full_blocks else {}  # not in torch 2.11
        if compute_dq_write_order:
            more |= {"compute_dq_write_order": True, "dq_kv_order": dq_kv_order}
        return torch_flex.create_block_mask(mask_mod, B, H, Q_LEN, KV_LEN, device, BLOCK_SIZE, **more)
    blocked: Any = with_states(_mask_mod(mask_mod), B or 1, H or 1, Q_LEN, KV_LEN, device)
    partial, full = _blocks(blocked.states.expand(B or 1, H or 1, -1, -1), sizes)
    kinds = (partial, full) if separate_full_blocks else (partial | full,)
    lists = [x for kind in kinds for x in _block_lists(kind)]
    return BlockMask.from_kv_blocks(*lists, BLOCK_SIZE=sizes, mask_mod=mask_mod, seq_lengths=(Q_LEN, KV_LEN))


_mask_mod = mask_mod


def _blocks(states: Tensor, sizes: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Which blocks are partial, and which are full, bool (b, h, rows, keys), by the states (b, h, …) of tiles."""
    rows, keys = (min(size // TILE, max(n, 1)) for size, n in zip(sizes, states.shape[2:], strict=True))
    missing = (0, -states.shape[3] % keys, 0, -states.shape[2] % rows)
    tiles = torch.nn.functional.pad(states, missing).unflatten(3, (-1, keys)).unflatten(2, (-1, rows))
    full = (tiles == FULL).all(3).all(-1)
    return (tiles >= PARTIAL).any(3).any(-1) & ~full, full


def _block_lists(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """How many blocks each row has, and their numbers, in order, before all others."""
    order = blocks.int().argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(-1, dtype=torch.int32), order.int()
