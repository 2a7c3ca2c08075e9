"""8-bit q, k and v, and what their numbers stand for."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor

from saccade import layouts, ops
from saccade.backends import Quantization, backend_module
from saccade.call import needs_gradient
from saccade.call.descale import BLOCK, EIGHT_BITS, WIDER, Descale
from saccade.layouts import Dense, Layout, Paged
from saccade.layouts.validate import check_offsets, shortened
from saccade.ops import autograd, replay
from saccade.util import arguments, hardware

ops.library.define(
    "quantize(Tensor x, SymInt h_k, Tensor? starts, Tensor? used, Tensor? mean, bool subtracts, str per, "
    "ScalarType dtype, SymInt blocks, bool rotate, bool keys_first, str side, bool validate) "
    "-> (Tensor, Tensor, Tensor)"
)
ops.library.define("mean_of_keys(Tensor k, Tensor? starts, Tensor? used, bool rotate, bool validate) -> Tensor")

PER = "tensor", "head", "block"
ORDERS = "rows", "keys"


class Quantized(NamedTuple):
    """The result of `quantize`: operands of `attention`, and their factors."""

    q: Tensor | None
    """8 bits, in the shape and memory order of q; None where no q was given"""
    k: Tensor
    v: Tensor
    descale: Descale
    """for `attention(…, descale=…)`"""
    shift: Tensor | None
    """with `smooth_k`: `descale.shift`, which `attention` adds to the LSE itself, times its scale"""


def quantize(
    q: Tensor | None,
    k: Tensor,
    v: Tensor,
    *,
    per: Literal["tensor", "head", "block"] = "head",
    dtype: torch.dtype = torch.float8_e4m3fn,
    smooth_k: bool = False,
    rotate: bool = False,
    layout: Layout | None = None,
    v_order: Literal["rows", "keys"] = "rows",
) -> Quantized:
    """8-bit q, k and v, and the factors by which attention reads them.

    Formula: `byte = round(x / descale)`, to nearest, ties to even, with `descale = max |x| / 448` of e4m3 or
    `max |x| / 57344` of e5m2, where the maximum is over the whole tensor, over each sequence's head, or over each block
    of 128 rows of it. Query heads that share a key head share its factor. Then `x = byte * descale` to half of the
    byte's last bit.

    Rows that are not in use affect no factor, and their bytes are zero. If all numbers are zero, the factor is 1. No
    factor is below 2^-126. NaN and infinities become NaN. The maximum ignores them, so other numbers stay as exact.

    On a GPU `per="block"` reads each tensor once, the others twice. Nothing waits for the device, and CUDA graphs may
    be replayed with other lengths. A CPU and a GPU give the same bytes, except that the sums of rotation and
    smoothing round in float32.

    Args:
        q: as `attention` takes it, float16, bfloat16 or float32; None quantizes k and v alone, for a cache, or where
            queries keep their 16 bits.
        k: the same.
        v: the same.
        per: what shares a factor: "tensor", one for each operand, (); "head", one for each sequence and key head,
            (b, h_k); "block", one for each 128 rows or keys of a sequence besides, (b, h_k, n). More factors cost
            attention little, and outliers then harm only their own block.
        dtype: torch.float8_e4m3fn, four bits of precision, or torch.float8_e5m2, three of them.
        smooth_k: subtract the mean of each sequence's keys. Keys that share a large part become small numbers. All
            scores of a row decrease by the same number, the shift `q · mean` times the scale, which softmax ignores.
            The `Descale` holds the shift. Attention multiplies it by its own scale and adds it to the LSE. It refuses
            sinks and score functions, which need the original scores.
        rotate: multiply q and k by an orthogonal Hadamard matrix, which spreads an outlier over the elements of its
            row. `q kᵀ` stays as it is. The matrix mixes groups of elements. The size of a group is the largest power
            of two that divides d: 32 for d = 96. For odd d nothing rotates. One NaN makes its row NaN.
        layout: where rows are: `Dense` in any order, padded, or `Packed`, with the meaning that it has in `attention`.
            Blocks count from the first row of each sequence.
        v_order: the memory order of 8-bit v: "rows", v's own; or "keys": the keys of one column are neighbours, as
            Hopper's tensor cores read 8-bit values. The shape is the same.

    Returns:
        `Quantized(q, k, v, descale, shift)`: 8-bit tensors of the operands' shapes, a `Descale`, and with `smooth_k`
        the shift that it holds, `q · mean` before any scale, float32 (b, h_q, s_q), or packed (h_q, t_q), zero in rows
        that are not in use; else None.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit one another, an unknown `per`, `dtype` or `v_order`, an
            operand that requires a gradient, `smooth_k` without q, lengths that the operands do not have; a `Paged`
            layout, and ranges of keys, which may be several sequences'.
        TypeError: operands that are not tensors, a layout that is none.

    Source: Dao et al., FlashAttention-3 (https://arxiv.org/abs/2407.08608), for blocks and the rotation; Zhang et al.,
    SageAttention (https://arxiv.org/abs/2410.02367), for smoothing.

    >>> q, k, v = torch.randn(1, 4, 256, 64), torch.randn(1, 2, 256, 64), torch.randn(1, 2, 256, 64)
    >>> q8, k8, v8, descale, _ = quantize(q, k, v, per="block", rotate=True)
    >>> k8.dtype, descale.k.shape
    (torch.float8_e4m3fn, torch.Size([1, 2, 2]))
    >>> cache = quantize(None, k, v)
    >>> (cache.k.float() * cache.descale.k[..., None, None] - k).abs().max() < 0.2
    tensor(True)
    """
    layout = Dense() if layout is None else layout
    _check(q, k, v, layout)
    _check_options(per, dtype, v_order, {"smooth_k": smooth_k, "rotate": rotate})
    direct = ops.runs_directly(q, k, v)
    rows_q, rows_k = _row_spans(q, k, layout)
    keys = layout.canonical(layouts.with_rows(k))
    mean = None
    if smooth_k:
        if q is None:
            raise ValueError("smooth_k needs q, which the shift of the LSE depends on: pass q, or smooth_k=False")
        flat = keys, rows_k.starts, rows_k.used, bool(rotate), rows_k.validate
        mean = _mean_of_keys(*flat) if direct else torch.ops.saccade.mean_of_keys.default(*flat)

    def made(x: Tensor, at: _RowSpans, mean: Tensor | None, turned: bool, keys_first: bool) -> tuple[Tensor, ...]:
        rows = layout.canonical(layouts.with_rows(x))
        options = (
            mean,
            mean is not None and at.side == "k",
            per,
            dtype,
            at.blocks,
            bool(turned),
            keys_first,
            at.side,
            at.validate,
        )
        flat = rows, keys.shape[1], at.starts, at.used, *options
        codes, *rest = _quantize(*flat) if direct else torch.ops.saccade.quantize.default(*flat)
        return layout.ordered(codes), *rest

    q8, of_q, shift = (None, None, None) if q is None else made(q, rows_q, mean, rotate, False)
    k8, of_k, _ = made(k, rows_k, mean, rotate, False)
    v8, of_v, _ = made(v, rows_k, None, False, v_order == "keys")
    shift = layout.ordered_lse(shift) if smooth_k and shift is not None else None
    return Quantized(q8, k8, v8, Descale(of_q, of_k, of_v, shift), shift)


class _RowSpans(NamedTuple):
    """The rows of q, or of k and v, in memory."""

    side: str
    starts: Tensor | None
    used: Tensor | None
    blocks: int
    """of the longest sequence, as far as the host knows"""
    validate: bool


def _row_spans(q: Tensor | None, k: Tensor, layout: Layout) -> tuple[_RowSpans, _RowSpans]:
    sizes = layout.sizes(k if q is None else q, k)
    by_side = (
        ("q", layout.cu_seqlens_q, layout.seqused_q, sizes.s_q),
        ("k", layout.cu_seqlens_k, layout.seqused_k, sizes.s_k),
    )
    validate = bool(layout.validate)
    found = [_RowSpans(side, starts, used, -(-s // BLOCK), validate) for side, starts, used, s in by_side]
    return found[0], found[1]


def _check(q: Tensor | None, k: Tensor, v: Tensor, layout: Any) -> None:
    named = ({} if q is None else {"q": q}) | {"k": k, "v": v}
    arguments.tensors(**named)
    if not isinstance(layout, Layout):
        raise TypeError(f"layout must be a Dense or a Packed layout, got {arguments.describe(layout)}")
    if isinstance(layout, Paged):
        raise ValueError(
            f"quantize takes no pages, got {layout!r}: quantize the new rows, as Dense('bshd') or Packed, before "
            "append_kv writes them to the cache"
        )
    if layout.starts_k is not None:
        raise ValueError(
            "quantize takes no ranges of keys (starts_k), of which several sequences may share a row: quantize k and v "
            "as one sequence, quantize(None, k[None], v[None], per='tensor', layout=Dense('bshd')), got k "
            f"{tuple(k.shape)}"
        )
    for name, x in named.items():
        if x.is_nested or x.layout != torch.strided:
            raise ValueError(f"{name} must be a dense tensor; of a jagged one pass x.values() and Packed(x.offsets())")
        if x.dtype not in WIDER:
            raise ValueError(f"quantize takes float16, bfloat16 and float32, got {name} {x.dtype}")
    error = layout.shape_error((k if q is None else q).shape, k.shape, v.shape)
    if error := error or layout.mask_error(None, k if q is None else q, k):
        got = ", ".join([f"{name} {tuple(x.shape)}" for name, x in named.items()])
        raise ValueError(f"{error}: {got} in order {layout.order}")
    tensors = [*named.values(), *layout.tensors]
    if len(devices := {x.device for x in tensors}) > 1:
        raise ValueError(f"all tensors of quantize must be on one device, got {', '.join(map(str, devices))}")
    _refuse_gradients(*named.values())


def _refuse_gradients(*tensors: Tensor | None) -> None:
    autograd.refuse_tangents(*tensors)
    if needs_gradient(*tensors):
        raise ValueError("quantize has no gradients: call it inside torch.no_grad(), or pass x.detach()")


def _check_options(per: Any, dtype: Any, v_order: Any, flags: dict[str, Any]) -> None:
    for name, x, known in (("per", per, PER), ("dtype", dtype, EIGHT_BITS), ("v_order", v_order, ORDERS)):
        if x not in known:
            got = x if isinstance(x, torch.dtype) else arguments.describe(x)
            words = (repr(word) if isinstance(word, str) else str(word) for word in known)
            raise ValueError(f"{name} must be {' or '.join(words)}, got {got}")
    arguments.flags(**flags)


# The operators.


def _quantize(*flat: Any) -> tuple[Tensor, Tensor, Tensor]:
    *fields, side, validate = flat
    call = Quantization(*fields)
    tensors = [x for x in call if isinstance(x, Tensor)]
    static = *(None if isinstance(x, Tensor) else x for x in call), *(x is None for x in call)
    found = None if validate else replay.of_tensors(("quantize", *static), tensors)
    if found is not None and (results := found.again()) is not None:
        return cast("tuple[Tensor, Tensor, Tensor]", tuple(results))
    _check_lengths(call, side, validate)
    if not call.sequences:  # rows of no sequence are zero, and backends look for one
        codes, descale, shift = _fake_quantize(*flat)
        codes.view(torch.uint8).zero_()
        return codes, descale.fill_(1), shift.zero_()
    module = _backend(call.x)

    def work() -> tuple[Tensor, Tensor, Tensor]:
        codes, descale, shift = module.quantize(call)
        return codes, descale, descale.new_empty(0) if shift is None else shift  # an operator's results are tensors

    return work() if found is None else cast(Any, tuple(found.recorded(module, (), work)))


def _mean_of_keys(k: Tensor, starts: Tensor | None, used: Tensor | None, rotate: bool, validate: bool) -> Tensor:
    call = Quantization(k, k.shape[1], starts, used, rotate=rotate)
    _check_lengths(call, "k", validate)
    if not call.sequences:
        return _fake_mean_of_keys(k, starts, used, rotate, validate)
    return _backend(k).mean(call)


def _check_lengths(call: Quantization, side: str, validate: bool) -> None:
    """Reads offsets and lengths, on a CPU or if asked. Raises ValueError for those that the operand does not have."""
    if call.x.device.type != "cpu" and not validate:
        return
    s, starts, used = call.x.shape[2], call.starts, call.used
    lengths = [s] * call.sequences
    if starts is not None:
        lengths = check_offsets(f"cu_seqlens_{side}", starts.tolist(), s)
    if used is not None and any(not 0 <= n <= most for n, most in zip(used.tolist(), lengths, strict=True)):
        got = f"{shortened(used.tolist())} of {shortened(lengths)}"
        raise ValueError(f"seqused_{side} must be between 0 and the rows of each sequence, got {got}")


def _backend(x: Tensor) -> Any:
    kernels = x.device.type == "cuda" and hardware.triton_obstacle() is None
    return backend_module("triton" if kernels else "cpu", "quantize")


def _without_gradients(operator: Any) -> Any:
    def at_autograd(*flat: Any) -> Any:
        _refuse_gradients(flat[0])
        with torch._C._AutoDispatchBelowAutograd():
            return operator(*flat)

    return at_autograd


def _fake_quantize(*flat: Any) -> tuple[Tensor, Tensor, Tensor]:
    call = Quantization(*flat[:-2])
    factors = call.x.new_empty(call.descale_shape, dtype=torch.float32)
    shape = call.x.shape[:3] if call.mean is not None and not call.subtracts else (0,)
    return layouts.empty_bytes(call.x, call.dtype, call.keys_first), factors, factors.new_empty(shape)


def _fake_mean_of_keys(k: Tensor, starts: Tensor | None, used: Any, rotate: bool, validate: bool) -> Tensor:
    return k.new_empty(Quantization(k, k.shape[1], starts).sequences, k.shape[1], k.shape[3], dtype=torch.float32)


_OPERATORS = ("quantize", _quantize, _fake_quantize), ("mean_of_keys", _mean_of_keys, _fake_mean_of_keys)
for _name, _kernel, _fake in _OPERATORS:
    ops.library.impl(_name, _kernel, "CompositeExplicitAutograd")
    ops.library.impl(_name, _without_gradients(getattr(torch.ops.saccade, _name)), "Autograd")
    torch.library.register_fake(f"saccade::{_name}", _fake, lib=ops.library)
