"""Whether captured tensors reach as far as a call's indices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor, fx

from saccade.scores.callbacks.score_callback import CallbackMod
from saccade.scores.codegen.program import program_of
from saccade.scores.library import Ready
from saccade.scores.tracing.tape import TILE
from saccade.util.caches import compile_constant


class Sizes(NamedTuple):
    """How many of each index a call has."""

    b: int
    h: int
    s_q: int
    s_k: int
    exact: bool = True
    """Whether every sequence has these lengths; otherwise tensors for rows and keys may be longer."""

    def __str__(self) -> str:
        more = "" if self.exact else ", or more rows and keys"
        return f"(b, h_q, s_q, s_k) = {tuple(self[:4])}{more}"


def broadcasts(shape: Sequence[int], sizes: Sizes) -> bool:
    """Whether a shape has one element, or one for each index, in each of the last dimensions."""
    sizes_of_shape = (*(1,) * (4 - len(shape)), *shape)
    longer = False, False, not sizes.exact, not sizes.exact
    return len(shape) <= 4 and all(
        n == 1 or n == m or (more and n > m) for n, m, more in zip(sizes_of_shape, sizes[:4], longer, strict=True)
    )


def complaint(score_mod: Any, sizes: Sizes) -> str | None:
    """What is wrong with the shapes of a ready modification's or a callback's tensors, or None."""
    if isinstance(score_mod, Ready):
        if score_mod.parts:
            return next(filter(None, (complaint(part, sizes) for part in score_mod.parts)), None)
        t = score_mod.tensors[0]
        if score_mod.heads is not None:
            if t.shape[score_mod.heads] == sizes.h or (score_mod.shares and t.shape[score_mod.heads] == 1):
                return None
            return f"{score_mod.kind} needs one of each query head, h_q = {sizes.h}, got {tuple(t.shape)}"
    tensors = score_mod.tensors if isinstance(score_mod, (Ready, CallbackMod)) else ()
    for t in tensors:
        if not broadcasts(t.shape, sizes):
            name = score_mod.kind or "a callback's tensor"
            return f"{name} must broadcast to {sizes}, got {tuple(t.shape)}"
    return None


def short(identity: str, tensors: Sequence[Tensor], sizes: Sizes) -> str | None:
    """An error for a tensor with fewer elements than the index that it is read at, or None. Computed indices are not
    checked."""
    for tensor, dim, name in _direct(identity):
        size = getattr(sizes, {"q_idx": "s_q", "kv_idx": "s_k"}.get(name, name))
        if tensors[tensor].shape[dim] < size and (sizes.exact or name in ("b", "h")):
            function, shape = identity.partition("~")[0], tuple(tensors[tensor].shape)
            return f"{function} reads a tensor {shape} at {name} in dimension {dim}, and the call has {sizes}"
    return None


@compile_constant
def _direct(identity: str) -> list[tuple[int, int, str]]:
    """Tensors, dimensions and the names of the indices that these are read at; found once for a program."""
    program = program_of(identity)
    if program is None:
        return []
    if "direct" not in program.emitted:
        program.emitted["direct"] = [
            (tensor, dim, str(x.target))
            for tensor, at in zip(program.read_tensors, program.read_indices, strict=True)
            for dim, x in enumerate(at)
            if isinstance(x, fx.Node) and x.op == "placeholder" and x.target in TILE[1:]
        ]
    return program.emitted["direct"]
