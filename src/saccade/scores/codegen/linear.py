"""Scores that are linear in the key's index: `score + pitch kv_idx + rest`, where pitch and rest belong to the row.

A kernel adds such a term to a tile with one multiply-add for each score: `pitch` times the column in the tile, onto the
product; what is the same for a row goes into the softmax's shift. ALiBi is one.
"""

# torch.fx types the arguments of nodes as unions of everything.
# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportOptionalMemberAccess=false

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from saccade.scores.codegen.emitter import Emitter
from saccade.scores.codegen.program import Program
from saccade.scores.codegen.ranges import limits_of
from saccade.scores.codegen.reads import EmitOptions, Value
from saccade.scores.recording.trace import name_of, outputs_of, shallow

PARAMETERS = "data, b, h, q_idx, kv_idx"
_SCORE = "score"
_LEAVES = {_SCORE: (1, None), "kv_idx": (0, "1.0")}


class _Other(Exception):
    """Not linear."""


def linear_source(program: Program, options: EmitOptions) -> str | None:
    """`pitch`, and `level`: what is added to a score of product 0; None for a score that is not linear."""
    graph = program.value_decomposed.graph
    if not shallow(graph):
        return None
    (out,) = outputs_of(graph)
    emitter = Emitter(program, options)
    try:
        scores, pitch = _terms(out, emitter)
    except _Other:
        return None
    if scores != 1:
        return None
    level = Emitter(program, options)
    level.values = {x: Value("0.0", "float") for x in graph.nodes if x.name == _SCORE}
    added = level.float(level.value(out))
    sources = (
        emitter.function("pitch", PARAMETERS, f"return {pitch or '0.0'}"),
        level.function("level", PARAMETERS, f"return {added}"),
    )
    return "\n\n".join(sources)


def _terms(x: Any, emitter: Emitter) -> tuple[int, str | None]:
    """How often the score is in a sum, and the factor of kv_idx, None for 0.

    Raises:
        _Other: the value is no such sum.
    """
    if not isinstance(x, fx.Node) or _of_a_row(x):
        return 0, None
    if x.op == "placeholder" and x.name in _LEAVES:
        return _LEAVES[x.name]
    if _wraps(x, emitter):
        raise _Other
    name = name_of(x) if x.op == "call_function" else ""
    if name in ("add", "sub") and len(x.args) == 2 and x.kwargs.get("alpha", 1) == 1:
        (a, p), (b, q) = (_terms(y, emitter) for y in x.args)
        if name == "sub" and b:
            raise _Other
        sign = "-" if name == "sub" else "+"
        return a + b, p if q is None else f"({p or '0.0'} {sign} {q})"
    if name == "neg":
        return _scaled(x.args[0], "(-1.0)", emitter)
    if name == "mul":
        for factor, other in (x.args, x.args[::-1]):
            if not isinstance(factor, fx.Node) or _of_a_row(factor):
                return _scaled(other, emitter.float(emitter.value(factor)), emitter)
    if name == "_to_copy" and _keeps(x.args[0].meta["val"].dtype, x.meta["val"].dtype):
        return _terms(x.args[0], emitter)
    raise _Other


def _wraps(x: fx.Node, emitter: Emitter) -> bool:
    """Whether an integer may have left the limits of its dtype, and have come back as another."""
    dtype = x.meta["val"].dtype
    if dtype.is_floating_point or dtype in (torch.bool, torch.int64):
        return False
    return Emitter(emitter.program, emitter.options).value(x).span == limits_of(dtype)


def _keeps(source: torch.dtype, target: torch.dtype) -> bool:
    """Whether indices stay what they are."""
    wide = target in (torch.float32, torch.int32, torch.int64)
    return target == source or (wide and not source.is_floating_point)


def _scaled(x: Any, factor: str, emitter: Emitter) -> tuple[int, str | None]:
    scores, pitch = _terms(x, emitter)
    if scores:
        raise _Other
    return 0, pitch and f"({factor} * {pitch})"


def _of_a_row(x: fx.Node) -> bool:
    """One value for all keys."""
    return tuple(x.meta["val"].shape)[-1:] in ((), (1,))
