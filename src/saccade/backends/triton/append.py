"""New keys and values into the pages of a cache: one launch, which reads the lengths on the device."""

# pyright: reportCallIssue=false

from __future__ import annotations

from typing import Any

import torch

from saccade.backends import Append, Rotary
from saccade.backends.device.launch import on_device, run
from saccade.backends.device.records import Rows
from saccade.backends.triton.append_kernel import append_kernel
from saccade.backends.triton.paged import many, page_table
from saccade.layouts import Paged


def append(given: Append) -> None:
    """Writes what has a page; the rest is left out."""
    layout, new = given.layout, given.k_new
    tokens = new.shape[:-2].numel()
    if not tokens or not layout.sequences or not new.shape[-2]:
        return
    arguments = _arguments(given)
    key = tuple((x.dtype, x.device, x.shape, x.stride(), x.data_ptr() % 16) for x in _tensors(given)), given[5] is None
    with on_device(new):
        found = _launches.get(key)
        if found is not None:
            compiled, fixed = found
            run(compiled, (tokens, 1, 1), new.device.index, (*arguments, *fixed))
            return
        fixed = _constants(given)
        compiled = append_kernel[(tokens,)](*arguments, **fixed, num_warps=4)
    if compiled is not None:  # the interpreter compiles nothing
        if len(_launches) >= MAXSIZE:
            _launches.clear()
        _launches[key] = compiled, tuple(fixed.values())


_launches: dict[Any, Any] = {}
MAXSIZE = 1024


def _tensors(given: Append) -> list[Any]:
    rotary = [] if given.rotary is None else [given.rotary.cos, given.rotary.sin]
    return [*given[:4], *given.layout.tensors, *rotary]


def _arguments(given: Append) -> tuple[Any, ...]:
    layout = given.layout
    rows = (Rows.of(layout.canonical(x)) for x in (given.k_new, given.v_new, given.k_cache, given.v_cache))
    starts = None if layout.cu_seqlens_q is None else layout.cu_seqlens_q.contiguous()
    cos, sin, positions = (None, None, 1) if given.rotary is None else (*given.rotary[:2], given.rotary.cos.shape[0])
    tensors = (
        *rows,
        starts,
        layout.seqused_k.contiguous(),
        page_table(layout, layout.canonical(given.k_cache)),
        cos,
        sin,
    )
    return *tensors, given.k_new.shape[-2], given.k_new.shape[-3], positions


def _constants(given: Append) -> dict[str, Any]:
    """In the order of the kernel's last parameters."""
    h_k, d, d_v = *given.k_new.shape[-2:], given.v_new.shape[-1]
    pairs, interleaved = (0, False) if given.rotary is None else (given.rotary.cos.shape[1], given.rotary.interleaved)
    blocks = {name: 1 << max(n - 1, 0).bit_length() for name, n in (("H", h_k), ("D", d), ("DV", d_v), ("P", pairs))}
    return {
        "PAGE": given.k_cache.shape[1], "D": d, "D_V": d_v, "PAIRS": pairs, "INTERLEAVED": interleaved,
        **{f"BLOCK_{name}": n for name, n in blocks.items()}, "N": many(given.layout),
    }  # fmt: skip


def compiled(d: int, d_v: int, dtype: torch.dtype) -> Any:
    """The kernel as the compile gate sees it: sequences end to end, and keys that are turned."""
    given = (torch.empty(*shape, dtype=dtype) for shape in ((9, 16, 8, d), (9, 16, 8, d_v), (4, 8, d), (4, 8, d_v)))
    layout = Paged(torch.zeros(3, 9, dtype=torch.int32), torch.zeros(3).int(), torch.zeros(4).int())
    made = Append(*given, layout, Rotary(torch.empty(99, d // 2), torch.empty(99, d // 2), False))
    return append_kernel.warmup(*_arguments(made), **_constants(made), num_warps=4, grid=(1,))
