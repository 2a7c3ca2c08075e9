"""Attention over ranks by other libraries, for rank_work.py: ring-flash-attention, its zigzag ring (its plain one where
all keys are seen) and its gather of keys, "llama3", over FlashAttention-3's kernels and over saccade's; and torch's own
ring. A library that is not here has a provider that says so.

ring-flash-attention calls four private functions of flash-attn 2. FlashAttention-3's operators stand for them here, as
`saccade.compat.install("flash_attn")` puts saccade's there.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.harness.providers.flash import FlashAttention3
from saccade.compat import install


class Refused(Exception):
    """What a library does not take."""


def providers(folder: Path | None, local: Any) -> dict[str, Any]:
    """By name, a function of a cell and whole tensors that makes a `local`."""
    found: dict[str, Any] = {}
    for kernels in ("fa3", "saccade"):
        try:
            modules = _rings(folder, kernels)
            found |= {f"zigzag {kernels}": _zigzag(modules, local), f"llama3 {kernels}": _llama3(modules, local)}
        except (Refused, ImportError) as problem:
            found |= dict.fromkeys((f"zigzag {kernels}", f"llama3 {kernels}"), _missing(problem))
    return found | {"torch": _torch(local)}


def _missing(problem: Exception) -> Callable[..., Any]:
    def prepare(cell: Any, whole: list[Tensor]) -> Any:
        raise Refused(str(problem))

    return prepare


def _check(cell: Any) -> None:
    if cell.score is not None or cell.mask == "window":
        raise Refused("takes full and causal masks without score functions")


def _rings(folder: Path | None, kernels: str) -> tuple[Any, ...]:
    """Its modules over these private functions; without its __init__, which imports transformers."""
    if folder is None:
        raise Refused("ring-flash-attention is not here: --peers PATH says where its package is")
    missing = FlashAttention3().available(torch.device("cuda")) if torch.cuda.is_available() else "without GPUs"
    if kernels == "fa3" and missing is not None:
        raise Refused(f"FlashAttention-3: {missing}")
    flash = _flash_attention_3() if kernels == "fa3" else None
    for name in [x for x in sys.modules if x.partition(".")[0] in ("ring_flash_attn", "flash_attn")]:
        del sys.modules[name]
    if flash is None:
        install("flash_attn")
    else:
        sys.modules["flash_attn"] = sys.modules["flash_attn.flash_attn_interface"] = flash
    package = ModuleType("ring_flash_attn")
    package.__path__ = [str(folder / "ring_flash_attn")]
    sys.modules["ring_flash_attn"] = package
    names = "zigzag_ring_flash_attn", "llama3_flash_attn_varlen", "ring_flash_attn"
    return tuple(importlib.import_module(f"ring_flash_attn.{name}") for name in names)


def _flash_attention_3() -> ModuleType:
    """flash-attn's private functions by FlashAttention-3."""
    operators = torch.ops.flash_attn_3

    def forward(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), alibi_slopes=None,
                return_softmax=False):  # fmt: skip
        out, lse, *_ = operators.fwd(q, k, v, softmax_scale=softmax_scale, is_causal=causal, num_splits=1)
        return out, lse, None, None

    def backward(dout, q, k, v, out, softmax_lse, dq, dk, dv, dropout_p=0.0, softmax_scale=None, causal=False,
                 window_size=(-1, -1), alibi_slopes=None, deterministic=False):  # fmt: skip
        operators.bwd(
            dout, q, k, v, out, softmax_lse.contiguous(), dq, dk, dv, softmax_scale=softmax_scale, is_causal=causal
        )

    def varlen_forward(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0,
                       softmax_scale=None, causal=False, window_size=(-1, -1), alibi_slopes=None,
                       return_softmax=False):  # fmt: skip
        lengths = _lengths(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        out, lse, *_ = operators.fwd(q, k, v, softmax_scale=softmax_scale, is_causal=causal, num_splits=1, **lengths)
        return out, lse, None, None

    def varlen_backward(dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q,
                        max_seqlen_k, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1),
                        alibi_slopes=None, deterministic=False):  # fmt: skip
        lengths = _lengths(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        options = {"softmax_scale": softmax_scale, "is_causal": causal, **lengths}
        operators.bwd(dout, q, k, v, out, softmax_lse.contiguous(), dq, dk, dv, **options)

    module = ModuleType("flash_attn")
    vars(module).update(
        _flash_attn_forward=forward, _flash_attn_backward=backward, _flash_attn_varlen_forward=varlen_forward,
        _flash_attn_varlen_backward=varlen_backward, __path__=[],
    )  # fmt: skip
    return module


def _lengths(cu_q: Tensor, cu_k: Tensor, most_q: int, most_k: int) -> dict[str, Any]:
    return {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, "max_seqlen_q": most_q, "max_seqlen_k": most_k}


def _zigzag(modules: tuple[Any, ...], local: Any) -> Callable[..., Any]:
    def prepare(cell: Any, whole: list[Tensor]) -> Any:
        _check(cell)
        if not cell.dense or cell.rows % (2 * dist.get_world_size()):
            raise Refused("takes documents of lengths that are multiples of twice the ranks")
        rank, ranks = dist.get_rank(), dist.get_world_size()

        def rows(x: Tensor) -> Tensor:
            if not causal:
                return x.chunk(ranks)[rank][None]
            chunks = x.chunk(2 * ranks)
            return torch.cat([chunks[rank], chunks[2 * ranks - 1 - rank]])[None]

        causal = cell.mask == "causal"
        function = modules[0].zigzag_ring_flash_attn_func if causal else modules[2].ring_flash_attn_func
        return local([rows(x) for x in whole], lambda q, k, v: function(q, k, v, causal=causal), rows)

    return prepare


def _llama3(modules: tuple[Any, ...], local: Any) -> Callable[..., Any]:
    def prepare(cell: Any, whole: list[Tensor]) -> Any:
        _check(cell)
        rank, ranks, module, causal = dist.get_rank(), dist.get_world_size(), modules[1], cell.mask == "causal"
        if cell.rows % ranks:
            raise Refused(f"takes rows that {ranks} ranks divide, got {cell.rows}")
        offsets = torch.tensor([0, *cell.lengths], device=whole[0].device).cumsum(0).int()
        *lengths, keys = module.llama3_flash_attn_prepare_cu_seqlens(offsets, causal, rank, ranks)

        def rows(x: Tensor) -> Tensor:
            return x.chunk(ranks)[rank]

        def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            every = k.shape[1]  # all heads at once: the fastest here
            return module.llama3_flash_attn_varlen_func(
                q, k, v, *lengths, heads_k_stride=every, local_k_slice=keys, causal=causal
            )

        return local([rows(x).contiguous() for x in whole], call, rows)

    return prepare


def _torch(local: Any) -> Callable[..., Any]:
    """`context_parallel` around scaled_dot_product_attention, keys repeated for each query head as its ring asks."""

    def prepare(cell: Any, whole: list[Tensor]) -> Any:
        _check(cell)
        if not cell.dense or cell.rows % (2 * dist.get_world_size()):
            raise Refused("takes one document whose length is a multiple of twice the ranks")
        from torch.nn.attention import SDPBackend, sdpa_kernel

        device, causal = whole[0].device.type, cell.mask == "causal"
        rank, ranks, (h_q, h_k) = dist.get_rank(), dist.get_world_size(), cell.heads
        group = h_q // h_k

        def rows(x: Tensor) -> Tensor:
            chunks = x.chunk(2 * ranks)
            mine = (rank, 2 * ranks - 1 - rank) if causal else (2 * rank, 2 * rank + 1)
            return torch.cat([chunks[i] for i in mine]).transpose(0, 1)[None]

        def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            k, v = (x.repeat_interleave(group, 1) if group > 1 else x for x in (k, v))
            _balance(causal)
            with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
                return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)

        _enter(device, ranks)
        return local([rows(x).contiguous() for x in whole], call, rows)

    return prepare


def _balance(causal: bool) -> None:
    """Whether ranks have a chunk from each end, which torch's ring takes of causal masks alone."""
    from torch.distributed.tensor.experimental import _attention

    vars(_attention)["_cp_options"].enable_load_balance = causal


@cache
def _enter(device: str, ranks: int) -> Any:
    """Once, for good: its operands are sharded when it begins, and calls in it are over ranks."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel

    some = torch.zeros(1, 1, 4 * ranks, 1, device=device)
    context = context_parallel(init_device_mesh(device, (ranks,)), buffers=[some], buffer_seq_dims=[2])
    context.__enter__()
    return context
