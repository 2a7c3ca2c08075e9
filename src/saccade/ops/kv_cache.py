"""Writes to a paged cache: new keys and values, with rotary embeddings, as a serving loop appends them."""

from __future__ import annotations

from typing import Any, TypedDict, Unpack, overload

import torch
from torch import Tensor

from saccade import layouts, ops
from saccade.backends import Append, Rotary, backend_module
from saccade.call import needs_gradient
from saccade.call.descale import EIGHT_BITS, WIDER, Descale, Factors, factors
from saccade.layouts import CacheSlots, LatentCache, Paged
from saccade.ops import autograd, replay, vmap
from saccade.ops.replay import CallKey
from saccade.util import arguments, memory_layout
from saccade.util.arguments import Unsupported

ops.library.define(
    "append_kv(Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor k_new, Tensor v_new, Tensor? q, Tensor[] tensors, "
    "str layout, Tensor[] rotary, bool interleaved, Tensor? k_factor=None, Tensor? v_factor=None) -> Tensor"
)


class _AppendOptions(TypedDict, total=False):
    """The arguments of `append_kv` that do not change what it returns."""

    slot_mapping: Tensor | None
    positions: Tensor | None
    rotary: tuple[Tensor, Tensor] | None
    interleaved: bool
    descale: Descale | None


@overload
def append_kv(
    k_cache: LatentCache, v_cache: LatentCache, layout: Paged | None, k_new: Tensor, v_new: None, *,
    slot_mapping: Tensor | None = None,
) -> None: ...  # fmt: skip


@overload
def append_kv(
    k_cache: Tensor, v_cache: Tensor, layout: Paged | None, k_new: Tensor, v_new: Tensor, *, q: None = None,
    **options: Unpack[_AppendOptions],
) -> None: ...  # fmt: skip


@overload
def append_kv(
    k_cache: Tensor, v_cache: Tensor, layout: Paged | None, k_new: Tensor, v_new: Tensor, *, q: Tensor,
    **options: Unpack[_AppendOptions],
) -> Tensor: ...  # fmt: skip


def append_kv(
    k_cache: Tensor | LatentCache,
    v_cache: Tensor | LatentCache,
    layout: Paged | None,
    k_new: Tensor,
    v_new: Tensor | None,
    *,
    slot_mapping: Tensor | None = None,
    positions: Tensor | None = None,
    q: Tensor | None = None,
    rotary: tuple[Tensor, Tensor] | None = None,
    interleaved: bool = False,
    descale: Descale | None = None,
) -> Tensor | None:
    """Writes new keys and values to the pages of a cache, and rotates them and their queries, in one launch.

    Formula, with a layout: row `i` of sequence `b` becomes key `p = layout.seqused_k[b] + i`, after those that the
    sequence has. With `slot_mapping`: row `i` becomes row `n % page_size` of page `n // page_size`, `n =
    slot_mapping[i]`. With `rotary=(cos, sin)` each pair (x, y) among the first elements of a key and of a query at
    position p becomes `(x cos[p] - y sin[p], y cos[p] + x sin[p])`, in float32, or in float64 for
    float64 rows.

    Caches of e4m3 or e5m2 convert wider rows after the rotation: `byte = round(value / descale)`, to nearest, ties to
    even. A number beyond the largest one becomes the largest one. NaN and infinities become NaN. Rows of the caches'
    own 8-bit dtype are copied.

    On a GPU the device reads lengths, tables, slots and factors: a CUDA graph may be replayed with others. A new row is
    not written if it is beyond the table, or if its page number or slot is out of range, such as -1. Requests that only
    pad a batch therefore need no page. Of two rows with one slot, either one is written.

    Args:
        k_cache: (pages, page_size, h_k, d), written in place; any strides, the last dimension contiguous. Or a
            LatentCache, which is v_cache too: rows (b, s, 1, d) or (t, 1, d) become records, v_new is None, and there
            is no rotation.
        v_cache: (pages, page_size, h_k, d_v).
        layout: with the lengths *before* these rows; attention then takes one with the lengths after them. None with
            `slot_mapping`.
        k_new: (b, s, h_k, d); or (t, h_k, d), with a layout whose `cu_seqlens_q` says which rows are whose. Of the
            caches' dtype; float16, bfloat16 or float32 for 8-bit caches too.
        v_new: (b, s, h_k, d_v), or (t, h_k, d_v).
        slot_mapping: (t,) or (b, s), a number for each new row, int32 or int64, in the place of a layout. -1 is a row
            that is not written.
        positions: the positions of the new rows, for `rotary`: int32 or int64, of slot_mapping's shape.
        q: (b, s, h_q, d) or (t, h_q, d): the queries of the same tokens, for `rotary`; not written to.
        rotary: cos and sin, (positions, pairs) with `2 * pairs <= d`, of any float dtype. Later positions take the last
            row.
        interleaved: pairs are the elements (0, 1), (2, 3), …; else (0, pairs), (1, pairs + 1), …
        descale: `Descale(k=…, v=…)` of 8-bit caches that take wider rows, as attention to them takes it; None is 1.
            With `slot_mapping` a number, () or (h_k,), because slots do not say to which sequence a row belongs.

    Returns:
        None; or with `q` the rotated queries, of q's shape and memory order. Queries of no sequence are zero.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit one another, or an operand that requires a gradient;
            a layout and slots, or neither; caches that share memory with each other, with the new rows, or, as an
            expanded view does, within; a cache that vmap does not map over; when numbers are read, as they are on a
            CPU, lengths that are negative or beyond the table, broken offsets, and slots that are neither -1 nor in the
            cache; 8-bit rows with `rotary` or `descale`; a descale of q, or with a shift, which rows of a smoothed
            cache would need as well.
        TypeError: a layout that is not `Paged`, a descale that is no `Descale`.

    Source: Su et al., RoFormer (https://arxiv.org/abs/2104.09864).

    >>> cache = torch.zeros(2, 8, 1, 4), torch.zeros(2, 8, 1, 4)
    >>> layout = Paged(torch.tensor([[1]]), seqused_k=torch.tensor([3]))
    >>> append_kv(*cache, layout, torch.ones(1, 2, 1, 4), torch.ones(1, 2, 1, 4))
    >>> cache[0][1, :, 0, 0]
    tensor([0., 0., 0., 1., 1., 0., 0., 0.])
    >>> slots = torch.tensor([15, -1])  # row 7 of page 1, and nowhere
    >>> append_kv(*cache, None, torch.ones(2, 1, 4), torch.ones(2, 1, 4), slot_mapping=slots)
    >>> cache[0][1, :, 0, 0]
    tensor([0., 0., 0., 1., 1., 0., 0., 1.])
    >>> cache = [torch.zeros(2, 8, 1, 4).to(torch.float8_e4m3fn) for _ in range(2)]
    >>> append_kv(*cache, layout, torch.ones(1, 2, 1, 4), torch.ones(1, 2, 1, 4), descale=Descale(k=0.5, v=0.25))
    >>> cache[0][1, 3, 0].float(), cache[1][1, 3, 0].float()
    (tensor([2., 2., 2., 2.]), tensor([4., 4., 4., 4.]))
    """
    if isinstance(k_cache, LatentCache) or isinstance(v_cache, LatentCache):
        others = {"q": q, "positions": positions, "rotary": rotary, "descale": descale}
        if given := [name for name, x in others.items() if x is not None]:
            raise Unsupported(f"append_kv: a LatentCache takes rows that are rotated already: omit {', '.join(given)}")
        return _append_records(k_cache, v_cache, _slots(layout, slot_mapping, None, None), k_new, v_new)
    arguments.tensors(v_new=v_new)
    assert isinstance(v_new, Tensor)
    known = _known(k_cache, v_cache, layout, k_new, v_new, slot_mapping, positions, q, rotary, interleaved, descale)
    if known is not None and (results := known.again()) is not None:
        return results[0]
    slots = _slots(layout, slot_mapping, positions, rotary)
    _check(k_cache, v_cache, slots, k_new, v_new, q)
    found = _factors(descale, slots, k_cache, k_new)
    if rotary is not None:
        check_rotary(rotary, k_new)
        if k_new.dtype in EIGHT_BITS:
            raise ValueError(
                f"rotary takes rows of 16 bits or more, got {k_new.dtype}: give the rows before quantization"
            )
    elif q is not None or positions is not None:
        name = "positions" if q is None else "q"
        raise ValueError(f"{name} is used only with rotary=(cos, sin), which is None: omit it")
    arguments.flags(interleaved=interleaved)
    k_new, v_new, q = layouts.with_rows(k_new), layouts.with_rows(v_new), None if q is None else layouts.with_rows(q)
    tables = [] if rotary is None else [table.contiguous() for table in rotary]
    flat = k_cache, v_cache, k_new, v_new, q, slots.tensors, slots.text, tables, bool(interleaved), *found.each[1:]
    direct = ops.runs_directly(k_cache, v_cache, k_new, v_new, q, *tables, *found.each[1:])
    rotated = _append(*flat, known=known) if direct else torch.ops.saccade.append_kv(*flat)
    return None if q is None else rotated


def _append_records(k_cache: Any, v_cache: Any, slots: Paged | CacheSlots, k_new: Any, v_new: Any) -> None:
    """Writes rows to a cache of records. Raises TypeError for two caches, or values apart from keys, and ValueError, as
    `append_kv`, for rows of another shape, dtype or device, or that require a gradient."""
    if k_cache is not v_cache or v_new is not None:
        got = f"{arguments.describe(v_cache)} and v_new {arguments.describe(v_new)}"
        raise TypeError(
            f"a LatentCache holds keys and values: pass it as k_cache and v_cache, and v_new=None, got {got}"
        )
    arguments.tensors(k_new=k_new)
    lead = k_new.shape[:-2]
    if isinstance(slots, CacheSlots):
        fits = lead == slots.slot_mapping.shape
    else:
        fits = len(lead) == (2 if slots.cu_seqlens_q is None else 1) and (len(lead) == 1 or lead[0] == slots.sequences)
    if not fits or k_new.shape[-2:] != (1, k_cache.record.d) or k_new.dtype not in WIDER:
        wanted = f"(b, s, 1, {k_cache.record.d}) or (t, 1, {k_cache.record.d}), of float16, bfloat16 or float32"
        where = f"slot_mapping {tuple(slots.slot_mapping.shape)}" if isinstance(slots, CacheSlots) else repr(slots)
        raise ValueError(f"k_new must be rows of {k_cache!r} for {where}, {wanted}, got {arguments.describe(k_new)}")
    if len(devices := {x.device for x in (k_new, k_cache.bytes, *slots.tensors)}) > 1:
        raise ValueError(f"all tensors of append_kv must be on one device, got {', '.join(map(str, devices))}")
    if needs_gradient(k_new):
        raise ValueError("append_kv has no gradients: call it inside torch.no_grad()")
    memory_layout.refuse_shared("k_cache", k_cache.bytes, [("k_new", k_new)])
    pages, size = k_cache.bytes.shape[:2]
    if k_new.is_cpu:
        _check_numbers(slots, k_new, pages, size)
    found = backend_module("cpu", "append").rows_of(slots, k_new, pages, size)
    k_cache.write(found.slot, k_new.flatten(0, -2))


def _check_numbers(slots: Paged | CacheSlots, k_new: Tensor, pages: int, page_size: int) -> None:
    """Reads slots, or lengths and offsets."""
    if isinstance(slots, CacheSlots):
        slots.check_slots(pages, page_size)
    else:
        slots.check_lengths(k_new.shape[0], page_size)


def _known(
    k_cache: Any, v_cache: Any, layout: Any, k_new: Any, v_new: Any, slots: Any, positions: Any, q: Any, rotary: Any,
    interleaved: Any, descale: Any,
) -> CallKey | None:  # fmt: skip
    """The call by its arguments, if it has a key."""
    kinds = (rotary, tuple), (layout, Paged), (descale, Descale)
    if type(interleaved) is not bool or not all(x is None or isinstance(x, kind) for x, kind in kinds):
        return None
    if descale is not None and (descale.q is not None or descale.shift is not None):
        return None
    factors = () if descale is None else (descale.k, descale.v)
    indices = () if layout is None else layout.tensors
    optional = q, slots, positions, *factors
    given = [x for x in optional if x is not None]
    static = layout and (layout.text, layout.ints), rotary and len(rotary), interleaved, *(x is None for x in optional)
    tensors = k_new, v_new, *given, *(rotary or ()), *indices, k_cache, v_cache
    return replay.of_tensors(("append_kv", *static), tensors, 2)


def _append(
    k_cache: Tensor, v_cache: Tensor, k_new: Tensor, v_new: Tensor, q: Tensor | None, tensors: Any, layout: str,
    rotary: Any, interleaved: bool, k_factor: Tensor | None = None, v_factor: Tensor | None = None,
    known: CallKey | None = None,
) -> Tensor:  # fmt: skip
    _refuse_shared(k_cache, v_cache, {"k_new": k_new, "v_new": v_new} | ({} if q is None else {"q": q}))
    tensors = list(tensors)
    slots = CacheSlots(*tensors) if layout == CacheSlots.text else layouts.from_tensors(layout, tensors, [])
    assert isinstance(slots, (Paged, CacheSlots))
    if k_cache.device.type == "cpu":
        _check_numbers(slots, k_new, *k_cache.shape[:2])
    backend = "triton" if k_cache.device.type == "cuda" else "cpu"
    module = backend_module(backend, "append")
    turns = Rotary(rotary[0], rotary[1], interleaved) if rotary else None
    call = Append(k_cache, v_cache, k_new, v_new, slots, turns, q, Factors(None, k_factor, v_factor))
    rotated = known.recorded(module, (), lambda: [module.append(call)])[0] if known else module.append(call)
    return k_new.new_empty(0) if rotated is None else rotated  # an operator's result is a tensor


def _append_autograd(*flat: Any) -> Tensor:
    tensors = *flat[:5], *flat[9:]
    autograd.refuse_tangents(*tensors)
    if needs_gradient(*tensors):
        raise ValueError("append_kv has no gradients: call it inside torch.no_grad()")
    with torch._C._AutoDispatchBelowAutograd():
        return torch.ops.saccade.append_kv(*flat)


def _fake_append(*flat: Any) -> Tensor:
    k_new, q = flat[2], flat[4]
    return k_new.new_empty(0) if q is None else layouts.empty_like_rows(q, q.shape[-1])


ops.implement("append_kv", _append, "CompositeExplicitAutograd")
ops.implement("append_kv", _append_autograd, "Autograd")
torch.library.register_fake("saccade::append_kv", _fake_append, lib=ops.library)


def _mapped(info: Any, in_dims: Any, *flat: Any) -> tuple[Any, Any]:
    """The rule of vmap: one example after the other, each into caches of its own."""
    for name, cache, dim in zip(("k_cache", "v_cache"), flat, in_dims, strict=False):
        if dim is None:
            raise ValueError(
                f"vmap: {name} {tuple(cache.shape)} is one tensor for a batch of {info.batch_size} calls that write to "
                "it: map over it too, or append all rows in one call"
            )
    operator = torch.ops.saccade.append_kv
    (rotated,), _ = vmap.one_by_one(lambda *example: (operator(*example),))(info, in_dims, *flat)
    return rotated, 0


vmap.register(ops.library, "append_kv", _mapped)


_APART = (
    "pass memory of its own; or, where values are the first d_v columns of keys, the others and these: "
    "cache[..., d_v:] and cache[..., :d_v]"
)


def _slots(layout: Any, slot_mapping: Any, positions: Any, rotary: Any) -> Paged | CacheSlots:
    """The layout or slots of new rows."""
    if slot_mapping is None:
        if not isinstance(layout, Paged):
            raise TypeError(f"append_kv needs a Paged layout, or None with slot_mapping=…, got {layout!r}")
        if layout.slots is not None:
            raise ValueError(f"append_kv takes a Paged layout with a block table, or slot_mapping=…, got {layout!r}")
        if positions is not None:
            raise ValueError("positions go with slot_mapping; those of a layout's rows follow from its lengths")
        if rotary is not None and layout.k_offset is not None:
            raise ValueError(
                "rotary counts the positions of a layout's keys from 0, and this layout has a k_offset: pass "
                "slot_mapping and positions=… in its place"
            )
        return layout
    if layout is not None:
        raise ValueError(
            f"pass a layout or slot_mapping, not both: got {layout!r} and {arguments.describe(slot_mapping)}"
        )
    if rotary is not None and positions is None:
        raise ValueError("rotary with slot_mapping needs positions=…, because slots do not say the positions of rows")
    return CacheSlots(slot_mapping, positions)


def _check(
    k_cache: Tensor, v_cache: Tensor, slots: Paged | CacheSlots, k_new: Tensor, v_new: Tensor, q: Tensor | None
) -> None:
    new = {"k_new": k_new, "v_new": v_new} | ({} if q is None else {"q": q})
    named = {"k_cache": k_cache, "v_cache": v_cache, **new}
    arguments.tensors(**named)
    if k_new.shape[-2:] == k_cache.shape[-2:]:
        complaint = slots.shape_error(k_new.shape, k_cache.shape, v_cache.shape, "k_new")
    else:
        complaint = "k_new must have k_cache's heads and head dim"
    if not complaint and (k_new.shape[:-1] != v_new.shape[:-1] or v_new.shape[-1] != v_cache.shape[-1]):
        complaint = "k_new and v_new must have the same rows and heads, and v_cache's head dim"
    if not complaint and q is not None and (*q.shape[:-2], q.shape[-1]) != (*k_new.shape[:-2], k_new.shape[-1]):
        complaint = "q and k_new must have the same rows and head dim"
    if not complaint and (memory_layout.negated(k_cache) or memory_layout.negated(v_cache)):
        complaint = "caches must have memory of their own, and not be views of negated numbers"
    if complaint:
        raise ValueError(f"{complaint}: {', '.join(f'{name} {tuple(x.shape)}' for name, x in named.items())}")
    tensors = named.values()
    kinds, rows = {k_cache.dtype, v_cache.dtype}, {x.dtype for x in new.values()}
    if len(kinds) > 1 or len(rows) > 1 or (kinds != rows and not (kinds < {*EIGHT_BITS} and rows < {*WIDER})):
        raise ValueError(
            f"caches and new rows must share one dtype, got {', '.join(str(x.dtype) for x in tensors)}; caches of "
            "float8_e4m3fn or float8_e5m2 take rows of float16, bfloat16 or float32 as well"
        )
    if len(devices := {x.device for x in (*tensors, *slots.tensors)}) > 1:
        raise ValueError(f"all tensors of append_kv must be on one device, got {', '.join(map(str, devices))}")
    for name, x in (("k_cache", k_cache), ("v_cache", v_cache)):
        if x.stride(-1) != 1 and x.shape[-1] != 1:
            raise ValueError(f"the last dimension of a cache must be contiguous, got strides {x.stride()} of {name}")


def _refuse_shared(k_cache: Tensor, v_cache: Tensor, new: dict[str, Tensor]) -> None:
    memory_layout.refuse_shared("k_cache", k_cache, [("v_cache", v_cache)], _APART)
    memory_layout.refuse_shared("k_cache", k_cache, new.items())
    memory_layout.refuse_shared("v_cache", v_cache, new.items())


def _factors(descale: Any, slots: Paged | CacheSlots, k_cache: Tensor, k_new: Tensor) -> Factors:
    """The factors of the bytes of new rows."""
    if descale is None:
        return Factors()
    if not isinstance(descale, Descale):
        raise TypeError(f"descale must be a Descale(k=…, v=…), got {arguments.describe(descale)}")
    if k_cache.dtype not in EIGHT_BITS or k_new.dtype in EIGHT_BITS:
        got = f"caches of {k_cache.dtype} and rows of {k_new.dtype}, which are copied as they are"
        raise ValueError(f"descale is for 8-bit caches that take wider rows, got {got}")
    if descale.q is not None or descale.shift is not None:
        name = "shift" if descale.q is None else "q"
        raise ValueError(f"append_kv takes Descale(k=…, v=…) without {name}: it quantizes keys and values as they are")
    tensors = {name: x for name in "kv" if isinstance(x := getattr(descale, name), Tensor)}
    for name, x in tensors.items():
        if x.device != k_cache.device:
            raise ValueError(f"the descale of {name} must be on k_cache's device {k_cache.device}, got {x.device}")
        if isinstance(slots, CacheSlots) and x.dim() > 1:
            raise ValueError(
                f"with slot_mapping the descale of {name} must be a number, () or (h_k,) = ({k_cache.shape[-2]},), "
                f"because slots do not say to which sequence a row belongs, got {tuple(x.shape)}"
            )
    h_k, page_size = k_cache.shape[-2], k_cache.shape[1]
    of_slots = isinstance(slots, CacheSlots)
    shape = (1, h_k, 0, 0) if of_slots else (slots.sequences, h_k, 0, slots.capacity(page_size))
    return factors(descale, k_cache.device, False, shape)


def check_rotary(rotary: Any, k_new: Tensor) -> None:
    """Raises TypeError or ValueError for what are no tables of angles for these rows."""
    if not isinstance(rotary, (tuple, list)) or len(rotary) != 2:
        raise TypeError(f"rotary must be two tensors, (cos, sin), got {arguments.describe(rotary)}")
    cos, sin = rotary
    arguments.tensors(cos=cos, sin=sin)
    if cos.device != k_new.device or sin.device != k_new.device:
        raise ValueError(f"cos and sin must be on k_new's device {k_new.device}, got {cos.device}, {sin.device}")
    if cos.shape != sin.shape or cos.dim() != 2 or not 0 < 2 * cos.shape[1] <= k_new.shape[-1] or not cos.shape[0]:
        got = f"cos {tuple(cos.shape)}, sin {tuple(sin.shape)}"
        raise ValueError(f"rotary needs cos and sin (positions, pairs), 2 pairs <= {k_new.shape[-1]}, got {got}")
    if not cos.is_floating_point() or cos.dtype != sin.dtype:
        raise ValueError(f"cos and sin must share one float dtype, got {cos.dtype}, {sin.dtype}")
