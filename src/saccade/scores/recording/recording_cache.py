"""Recordings with their proofs: a function runs again when its proof no longer holds."""

from __future__ import annotations

import types
from typing import Any, NamedTuple

import torch
from torch import Tensor

from saccade.bounded_cache import BoundedCache
from saccade.scores.codegen.program import Program
from saccade.scores.recording.proof import Find, Proof, Unproven
from saccade.scores.recording.recorder import Recording


class ProvenRecording(NamedTuple):
    """A Program, and where its function finds the tensors and numbers that it takes."""

    proof: Proof
    program: Program
    tensors: tuple[Find, ...]
    numbers: tuple[tuple[Any, Find | None], ...]
    """Numbers, and the tensors that they are read of."""
    rows: bool
    sure: bool
    """The proof is older than the recording. Otherwise another thread may have changed something between the two."""

    def inputs(self, fn: Any) -> tuple[list[Tensor], list[Any]]:
        tensors = [find(fn) for find in self.tensors]
        return tensors, [x if find is None else find(fn).item() for x, find in self.numbers]


_cache: BoundedCache[Any, ProvenRecording] = BoundedCache(512)


def find_recording(fn: Any, settings: Any) -> ProvenRecording | None:
    """The recording of a function whose proof holds. `settings` are what a recording depends on besides the function.
    It may be used where it is `sure`."""
    proven = _cache.get(_key(fn, settings))
    return proven if proven is not None and proven.proof.holds(fn) else None


def find_sure(fn: Any, *settings: Any) -> ProvenRecording | None:
    """The recording of a function whose proof holds, by any name, where it may be used. The settings, as above, but
    for the name."""
    proven = _cache.get(_key(fn, settings))
    return proven if proven is not None and proven.proof.holds(fn) else None


def put_recording(
    fn: Any, settings: Any, recording: Recording, program: Program, older: ProvenRecording | None
) -> None:
    """Caches a recording that has a proof. It is sure if `older`, which was found before the recording, still holds."""
    if recording.called is None:
        return
    key, tape = _key(fn, settings), recording.tape
    try:
        sure = older is not None and older.proof.holds(fn)
        proof = older.proof if older is not None and sure else Proof(fn, recording.called)
        tensors = tuple([proof.find(x) for x in tape.tensors])
        sources = [None if x is None else proof.find(x) for x in tape.sources]
        numbers = tuple(zip(tape.numbers, sources, strict=True))
        owners = (fn.__func__, fn.__self__) if isinstance(fn, types.MethodType) else (fn,)
        proven = _cache.put(key, ProvenRecording(proof, program, tensors, numbers, tape.rows, sure), owners)
        if sure:
            dtype, device, _, *more = settings
            _cache.put(_key(fn, (dtype, device, *more)), proven, owners)
    except (Unproven, TypeError):  # TypeError: an owner without weak references
        _cache.discard(key)


def _key(fn: Any, settings: Any) -> Any:
    same = (id(fn.__func__), id(fn.__self__)) if type(fn) is types.MethodType else id(fn)
    return same, settings, torch.is_grad_enabled(), torch.get_default_dtype()
