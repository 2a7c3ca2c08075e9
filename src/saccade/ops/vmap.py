"""Batching rules of the operators: for `torch.vmap`, `torch.func.jacrev` and `is_grads_batched` of torch.autograd.

Examples are folded into the batch rows of one call, where a batch row is computed alike wherever it is; any other call
is a loop over the examples. The rule: a call folds where its layout is Dense, nothing but used lengths differs from
batch row to batch row in what is not batched, nothing but q, k, v, used lengths, and what a forward gives its backward,
is batched, and no gradient is a sum over batch rows.
"""

# What `torch._vmap_internals` itself is made of.
# pyright: reportPrivateImportUsage=false, reportAttributeAccessIssue=false

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from saccade.call import Call, flatten, operator, unflatten
from saccade.layouts import LENGTHS, ORDERS
from saccade.masks import Blocked, Mask, MaskMod
from saccade.scores import Traced


def forward(info: Any, in_dims: Any, *arguments: Any) -> tuple[Any, Any]:
    """The rule of `saccade::forward`."""
    *flat, lse = arguments
    of_calls, dims = operator("forward", flat), in_dims[:-1]
    call, backend = unflatten(*_example(flat, dims, 0))
    if not _folds(call, dims):
        return _looped(of_calls, info, in_dims, arguments)
    at, b, fold = _fold(info, call)
    results = of_calls(*flatten(_folded(call, flat, dims, fold, at), backend), lse)
    return _unfolded(results, (at, 0, 0), info.batch_size, b)


def backward(info: Any, in_dims: Any, *arguments: Any) -> tuple[Any, Any]:
    """The rule of `saccade::backward`."""
    saved, flat, wanted = arguments[:4], arguments[4:-1], arguments[-1]
    of_calls, dims = operator("backward", flat), in_dims[4:-1]
    call, backend = unflatten(*_example(flat, dims, 0))
    if not _folds(call, dims) or call.sink is not None or any(wanted):
        return _looped(of_calls, info, in_dims, arguments)
    at, b, fold = _fold(info, call)
    # dout, dlse, out and lse
    saved = (None if x is None else fold(x, *how) for x, *how in zip(saved, in_dims, (at, 0, at, 0), strict=False))
    results = of_calls(*saved, *flatten(_folded(call, flat, dims, fold, at), backend), wanted)
    gradients, out_dims = _unfolded(results[:4], (at, at, at, 0), info.batch_size, b)
    return (*gradients, results[4]), (*out_dims, [None] * len(results[4]))


class Info(NamedTuple):
    """The arguments of a rule."""

    batch_size: int


def of_older_vmap(rule: Callable[..., tuple[Any, Any]]) -> Callable[..., Any]:
    """The same for tensors that torch's older vmap has batched, as `is_grads_batched` does."""

    def batched(*arguments: Any) -> Any:
        levels: set[int] = set()
        sizes: list[int] = []

        def unwrapped(x: Any) -> Any:
            if isinstance(x, (list, tuple)):
                return [unwrapped(y) for y in x]
            if not isinstance(x, Tensor) or not torch._C._functorch.is_legacy_batchedtensor(x):
                return x
            level, x = _plain(x)
            levels.add(level)
            sizes.append(x.shape[0])
            return x

        def wrapped(x: Any, dim: Any) -> Any:
            if isinstance(x, (list, tuple)):
                return type(x)([wrapped(*pair) for pair in zip(x, dim, strict=True)])
            return x if dim is None else torch._add_batch_dim(x, dim, level)

        plain = [unwrapped(x) for x in arguments]
        (level,) = levels if len(levels) == 1 else _nested()
        in_dims = [_dims(*pair) for pair in zip(arguments, plain, strict=True)]
        return wrapped(*rule(Info(sizes[0]), in_dims, *plain))

    return batched


def _dims(x: Any, plain: Any) -> Any:
    if isinstance(x, (list, tuple)):
        return [_dims(*pair) for pair in zip(x, plain, strict=True)]
    return None if x is plain else 0


_LEVELS = 64
"""The levels that torch has."""


def _plain(x: Tensor) -> tuple[int, Tensor]:
    """The level at which a tensor is batched, and the tensor with its examples first. In autograd's own threads nothing
    else knows the level; of one that a tensor has not, it becomes larger and stays batched."""
    for level in range(1, _LEVELS):
        plain = torch._remove_batch_dim(x, level, 1, 0)
        if not torch._C._functorch.is_legacy_batchedtensor(plain):
            return level, plain
    return _nested()


def _nested() -> NoReturn:
    raise RuntimeError("batched gradients of saccade.attention inside of batched gradients: use torch.func.vmap")


def forward_out(info: Any, in_dims: Any, *arguments: Any) -> tuple[Any, Any]:
    """The rule of `saccade::forward_out`."""
    if in_dims[0] is None:
        raise ValueError(
            f"vmap: out {tuple(arguments[0].shape)} is one tensor for a batch of {info.batch_size} calls: map over it "
            "too, or omit it"
        )
    return _looped(operator("forward_out", arguments[1:]), info, in_dims, arguments)


_OPERANDS = 3
"""The first of the flat arguments; the sink, captured tensors and all other tensors follow."""


def _folds(call: Call, dims: Sequence[Any]) -> bool:
    """Whether the examples of a call can be batch rows of one; `dims` are those of its flat arguments."""
    layout, mask, score = call.layout, call.mask, call.score
    if layout.order not in ORDERS or layout.positioned or call.dropout is not None or call.descale is not None:
        return False
    sink, captures, tensors = dims[_OPERANDS : _OPERANDS + 3]
    others = [sink, *captures, *tensors[len(layout.tensors) :]]
    if any(dim is not None for dim in others):
        return False
    if isinstance(score, Traced) and score.program.by_batch_row:
        return False
    return mask is None or not (isinstance(mask, Blocked) or any(map(_by_batch_row, mask.leaves())))


def _by_batch_row(leaf: Mask) -> bool:
    """Whether a mask may be another one in another batch row."""
    if isinstance(leaf, MaskMod):
        return leaf.predicate.program.by_batch_row
    return "b" in leaf.indices


Fold = Callable[..., Tensor]


def _fold(info: Any, call: Call) -> tuple[int, int, Fold]:
    """The dimension of the batch rows of an example's q, their number, and what folds a tensor's examples into them."""
    at = ORDERS[call.layout.order][0]

    def fold(x: Tensor, dim: int | None, at: int = 0) -> Tensor:
        x = x[None].expand(info.batch_size, *x.shape) if dim is None else x
        return x.movedim(dim or 0, at).flatten(at, at + 1)

    return at, call.given[0].shape[at], fold


def _folded(call: Call, flat: Sequence[Any], dims: Sequence[Any], fold: Fold, at: int) -> Call:
    """The call of all examples, of which `call` is one."""
    q, k, v = (fold(x, dim, at) for x, dim in zip(flat[:_OPERANDS], dims, strict=False))
    layout: Any = call.layout
    names = [name for name in LENGTHS if getattr(layout, name) is not None]
    lengths = zip(names, flat[_OPERANDS + 2], dims[_OPERANDS + 2], strict=False)
    used = {name: fold(x, dim) for name, x, dim in lengths}
    return call.replace(given=(q, k, v, None), layout=replace(layout, **used))


def _unfolded(results: Sequence[Tensor], dims: Sequence[int], size: int, b: int) -> tuple[Any, Any]:
    """Results by example, with the dimension of these; what nobody asked for has none."""
    asked = [x.dim() > 1 for x in results]
    unfolded = (x.unflatten(at, (size, b)) if yes else x for x, at, yes in zip(results, dims, asked, strict=True))
    return tuple(unfolded), tuple(at if yes else None for at, yes in zip(dims, asked, strict=True))


def one_by_one(operator: Any) -> Callable[..., tuple[Any, Any]]:
    """The rule of an operator that takes one example at a time."""
    return lambda info, in_dims, *arguments: _looped(operator, info, in_dims, arguments)


def register(library: torch.library.Library, name: str, rule: Callable[..., tuple[Any, Any]]) -> None:
    """Registers a rule with both of torch's vmaps."""
    torch.library.register_vmap(f"{library.ns}::{name}", rule, lib=library)
    if torch._C._parse_dispatch_key("Batched"):  # the older one's, as long as torch has it
        library.impl(name, of_older_vmap(rule), "Batched")


def _looped(operator: Any, info: Any, in_dims: Any, arguments: Sequence[Any]) -> tuple[Any, Any]:
    """One call for each example; of no example the shapes of one of zeros."""
    results = [operator(*_example(arguments, in_dims, i)) for i in range(max(1, info.batch_size))]

    def stacked(each: Sequence[Tensor]) -> Tensor:
        return torch.stack([*each])[: info.batch_size]

    found = [
        [stacked(each) for each in zip(*parts, strict=True)] if isinstance(parts[0], list) else stacked(parts)
        for parts in zip(*results, strict=True)
    ]
    return tuple(found), tuple([0] * len(x) if isinstance(x, list) else 0 for x in found)


def _example(x: Any, dim: Any, i: int) -> Any:
    if isinstance(x, (list, tuple)):
        return [_example(y, one, i) for y, one in zip(x, dim, strict=True)]
    if dim is None:
        return x
    return x.select(dim, i) if x.shape[dim] else x.new_zeros([n for at, n in enumerate(x.shape) if at != dim % x.dim()])
