"""Calls that were made before: what an earlier one with the same key allocated and launched is done again.

Small calls are bound by what the host does in front of a launch, and most of it comes out the same in each step of a
loop. **A key holds all that the host reads but addresses; a call of which no key does is computed as if it were the
first.** So a call whose key is known has passed its checks, and its kernels, grids and sizes are known.

Keys are made of what a caller passes, without a Call: `of_arguments` of those of `attention`, `of_operator` of those of
a registered operator. A score function is in a key as its recording, **while the proof of that recording holds in this
call**; tensors and numbers that it captures are read anew. Its address is a guess at that recording, whose proof
decides as ever. The first call with a key is noted here, the second one is recorded by the backend
(`backends/device/replay.py`), all later ones are replayed.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Hashable, Sequence
from operator import attrgetter, is_
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor

from saccade import dispatch, scores
from saccade.alignment import ALIGNMENT
from saccade.arguments import PLAIN, watched
from saccade.bounded_cache import BoundedCache
from saccade.call import Call, Static, flatten, needs_gradient
from saccade.descale import Descale
from saccade.dropout import Dropout
from saccade.layouts import Layout
from saccade.masks import Blocked, Mask, MaskMod, Window, as_mask
from saccade.scores import Softcap

on_host = attrgetter("is_cpu")
_form, _requires_grad = attrgetter("shape", "dtype", "device"), attrgetter("requires_grad")
_FLAGS = {bool, type(None)}
_HALF_OR_LESS = {torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2}
"""The dtypes whose kernels depend on no setting of torch."""


class Kept(Protocol):
    """What a backend makes of a recorded call."""

    static: tuple[Static, bool] | None
    """Of a forward with gradients: what its operator takes besides tensors, and whether there is a sink."""

    def ready(self) -> bool:
        """Whether it may run now."""
        ...

    def __call__(self, addresses: Sequence[int]) -> Sequence[Tensor | None]:
        """The results; None for one that is an operand."""
        ...


class _Unready(NamedTuple):
    """In the place of a replay."""

    word: str
    static: tuple[Static, bool] | None = None

    def ready(self) -> bool:
        return False


_ONCE, _NEVER = _Unready("seen once"), _Unready("does more than to allocate and launch")
_replays: BoundedCache[Any, Any] = BoundedCache(4096)
_guesses: BoundedCache[Any, Any] = BoundedCache(2048)


def forget() -> None:
    """Drops all that is kept of calls: plans too."""
    _replays.clear()
    _guesses.clear()
    dispatch.forget()


class Found(NamedTuple):
    """A call that has a key."""

    key: Hashable
    operands: Sequence[Tensor]
    """those of its tensors that the caller passes"""
    addresses: list[int]
    """theirs"""
    replay: Any
    """what an earlier call left, or None"""
    needs_gradient: bool = False
    dropout_p: float = 0.0
    """Where each call draws a state of dropout, which becomes its last operand."""

    def again(self) -> Sequence[Tensor | None] | None:
        """The results of a call without gradients, or None where it takes the long way."""
        if self.replay is None or not self.replay.ready():
            return None
        found = self.drawn() if self.dropout_p else self
        return found.replay(found.addresses)

    def drawn(self) -> Found:
        """The call with the state of dropout, drawn now."""
        state = cast(Dropout, Dropout.draw(self.dropout_p, self.operands[0].device)).state
        return self._replace(operands=(*self.operands, state), addresses=[*self.addresses, state.data_ptr()])

    def learn(self, tensors: Sequence[Tensor | None], static: Static) -> None:
        """Keeps what an operator takes besides these tensors, if they are the operands: for later calls with
        gradients, which are not flattened."""
        kept, given = _replays.get(self.key), [x for x in tensors if x is not None]
        same = len(given) == len(self.operands) + bool(self.dropout_p) and all(map(is_, given, self.operands))
        if kept is not None and kept.static is None and kept.ready() and same:
            kept.static = static, tensors[3] is not None

    def recorded(
        self, module: Any, more: Sequence[Tensor], work: Callable[[], Sequence[Tensor | None]]
    ) -> Sequence[Tensor | None]:
        """The results of `work`, which computes this call; recorded for later ones the second time.

        Args:
            module: the backend.
            more: further operands, which the call drew itself.
        """
        if self.replay is not _ONCE or not hasattr(module, "recorder"):
            if self.replay is None:
                _replays.put(self.key, _ONCE)
            return work()
        recorder = module.recorder()
        if recorder is None:
            return work()
        with recorder:
            results = work()
        replay = recorder.replay([*self.operands, *more], results)
        if replay is not None or not recorder.compiles:
            _replays.put(self.key, replay or _NEVER)
        return results


def _find(static: Hashable, tensors: Sequence[Tensor], written: int = 0, **more: Any) -> Found | None:
    """The call of these tensors, and of all else that the host reads; None of tensors that are not plainly memory.

    Args:
        written: how many of the last tensors the call writes to: the key holds how they lie to the others, so that
            what was found not to overlap does not.
    """
    if not PLAIN.issuperset(map(type, tensors)) or any(map(Tensor.is_neg, tensors)) or any(map(on_host, tensors)):
        return None
    try:
        addresses = [*map(Tensor.data_ptr, tensors)]
        lie = *map(_form, tensors), *map(Tensor.stride, tensors)
    except RuntimeError:  # tensors without memory, or of no strides
        return None
    if not all(addresses):
        return None
    low = 0
    for address in addresses:
        low |= address
    rests = low % ALIGNMENT and tuple([address % ALIGNMENT for address in addresses])
    same = len({*addresses}) != len(addresses) and tuple(map(addresses.index, addresses))
    key = static, *lie, rests, same, written and _distances(tensors, addresses, written)
    return Found(key, tensors, addresses, _replays.get(key), **more)


def _distances(tensors: Sequence[Tensor], addresses: Sequence[int], written: int) -> Hashable:
    """How far tensors of one piece of memory are from those of the last ones that are written to."""
    memory = [x.untyped_storage()._cdata for x in tensors]
    last = range(len(tensors) - written, len(tensors))
    if len({*memory}) == len(memory):
        return None
    pairs = [(i, j) for i in last for j in range(i) if memory[i] == memory[j]]
    return tuple([(i, j, addresses[i] - addresses[j]) for i, j in pairs])


def _settings(q: Tensor) -> Hashable:
    """What kernels of a dtype depend on besides a call."""
    return q.dtype in _HALF_OR_LESS or torch.backends.cuda.matmul.allow_tf32


def _bits(*numbers: Any) -> Hashable:
    """Numbers as a key holds them: 0.0 and -0.0 are equal, and so are 1, 1.0 and True."""
    return tuple([x if type(x) is int else (type(x), struct.pack("d", x)) for x in numbers])


# Calls of `attention`.


def of_arguments(
    q: Any,
    k: Any,
    v: Any,
    mask: Any,
    score_mod: Any,
    layout: Any,
    scale: Any,
    sink: Any,
    dropout_p: Any,
    flags: tuple[Any, Any, Any],
    backend: Any,
    out: Any,
    descale: Any,
) -> Found | None:
    """A call by its arguments; None of one that takes the long way.

    Args:
        flags: `return_lse`, `return_max_scores` and `deterministic`.
    """
    plain = type(dropout_p) in (float, int) and type(backend) is str and _FLAGS.issuperset(map(type, flags))
    if not plain or not isinstance(layout, Layout) or layout.validate or not isinstance(q, Tensor):
        return None
    # 0.0, which -0.0 is equal to
    if (type(scale) is not float and scale is not None) or scale == 0 or watched() or _is_cast(q):
        return None
    tensors, sunk = (q, k, v) if sink is None else (q, k, v, sink), sink is not None
    if not all(isinstance(x, Tensor) for x in tensors):
        return None
    grad = torch.is_grad_enabled()
    needs = grad and any(map(_requires_grad, tensors))
    masked: Any = None
    others, scaled = layout.tensors, None
    if descale is not None:
        if needs or (scaled := _factors(descale)) is None:
            return None
        others = *others, *scaled.tensors
    if type(mask) is Window:
        masked = mask.left, mask.right
    elif mask is not None:
        if (bound := _bound(mask)) is None:
            return None
        masked, others = bound.static, (*others, *bound.tensors)
    deterministic = flags[2] is None and torch.are_deterministic_algorithms_enabled()
    static = (
        layout.text, layout.ints, layout.bounds, masked, scale, sunk, flags, deterministic, backend, dropout_p,
        scaled and scaled.static, _settings(q),
    )  # fmt: skip
    if score_mod is not None:
        if type(score_mod) is Softcap:
            static = *static, struct.pack("d", score_mod.cap)
        else:
            return _with_function(score_mod, static, tensors, others, out, needs, dropout_p)
    return _with_gradients(static, (*tensors, *others), out, needs, dropout_p)


def _is_cast(x: Tensor) -> bool:
    """Whether autocast may take another dtype."""
    if not torch._C._is_any_autocast_enabled():
        return False
    device = x.device.type
    return torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) != x.dtype


class _Part(NamedTuple):
    """A mask, or factors, as a key holds them."""

    static: Hashable
    tensors: Sequence[Tensor]


def _factors(descale: Any) -> _Part | None:
    """None of numbers, of which each call makes tensors, and of a shift, which is added to what a call returns."""
    given = (descale.q, descale.k, descale.v) if isinstance(descale, Descale) else (1.0,)
    tensors = [x for x in given if isinstance(x, Tensor)]
    if len(tensors) + given.count(None) < len(given) or descale.shift is not None:
        return None
    return _Part((descale.backward, *map(is_, given, (None,) * 3)), tensors)


def _bound(mask: Any) -> _Part | None:
    """None of what is no mask, which the long way refuses."""
    try:
        mask = mask if isinstance(mask, Mask) else as_mask(mask)
        mask = mask.bound() if mask.listed else mask
    except (TypeError, ValueError):
        return None
    if isinstance(mask, Blocked):  # how often its tensors were written decides whether its states hold
        return None
    forms = tuple([leaf.form for leaf in mask.leaves() if isinstance(leaf, MaskMod)])
    return _Part((mask.identity, mask.lower, mask.numbers, forms), mask.tensors)


def _with_gradients(
    static: Hashable, tensors: Sequence[Tensor], out: Any, needs: bool, dropout_p: float
) -> Found | None:
    """The call that may need gradients, or write to `out`."""
    more: dict[str, Any] = {"needs_gradient": needs, "dropout_p": dropout_p}
    if out is None:
        return _find((static, needs), tensors, **more)
    if needs or not isinstance(out, Tensor) or (out.requires_grad and torch.is_grad_enabled()):
        return None
    return _find((static, "out"), (*tensors, out), 1, **more)


class _Guess(NamedTuple):
    """The recording of an earlier call with a function at this address. It is this call's too where its proof holds,
    which decides what the function is."""

    inputs: Callable[[Any], Any]
    recording: Hashable


def _with_function(
    score_mod: Any,
    static: tuple[Hashable, ...],
    tensors: Sequence[Tensor],
    others: Sequence[Tensor],
    out: Any,
    needs: bool,
    dropout_p: float,
) -> Found | None:
    """The call with a function."""
    grad, numbers = torch.is_grad_enabled(), []
    at = id(score_mod), grad, torch.get_default_dtype(), tensors[0].device, tensors[0].dtype
    guess = _guesses.get(at)
    if guess is not None and (now := guess.inputs(score_mod)) is not None:
        recording, captures = guess.recording, now[0]
    else:
        if (bound := scores.proven(score_mod, tensors[0])) is None:
            return None
        recording, captures, numbers, inputs = bound
        if inputs is not None:
            _guesses.put(at, _Guess(inputs, recording))
    needs = needs or (grad and any(map(_requires_grad, captures)))
    static = *static, recording, _bits(*numbers), len(captures)
    return _with_gradients(static, (*tensors, *captures, *others), out, needs, dropout_p)


# Calls of the operators, as compiled models make them, and of backwards.


def of_operator(name: str, arguments: Sequence[Any], *more: Hashable, out: Tensor | None = None) -> Found | None:
    """A call of an operator by its `flatten`ed arguments.

    Args:
        more: what else it takes that is no tensor.
    """
    return _of_flat(name, (), arguments, more, out)


def of_backward(
    dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, arguments: Sequence[Any], wanted: Sequence[bool]
) -> Found | None:
    """A backward."""
    given = (dout, out, lse) if dlse is None else (dout, out, lse, dlse)
    return _of_flat("backward", given, arguments, (dlse is None, *wanted), None)


def _of_flat(
    name: str, given: Sequence[Tensor], arguments: Sequence[Any], more: Sequence[Hashable], out: Tensor | None
) -> Found | None:
    q, k, v, sink, captures, tensors, header, ints, floats = arguments
    # The host reads lengths, numbers, and how often the tensors of a Blocked mask were written.
    if on_host(q) or watched() or "validate" in header or " numbers" in header or f" {Blocked.MARK}" in header:
        return None
    operands = (*given, q, k, v, *captures, *tensors) if sink is None else (*given, q, k, v, sink, *captures, *tensors)
    static = name, header, sink is None, len(captures), *more, *ints, _settings(q), *map(float.hex, floats)
    return _find(static, operands) if out is None else _find((*static, "out"), (*operands, out), 1)


def of_tensors(static: Hashable, tensors: Sequence[Any], written: int = 0) -> Found | None:
    """A call of another function, which has no gradients and writes to the last tensors."""
    if not PLAIN.issuperset(map(type, tensors)) or on_host(tensors[-1]) or watched():
        return None
    return None if needs_gradient(*tensors) else _find(static, tensors, written)


def of_call(call: Call, backend: str, lse: bool) -> Found | None:
    """A Call that was not found by its arguments."""
    if call.given is None or call.arrivals is not None or call.first_b:
        return None
    return of_operator("forward", flatten(call, backend), lse, out=call.given[3])
