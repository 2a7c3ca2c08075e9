"""Scores to which nothing is added but reads by distance: beyond the reach of its tables such a score adds one number
to all scores of a tile.

`relative_bias` and `t5_bias` are such: of s = 8192, 95 % of the tiles lie beyond a reach of 128.
"""

# torch.fx types the arguments of nodes as unions of everything.
# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from saccade.scores.codegen.emitter import Emitter
from saccade.scores.codegen.program import Program
from saccade.scores.codegen.reads import EmitOptions, Value
from saccade.scores.recording.trace import name_of, outputs_of, shallow

_REACH = "data, b, h"
_LEVEL = "data, b, h, q_idx, kv_idx"


def has_plateaus(program: Program) -> bool:
    """Whether a score is itself plus or minus reads by distance."""
    graph = program.value_decomposed.graph
    if not program.distance_reads or not shallow(graph):
        return False
    return _scores(outputs_of(graph)[0], program) == 1


def plateau_source(program: Program, options: EmitOptions) -> str:
    """`reach`: low and high, the distances up to which and from which on every read has one place; and `level`: what is
    added to a score at one row and one key. Where every read has one place at all distances, they are all up to low and
    none is from high on: a kernel finds each distance on one side, or in reach."""
    graph = program.value_decomposed.graph
    level = Emitter(program, options)
    for x in graph.nodes:
        if x.name == "score":
            level.values[x] = Value("0.0", "float")
        elif _by_distance(x, program):
            level.values[x] = level.table(_number(x, program), ())
    text = level.float(level.value(outputs_of(graph)[0]))
    reach = Emitter(program, options)
    lows, highs = zip(*(reach.table_reach(n) for n in range(len(program.distance_reads))), strict=True)
    low = _nested("tl.minimum", lows)
    ends = low, _nested("tl.maximum", (low, *highs))
    sources = (
        reach.function("reach", _REACH, f"return {', '.join(f'{x}.to(tl.int32)' for x in ends)}"),
        level.function("level", _LEVEL, f"return {text}"),
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
