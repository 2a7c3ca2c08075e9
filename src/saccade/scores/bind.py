"""From a function of the score to the Score that a Call holds, and back from its flat form."""

from __future__ import annotations

import re
from collections.abc import Hashable, Sequence
from contextlib import nullcontext
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from saccade.scores.callbacks.score_callback import CallbackMod, callbacks_of
from saccade.scores.codegen.program import Program, cache, pinned, program_of
from saccade.scores.codegen.ranges import check_numbers
from saccade.scores.library import KINDS, Ready, Softcap
from saccade.scores.score_mod import Function, Predicate, Score, ScoreMod, Traced, WithDerivative, name_of, one_by_one
from saccade.scores.tracing.guards import GuardedTrace, find_trace, find_trusted, put_trace
from saccade.scores.tracing.tape import TILE, broadcast_shape
from saccade.scores.tracing.trace import trace_function
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


_form = attrgetter("shape", "dtype", "device")


def is_kind(word: str) -> bool:
    """Whether a Spec may call a score so."""
    return (
        word == "composed"
        or all(part in KINDS for part in word.split("+"))
        or bool(re.fullmatch(r"score\(\w+\)", word))
    )


def bind(score_mod: Function | Score | None, q: Tensor) -> Score | None:
    """The Score of any callable, which is traced the first time. Raises TypeError for what is not callable, and
    ValueError for a function that cannot be traced, a wrong derivative, or tensors on other devices."""
    if score_mod is None or isinstance(score_mod, Score):
        return score_mod
    if not callable(score_mod):
        raise TypeError(f"score_mod must be a function of (score, b, h, q_idx, kv_idx), got {score_mod!r}")
    if torch.compiler.is_dynamo_compiling():
        # Imported here, as it imports torch's compiler, which takes as long as torch itself.
        from saccade.scores import bind_compiled

        return bind_compiled.bind(score_mod, q)
    if not isinstance(score_mod, CallbackMod):
        return _bind(score_mod, q)
    values, last = score_mod.values(q), score_mod.bound
    if last is not None and last[0] == values:
        return last[1]
    score = _bind(score_mod, q)
    # A value that is computed of a tensor is of what the tensor holds now.
    computes = score.program.before[1] is not None or score.program.numbers[1] is not None
    score_mod.bound = None if computes else (values, score)
    return score


def _bind(score_mod: Function, q: Tensor) -> Traced:
    own = isinstance(score_mod, ScoreMod) and score_mod.bprop is not None
    fn = WithDerivative(score_mod) if isinstance(score_mod, ScoreMod) and own else score_mod
    name = score_mod.kind if isinstance(score_mod, Ready) and score_mod.kind else f"score({name_of(score_mod)})"
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    program, tensors, numbers, rows = _traced(score_mod, fn, (dtype, q.device, name), q.device, 1 + own)
    score = Traced(program, tensors, numbers, score_mod, rows)
    if torch.compiler.is_compiling():  # torch.export, whose graph names the Program, and does not keep it alive
        pinned[program.identity] = program
    if not program.checked and isinstance(score_mod, ScoreMod):
        check_derivative(score, q.device, *score_mod.sample())
        program.checked = True
    return score


def _traced(
    fn: Any, run: Function, settings: tuple[Any, ...], device: torch.device | None, outputs: int = 1
) -> tuple[Program, list[Tensor], list[Any], bool]:
    """A function's Program, its tensors and numbers, and whether it reads rows. `run` is recorded for the function,
    unless guards say that the trace would be the same. `settings` start with the dtype, device and name."""
    guarded = find_trace(fn, settings)
    now = guarded.inputs(fn) if guarded is not None and guarded.trusted else None
    if guarded is not None and now is not None:
        program, rows = guarded.program, guarded.rows
        tensors, numbers = now
    else:
        dtype, traced_on, name, *_ = settings
        trace = trace_function(run, dtype, traced_on, outputs)
        program, tape = cache.program(trace, name), trace.tape
        if isinstance(fn, CallbackMod) and program.callbacks is None:
            program.callbacks = callbacks_of(fn, program, tape)
        put_trace(fn, settings, trace, program, guarded)
        tensors, numbers, rows = tape.tensors, tape.numbers, tape.rows
    return program, *_values(program, tensors, numbers, device), rows


def _values(
    program: Program, captures: Sequence[Tensor], numbers: Sequence[Any], device: torch.device | None
) -> tuple[list[Tensor], list[Any]]:
    """A program's tensors and numbers, from those that its function captures."""
    if numbers:
        check_numbers(numbers, program.dtype)
    tensors = [x if device is None or x.device == device else _on(x, device) for x in captures]
    return _picked(program.before, [*tensors, *numbers]), _numbers(program.numbers, tensors, numbers)


class TracedValues(NamedTuple):
    """A trace whose guards hold, with its program's tensors and numbers of this call."""

    trace: GuardedTrace
    tensors: Sequence[Tensor]
    numbers: Sequence[Any]


def of_values(score_mod: Any, values: TracedValues | None) -> Any:
    """The function, bound by what its guards gave; what they gave is not computed again. Without values the function
    itself."""
    return score_mod if values is None else Traced(values.trace.program, *values[1:], score_mod, values.trace.rows)


class GuardedScore(NamedTuple):
    """A function whose trace its guards say to be the same."""

    key: Hashable
    """what stands for the trace, for the forms of its tensors and for the numbers that the guards compare"""
    numbers: Sequence[Any]
    """the other ones that its Score has now"""
    values: TracedValues
    settled: bool = False
    """whether the tensors alone may differ while the guards hold"""


def guarded(score_mod: Any, q: Tensor) -> GuardedScore | None:
    """What a call with a function has without binding it; None where it has to. A Score has no trace."""
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    if (found := find_trusted(score_mod, dtype, q.device)) is None or not found[0].program.checked:
        return None
    trace, (tensors, numbers) = found
    if trace.whole and not trace.counts:
        return GuardedScore(trace.guards, [], TracedValues(trace, tensors, numbers), settled=True)
    if trace.whole:
        check_numbers(numbers, dtype)
        return GuardedScore(trace.guards, numbers, TracedValues(trace, tensors, numbers))
    tensors, numbers = _values(trace.program, tensors, numbers, q.device)
    return GuardedScore((trace.guards, *map(_form, tensors)), numbers, TracedValues(trace, tensors, numbers))


def captured(score_mod: Any) -> list[Tensor]:
    """The leaves of autograd's graph that a function's captured tensors come from."""
    if score_mod is None or isinstance(score_mod, Score):
        return []
    tensors = trace_function(score_mod, torch.float32, torch.device("cpu")).tape.tensors
    leaves = {id(x): x for x in tensors if x.requires_grad and x.grad_fn is None}
    nodes = [x.grad_fn for x in tensors if x.grad_fn is not None]
    met = set()
    while nodes:
        node = nodes.pop()
        if node is None or node in met:
            continue
        met.add(node)
        if hasattr(node, "variable"):
            leaves[id(node.variable)] = node.variable
        nodes += [x for x, _ in node.next_functions]
    return list(leaves.values())


def predicate(fn: Function, name: str | None = None) -> Any:
    """A function (b, h, q_idx, kv_idx) -> bool, traced as a score function that ignores the score. Raises ValueError
    for a function that cannot be recorded."""
    if torch.compiler.is_dynamo_compiling():
        from saccade.scores import bind_compiled

        return bind_compiled.bind_predicate(fn, name)
    return traced_predicate(fn, name)


def traced_predicate(fn: Function, name: str | None = None) -> Traced:
    """`predicate` of a function that exists outside of compiled regions, also while something else compiles."""
    settings = torch.float32, torch.device("cpu"), name or name_of(fn), "predicate"
    # A graph that nobody follows would save tensors, which hooks count. torch.export would keep the mode.
    with nullcontext() if torch.compiler.is_compiling() else torch.no_grad():
        program, tensors, numbers, _ = _traced(fn, Predicate(fn), settings, None)
    return Traced(program, [x.detach() for x in tensors], numbers)


def evaluated(fn: Function, *at: Tensor) -> Tensor:
    """What a predicate returns when it runs itself: a bool tensor of the shape of all four indices."""
    if trace_function(Predicate(fn), torch.float32, at[0].device).tape.rows:
        score = torch.zeros(broadcast_shape(*(x.shape for x in at)), device=at[0].device)
        if not score.numel():  # over which torch.vmap maps no function
            return score != 0
        return one_by_one(Predicate(fn))(score, *at) != 0
    return fn(*at) != 0


def _on(x: Tensor, device: torch.device) -> Tensor:
    """A captured tensor of another device."""
    if x.dim() == 0:
        return x.to(device)
    raise ValueError(f"a captured tensor {x.dtype} {tuple(x.shape)} is on {x.device}, and q on {device}")


def _picked(part: tuple[list[int], Any], captures: Sequence[Any]) -> list[Tensor]:
    order, module = part
    if module is None:
        return [captures[i] for i in order]
    return list(module.forward(*(x if isinstance(x, Tensor) else torch.tensor(x, device="cpu") for x in captures)))


def _numbers(part: tuple[list[int], Any], tensors: Sequence[Tensor], lifted: Sequence[Any]) -> list[Any]:
    order, module = part
    if module is None:
        return [(*tensors, *lifted)[i] for i in order]
    wide = [torch.tensor(x, dtype=torch.int64 if isinstance(x, int) else torch.float64, device="cpu") for x in lifted]
    return [x.item() for x in module.forward(*tensors, *wide)]


def check_derivative(score: Traced, device: torch.device, rows: int, keys: int) -> None:
    """Compares a user's own derivative with autograd's, on numbers, at the first rows and keys. Raises ValueError if
    they differ."""
    generator = torch.Generator().manual_seed(0)
    x = (4 * torch.randn(rows, keys, generator=generator, dtype=score.program.dtype, device="cpu")).to(device)
    zero = torch.zeros((1, 1), dtype=torch.int64, device=device)
    at = zero, zero, torch.arange(rows, device=device)[:, None], torch.arange(keys, device=device)[None]
    own = score.derivative(x, *at)
    derived = score.derivative(x, *at, derived=True)
    error = (own - derived).abs()
    allowed = _RELATIVE * (derived.abs() + derived.abs().mean()) + torch.finfo(x.dtype).tiny
    if not bool((error <= allowed).all()):
        i = int((error - allowed).nan_to_num(torch.inf).argmax())
        raise ValueError(
            f"the derivative of {score.kind} is wrong: at score {x.flatten()[i]:.4g} bprop gives "
            f"{own.flatten()[i]:.6g} for a gradient of 1, and autograd {derived.flatten()[i]:.6g}"
        )


_RELATIVE = 1e-3
"""Far above rounding, far below the error of a wrong formula."""


def from_tensors(identity: str, tensors: Sequence[Tensor], ints: list[int], floats: list[float]) -> Score | None:
    """The inverse of a Score's `identity`, `tensors`, `ints` and `floats`. It takes its numbers from the front of the
    lists."""
    if identity == "none":
        return None
    return Softcap(floats.pop(0)) if identity == "softcap" else Traced.of_tensors(identity, list(tensors), ints, floats)
