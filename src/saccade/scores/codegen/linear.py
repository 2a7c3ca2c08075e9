"""Scores of which a kernel adds little to a tile: linear ones, and those that are constant beyond a distance.

Linear in the key's index is `score + pitch kv_idx + rest`, where pitch and rest belong to the row. A kernel adds such a
term to a tile with one multiply-add for each score: `pitch` times the column in the tile, onto the product; what is the
same for a row goes into the softmax's shift. ALiBi is one.

Scores to which nothing is added but reads by distance have one number for all scores of a tile beyond the reach of
their tables. `relative_bias` and `t5_bias` are such: of s = 8192, 95 % of the tiles lie beyond a reach of 128.
"""

# torch.fx types the arguments of nodes as unions of everything.
# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportOptionalMemberAccess=false
# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from saccade.scores.codegen.emitter import EmitOptions, Emitter, Value
from saccade.scores.codegen.program import Program
from saccade.scores.codegen.ranges import limits_of
from saccade.scores.tracing.lowering import name_of, outputs_of, shallow

PARAMETERS = "data, b, h, q_idx, kv_idx"
_SCORE = "score"
_LEAVES = {_SCORE: (1, None), "kv_idx": (0, "1.0")}


class _Other(Exception):
    """Not linear."""


def linear_source(program: Program, options: EmitOptions) -> str | None:
    """`pitch`, and `bias`: what is added to a score of product 0; None for a score that is not linear."""
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
    bias = Emitter(program, options)
    bias.values = {x: Value("0.0", "float") for x in graph.nodes if x.name == _SCORE}
    added = bias.float(bias.value(out))
    sources = (
        emitter.function("pitch", PARAMETERS, f"return {pitch or '0.0'}"),
        bias.function("bias", PARAMETERS, f"return {added}"),
    )
    return "\n\n".join(sources)


def _terms(x: Any, emitter: Emitter) -> tuple[int, str | None]:
    """How often the score is in a sum, and the factor of kv_idx, None for 0. Raises _Other for any other value."""
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


_REACH = "data, b, h"
_BIAS = "data, b, h, q_idx, kv_idx"


def has_plateaus(program: Program) -> bool:
    """Whether a score is itself plus or minus reads by distance."""
    graph = program.value_decomposed.graph
    if not program.distance_reads or not shallow(graph):
        return False
    return _scores(outputs_of(graph)[0], program) == 1


def plateau_source(program: Program, options: EmitOptions) -> str:
    """`reach`: low and high, the distances up to which and from which on every read has one place; and `bias`: what is
    added to a score at one row and one key. Where every read has one place at all distances, they are all up to low and
    none is from high on: a kernel finds each distance on one side, or in reach."""
    graph = program.value_decomposed.graph
    bias = Emitter(program, options)
    for x in graph.nodes:
        if x.name == "score":
            bias.values[x] = Value("0.0", "float")
        elif _by_distance(x, program):
            bias.values[x] = bias.table(_number(x, program), ())
    text = bias.float(bias.value(outputs_of(graph)[0]))
    reach = Emitter(program, options)
    lows, highs = zip(*(reach.table_reach(n) for n in range(len(program.distance_reads))), strict=True)
    low = _nested("tl.minimum", lows)
    ends = low, _nested("tl.maximum", (low, *highs))
    sources = (
        reach.function("reach", _REACH, f"return {', '.join(f'{x}.to(tl.int32)' for x in ends)}"),
        bias.function("bias", _BIAS, f"return {text}"),
    )
    return "\n\n".join(sources)


def _nested(name: str, texts: tuple[str, ...]) -> str:
    return texts[0] if len(texts) == 1 else f"{name}({texts[0]}, {_nested(name, texts[1:])})"


def _number(x: fx.Node, program: Program) -> int:
    """Which of the reads by distance a node is."""
    return list(program.distance_reads).index(x.meta["read"])


def _by_distance(x: fx.Node, program: Program) -> bool:
    return x.op == "call_function" and x.meta.get("read") in program.distance_reads


def _scores(x: Any, program: Program) -> int | None:
    """How often the score is in a sum of it and reads by distance; None of anything else."""
    if not isinstance(x, fx.Node):
        return None
    if _by_distance(x, program):
        return 0
    if x.op == "placeholder":
        return 1 if x.name == "score" else None
    name = name_of(x) if x.op == "call_function" else ""
    if name == "_to_copy" and x.meta["val"].dtype == torch.float32:
        return _scores(x.args[0], program)
    if name in ("add", "sub") and len(x.args) == 2 and x.kwargs.get("alpha", 1) == 1:
        a, b = (_scores(y, program) for y in x.args)
        return None if a is None or b is None or (name == "sub" and b) else a + b
    return None
