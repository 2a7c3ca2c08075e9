"""`bind` inside `torch.compile`: a Score of the graph's tensors and numbers, whose Program is a constant."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from saccade.scores.codegen.program import cache, pinned, program_of
from saccade.scores.score_mod import Function, Predicate, Score, ScoreMod, WithDerivative, name_of
from saccade.scores.tracing import dynamo
from saccade.scores.tracing.trace import Trace, trace_function
from saccade.util.caches import callable_of, compile_constant, standing_for


class CompiledScore(Score):
    """A Score inside a compiled region."""

    def __init__(self, identity: str, tensors: Sequence[Tensor], ints: Any, floats: Any, fn: Function) -> None:
        self.identity, self.tensors, self.ints, self.floats, self.fn = identity, tensors, ints, floats, fn
        self.kind = identity.partition("~")[0]
        self.own = isinstance(fn, ScoreMod) and fn.bprop is not None

    @property
    def indices(self) -> frozenset[str]:
        return frozenset(_indices(self.identity))

    def reading(self, tensors: Sequence[Tensor]) -> CompiledScore:
        return CompiledScore(self.identity, tensors, self.ints, self.floats, self.fn)

    def __call__(self, score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return self.fn(score, b, h, q_idx, kv_idx).to(score.dtype).expand_as(score)


def bind(score_mod: Any, q: Tensor) -> Score:
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    own = isinstance(score_mod, ScoreMod) and score_mod.bprop is not None
    kind = score_mod.kind if isinstance(score_mod, ScoreMod) else None
    if isinstance(score_mod, ScoreMod) and getattr(score_mod, "frozen", False):
        # A branch makes a constant of what a comparison of sizes does not.
        ones = [tuple([True if n == 1 else False for n in x.shape]) for x in score_mod.tensors]  # noqa: SIM210
        forms = tuple([(x.dtype, form) for x, form in zip(score_mod.tensors, ones, strict=True)])
        plan, numbers = _plan_of_traces(standing_for(score_mod.fn), standing_for(score_mod.bprop), forms, dtype)
        tensors = list(score_mod.tensors)
    else:
        tape, outputs = dynamo.trace_function(WithDerivative(score_mod) if own else score_mod, dtype, q.device, 1 + own)
        name = kind or f"score({name_of(score_mod)})"
        plan = _plan(name, tuple(tape.steps), outputs, tuple(tape.forms), dtype)
        tensors, numbers = tape.tensors, tape.numbers
    return CompiledScore(*_inputs(plan, [x.to(q.device) if x.dim() == 0 else x for x in tensors], numbers), score_mod)


def bind_predicate(fn: Function, name: str | None) -> CompiledScore:
    tape, outputs = dynamo.trace_function(Predicate(fn), torch.float32, torch.device("cpu"), 1)
    plan = _plan(name or name_of(fn), tuple(tape.steps), outputs, tuple(tape.forms), torch.float32)
    return CompiledScore(*_inputs(plan, [x.detach() for x in tape.tensors], tape.numbers), fn)


def _inputs(plan: Any, tensors: list[Tensor], numbers: list[Any]) -> tuple[str, list[Tensor], list[Any], list[Any]]:
    identity, wanted_tensors, wanted_numbers, integral = plan
    picked = (
        _numbers(identity, *numbers) if wanted_numbers is None else [(*tensors, *numbers)[i] for i in wanted_numbers]
    )
    if wanted_tensors is None:
        tensors = list(_before(identity, *tensors, *[torch.tensor(x, device="cpu") for x in numbers]))
    else:
        tensors = [tensors[i] for i in wanted_tensors]
    ints = [x for x, whole in zip(picked, integral, strict=True) if whole]
    floats = [x for x, whole in zip(picked, integral, strict=True) if not whole]
    return identity, tensors, ints, floats


@compile_constant
def _plan(name: str, steps: Any, outputs: Any, forms: Any, dtype: torch.dtype) -> Any:
    return _pinned(name, Trace(dynamo.stand_in_tape(steps, forms, dtype), outputs, None, {}))


@compile_constant
def _plan_of_traces(fn: Any, bprop: Any, forms: Any, dtype: torch.dtype) -> Any:
    """Of callbacks' traces, which are constants themselves."""
    tensors = (
        torch.zeros((), dtype=kind, device="cpu").expand([1 if one else 11 for one in ones]) for kind, ones in forms
    )
    mod = ScoreMod(callable_of(fn), *tensors, bprop=callable_of(bprop))
    own = mod.bprop is not None
    trace = trace_function(
        WithDerivative(mod) if own else mod, dtype, torch.device("cpu"), 1 + own, reads_numbers=False
    )
    identity, wanted, numbers, integral = _pinned(f"score({name_of(mod.fn)})", trace)
    order = [next(i for i, x in enumerate(mod.tensors) if x is tensor) for tensor in trace.tape.tensors]
    wanted = None if wanted is None else tuple(order[i] for i in wanted)
    # Numbers are counted after the tensors, of which there may be more.
    more = len(mod.tensors) - len(order)
    numbers = None if numbers is None else tuple(i + more for i in numbers)
    return (identity, wanted, numbers, integral), tuple(trace.tape.numbers)


def _pinned(name: str, trace: Trace) -> Any:
    """What a graph is made of: the Program's identity, and which tensors and numbers of a tape it takes. Compiled
    graphs name Programs, and keep none alive."""
    program = cache.program(trace, name)
    pinned[program.identity] = program
    before, numbers = program.before, program.numbers
    return (
        program.identity,
        None if before[1] else tuple(before[0]),
        None if numbers[1] else tuple(numbers[0]),
        tuple(program.integral),
    )


@compile_constant
def _indices(identity: str) -> list[str]:
    return sorted(program_of(identity).indices)


@torch._dynamo.allow_in_graph
def _before(identity: str, *given: Tensor) -> tuple[Tensor, ...]:
    module: Any = program_of(identity).before[1]
    return tuple(module.forward(*given))


@compile_constant
def _numbers(identity: str, *numbers: Any) -> list[Any]:
    wide = [torch.tensor(x, dtype=torch.int64 if isinstance(x, int) else torch.float64, device="cpu") for x in numbers]
    module: Any = program_of(identity).numbers[1]
    given = [torch.zeros((), device="cpu")] * (len(list(module.graph.find_nodes(op="placeholder"))) - len(wide))
    return [x.item() for x in module.forward(*given, *wide)]
