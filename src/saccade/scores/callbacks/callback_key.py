"""When two callbacks record the same graph: a key for a callback, or none.

A callback's own key, `score_mod_graph_cache_key`, stands for everything that the callback holds. A function without one
is known for as long as a proof holds that nothing which it reads has changed. Bound methods and callable objects may
hold anything: they have no key unless they say one.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

from torch import Tensor

from saccade.bounded_cache import BoundedCache
from saccade.scores.callbacks.graph import Graph, Node
from saccade.scores.recording.proof import Proof, Unproven

Callback = Callable[..., Any]
OWN_KEY = "score_mod_graph_cache_key"
_ATTRIBUTES = frozenset((*dir(Graph()), *vars(Node), "get", "items", "keys", "values"))
"""What a callback may ask of its arguments: nobody changes what these mean."""
_proofs: BoundedCache[int, Proof] = BoundedCache(256)


def callback_key(callback: Callback | None) -> Any:
    """Equal for callbacks that record the same graph; None for one without a key, which is recorded each time.

    Raises:
        TypeError: a `score_mod_graph_cache_key` that holds tensors or unhashable values.
    """
    if callback is None:
        return ("nothing",)
    method = isinstance(callback, types.MethodType)
    owner = callback.__self__ if method else callback
    if hasattr(owner, OWN_KEY):
        own = getattr(owner, OWN_KEY)
        code = getattr(getattr(callback, "__func__", callback), "__code__", None)
        names = getattr(callback, "__module__", None), getattr(callback, "__qualname__", None)
        return "own", type(owner), code, *names, frozen(own() if callable(own) else own)
    if not isinstance(callback, (types.FunctionType, functools.partial)):
        return None
    proof = _proofs.get(id(callback))
    if proof is None or not proof.holds(callback):
        try:
            proof = Proof(callback, set(), _ATTRIBUTES)
        except Unproven:
            return None
        _proofs.put(id(callback), proof, [callback])
    return proof


def frozen(value: Any) -> Any:
    """A hashable form of a key: dictionaries, lists, tuples and sets by their contents.

    Raises:
        TypeError: a tensor, or an unhashable value.
    """
    if isinstance(value, Tensor):
        raise TypeError(
            f"{OWN_KEY} must not hold tensors, got {value.dtype} {tuple(value.shape)}: what changes from call to call "
            "goes into the dictionaries of tensors"
        )
    if isinstance(value, dict):
        return "dict", frozenset((frozen(k), frozen(v)) for k, v in value.items())
    if isinstance(value, (list, tuple)):
        return type(value), tuple(map(frozen, value))
    if isinstance(value, (set, frozenset)):
        return "set", frozenset(map(frozen, value))
    hash(value)
    return type(value), value
