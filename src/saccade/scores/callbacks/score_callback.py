"""Callbacks that build a cuDNN graph as score modifications: a new one is recorded once.

A callback's own key, `score_mod_graph_cache_key`, stands for everything that the callback holds. A function without one
is known for as long as guards hold that nothing which it reads has changed. Bound methods and callable objects may
hold anything: they have no key unless they say one.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from saccade.scores.callbacks.graph import CallbackGraph, Graph, GraphStep, Node, data_type
from saccade.scores.codegen.program import Program
from saccade.scores.score_mod import Score, ScoreMod, name_of
from saccade.scores.tracing.guards import Guards, Unguarded
from saccade.scores.tracing.tape import Tape, is_number
from saccade.util.caches import BoundedCache, CacheInfo, callable_of, compile_constant, standing_for

Callback = Callable[..., Any]
OWN_KEY = "score_mod_graph_cache_key"
_ATTRIBUTES = frozenset((*dir(Graph()), *vars(Node), "get", "items", "keys", "values"))
"""What a callback may ask of its arguments: nobody changes what these mean."""
_guards: BoundedCache[int, Guards] = BoundedCache(256)


def callback_key(callback: Callback | None) -> Any:
    """Equal for callbacks that record the same graph; None for one without a key, which is recorded each time.

    Raises:
        TypeError: a `score_mod_graph_cache_key` that holds tensors or unhashable values.
    """
    if callback is None:
        return ("nothing",)
    method = isinstance(callback, types.MethodType)
    owner = callback.__self__ if method else callback
    if hasattr(owner, OWN_KEY):
        own = getattr(owner, OWN_KEY)
        code = getattr(getattr(callback, "__func__", callback), "__code__", None)
        names = getattr(callback, "__module__", None), getattr(callback, "__qualname__", None)
        return "own", type(owner), code, *names, frozen(own() if callable(own) else own)
    if not isinstance(callback, (types.FunctionType, functools.partial)):
        return None
    guards = _guards.get(id(callback))
    if guards is None or not guards.holds(callback):
        try:
            guards = Guards(callback, set(), _ATTRIBUTES)
        except Unguarded:
            return None
        _guards.put(id(callback), guards, [callback])
    return guards


def frozen(value: Any) -> Any:
    """A hashable form of a key: dictionaries, lists, tuples and sets by their contents. Raises TypeError for a tensor,
    or an unhashable value."""
    if isinstance(value, Tensor):
        raise TypeError(
            f"{OWN_KEY} must not hold tensors, got {value.dtype} {tuple(value.shape)}: what changes from call to call "
            "goes into the dictionaries of tensors"
        )
    if isinstance(value, dict):
        return "dict", frozenset((frozen(k), frozen(v)) for k, v in value.items())
    if isinstance(value, (list, tuple)):
        return type(value), tuple(map(frozen, value))
    if isinstance(value, (set, frozenset)):
        return "set", frozenset(map(frozen, value))
    hash(value)
    return type(value), value


class ProgramCallbacks(NamedTuple):
    """Traces that read what the Program does: a step `tensor` has its number among the Program's tensors, and a
    step `runtime` among its numbers."""

    forward: CallbackGraph
    backward: CallbackGraph | None
    """None: the derivative is autograd's."""


def callbacks_of(mod: CallbackMod, program: Program, tape: Tape) -> ProgramCallbacks | None:
    """None where a trace reads something that is not an input of the Program."""
    if program.before[1] is not None or program.numbers[1] is not None:
        return None
    steps_of_tensors = [_tensor_step(x, program, tape) for x in mod.tensors]
    forward, backward = mod.fn, mod.bprop
    assert isinstance(forward, CallbackGraph)
    assert backward is None or isinstance(backward, CallbackGraph)
    if any(
        step.name == "tensor" and steps_of_tensors[step.attributes[0]] is None
        for callback_graph in (forward, backward)
        if callback_graph is not None
        for step in callback_graph.steps
    ):
        return None

    def placed(callback_graph: CallbackGraph) -> CallbackGraph:
        steps = (steps_of_tensors[x.attributes[0]] or x if x.name == "tensor" else x for x in callback_graph.steps)
        return replace(callback_graph, steps=tuple(steps))

    return ProgramCallbacks(placed(forward), None if backward is None else placed(backward))


def _tensor_step(x: Tensor, program: Program, tape: Tape) -> GraphStep | None:
    """The step that reads one of the callback's tensors of a Program's inputs, which are picked from the tensors and
    then the numbers of a tape."""
    for name, captures, first, (picked, _) in (
        ("tensor", tape.tensors, 0, program.before),
        ("runtime", tape.sources, len(tape.tensors), program.numbers),
    ):
        i = _index(captures, x)
        if i is not None and first + i in picked:
            return GraphStep(name, (), (picked.index(first + i),))
    return None


def _index(captures: Sequence[Tensor | None], x: Tensor) -> int | None:
    return next((i for i, other in enumerate(captures) if other is x), None)


Tensors = dict[str, Tensor]
CallbackGraphs = tuple[CallbackGraph, CallbackGraph | None]
"""Of score_mod, and of score_mod_bprop after it."""


class CallbackMod(ScoreMod):
    """A ScoreMod of recorded callbacks; `score_callback` makes it."""

    frozen = True
    """Its functions are traces, which are constants."""
    bound: tuple[Any, Score] | None = None
    """The Score that it was last bound to, after the values that this was bound for."""

    def values(self, q: Tensor) -> tuple[Any, ...]:
        """All that a Score for this q is made of but the tensors themselves, which stay: numbers by their bits."""
        key: list[Any] = [q.device, q.dtype == torch.float64]
        for x in self.tensors:
            if is_number(x):
                value = x.item()
                key.append((x.dtype, value.hex() if isinstance(value, float) else value))
            else:
                key.append((x.dtype, x.shape, x.device, x.requires_grad))
        return tuple(key)

    def sample(self) -> tuple[int, int]:
        """No further than its tensors reach."""
        rows, keys = super().sample()
        for x in self.tensors:
            rows = min([rows, *(n for n in x.shape[-2:-1] if n != 1)])
            keys = min([keys, *(n for n in x.shape[-1:] if n != 1)])
        return rows, keys


def score_callback(
    score_mod: Callback, score_mod_bprop: Callback | None = None, score_mod_tensors: Tensors | None = None,
    score_mod_bprop_tensors: Tensors | None = None,
) -> ScoreMod:  # fmt: skip
    """`score -> score_mod(graph, score, tensors)`: a callback that builds a cuDNN graph, as a `ScoreMod` for
    `attention`, on every backend and without cuDNN.

    Args:
        score_mod: `score_mod(graph, score, tensors) -> score`, by the graph's operations, which have cuDNN's names:
            `graph.mul(a=score, b=tensors["factor"])`. The score is scaled, and (b, h_q, s_q, s_k).
        score_mod_bprop: `score_mod_bprop(graph, dP, tensors) -> dP`, the gradient of the modified score made that of
            the score. score_mod is recorded anew before it, in the same graph, so that it may use what that kept. It is
            checked with numbers when it is new. None: the derivative is derived.
        score_mod_tensors: what score_mod finds in `tensors`: tensors that broadcast to (b, h_q, s_q, s_k), on q's
            device. Those of one element on the CPU are runtime numbers. What requires a gradient gets one.
        score_mod_bprop_tensors: the same for score_mod_bprop.

    A callback is called by this function, when it is new: what it builds then is what every call of attention with the
    result takes. A function is known while guards hold that nothing it reads has changed; a bound method or an object
    is known by its `score_mod_graph_cache_key`, a value or a function. Any other callback is called by each
    `score_callback`. Equal graphs are traced and compiled once, for all values of the tensors.

    Raises:
        TypeError: arguments of other types, or a callback that returns no value of the graph.
        ValueError: tensors of more than four dimensions, tensors for a score_mod_bprop that is not there, or one that
            is not linear in dP.

    Source: the callbacks of cuDNN's `graph.sdpa(score_mod=…)`, https://docs.nvidia.com/cudnn/operations/Attention

    >>> def softcap(graph, score, tensors):
    ...     return graph.mul(a=graph.tanh(input=graph.div(a=score, b=tensors["cap"])), b=tensors["cap"])
    >>> q, k, v = (torch.randn(1, 2, 8, 4) for _ in range(3))
    >>> capped = score_callback(softcap, score_mod_tensors={"cap": torch.full((1, 1, 1, 1), 0.8)})
    >>> attention(q, k, v, mask=causal(), score_mod=capped).shape
    torch.Size([1, 2, 8, 4])
    """
    if not callable(score_mod) or not (score_mod_bprop is None or callable(score_mod_bprop)):
        raise TypeError(f"score_callback needs functions, got {score_mod!r} and {score_mod_bprop!r}")
    if score_mod_bprop is None and score_mod_bprop_tensors is not None:
        raise ValueError("score_mod_bprop_tensors requires score_mod_bprop")
    named_tensors = [_checked(tensors) for tensors in (score_mod_tensors, score_mod_bprop_tensors)]
    captures = [x for named in named_tensors for x in named.values()]
    if torch.compiler.is_compiling():
        forms = (tuple((name, x.dtype) for name, x in named.items()) for named in named_tensors)
        forward, backward = getattr(_pinned, _pin(standing_for(score_mod), standing_for(score_mod_bprop), *forms))
        return CallbackMod(forward, *_numbers_apart(captures), bprop=backward)
    callback_graphs = _cache.graphs_of(score_mod, score_mod_bprop, *named_tensors)
    if all(x.numel() == 1 and x.device.type == "cpu" and not x.requires_grad for x in captures):
        return _cache.of_numbers(callback_graphs, captures)
    return _modification(callback_graphs, captures)


def _numbers_apart(captures: Sequence[Tensor]) -> list[Tensor]:
    """With tensors of one element as such without dimensions, which may be numbers."""
    return [x.reshape(()) if x.numel() == 1 else x for x in captures]


def _modification(callback_graphs: CallbackGraphs, captures: Sequence[Tensor]) -> CallbackMod:
    forward, backward = callback_graphs
    tensors = _numbers_apart(captures)
    if backward is not None:
        _cache.check_linear(backward, tensors)
    return CallbackMod(forward, *tensors, bprop=backward)


_pinned = SimpleNamespace()
"""Traces of compiled regions, which are not forgotten."""


@compile_constant
def _pin(score_mod: Any, bprop: Any, forms: Any, forms_bprop: Any) -> str:
    """The name of a trace; torch.compile calls this once."""
    stand_ins = (
        {name: torch.zeros((), dtype=dtype, device="cpu") for name, dtype in form} for form in (forms, forms_bprop)
    )
    graphs_of = _cache.graphs_of(callable_of(score_mod), callable_of(bprop), *stand_ins)
    callback_graphs = vars(_pinned)
    name = next(
        (name for name, other in list(callback_graphs.items()) if other == graphs_of), f"recorded{len(callback_graphs)}"
    )
    setattr(_pinned, name, graphs_of)
    return name


def _checked(tensors: Tensors | None) -> Tensors:
    if tensors is None:
        return {}
    if not isinstance(tensors, dict):
        raise TypeError(f"the tensors of a callback must be a dict, got {type(tensors).__name__}")
    for name, x in tensors.items():
        if not isinstance(name, str) or not isinstance(x, Tensor):
            raise TypeError(f"the tensors of a callback must map names to tensors, got {name!r}: {type(x).__name__}")
        if x.dim() > 4:
            raise ValueError(
                f"tensors of a callback broadcast to (b, h_q, s_q, s_k); {name} has shape {tuple(x.shape)}"
            )
    return tensors


class _Cache:
    """Traces by the keys of their callbacks. No lock is held while a callback runs: two threads may record the
    same graph."""

    def __init__(self) -> None:
        self.callback_graphs: BoundedCache[Any, CallbackGraphs] = BoundedCache(256)
        self.linear: BoundedCache[CallbackGraph, bool] = BoundedCache(256)
        self.mods: BoundedCache[Any, tuple[list[Tensor], CallbackMod]] = BoundedCache(256)

    def graphs_of(
        self, score_mod: Callback, bprop: Callback | None, forward_tensors: Tensors, bprop_tensors: Tensors
    ) -> CallbackGraphs:
        keys = callback_key(score_mod), callback_key(bprop)
        forms = (tuple((name, x.dtype) for name, x in tensors.items()) for tensors in (forward_tensors, bprop_tensors))
        key = None if None in keys else (*keys, *forms)
        callback_graph = self.callback_graphs.get(key)
        if callback_graph is None:
            callback_graph = _trace_callbacks(score_mod, bprop, forward_tensors, bprop_tensors)
            if key is not None and keys == (callback_key(score_mod), callback_key(bprop)):
                self.callback_graphs.put(key, callback_graph)
        return callback_graph

    def of_numbers(self, callback_graphs: CallbackGraphs, captures: list[Tensor]) -> CallbackMod:
        """The modification of the same callbacks and tensors, which are numbers: it is cheap to keep, and reads their
        values in each call."""
        key = *callback_graphs, *((id(x), x.data_ptr()) for x in captures)
        return self.mods.get_or_make(key, lambda: (captures, _modification(callback_graphs, captures)))[1]

    def check_linear(self, callback_graph: CallbackGraph, tensors: list[Tensor]) -> None:
        """Raises ValueError for a derivative that is not linear in dP."""
        if self.linear.get(callback_graph):
            return
        device = next((x.device for x in tensors if x.device.type != "cpu"), torch.device("cpu"))
        dP = torch.tensor([[0.0], [1.0], [-2.5], [1e3]], dtype=torch.float64, device=device)
        score = torch.linspace(-4, 4, 16, dtype=torch.float64, device=device).expand(4, 16)
        zero = torch.zeros((1, 1), dtype=torch.int64, device=device)
        with torch.no_grad():
            gradient = callback_graph(dP.expand(4, 16), score, zero, zero, zero, zero, *tensors).expand(4, 16)
            wanted = dP * gradient[1]
            wrong = (gradient - wanted).abs() > _RELATIVE * wanted.abs()
        if bool(wrong.any()):
            row, column = wrong.nonzero()[0].tolist()
            raise ValueError(
                f"score_mod_bprop {callback_graph.name} must be linear in dP: of dP = {dP[row, 0]:g} it makes "
                f"{gradient[row, column]:g}, and of dP = 1 {gradient[1, column]:g}"
            )
        self.linear.put(callback_graph, True)


_RELATIVE = 1e-6
"""Far above rounding."""
_cache = _Cache()


def _trace_callbacks(
    score_mod: Callback, bprop: Callback | None, forward_tensors: Tensors, bprop_tensors: Tensors
) -> CallbackGraphs:
    graph = Graph()
    forward = CallbackGraph.of(name_of(score_mod), _called(graph, score_mod, forward_tensors), False)
    if bprop is None:
        return forward, None
    graph = Graph()
    _called(graph, score_mod, forward_tensors)  # for what it keeps
    gradient = graph._input("gradient")
    output = bprop(graph, gradient, _inputs(graph, bprop_tensors, len(forward_tensors)))
    return forward, CallbackGraph.of(name_of(bprop), output, True)


def _called(graph: Graph, score_mod: Callback, tensors: Tensors) -> Any:
    return score_mod(graph, graph._input("score"), _inputs(graph, tensors, 0))


def _inputs(graph: Graph, tensors: Tensors, first: int) -> dict[str, Any]:
    """The tensors as values of the graph, numbered from `first` on."""
    types = {x.value: x for x in data_type}
    return {
        name: graph._input("tensor", first + i, result_type=types.get(x.dtype, data_type.NOT_SET))
        for i, (name, x) in enumerate(tensors.items())
    }


def callback_info() -> CacheInfo:
    """How many callbacks were found in the cache, and how many were recorded."""
    return _cache.callback_graphs.info()


def callback_clear() -> None:
    """Forgets all recorded callbacks; those in use stay."""
    _cache.callback_graphs.clear()
    _cache.linear.clear()
    _cache.mods.clear()
