"""Recordings that are kept with their proofs: a function that has one runs again where it no longer holds."""

from __future__ import annotations

import types
import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor

from saccade.scores.codegen.program import Program
from saccade.scores.recording.proof import Find, Proof, Unproven
from saccade.scores.recording.recorder import Recording

MAXSIZE = 256


class Kept(NamedTuple):
    """A Program, and where its function finds what it takes."""

    proof: Proof
    program: Program
    tensors: tuple[Find, ...]
    numbers: tuple[tuple[Any, Find | None], ...]
    """Numbers, and the tensors that they are read of."""
    rows: bool
    alive: tuple[Any, ...]
    """Weak references, which take it away with what they refer to."""
    sure: bool
    """The proof is older than the recording. Else another thread may have changed something between the two."""

    def inputs(self, fn: Any) -> tuple[list[Tensor], list[Any]]:
        tensors = [find(fn) for find in self.tensors]
        return tensors, [x if find is None else find(fn).item() for x, find in self.numbers]


_kept: dict[Any, Kept] = {}


def kept(fn: Any, form: Any) -> Kept | None:
    """What is known of a function whose proof holds; `form` is all else that a recording depends on. Its recording is
    the function's if it is `sure`."""
    found = _kept.get(_key(fn, form))
    return found if found is not None and found.proof.holds(fn) else None


def keep(fn: Any, form: Any, recording: Recording, program: Program, older: Kept | None) -> None:
    """Keeps a recording if there is a proof for it, surely if `older` was `kept` before the recording and still is."""
    if recording.called is None:
        return
    key = _key(fn, form)
    try:
        sure = older is not None and older.proof.holds(fn)
        proof = older.proof if older is not None and sure else Proof(fn, recording.called)
        tensors = tuple([proof.find(x) for x in recording.tape.tensors])
        read = [None if x is None else proof.find(x) for x in recording.tape.sources]
        parts = (fn.__func__, fn.__self__) if isinstance(fn, types.MethodType) else (fn,)
        alive = tuple([weakref.ref(x, lambda _: _kept.pop(key, None)) for x in parts])
    except (Unproven, TypeError):  # or what has no weak references
        _kept.pop(key, None)
        return
    if len(_kept) >= MAXSIZE:
        _kept.clear()
    numbers = tuple(zip(recording.tape.numbers, read, strict=True))
    _kept[key] = Kept(proof, program, tensors, numbers, recording.tape.rows, alive, sure)


def _key(fn: Any, form: Any) -> Any:
    same = (id(fn.__func__), id(fn.__self__)) if type(fn) is types.MethodType else id(fn)
    return same, form, torch.is_grad_enabled(), torch.get_default_dtype()


def forget() -> None:
    _kept.clear()
