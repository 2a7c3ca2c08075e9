"""Calls that were made before: what an earlier one with the same key allocated and launched is done again.

Small calls are bound by what the host does in front of a launch, and most of it comes out the same in each step of a
loop. **A key holds all that the host reads but addresses; a call of which no key does is computed as if it were the
first.** So a call whose key is known has passed its checks, and its kernels, grids and sizes are known.

Keys are made of what a caller passes, without a Call: `of_arguments` of those of `attention`, `of_operator` of those of
a registered operator. A score function is in a key as its trace, **while the guards of that trace hold in this
call**; tensors and numbers that it captures are read anew. Its address is a guess at that trace, whose guards
decides as ever. The first call with a key is noted here, the second one is recorded by the backend
(`backends/device/replay.py`), all later ones are replayed. Once calls that differ in sizes alone were made twice, as
each layer of a model makes them, the first one is recorded.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Hashable, Sequence
from functools import lru_cache, reduce
from operator import attrgetter, is_, or_
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor

from saccade import scores
from saccade.call import Call, Static, flatten, needs_gradient, split
from saccade.call.descale import Descale
from saccade.call.dropout import Dropout
from saccade.layouts import Layout
from saccade.masks import Blocked, Mask, MaskMod, as_mask
from saccade.ops import dispatch
from saccade.scores import Softcap, TracedValues
from saccade.util.arguments import PLAIN, watched, watched_in_eager
from saccade.util.caches import BoundedCache
from saccade.util.memory_layout import ALIGNMENT

on_host = attrgetter("is_cpu")
_form, _requires_grad = attrgetter("shape", "dtype", "device"), attrgetter("requires_grad")
_address, _strides, _is_neg = Tensor.data_ptr, Tensor.stride, Tensor.is_neg
_FLAGS, _NUMBERS = {bool, type(None)}, {float, int}
_HALF_OR_LESS = {torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2}
"""The dtypes whose kernels depend on no setting of torch."""


class Kept(Protocol):
    """A backend's replay of a recorded call."""

    static: tuple[Any, bool] | None
    """For a forward with gradients: the part of its backward besides tensors, and whether there is a sink."""

    def ready(self) -> bool:
        """Whether it may run now."""
        ...

    def __call__(self, addresses: Sequence[int]) -> Sequence[Tensor | None]:
        """The results; None for one that is an operand."""
        ...

    def nothing(self) -> Tensor:
        """An empty tensor of the LSE's dtype."""
        ...


class _Unready(NamedTuple):
    """Stands for a replay that does not exist."""

    word: str
    static: tuple[Any, bool] | None = None

    def ready(self) -> bool:
        return False


_ONCE, _NEVER = _Unready("seen once"), _Unready("does more than to allocate and launch")
_replays: BoundedCache[Any, Any] = BoundedCache(4096)
_guesses: BoundedCache[Any, Any] = BoundedCache(2048)
_forms: BoundedCache[Any, bool] = BoundedCache(512)
"""Forms of which a call came again: each step of a model has other sizes, and calls them once a layer."""


def forget() -> None:
    """Drops all that is kept of calls: plans too."""
    _replays.clear()
    _guesses.clear()
    _forms.clear()
    dispatch.forget()


class CallKey(NamedTuple):
    """A call that has a key."""

    key: tuple[Hashable, ...]
    """its form, which is all but its sizes; and those"""
    operands: Sequence[Tensor]
    """those of its tensors that the caller passes"""
    addresses: list[int]
    """theirs"""
    replay: Any
    """what an earlier call left, or None"""
    needs_gradient: bool = False
    dropout_p: float = 0.0
    """The p of dropout. Each call draws a state, which becomes its last operand."""

    def again(self) -> Sequence[Tensor | None] | None:
        """The results of a call without gradients, or None where it takes the long way."""
        if self.replay is None or not self.replay.ready():
            return None
        found = self.drawn() if self.dropout_p else self  # which holds the state until the launches are asked for
        return found.replay(found.addresses)

    def drawn(self) -> CallKey:
        """The call with the state of dropout, drawn now."""
        state = cast(Dropout, Dropout.draw(self.dropout_p, self.operands[0].device)).state
        return self._replace(operands=(*self.operands, state), addresses=[*self.addresses, state.data_ptr()])

    def learn(self, tensors: Sequence[Tensor | None], static: Any) -> None:
        """Keeps what a backward needs besides these tensors, if they are the operands: for later calls with gradients,
        which are not flattened."""
        kept = _replays.get(self.key)
        if kept is None or kept.static is not None or not kept.ready():
            return
        given = [x for x in tensors if x is not None]
        if len(given) == len(self.operands) + bool(self.dropout_p) and all(map(is_, given, self.operands)):
            kept.static = static, tensors[3] is not None

    def recorded(
        self, module: Any, more: Sequence[Tensor], work: Callable[[], Sequence[Tensor | None]]
    ) -> Sequence[Tensor | None]:
        """The results of `work`, which computes this call; recorded for later ones the second time, or the first time
        where calls of other sizes were made twice. `module` is the backend, and `more` are further operands, which the
        call drew itself."""
        form, first = self.key[0], self.replay is None
        if first and _forms.get(form) is None:
            _replays.put(self.key, _ONCE)
            return work()
        if not (first or self.replay is _ONCE) or not hasattr(module, "recorder"):
            return work()
        if not first:
            _forms.put(form, True)
        recorder = None if any(map(on_host, self.operands)) else module.recorder()  # whose numbers the host may read
        if recorder is None:
            return work()
        with recorder:
            results = work()
        replay = recorder.replay([*self.operands, *more], results)
        if replay is not None or not recorder.compiles:
            _replays.put(self.key, replay or (_ONCE if first else _NEVER))
        return results


def _find(
    static: Hashable, tensors: Sequence[Tensor], written: int = 0, needs_gradient: bool = False, dropout_p: float = 0.0
) -> CallKey | None:
    """The call of these tensors, of classes in PLAIN, and of all else that the host reads; None of tensors that are not
    plainly memory. In the path of every small call. written: how many of the last tensors the call writes to: the key
    holds how they lie to the others, so that what was found not to overlap does not."""
    if any(map(_is_neg, tensors)):
        return None
    try:
        addresses = [*map(_address, tensors)]
        memory = *map(_form, tensors), *map(_strides, tensors)
    except RuntimeError:  # tensors without memory, or of no strides
        return None
    if not all(addresses):
        return None
    low, same = reduce(or_, addresses) % ALIGNMENT, len({*addresses}) != len(addresses)
    rests = low and tuple([address % ALIGNMENT for address in addresses])
    of_one = same and tuple(map(addresses.index, addresses))
    key = static, memory, rests, of_one, written and _distances(tensors, addresses, written)
    return CallKey(key, tensors, addresses, _replays.get(key), needs_gradient, dropout_p)


def _distances(tensors: Sequence[Tensor], addresses: Sequence[int], written: int) -> Hashable:
    """How far tensors are from those of the last ones, which are written to, where their memory overlaps."""
    starts = [x.untyped_storage().data_ptr() for x in tensors]
    ends = [start + x.untyped_storage().nbytes() for start, x in zip(starts, tensors, strict=True)]
    last = range(len(tensors) - written, len(tensors))
    pairs = [(i, j) for i in last for j in range(i) if starts[i] < ends[j] and starts[j] < ends[i]]
    return tuple([(i, j, addresses[i] - addresses[j]) for i, j in pairs])


def _settings(q: Tensor) -> Hashable:
    """The settings of torch that kernels of a dtype depend on."""
    return q.dtype in _HALF_OR_LESS or torch.backends.cuda.matmul.fp32_precision


def _bits(*numbers: Any) -> Hashable:
    """Numbers as a key holds them: 0.0 and -0.0 are equal, and so are 1, 1.0 and True."""
    return tuple([x if type(x) is int else (type(x), struct.pack("d", x)) for x in numbers])


# Calls of `attention`.


def of_arguments(
    q: Any, k: Any, v: Any, mask: Any, score_mod: Any, layout: Any, scale: Any, sink: Any, dropout_p: Any,
    flags: tuple[Any, Any, Any], backend: Any, out: Any, descale: Any,
) -> tuple[CallKey | None, TracedValues | None]:  # fmt: skip
    """A call by its arguments, or None if it takes the long way; and what the guards of its score function gave. A
    call asks them once: they compute what the function does of captured tensors, and checkpoints count what autograd
    saves. flags: `return_lse`, `return_max_scores` and `deterministic`."""
    if not _is_plain(q, layout, scale, dropout_p, flags, backend):
        return None, None
    masked = _NOTHING if mask is None else _of_mask(mask)
    scaled = _NOTHING if descale is None else _of_factors(descale)
    if masked is None or scaled is None:
        return None, None
    scored = _NOTHING if score_mod is None else _of_function(score_mod, q)
    if scored is None:
        return None, None
    values = scored.values
    deterministic = flags[2] is None and torch.are_deterministic_algorithms_enabled()
    static = (
        layout.text, layout.ints, layout.bounds, masked.static, scored.static, scaled.static, scale, sink is None,
        flags, deterministic, backend, dropout_p, _settings(q),
    )  # fmt: skip
    tensors = (q, k, v, *scored.tensors) if sink is None else (q, k, v, sink, *scored.tensors)
    if not PLAIN.issuperset(map(type, tensors)):
        return None, values
    needs = torch.is_grad_enabled() and any(map(_requires_grad, tensors))
    others = *layout.tensors, *masked.tensors, *scaled.tensors
    if others:
        if not PLAIN.issuperset(map(type, others)):
            return None, values
        tensors += others
    if out is None:
        if needs and descale is not None:
            return None, values
        return _find((static, needs), tensors, 0, needs, dropout_p), values
    if needs or type(out) not in PLAIN or (out.requires_grad and torch.is_grad_enabled()):
        return None, values
    return _find((static, "out"), (*tensors, out), 1, False, dropout_p), values


def _is_plain(q: Tensor, layout: Any, scale: Any, dropout_p: Any, flags: Any, backend: Any) -> bool:
    """Whether arguments are of the types that keys are made of, and nothing watches or casts."""
    if not isinstance(layout, Layout) or layout.validate or type(backend) is not str:
        return False
    if scale is not None and (type(scale) is not float or not scale):  # 0.0, which -0.0 is equal to
        return False
    if type(dropout_p) not in _NUMBERS or not _FLAGS.issuperset(map(type, flags)) or watched_in_eager():
        return False
    return not torch._C._is_any_autocast_enabled() or not _is_cast(q)


def _is_cast(x: Tensor) -> bool:
    """Whether autocast, which is on somewhere, may take another dtype."""
    device = x.device.type
    return torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) != x.dtype


class _Part(NamedTuple):
    """A mask, factors or a function, as a key holds them."""

    static: Hashable
    tensors: Sequence[Tensor]
    values: TracedValues | None = None
    """of a function, what the guards of its trace gave"""


_NOTHING = _Part(None, ())


def _of_factors(descale: Any) -> _Part | None:
    """None of numbers, of which each call makes tensors, and of a shift, which is added to what a call returns."""
    given = (descale.q, descale.k, descale.v) if isinstance(descale, Descale) else (1.0,)
    tensors = [x for x in given if isinstance(x, Tensor)]
    if len(tensors) + given.count(None) < len(given) or descale.shift is not None:
        return None
    return _Part((descale.backward, *map(is_, given, (None,) * 3)), tensors)


def _of_mask(mask: Any) -> _Part | None:
    """None of what is no mask, which the long way refuses, and of one whose states hold until its tensors are written
    to, which the host counts. What never changes is computed once for a mask."""
    if isinstance(mask, Mask):
        if (known := mask.__dict__.get(_PART)) is not None:
            return known
    elif type(mask) in PLAIN and mask.dtype is torch.bool:  # its shape says the rest
        return _Part("tensor", (mask,))
    try:
        mask = mask if isinstance(mask, Mask) else as_mask(mask)
        bound = mask.bound() if mask.block_sparse else mask
    except (TypeError, ValueError):
        return None
    if isinstance(bound, Blocked):
        return None
    forms = tuple([leaf.form for leaf in bound.leaves() if isinstance(leaf, MaskMod)])
    part = _Part((bound.identity, bound.has_lower_bound, bound.numbers, forms), bound.tensors)
    if not mask.block_sparse:
        mask.__dict__[_PART] = part
    return part


_PART = "part_of_a_key"


class _Guess(NamedTuple):
    """The trace of an earlier call with a function at this address. It is this call's too where its guards hold,
    which decides what the function is."""

    key: Hashable
    trace: Any


def _of_function(score_mod: Any, q: Tensor) -> _Part | None:
    """None of a function without guards."""
    if type(score_mod) is Softcap:
        return _Part(struct.pack("d", score_mod.cap), ())
    at = id(score_mod), torch.is_grad_enabled(), torch.get_default_dtype(), q.device, q.dtype
    guess = _guesses.get(at)
    if guess is not None and (now := guess.trace.inputs(score_mod)) is not None:
        return _Part(guess.key, now[0], TracedValues(guess.trace, *now))
    if (found := scores.guarded(score_mod, q)) is None:
        return None
    key = found.key, _bits(*found.numbers)
    if found.settled:
        _guesses.put(at, _Guess(key, found.values.trace))
    return _Part(key, found.values.tensors, found.values)


# Calls of the operators, as compiled models make them, and of backwards.


def of_operator(name: str, arguments: Sequence[Any], *more: Hashable, out: Tensor | None = None) -> CallKey | None:
    """A call of an operator by its `flatten`ed arguments, and by what else it takes that is no tensor."""
    if on_host(arguments[0]) or watched():
        return None
    tensors, static = split(arguments)
    if (tail := tail_of(static)) is None:
        return None
    operands = [x for x in tensors if x is not None]
    if not PLAIN.issuperset(map(type, operands)):
        return None
    key = name, tensors[3] is None, *more, tail, _settings(operands[0])
    return _find(key, operands) if out is None else _find((*key, "out"), (*operands, out), 1)


def of_backward(given: Sequence[Any], arguments: Sequence[Any], wanted: Sequence[bool]) -> CallKey | None:
    """A backward, of dout, dlse, out and lse."""
    if on_host(given[0]):
        return None
    tensors, static = split(arguments)
    return of_saved(given, tensors, tail_of(static), wanted)


def of_saved(
    given: Sequence[Any], tensors: Sequence[Tensor | None], tail: Hashable | None, wanted: Sequence[bool]
) -> CallKey | None:
    """The same key from what autograd saves: the call's tensors, and its `tail_of`."""
    if tail is None or watched():
        return None
    operands = [x for x in (*given, *tensors) if x is not None]
    if not PLAIN.issuperset(map(type, operands)):
        return None
    static = "backward", given[1] is None, tensors[3] is None, *wanted, tail, _settings(given[0])
    return _find(static, operands)


def tail_of(static: Static) -> Hashable | None:
    """The part of an operator's arguments besides tensors, as a key holds it; None if the host reads tensors."""
    captures, header, ints, floats = static
    return None if _is_read(header) else (captures, header, *ints, *map(float.hex, floats))


@lru_cache(maxsize=512)
def _is_read(header: str) -> bool:
    """Whether the host reads lengths, numbers, or how often the tensors of a Blocked mask were written."""
    return "validate" in header or " numbers" in header or f" {Blocked.MARK}" in header


def of_tensors(static: Hashable, tensors: Sequence[Any], written: int = 0) -> CallKey | None:
    """A call of another function, which has no gradients and writes to the last tensors."""
    if watched() or not PLAIN.issuperset(map(type, tensors)) or on_host(tensors[-1]):  # torch.compile follows this
        return None
    return None if needs_gradient(*tensors) else _find(static, tensors, written)


def of_call(call: Call, backend: str, lse: bool) -> CallKey | None:
    """A Call that was not found by its arguments."""
    if call.given is None:
        return None
    return of_operator("forward", flatten(call, backend), lse, out=call.given[3])
