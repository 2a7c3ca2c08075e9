"""The probabilities that flash-attn returns with dropout, negative where dropped, found by calls whose v is one-hot."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor


def returned_by(function: Callable[..., Any], module: Any) -> Callable[..., Any]:
    """The function, which with dropout and return_attn_probs returns (out, softmax_lse, S_dmask) too."""
    signature = inspect.signature(function)

    @wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
        if not (given["dropout_p"] and given["return_attn_probs"]):
            return function(*args, **kwargs)
        given["return_attn_probs"] = False
        before = random_state(given)
        out = function(*bound.args, **bound.kwargs)
        after = random_state(given)
        with torch.no_grad():
            lse, dropped = _of_call(_unpacked(given), module, before)
        random_state(given, after)
        return out, lse, dropped

    return wrapped


def random_state(given: dict[str, Any], state: Tensor | None = None) -> Tensor:
    """The state of the generator that the call draws from, which becomes `state`, if given."""
    x = given.get("q", given.get("qkv"))
    assert isinstance(x, Tensor)
    source: Any = torch.cuda if x.is_cuda else torch
    if state is not None:
        source.set_rng_state(state)
    return source.get_rng_state()


def _unpacked(given: dict[str, Any]) -> dict[str, Any]:
    """The arguments of flash_attn_func, or of flash_attn_varlen_func, for the same call."""
    rest = dict(given)
    if "qkv" in rest:
        rest["q"], rest["k"], rest["v"] = rest.pop("qkv").unbind(-3)
    if "kv" in rest:
        rest["k"], rest["v"] = rest.pop("kv").unbind(-3)
    if "cu_seqlens" in rest:
        rest["cu_seqlens_q"] = rest["cu_seqlens_k"] = rest.pop("cu_seqlens")
        rest["max_seqlen_q"] = rest["max_seqlen_k"] = rest.pop("max_seqlen")
    return rest


def _of_call(given: dict[str, Any], module: Any, state: Tensor) -> tuple[Tensor, Tensor]:
    """softmax_lse, and the probabilities (b, h, s_q, s_k) with their signs."""
    function = module.flash_attn_func if "cu_seqlens_q" not in given else module.flash_attn_varlen_func
    p = given["dropout_p"]
    _, lse, _ = function(**{**given, "dropout_p": 0.0, "return_attn_probs": True})
    whole = _by_columns(function, {**given, "dropout_p": 0.0})
    even = {**given, "q": torch.zeros_like(given["q"]), "softcap": 0.0, "alibi_slopes": None}
    kept = _by_columns(function, {**even, "dropout_p": p}, state) != 0
    return lse, torch.where(kept, whole, -whole)


def _by_columns(function: Callable[..., Tensor], given: dict[str, Any], state: Tensor | None = None) -> Tensor:
    """The probabilities: column j of the result of a call whose value for key j is 1 in element j."""
    v, offsets = given["v"], given.get("cu_seqlens_k")
    if offsets is None:
        number, longest = torch.arange(v.shape[1], device=v.device), v.shape[1]
    else:
        number = torch.cat([torch.arange(n, device=v.device) for n in offsets.diff().tolist()])
        longest = int(given["max_seqlen_k"])
    columns = []
    for start in range(0, longest, v.shape[-1]):
        one_hot = number[:, None] == torch.arange(start, start + v.shape[-1], device=v.device)
        value = one_hot[:, None].to(v.dtype).expand(v.shape)
        if state is not None:
            random_state(given, state)
        columns.append(function(**{**given, "v": value.contiguous()}))
    result = torch.cat(columns, -1)[..., :longest]
    if offsets is not None:
        result = _padded(result, given["cu_seqlens_q"].tolist(), int(given["max_seqlen_q"]))
    return result.transpose(1, 2)


def _padded(x: Tensor, offsets: list[int], longest: int) -> Tensor:
    result = x.new_zeros(len(offsets) - 1, longest, *x.shape[1:])
    for row, (start, end) in enumerate(pairwise(offsets)):
        result[row, : end - start] = x[start:end]
    return result
