"""Recordings with their proofs: a function runs again when its proof no longer holds.

A proof speaks of whatever function it is asked about. So a recording is found by the function's identity, and one that
each call defines anew, as a closure in a model's `forward`, by its code and the objects that it captures. Either is a
guess, which the proof decides.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from saccade.bounded_cache import BoundedCache
from saccade.scores.codegen.program import Program
from saccade.scores.recording.proof import PARTS, Proof, Unproven, contents
from saccade.scores.recording.recorder import Recording


class ProvenRecording(NamedTuple):
    """A Program, and what its function reads the tensors and numbers from that it takes."""

    proof: Proof
    program: Program
    inputs: Callable[[Any], tuple[list[Tensor], list[Any]]]
    """(function) -> its tensors and numbers now"""
    rows: bool
    sure: bool
    """The proof is older than the recording. Otherwise another thread may have changed something between the two."""


_cache: BoundedCache[Any, ProvenRecording] = BoundedCache(512)


def find_recording(fn: Any, settings: Any) -> ProvenRecording | None:
    """The recording of a function whose proof holds. `settings` are what a recording depends on besides the function.
    It may be used where it is `sure`."""
    proven = _cache.get(_key(_same(fn), settings))
    if proven is not None and proven.proof.holds(fn):
        return proven
    proven = _cache.get(_key(_twin(fn), settings))
    return proven if proven is not None and proven.proof.holds(fn) else None


def find_sure(fn: Any, *settings: Any) -> ProvenRecording | None:
    """The recording of a function whose proof holds, by any name, where it may be used. The settings, as above, but
    for the name."""
    return find_recording(fn, settings)


def put_recording(
    fn: Any, settings: Any, recording: Recording, program: Program, older: ProvenRecording | None
) -> None:
    """Caches a recording that has a proof. It is sure if `older`, which was found before the recording, still holds."""
    if recording.called is None:
        return
    tape, keys = recording.tape, [_key(_same(fn), settings)]
    try:
        sure = older is not None and older.proof.holds(fn)
        proof = older.proof if older is not None and sure else Proof(fn, recording.called)
        inputs = proof.inputs(tape.tensors, zip(tape.numbers, tape.sources, strict=True))
        proven = ProvenRecording(proof, program, inputs, tape.rows, sure)
        owners = (fn.__func__, fn.__self__) if isinstance(fn, types.MethodType) else (fn,)
        twin, code = _twin(fn), _code(fn)
        of_others = [] if code is None else [_key(twin, settings)]
        if sure:
            dtype, device, _, *more = settings
            keys.append(_key(_same(fn), (dtype, device, *more)))
            of_others += [] if code is None else [_key(twin, (dtype, device, *more))]
        for key in keys:
            _cache.put(key, proven, owners)
        for key in of_others:
            _cache.put(key, proven, (code,))
    except (Unproven, TypeError):  # TypeError: an owner without weak references
        _cache.discard(keys[0])


def _key(fn: Any, settings: Any) -> Any:
    return fn, settings, torch.is_grad_enabled(), torch.get_default_dtype()


def _same(fn: Any) -> Any:
    """The function itself."""
    return (id(fn.__func__), id(fn.__self__)) if type(fn) is types.MethodType else id(fn)


def _code(fn: Any) -> types.CodeType | None:
    """The code of a function, or of the one that a record holds."""
    while type(fn) in PARTS or type(fn) is functools.partial:
        fn = fn.func if type(fn) is functools.partial else getattr(fn, "fn", None)
    return fn.__code__ if type(fn) is types.FunctionType else None


def _twin(fn: Any) -> Any:
    """What functions share that may be one function, defined again: code, and the objects that it captures."""
    kind = type(fn)
    if kind is types.FunctionType:
        return id(fn.__code__), *[id(contents(cell)) for cell in fn.__closure__ or ()]
    if kind is functools.partial:
        return kind, _twin(fn.func), *map(id, fn.args)
    if kind in PARTS and (inner := getattr(fn, "fn", None)) is not None:
        return kind, _twin(inner), *map(id, getattr(fn, "tensors", ()))
    return _same(fn)
