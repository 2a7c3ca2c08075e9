"""Programs as text, which exported graphs carry into other processes, and back.

The text is the graph of aten operations that a trace became. Reading it traces the same operations again, with the
checks of every trace: nothing else in a file is run.
"""

# torch.fx types the arguments of nodes as unions of everything.
# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

import base64
import json
import operator
import zlib
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, fx

from saccade.scores.codegen.program import Program, cache, program_of
from saccade.scores.tracing.lowering import Raw
from saccade.util.caches import compile_constant

NONE = "-"
_NAMESPACES = "aten", "prims", "saccade"
_TYPES = {torch.dtype: "dtype", torch.device: "device", torch.layout: "layout", torch.memory_format: "memory_format"}


@compile_constant
def written_programs(identities: tuple[str, ...]) -> str:
    """The Programs of these names as one word; names that are no Program's are left out."""
    programs = {name: program for name in identities if (program := program_of(name)) is not None}
    if not programs:
        return NONE
    text = json.dumps({name: _described(program) for name, program in programs.items()}, separators=(",", ":"))
    return base64.urlsafe_b64encode(zlib.compress(text.encode(), 9)).decode()


@lru_cache(maxsize=512)
def read_programs(text: str) -> None:
    """Keeps the Programs of a text under their names, as long as the process lives."""
    if text != NONE:
        for name, described in json.loads(zlib.decompress(base64.urlsafe_b64decode(text))).items():
            cache.adopt(name, lambda described=described: _made(described))


def _described(program: Program) -> dict[str, Any]:
    nodes = list(program.raw.module.graph.nodes)
    numbers_of = {node: i for i, node in enumerate(nodes)}
    inputs = [node.meta["val"] for node in nodes if node.op == "placeholder"]
    return {
        "name": program.name,
        "dtype": _word(program.dtype),
        "inputs": [[_word(x.dtype), list(x.shape)] for x in inputs],
        "tensors": program.raw.inputs[0],
        "steps": [
            [str(node.target), _plain(node.args, numbers_of), _plain(node.kwargs, numbers_of)]
            for node in nodes
            if node.op == "call_function"
        ],
        "outputs": _plain(nodes[-1].args[0], numbers_of),
    }


def _word(x: Any) -> str:
    return str(x).removeprefix("torch.")


def _plain(x: Any, numbers_of: dict[fx.Node, int]) -> Any:
    """An argument of a node, of what JSON has."""
    if isinstance(x, fx.Node):
        return {"node": numbers_of[x]}
    if isinstance(x, (tuple, list)):
        return [_plain(y, numbers_of) for y in x]
    if isinstance(x, dict):
        return {"named": {key: _plain(y, numbers_of) for key, y in x.items()}}
    for kind, word in _TYPES.items():
        if isinstance(x, kind):
            return {word: _word(x)}
    if x is None or isinstance(x, (bool, int, float, str)):
        return x
    raise TypeError(f"a score function with an argument {x!r} cannot be exported: it has no text")


def _made(described: dict[str, Any]) -> Program:
    inputs = [
        torch.zeros((), dtype=_of("dtype", word), device="cpu").expand(shape) for word, shape in described["inputs"]
    ]
    steps = [(_function(target), args, kwargs) for target, args, kwargs in described["steps"]]

    def run(*values: Tensor) -> tuple[Any, ...]:
        found = list(values)
        for function, args, kwargs in steps:
            found.append(function(*_filled(args, found), **_filled(kwargs, found)))
        return tuple(_filled(described["outputs"], found))

    end = 5 + described["tensors"]
    raw = Raw(run, inputs[:5], inputs[5:end], inputs[end:])
    return Program(described["name"], raw, _of("dtype", described["dtype"]))


def _filled(x: Any, found: list[Any]) -> Any:
    """The inverse of `_plain`, with values in the place of nodes."""
    if isinstance(x, list):
        return [_filled(y, found) for y in x]
    if not isinstance(x, dict):
        return x
    ((word, inner),) = x.items()
    if word == "node":
        return found[inner]
    if word == "named":
        return {key: _filled(y, found) for key, y in inner.items()}
    return _of(word, inner)


def _of(word: str, value: str) -> Any:
    return torch.device(value) if word == "device" else getattr(torch, value)


def _function(target: str) -> Any:
    if target == str(operator.getitem):
        return operator.getitem
    namespace, name, overload = target.split(".")
    if namespace not in _NAMESPACES:
        raise ValueError(f"an exported score function calls {target}, which is no operation of torch")
    return getattr(getattr(getattr(torch.ops, namespace), name), overload)
