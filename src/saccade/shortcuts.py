"""The way of calls that were made before, from their arguments to the launch.

A call of plain tensors on a GPU is found by a key of its arguments. The key decides all checks of `check_call`, so that
a call whose key is known has passed them, and all that a Call's key holds (`repeats.py`). A score function is in the
key as its recording, **while the proof of that recording holds in this call**; tensors and numbers that it captures are
read anew, and are operands and parts of the key. Its address is a guess at that recording, whose proof decides as ever.
Anything else takes the long way: through a Call and, with gradients, the operator.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Hashable, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from saccade import dispatch, repeats, scores
from saccade.alignment import ALIGNMENT
from saccade.backends import Saved
from saccade.bounded_cache import BoundedCache
from saccade.call import Call, flatten, joined, programs, savable, split, unflatten
from saccade.layouts import Dense
from saccade.masks import Window
from saccade.partial import Partial, Scored
from saccade.repeats import PLAIN
from saccade.scores import Softcap

_requires_grad, _form = attrgetter("requires_grad"), attrgetter("shape", "dtype", "device")
_address, _strides, _is_negative = Tensor.data_ptr, Tensor.stride, Tensor.is_neg
_FLAGS = {bool, type(None)}
_MOST_BACKWARDS = 16
"""Ways in which the gradients of one call may lie."""
_shortcuts: BoundedCache[Any, Any] = BoundedCache(2048)
_guesses: BoundedCache[Any, Any] = BoundedCache(2048)


class Found(NamedTuple):
    """A call that may have a shortcut."""

    key: Hashable
    operands: Sequence[Tensor]
    """q, k and v, the sink if there is one, and what the score function captures"""
    addresses: list[int]
    """theirs"""
    needs_gradient: bool
    shortcut: Any
    """what runs it; None: nothing yet; False: never"""


def forget() -> None:
    """Drops all that is kept of calls: plans too."""
    _shortcuts.clear()
    _guesses.clear()
    repeats.forget()
    dispatch.forget()


def _plain_operands(q: Any, k: Any, v: Any) -> list[int] | None:
    """The addresses of q, k and v, where they lie plainly in a GPU's memory and nothing watches."""
    if not (type(q) in PLAIN and type(k) in PLAIN and type(v) in PLAIN) or repeats.on_host(q):
        return None
    if repeats.watched() or q.is_neg() or k.is_neg() or v.is_neg():
        return None
    try:
        addresses = [q.data_ptr(), k.data_ptr(), v.data_ptr()]
    except RuntimeError:  # tensors without memory
        return None
    return None if not all(addresses) or (addresses[0] | addresses[1] | addresses[2]) % ALIGNMENT else addresses


def _lie(q: Tensor, k: Tensor, v: Tensor) -> tuple[Hashable, ...]:
    return (
        q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(),
        q.dtype, k.dtype, v.dtype, q.device, k.device, v.device,
    )  # fmt: skip


def _others(tensors: Sequence[Tensor], addresses: list[int]) -> Hashable | None:
    """How tensors besides q, k and v lie, but for their forms; None where one does not lie plainly. Appends to the
    addresses."""
    lie: list[Hashable] = []
    for x in tensors:
        if type(x) not in PLAIN or x.is_neg():
            return None
        try:
            address = x.data_ptr()
        except RuntimeError:  # tensors without memory
            return None
        if not address:
            return None
        addresses.append(address)
        lie += x.stride(), address % ALIGNMENT
    return tuple(lie)


def _is_cast(x: Tensor) -> bool:
    """Whether autocast may take another dtype."""
    if not torch._C._is_any_autocast_enabled():
        return False
    device = x.device.type
    return torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) != x.dtype


# Calls of `attention`.


def find(
    q: Any,
    k: Any,
    v: Any,
    sink: Any,
    mask: Any,
    score_mod: Any,
    layout: Any,
    scale: Any,
    flags: tuple[Any, Any, Any],
    backend: Any,
) -> Found | None:
    """The key of a call that has no other arguments, and its shortcut; None of a call that takes the long way.

    Args:
        flags: `return_lse`, `return_max_scores` and `deterministic`.
    """
    if (type(mask) is not Window and mask is not None) or type(layout) is not Dense or not layout.plain:
        return None
    if type(scale) is not float and scale is not None:
        return None
    if scale == 0:  # or -0.0, which is equal
        return None
    if type(backend) is not str or not _FLAGS.issuperset(map(type, flags)):
        return None
    addresses = _plain_operands(q, k, v)
    if addresses is None or _is_cast(q):
        return None
    operands: Sequence[Tensor] = (q, k, v)
    sunk: Hashable = None
    if sink is not None:
        if (others := _others((sink,), addresses)) is None:
            return None
        operands, sunk = (q, k, v, sink), (_form(sink), others)
    needs = q.requires_grad or k.requires_grad or v.requires_grad or (sink is not None and sink.requires_grad)
    needs = needs and torch.is_grad_enabled()
    window = None if mask is None else (mask.left, mask.right)
    deterministic = flags[2] is None and torch.are_deterministic_algorithms_enabled()
    key = _lie(q, k, v), needs, window, layout.order, scale, sunk, flags, deterministic, backend
    if score_mod is None:
        return Found(key, operands, addresses, needs, _shortcuts.get(key))
    if type(score_mod) is not Softcap:
        return _find_with(score_mod, key, operands, addresses, needs)
    key = key, score_mod.cap
    return Found(key, operands, addresses, needs, _shortcuts.get(key))


class _Guess(NamedTuple):
    """The shortcut of an earlier call with a function at this address. It is this call's too where the proof of that
    one's recording holds, which decides what the function is, and where what this one captures lies as that did."""

    inputs: Callable[[Any], Any]
    others: Hashable
    needs_gradient: bool
    shortcut: Any


def _find_with(
    score_mod: Any, key: tuple[Hashable, ...], operands: Sequence[Tensor], addresses: list[int], needs: bool
) -> Found | None:
    """The same with a function, of a call that has this key without it."""
    grad, place = torch.is_grad_enabled(), len(addresses)
    guess_key = key, id(score_mod), grad, torch.get_default_dtype()
    guess = _guesses.get(guess_key)
    if guess is not None and (now := guess.inputs(score_mod)) is not None:
        if _others(now[0], addresses) == guess.others:
            return Found(guess_key, (*operands, *now[0]), addresses, guess.needs_gradient, guess.shortcut)
        del addresses[place:]
    if (bound := scores.proven(score_mod, operands[0])) is None:
        return None
    recording, tensors, numbers, inputs = bound  # the recording stands for the forms of the tensors
    if (others := _others(tensors, addresses)) is None:
        return None
    needs = needs or (grad and any(map(_requires_grad, tensors)))
    key = key, recording, others, *map(_bits, numbers)
    shortcut = _shortcuts.get(key)
    if inputs is not None and shortcut:
        _guesses.put(guess_key, _Guess(inputs, others, needs, shortcut))
    return Found(key, (*operands, *tensors), addresses, needs, shortcut)


def _bits(x: Any) -> Hashable:
    """A number as a key holds it: 0.0 and -0.0 are equal, and so are 1, 1.0 and True."""
    return x if type(x) is int else (type(x), struct.pack("d", x))


def learn(found: Found, call: Call, backend: str, flags: tuple[Any, Any, Any]) -> None:
    """Keeps the shortcut of a call that took the long way, if its launches are known by now."""
    lse, scored, _ = flags
    needs = found.needs_gradient
    repeat = repeats.kept(repeats.key_of(call, backend, bool(lse) or needs))
    if repeat is False or (needs and scored):
        _shortcuts.put(found.key, False)
    elif repeat is not None:
        kind = (
            _Training(repeat, flatten(call, backend), bool(lse))
            if needs
            else _Inference(repeat, bool(lse), bool(scored))
        )
        _shortcuts.put(found.key, kind)


class _Inference(NamedTuple):
    """A call without gradients."""

    repeat: Any
    lse: bool
    scored: bool

    def __call__(self, found: Found) -> Any:
        """What `attention` returns, or None where the repeat may not run now."""
        if not self.repeat.ready():
            return None
        out, lse, top = self.repeat(found.addresses)
        if self.scored:
            return Scored(out, lse if self.lse else None, top)
        return Partial(out, lse) if self.lse else out


class _Training:
    """A call with gradients: an autograd.Function of its own, which takes the registered operator where its backward is
    not one that it has seen."""

    def __init__(self, repeat: Any, flat: Sequence[Any], lse: bool) -> None:
        self.repeat, self.lse = repeat, lse
        _, self.static = split(flat)
        self.sink, self.captures = flat[3] is not None, len(flat[4])
        self.programs = programs(self.static)  # which the header names
        self.backwards: dict[Hashable, Any] = {}

    def __call__(self, found: Found) -> Any:
        """The same."""
        if not self.repeat.ready():
            return None
        results = _apply(self, found.addresses, *found.operands)
        return Partial(*results) if self.lse else results

    def gradients(
        self, dout: Tensor, dlse: Tensor | None, saved: Sequence[Tensor], needs: Sequence[bool]
    ) -> Sequence[Tensor | None]:
        """Those of the operands, and where some are not needed perhaps others; saved: operands, out and lse."""
        *operands, out, lse = saved
        given = (dout, out, lse, *operands) if dlse is None else (dout, dlse, out, lse, *operands)
        wanted = needs[len(operands) - self.captures :]
        key, addresses = None, []
        if not torch.is_grad_enabled() and not repeats.watched():
            key, addresses = _lies_of_backward(given)
            key = None if key is None else (key, wanted)
        if (repeat := self.backwards.get(key)) and repeat.ready():
            dq, dk, dv, dsink, *more = repeat(addresses)
            return (dq, dk, dv, dsink, *more) if self.sink else (dq, dk, dv, *more)
        tensors = operands if self.sink else [*operands[:3], None, *operands[3:]]
        flat = joined(tensors, self.static)
        dq, dk, dv, dsink, more = torch.ops.saccade.backward.default(dout, dlse, out, lse, *flat, wanted)
        if key is not None and key not in self.backwards and len(self.backwards) < _MOST_BACKWARDS:
            repeat = repeats.kept(_gradient_key(flat, dout, dlse, out, lse, wanted))
            self.backwards |= {} if repeat is None else {key: repeat}
        return (dq, dk, dv, dsink, *more) if self.sink else (dq, dk, dv, *more)


def _gradient_key(
    flat: Sequence[Any], dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, wanted: Sequence[bool]
) -> Hashable | None:
    """The key of `repeats` for the backward of a call."""
    call, backend = unflatten(*flat)
    layout = call.layout
    rows = None if dlse is None else layout.canonical_lse(dlse)
    saved = Saved(layout.canonical(dout), rows, layout.canonical(out), layout.canonical_lse(lse), tuple(wanted))
    return repeats.gradient_key_of(call.replace(max_scores=False), saved, backend)


def _lies_of_backward(given: Sequence[Tensor]) -> tuple[Hashable | None, list[int]]:
    """How the tensors of a backward lie, and where; None of those that take the long way."""
    try:
        addresses = [*map(_address, given)]
    except RuntimeError:  # tensors without memory, as those of torch's older vmap
        return None, []
    if not PLAIN.issuperset(map(type, given)) or not all(addresses) or any(map(_is_negative, given)):
        return None, []
    low = 0
    for address in addresses:
        low |= address
    rests = low % ALIGNMENT and tuple([address % ALIGNMENT for address in addresses])
    return (*map(_form, given), *map(_strides, given), rests), addresses


class _Repeated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, known: _Training, addresses: list[int], *operands: Tensor) -> Any:
        out, lse, _ = known.repeat(addresses)
        ctx.known = known
        ctx.save_for_backward(*operands[:3], *savable(operands[3:]), out, lse)
        ctx.set_materialize_grads(False)
        return (out, lse) if known.lse else out

    @staticmethod
    def backward(ctx: Any, *given: Tensor | None) -> Any:
        dout, dlse = (*given, None)[:2]
        if dout is None and dlse is None:
            return (None,) * len(ctx.needs_input_grad)
        saved, needs = ctx.saved_tensors, ctx.needs_input_grad[2:]
        dout = torch.zeros_like(saved[-2]) if dout is None else dout
        gradients = ctx.known.gradients(dout, dlse, saved, needs)
        if all(needs):
            return None, None, *gradients
        return None, None, *(x if asked else None for x, asked in zip(gradients, needs, strict=True))


_above: Any = super(torch.autograd.Function, _Repeated)
_apply = _above.apply
"""That of C++: torch's own looks for transforms first, of which there are none here."""


# Calls of the operators, as compiled models make them.


def forward(arguments: Sequence[Any], otherwise: Callable[..., Any]) -> Any:
    """`saccade::forward` of tensors that need no gradient."""
    q, k, v, sink, captures, tensors, header, ints, floats, lse = arguments
    addresses = None if tensors else _plain_operands(q, k, v)
    more = captures if sink is None else (sink, *captures)
    others = None if addresses is None else _others(more, addresses)
    if addresses is None or others is None:
        return otherwise(*arguments)
    key = _lie(q, k, v), tuple(map(_form, more)), others, header, *ints, struct.pack(f"{len(floats)}d", *floats), lse
    shortcut = _shortcuts.get(key)
    if shortcut and shortcut.ready():
        out, row_lse, top = shortcut(addresses)
        row_lse = shortcut.nothing(torch.float32) if row_lse is None else row_lse
        return out, row_lse, shortcut.nothing(torch.float32) if top is None else top
    results = otherwise(*arguments)
    if shortcut is None:
        call, backend = unflatten(*arguments[:-1])
        _keep(key, repeats.key_of(call, backend, lse))
    return results


def backward(arguments: Sequence[Any], otherwise: Callable[..., Any]) -> Any:
    """`saccade::backward` of tensors that need no gradient."""
    dout, dlse, out, lse, q, k, v, sink, captures, tensors, header, ints, floats, wanted = arguments
    given = (dout, out, lse, q, k, v) if dlse is None else (dout, dlse, out, lse, q, k, v)
    given = (*given, *captures) if sink is None else (*given, sink, *captures)
    lie, addresses = None, []
    if not tensors and _plain_operands(q, k, v) is not None:
        lie, addresses = _lies_of_backward(given)
    if lie is None:
        return otherwise(*arguments)
    key = lie, sink is None, header, *ints, struct.pack(f"{len(floats)}d", *floats), *wanted
    shortcut = _shortcuts.get(key)
    if shortcut and shortcut.ready():
        dq, dk, dv, *more = shortcut(addresses)
        dsink, *dcaptures = (shortcut.nothing(dout.dtype) if x is None else x for x in more)
        return dq, dk, dv, dsink, dcaptures
    results = otherwise(*arguments)
    if shortcut is None:
        _keep(key, _gradient_key(arguments[4:-1], dout, dlse, out, lse, wanted))
    return results


def _keep(key: Hashable, of: Hashable) -> None:
    """Keeps the Repeat of a key of `repeats` for an operator's call."""
    if (repeat := repeats.kept(of)) is not None:
        _shortcuts.put(key, repeat)
