"""Recordings with their proofs: a function runs again when its proof no longer holds.

A proof speaks of whatever function it is asked about. So a recording is found by the function's identity, and one that
each call defines anew, as a closure in a model's `forward`, by its code and what it captures. Either is a guess, which
the proof decides.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from saccade.bounded_cache import BoundedCache
from saccade.scores.codegen.program import Program
from saccade.scores.recording.proof import PARTS, Proof, Unproven, contents
from saccade.scores.recording.recorder import Recording
from saccade.scores.recording.tape import Tape


class ProvenRecording(NamedTuple):
    """A Program, and what its function reads the tensors and numbers from that it takes."""

    proof: Proof
    program: Program
    inputs: Callable[[Any], tuple[list[Tensor], list[Any]] | None]
    """(function) -> its tensors and numbers now; None where the proof does not hold, or they have other forms"""
    rows: bool
    whole: bool
    """What its Score has is what the function captures, as it is; the proof speaks of the forms of all that."""
    counts: bool
    """Whether tensors' items are among its numbers. All others are what the proof compares them with."""
    sure: bool
    """The proof is older than the recording. Otherwise another thread may have changed something between the two."""


_cache: BoundedCache[Any, ProvenRecording] = BoundedCache(512)
_sure: BoundedCache[Any, ProvenRecording] = BoundedCache(512)
"""Those of score functions that may be used, without the name among their settings."""


def find_recording(fn: Any, settings: Any) -> ProvenRecording | None:
    """The recording of a function whose proof holds. `settings` are what a recording depends on besides the function.
    It may be used where it is `sure`."""
    proven = _cache.get(_key(_same(fn), settings))
    if proven is not None and proven.proof.holds(fn):
        return proven
    proven = _cache.get(_key(_twin(fn), settings))
    return proven if proven is not None and proven.proof.holds(fn) else None


def find_sure(fn: Any, dtype: torch.dtype, device: torch.device) -> tuple[ProvenRecording, Any] | None:
    """The recording of a score function whose proof holds, by any name, where it may be used; and its tensors and
    numbers. In the hot path of small calls."""
    settings = dtype, device, torch.is_grad_enabled(), torch.get_default_dtype()
    found = _sure.get((_same(fn), *settings))
    if found is not None and (now := found.inputs(fn)) is not None:
        return found, now
    found = _sure.get((_twin(fn), *settings))
    return (found, now) if found is not None and (now := found.inputs(fn)) is not None else None


def put_recording(
    fn: Any, settings: Any, recording: Recording, program: Program, older: ProvenRecording | None
) -> None:
    """Caches a recording that has a proof. It is sure if `older`, which was found before the recording, still holds."""
    if recording.called is None:
        return
    tape = recording.tape
    try:
        proof = Proof(fn, recording.called)
        inputs = proof.inputs(tape.tensors, [*zip(tape.numbers, tape.sources, strict=True)], recording.made)
        sure = older is not None and older.proof.holds(fn)  # before the recording, and after the new proof
        whole, counts = _whole(program, tape, settings[1]), any(x is not None for x in tape.sources)
        proven = ProvenRecording(proof, program, inputs, tape.rows, whole, counts, sure)
        owners = (fn.__func__, fn.__self__) if isinstance(fn, types.MethodType) else (fn,)
        twin, codes = _twin(fn), _codes(fn)
        places = [(_same(fn), owners), (twin, codes)] if codes else [(_same(fn), owners)]
        for name, of in places:
            _cache.put(_key(name, settings), proven, of)
            if sure and len(settings) == 3:  # of a score function
                _sure.put((name, *settings[:2], torch.is_grad_enabled(), torch.get_default_dtype()), proven, of)
    except (Unproven, TypeError):  # TypeError: an owner without weak references
        _cache.discard(_key(_same(fn), settings))


def _whole(program: Program, tape: Tape, device: torch.device) -> bool:
    captured = [*tape.tensors, *tape.numbers]
    places = [*program.before[0], *program.numbers[0]]
    computes = program.before[1] is not None or program.numbers[1] is not None
    return not computes and places == [*range(len(captured))] and all(x.device == device for x in tape.tensors)


def _key(fn: Any, settings: Any) -> Any:
    return fn, settings, torch.is_grad_enabled(), torch.get_default_dtype()


def _same(fn: Any) -> Any:
    """The function itself."""
    return (id(fn.__func__), id(fn.__self__)) if type(fn) is types.MethodType else id(fn)


def _codes(fn: Any) -> list[types.CodeType]:
    """The code of a function, or of those that a record holds."""
    if type(fn) is types.FunctionType:
        return [fn.__code__]
    return [code for x in _parts(fn) for code in _codes(x)]


def _parts(fn: Any) -> Sequence[Any]:
    """What tells one record, or partial, from others: its function and what is in its tuples."""
    kind = type(fn)
    if kind is functools.partial:
        return fn.func, *fn.args
    names, containers = PARTS.get(kind, ((), ())) if type(kind) is type else ((), ())
    return *[getattr(fn, name) for name in names[:1]], *[x for name in containers for x in getattr(fn, name)]


def _twin(fn: Any) -> Any:
    """What functions share that may be one function, defined again: code, and what it captures."""
    if type(fn) is types.FunctionType:  # which may capture itself
        return id(fn.__code__), *[_captured(contents(cell)) for cell in fn.__closure__ or ()]
    parts = _parts(fn)
    return (type(fn), *map(_twin, parts)) if parts else _captured(fn)


def _captured(x: Any) -> Any:
    """A tensor by its form, as another may take its place; else the object, or what is equal to it."""
    kind = type(x)
    if kind is Tensor or kind is torch.nn.Parameter:
        return x.shape, x.dtype, x.device
    return (kind, x) if kind is float or kind is int or kind is bool or kind is str else _same(x)
