"""`torch.nn.attention.varlen` by saccade: the same names, arguments and results, also on CPUs.

    from saccade.compat.torch_varlen import varlen_attn

Signatures are those of PyTorch 2.15, and `is_causal` of 2.10 and 2.11 is taken. PyTorch lacks: float32 and float64, any
head dim, gradients of the LSE, and `seqused_k` with gradients. Source: https://docs.pytorch.org/docs/stable/nn.attention.varlen.html
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from saccade import masks
from saccade.api import attention
from saccade.layouts import Packed, Paged
from saccade.util import arguments, memory_layout

__all__ = ["AuxRequest", "varlen_attn", "varlen_attn_out"]


class AuxRequest(NamedTuple):
    """What to return besides the output.

    Attributes:
        lse: the log of the sum of exponentials, (h_q, t_q), float32, natural log; differentiable here.
    """

    lse: bool = False


def varlen_attn(
    query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor | None, max_q: int | Tensor,
    max_k: int | Tensor, is_causal: bool = False, *, return_aux: AuxRequest | None = None, scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1), enable_gqa: bool = False, seqused_k: Tensor | None = None,
    block_table: Tensor | None = None, num_splits: int | None = None,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """`softmax(scale q k^T) v` within each of several sequences that lie end to end; query i of sequence b is row
    `cu_seq_q[b] + i`.

    Args:
        query: (t_q, h_q, d).
        key: (t_k, h_k, d), or with a block_table (pages, page_size, h_k, d).
        value: (t_k, h_k, d_v).
        cu_seq_q: (b + 1,) offsets of the queries' sequences.
        cu_seq_k: the same for the keys; with a block_table and no seqused_k, it gives their lengths.
        max_q: upper bound of the queries' lengths.
        max_k: the same for the keys.
        is_causal: the spelling of PyTorch 2.10 and 2.11 for `window_size=(-1, 0)`.
        return_aux: with `AuxRequest(lse=True)`, return (out, lse).
        scale: factor on q k^T, above 0; 1/sqrt(d) when None.
        window_size: (left, right), aligned at the bottom right of each sequence; -1 is unbounded; (-1, 0) is causal.
        enable_gqa: whether h_q may be a multiple of h_k.
        seqused_k: (b,) how many keys of each sequence are in use.
        block_table: (b, pages): the page table of a cache; without gradients. See `Paged`.
        num_splits: with a block_table, how many parts the keys are split into; with 1, results do not depend on the
            batch. Without a block_table keys are not split.

    Returns:
        out (t_q, h_q, d_v), and with `return_aux` the LSE (h_q, t_q).

    Raises:
        ValueError: shapes that do not fit, heads that differ without enable_gqa, a scale that is not above 0.
        Unsupported: block_table with gradients.

    >>> offsets = torch.tensor([0, 3, 10], dtype=torch.int32)
    >>> q, k, v = (torch.randn(10, 2, 16) for _ in range(3))
    >>> varlen_attn(q, k, v, offsets, offsets, 7, 7, window_size=(-1, 0)).shape
    torch.Size([10, 2, 16])
    """
    layout = layout_of(cu_seq_q, cu_seq_k, max_q, max_k, seqused_k, block_table, num_splits)
    mask = _mask(window_size, is_causal)
    return _attend((query, key, value), layout, mask, scale, enable_gqa, return_aux)


def varlen_attn_out(
    out: Tensor, query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor | None,
    max_q: int | Tensor, max_k: int | Tensor, is_causal: bool = False, *, return_aux: AuxRequest | None = None,
    scale: float | None = None, window_size: tuple[int, int] = (-1, -1), enable_gqa: bool = False,
    seqused_k: Tensor | None = None, block_table: Tensor | None = None, num_splits: int | None = None,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """`varlen_attn` into `out` (t_q, h_q, d_v), which is overwritten and returned; without gradients.

    Kernels write to `out` itself if it has q's dtype, its last dimension is contiguous, and it shares no memory with q,
    k and v. Otherwise the result is copied.

    Raises:
        RuntimeError: an operand requires a gradient.
        ValueError: as `varlen_attn`, or `out` has another shape or device, or integers.

    >>> offsets, x = torch.tensor([0, 3, 10]), torch.randn(10, 2, 16)
    >>> out = torch.empty_like(x)
    >>> varlen_attn_out(out, x, x, x, offsets, offsets, 7, 7) is out
    True
    """
    arguments.tensors(out=out, query=query, key=key, value=value)
    if torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value)):
        raise RuntimeError("varlen_attn_out has no gradient: call varlen_attn, or call it inside torch.no_grad()")
    layout = layout_of(cu_seq_q, cu_seq_k, max_q, max_k, seqused_k, block_table, num_splits)
    mask = _mask(window_size, is_causal)
    return _attend((query, key, value), layout, mask, scale, enable_gqa, return_aux, out)


def _attend(
    operands: tuple[Tensor, Tensor, Tensor], layout: Packed | Paged, mask: masks.Mask | None, scale: float | None,
    enable_gqa: bool, return_aux: AuxRequest | None, out: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """Writes to `out` itself where attention may; else copies the result to it."""
    query, key, value = operands
    arguments.tensors(query=query, key=key, value=value)
    arguments.flags(enable_gqa=enable_gqa)
    if return_aux is not None and not hasattr(return_aux, "lse"):
        raise TypeError(f"return_aux must be an AuxRequest, got {arguments.describe(return_aux)}")
    if scale is not None and not arguments.number("scale", scale) > 0:
        raise ValueError(f"varlen_attn: scale must be above 0, got {scale}")
    if query.dim() == 3 and key.dim() in (3, 4) and query.shape[1] != key.shape[-2] and not enable_gqa:
        raise ValueError(
            f"varlen_attn: {query.shape[1]} query heads and {key.shape[-2]} key heads need enable_gqa=True, or be equal"
        )
    shape = (*query.shape[:-1], value.shape[-1])
    if out is not None and (out.shape != shape or out.device != query.device or not out.is_floating_point()):
        raise ValueError(
            f"varlen_attn_out: out must be {shape}, of floats, on {query.device}, got {tuple(out.shape)}, {out.dtype}, "
            f"on {out.device}"
        )
    return_lse = return_aux is not None and bool(return_aux.lse)
    direct = out if out is not None and _writable(out, query, key, value) else None
    result = attention(query, key, value, mask=mask, layout=layout, scale=scale, return_lse=return_lse, out=direct)
    computed, lse = result if isinstance(result, tuple) else (result, None)
    if out is None:
        out = computed
    elif direct is None:
        out.copy_(computed)
    return out if lse is None else (out, lse)


def layout_of(
    cu_seq_q: Tensor, cu_seq_k: Tensor | None, max_q: int | Tensor, max_k: int | Tensor, seqused_k: Tensor | None,
    block_table: Tensor | None, num_splits: int | None,
) -> Packed | Paged:  # fmt: skip
    """The layout of these arguments of `varlen_attn`."""
    if block_table is None:
        if cu_seq_k is None:
            raise ValueError("varlen_attn: cu_seq_k may be None only with a block_table")
        return Packed(cu_seq_q, cu_seq_k, max_q, max_k, seqused_k=seqused_k)
    if seqused_k is None:
        if cu_seq_k is None:
            raise ValueError("varlen_attn: a block_table needs seqused_k or cu_seq_k, the lengths of the keys")
        arguments.tensors(cu_seq_k=cu_seq_k)
        seqused_k = cu_seq_k.diff()
    return Paged(block_table, seqused_k, cu_seq_q, num_splits)


def _writable(out: Tensor, *operands: Tensor) -> bool:
    """Whether attention may write to out itself."""
    if out.requires_grad or out.dtype != operands[0].dtype or torch.is_autocast_enabled(out.device.type):
        return False
    if out.stride(-1) != 1 and out.shape[-1] != 1:
        return False
    # torch.compile handles shared memory itself.
    return torch.compiler.is_compiling() or (
        memory_layout.no_overlap(out) and all(memory_layout.disjoint(out, x) for x in operands)
    )


def _mask(window_size: tuple[int, int], is_causal: bool) -> masks.Mask | None:
    arguments.flags(is_causal=is_causal)
    if not isinstance(window_size, (tuple, list)) or len(window_size) != 2:
        raise TypeError(f"varlen_attn: window_size is (left, right), got {window_size!r}")
    left, right = (None if arguments.integer("window_size", bound, -1) < 0 else bound for bound in window_size)
    if is_causal:
        if (left, right) not in ((None, None), (None, 0)):
            raise ValueError(f"varlen_attn: give is_causal or window_size={window_size}, not both")
        right = 0
    return None if left is None and right is None else masks.window(left, right)
