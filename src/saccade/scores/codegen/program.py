"""Reads of captured tensors whose place depends on rows and keys by their distance kv_idx - q_idx alone: the same along
every diagonal of the scores. T5's bias is one, as are all tables of relative positions."""

# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportAttributeAccessIssue=false, reportOptionalMemberAccess=false, reportArgumentType=false
# pyright: reportGeneralTypeIssues=false, reportIndexIssue=false, reportOptionalSubscript=false, reportCallIssue=false
# pyright: reportOptionalIterable=false, reportReturnType=false, reportOperatorIssue=false

from __future__ import annotations

import base64
import hashlib
import json
import operator
import os
import re
import threading
import weakref
import zlib
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import lru_cache
from typing import Any, TypeVar

import torch
from torch import Tensor, fx

from saccade.scores.codegen.assembly import Assembly, Read
from saccade.scores.tracing.lowering import K, Q, Raw, Tracer, aten, in_order, lower, name_of, outputs_of
from saccade.scores.tracing.tape import NO_DERIVATIVE, TILE, Refused, broadcast_shape, refusal_of
from saccade.scores.tracing.trace import Trace, error_text
from saccade.util.caches import BoundedCache, CacheInfo, cached_attribute, compile_constant
from saccade.util.kept_memory import in_thread


def by_distance(at: Sequence[Any]) -> bool:
    """Whether these are the indices of a read by distance."""
    nodes = [x for x in at if isinstance(x, fx.Node)]
    shape = broadcast_shape((1, 1), *(x.meta["val"].shape for x in nodes))
    return shape == (Q, K) and all(map(_same_along_diagonals, nodes))


def depends_on(name: str, at: Sequence[Any]) -> bool:
    """Whether some of the indices do on the tile's `name`."""
    met: dict[fx.Node, None] = {}
    for x in at:
        for node in in_order(x, lambda node: node.all_input_nodes, met) if isinstance(x, fx.Node) else ():
            met[node] = None
    return any(x.op == "placeholder" and str(x.target) == name for x in met)


def _same_along_diagonals(index: fx.Node) -> bool:
    slopes: dict[fx.Node, tuple[int, int] | None] = {}
    for node in in_order(index, lambda x: x.all_input_nodes, slopes):
        slopes[node] = _slopes(node, slopes)
    last = slopes[index]
    return last is not None and sum(last) == 0


_INDEX_SLOPES = {"q_idx": (1, 0), "kv_idx": (0, 1), "score": None}
_SIGNS = {"add": (1, 1), "sub": (1, -1), "neg": (-1,)}


def _slopes(node: fx.Node, known: dict[fx.Node, tuple[int, int] | None]) -> tuple[int, int] | None:
    """The factors of q_idx and kv_idx in a linear value; (0, 0) also for any function of their difference."""
    if node.op == "placeholder":
        return _INDEX_SLOPES.get(str(node.target), (0, 0))
    inputs = [known[x] for x in node.all_input_nodes]
    if None in inputs:
        return None
    signs = _SIGNS.get(name_of(node))
    # Sums of floats are rounded, each in its own way: (k + 0.1) - (q + 0.1) is no function of k - q.
    rounds = node.meta["val"].is_floating_point()
    if signs is None or rounds or node.kwargs.get("alpha", 1) != 1:
        return (0, 0) if all(sum(slopes) == 0 for slopes in inputs) else None
    terms = [known.get(x, (0, 0)) for x in node.args]
    q, kv = (sum(sign * term[i] for sign, term in zip(signs, terms, strict=True)) for i in range(2))
    return q, kv


# The graphs of one score function: its value, its derivatives, and where it reads captured tensors.


class Program:
    """What a score function computes. Its graphs take score, b, h, q_idx, kv_idx, the captured tensors, the numbers,
    and the numbers once more as tensors of no dimensions."""

    callbacks: Any = None
    """`ProgramCallbacks`, if it was made of callbacks."""

    def __init__(self, name: str, raw: Raw, dtype: torch.dtype) -> None:
        self.name, self.raw, self.dtype = name, raw, dtype
        self.emitted: dict[Any, Any] = {}
        """What others derive from it, once."""
        self._core(raw)
        self.dtypes = [node.meta["val"].dtype for node in self.tensor_nodes]
        self.ranks = [node.meta["val"].dim() for node in self.tensor_nodes]
        self.integral = [not node.meta["val"].is_floating_point() for node in self.number_nodes]
        self.before = _part(raw, self.tensor_nodes)
        self.numbers = _part(raw, self.number_nodes)
        self.value = self._assembled(self.core, 0)
        self.differentiable = [i for i, read in enumerate(self.reads) if read.meta["val"].is_floating_point()]
        decomposed = self._traced(self._forward)
        self.value_decomposed = self._assembled(decomposed, 0)
        derived = self._traced(self._backward)
        self.derived = derived
        self.derived_slope = self._assembled(derived, 0)
        # A derivative of the user's own takes the place of the derived one, which it is checked against.
        self.own = len(self.core_outputs()) > 1
        self.slope = self._assembled(decomposed, 1) if self.own else self.derived_slope
        self.checked = not self.own

    def _core(self, raw: Raw) -> None:  # noqa: C901 (one pass over a graph)
        """The pointwise part: reads of captured tensors are its inputs, their indices outputs."""
        graph = fx.Graph()
        copies: dict[fx.Node, Any] = {}
        nodes = list(raw.module.graph.nodes)
        for node, name in zip(nodes, TILE, strict=False):
            copies[node] = graph.placeholder(name)
            copies[node].meta = dict(node.meta)
        self.tensor_nodes: list[fx.Node] = []
        self.number_nodes: list[fx.Node] = []
        self.reads: list[fx.Node] = []
        self.read_tensors: list[int] = []
        at: list[tuple[Any, ...]] = []

        def placed(order: list[fx.Node], node: fx.Node) -> int:
            if node not in order:
                order.append(node)
            return order.index(node)

        def read(tensor: fx.Node, indices: tuple[Any, ...], val: Tensor) -> fx.Node:
            node = graph.placeholder(f"read{len(self.reads)}")
            node.meta = {"val": val, "kind": "tile"}
            self.reads.append(node)
            self.read_tensors.append(placed(self.tensor_nodes, tensor))
            at.append(indices)
            return node

        def argument(x: Any) -> Any:
            if not isinstance(x, fx.Node):
                return x
            while x.meta["kind"] == "number" and name_of(x) == "expand":
                x = x.args[0]
            if x in copies:
                return copies[x]
            if x.meta["kind"] == "tensor":
                val = x.meta["val"]
                copies[x] = read(x, (0,) * val.dim(), torch.zeros((1, 1), dtype=val.dtype, device="cpu"))
            elif (known := constant_of(raw, x)) is not None:
                copies[x] = graph.call_function(aten.scalar_tensor.default, (known,), {"dtype": x.meta["val"].dtype})
                copies[x].meta = {"val": torch.zeros((), dtype=x.meta["val"].dtype, device="cpu"), "kind": "number"}
            else:
                n = placed(self.number_nodes, x)
                copies[x] = graph.placeholder(f"n{n}")
                copies[x].meta = {"val": x.meta["val"], "kind": "number"}
            return copies[x]

        for node in nodes:
            if node.op == "output":
                graph.output((tuple(map(argument, node.args[0])), tuple(at)))
            elif node.op == "call_function" and node.meta["kind"] == "tile":
                if name_of(node) == "index":
                    copies[node] = read(node.args[0], tuple(map(argument, node.args[1])), node.meta["val"])
                    continue
                args, kwargs = fx.node.map_arg((node.args, node.kwargs), argument)
                copies[node] = graph.call_function(node.target, args, kwargs)
                copies[node].meta = dict(node.meta)
        self.core = graph
        self.read_indices = at
        self.core_module = fx.GraphModule(torch.nn.Module(), graph)

    def core_outputs(self) -> tuple[Any, ...]:
        return outputs_of(self.core)[0]

    def _placeholders(self) -> list[fx.Node]:
        return list(self.core.find_nodes(op="placeholder"))

    def _forward(self, *inputs: Tensor) -> Any:
        with torch.no_grad():
            return fx.Interpreter(self.core_module).run(*inputs)

    def _backward(self, *inputs: Tensor) -> Any:
        """slope, the derivative by every differentiable read, and the indices."""
        names = [node.name for node in self._placeholders()]
        with torch.enable_grad():
            arguments = list(inputs)
            wanted = []
            for name in ("score", *(self.reads[i].name for i in self.differentiable)):
                position = names.index(name)
                # Every read as large as the tile, so that nothing is summed here.
                arguments[position] = arguments[position].expand(Q, K).clone().requires_grad_()
                wanted.append(arguments[position])
            (modified, *_), at = fx.Interpreter(self.core_module).run(*arguments)
            if not isinstance(modified, Tensor) or not modified.requires_grad:
                return tuple(0.0 for _ in wanted), at
            # Of the sum: torch imports sympy to compare the shape of a gradient that is passed.
            try:
                gradients = torch.autograd.grad(modified.sum(), wanted, allow_unused=True)
            except RuntimeError as failed:
                raise self._without_derivative(failed) from failed
            return tuple(0.0 if x is None else x for x in gradients), at

    def _without_derivative(self, failed: RuntimeError) -> Exception:
        """What the user reads where torch names an operation that it cannot derive."""
        name = re.search(r"derivative for '?(?:aten::)?(\w+)", str(failed))
        if name is None:
            return failed
        lines = [x.meta.get("stack_trace") for x in self.raw.module.graph.nodes if name_of(x) == name[1]]
        return Refused(refusal_of(name[1], NO_DERIVATIVE), next(filter(None, lines), None))

    def _traced(self, function: Callable[..., Any]) -> fx.Graph:
        graph = Tracer(_decompositions()).trace(function, [node.meta["val"] for node in self._placeholders()])
        for node, core in zip(graph.find_nodes(op="placeholder"), self._placeholders(), strict=True):
            node.meta["core"] = core.name
            # In the derivative they were made as large as the tile; reads are what they are.
            node.meta["val"] = core.meta["val"]
        return graph

    def _assembled(self, graph: fx.Graph, *outputs: int) -> fx.GraphModule:
        """The graph with reads in their places, of some of its outputs."""
        return Assembly(self, graph).module(outputs)

    def locals(self, wanted: Sequence[bool]) -> tuple[fx.GraphModule, list[Read]]:
        """A graph of the derivatives by the reads of the tensors that are wanted, each followed by its indices."""
        return Assembly(self, self.derived).locals(wanted)

    @cached_attribute
    def indices(self) -> frozenset[str]:
        """Which of b and h it depends on."""
        inputs = self.value.graph.find_nodes(op="placeholder")
        return frozenset(str(node.target) for node in inputs if node.target in ("b", "h") and node.users)

    @cached_attribute
    def distance_reads(self) -> dict[int, Read]:
        """The reads of numbers by distance, by their numbers among all reads."""
        reads = Assembly(self, self.core).reads()
        return {i: reads[i] for i in self.differentiable if by_distance(reads[i].at)}

    @cached_attribute
    def distance_inputs(self) -> list[tuple[bool, bool]]:
        """Of each of those, whether its place depends on b, and on h."""
        return [(depends_on("b", read.at), depends_on("h", read.at)) for read in self.distance_reads.values()]

    @cached_attribute
    def reads_of_keys(self) -> frozenset[int]:
        """The tensors that are read at a key's number itself in their last dimension."""
        reads = zip(self.read_tensors, self.read_indices, strict=True)
        last = ((tensor, at[-1]) for tensor, at in reads if at)
        return frozenset(i for i, x in last if isinstance(x, fx.Node) and x.target == "kv_idx")

    @cached_attribute
    def own_elements(self) -> dict[int, tuple[str | None, ...]]:
        """The tensors that have an element for each row and key, as each is read once, at these numbers themselves, and
        at those of the batch row or the head. The names of the indices; None: the first element."""
        reads = zip(self.read_tensors, self.read_indices, strict=True)
        found = {}
        for tensor, at in reads:
            zeros = (isinstance(x, fx.Node) and name_of(x) == "zeros_like" for x in at)
            indices = tuple(None if zero else str(getattr(x, "target", x)) for x, zero in zip(at, zeros, strict=True))
            names = [*filter(None, indices)]
            plain = len({*names}) == len(names) and {"q_idx", "kv_idx"} <= {*names} <= {*TILE[1:]}
            if plain and self.read_tensors.count(tensor) == 1:
                found[tensor] = indices
        return found

    @cached_attribute
    def added(self) -> frozenset[int]:
        """Those of which each element is added to a score that is otherwise the product itself, so that the gradients
        of both are one."""
        if not _is_one(outputs_of(self.slope.graph)[0]):
            return frozenset()
        tensors = range(len(self.dtypes))
        derivatives = {i: outputs_of(self.locals([i == j for j in tensors])[0].graph) for i in self.own_elements}
        return frozenset(i for i, found in derivatives.items() if found and all(_is_one(x) for x, _ in found))

    @cached_attribute
    def inputs(self) -> frozenset[str]:
        """What its value or a derivative depends on, of the score, the indices and what else it takes."""
        graphs = self.value.graph, self.slope.graph, self.derived_slope.graph
        return frozenset(str(x.target) for graph in graphs for x in graph.find_nodes(op="placeholder") if x.users)

    @cached_attribute
    def by_batch_row(self) -> bool:
        """Whether its value or a derivative depends on the number of the batch row."""
        return "b" in self.inputs

    @cached_attribute
    def identity(self) -> str:
        """Equal for equal programs, in every process."""
        text = [str(self.value.graph), str(self.slope.graph), str(self.derived), str(self.dtypes), str(self.ranks)]
        text += [str(self.integral), str(self.dtype)]
        # The same expression of what is captured in another order is another program.
        text += [f"{order} {module and module.graph}" for order, module in (self.before, self.numbers)]
        return f"{self.name}~{hashlib.sha256(chr(10).join(text).encode()).hexdigest()[:12]}"


def _is_one(x: Any) -> bool:
    return not isinstance(x, fx.Node) and x == 1


def constant_of(raw: Raw, node: fx.Node) -> Any:
    """The Python number that a node of numbers always is, or None."""
    if node.op != "call_function":
        return None
    graph, inputs = _subgraph(raw, [node])
    if any(x.users for x in graph.find_nodes(op="placeholder")):
        return None
    if name_of(node) == "scalar_tensor" or name_of(node) == "full":
        return node.args[0] if name_of(node) == "scalar_tensor" else node.args[1]
    return fx.GraphModule(raw.module, graph).forward(*[None] * len(inputs))[0].item()  # none of them is read


def _subgraph(raw: Raw, nodes: Sequence[fx.Node]) -> tuple[fx.Graph, list[fx.Node]]:
    """A graph that computes some nodes from the tensors and numbers, all of which it takes."""
    graph = fx.Graph()
    inputs = [x for x in raw.module.graph.find_nodes(op="placeholder") if x.meta["kind"] != "tile"]
    copies = {node: graph.placeholder(node.name) for node in inputs}
    for node in nodes:
        for x in in_order(node, lambda x: x.all_input_nodes, copies):
            copies[x] = graph.node_copy(x, lambda x: copies[x])
    graph.output(tuple(copies[node] for node in nodes))
    return graph, inputs


def _part(raw: Raw, nodes: Sequence[fx.Node]) -> tuple[list[int], fx.GraphModule | None]:
    """How the boundary is made of tensors and numbers that are captured: by picking some of them, or by a module that
    takes them all."""
    graph, inputs = _subgraph(raw, nodes)
    if all(node in inputs for node in nodes):
        return [inputs.index(node) for node in nodes], None
    return [], fx.GraphModule(raw.module, graph)


@lru_cache(maxsize=1)
def _decompositions() -> dict[Any, Any]:
    """Torch's decompositions, and those of operations that torch keeps whole and kernels do not have."""
    from torch import _decomp

    # The public function adds, in a tenth of a second, what a Tracer decomposes anyway.
    core = getattr(_decomp, "_core_aten_decompositions_post_autograd", _decomp.core_aten_decompositions)
    names = (
        "gelu", "gelu_backward", "sigmoid_backward", "tanh_backward", "silu", "silu_backward", "softplus",
        "softplus_backward", "hardtanh", "hardtanh_backward", "elu", "elu_backward", "leaky_relu",
        "leaky_relu_backward", "mish", "hardsigmoid", "hardswish", "log_sigmoid_forward", "log_sigmoid_backward",
        "threshold",
        "threshold_backward", "logit", "logit_backward", "celu", "selu", "logaddexp", "logaddexp2", "lerp", "xlogy",
        "addcmul", "addcdiv", "nan_to_num", "square", "rsub", "relu6", "masked_fill", "hardsigmoid_backward",
        "hardswish_backward", "mish_backward", "sinc",
    )  # fmt: skip
    more = _decomp.get_decompositions([getattr(aten, name) for name in names if hasattr(aten, name)])
    own = {
        aten.masked_fill.Tensor: _masked_fill,
        aten.softshrink_backward.default: _shrink_backward,
        aten.hardshrink_backward.default: _shrink_backward,
    }
    return {**core(), **more, **own}


def _masked_fill(x: Tensor, mask: Tensor, value: Tensor) -> Tensor:
    """Torch's own imports sympy."""
    return torch.where(mask, value.to(x.dtype), x)


def _shrink_backward(grad: Tensor, x: Tensor, lambd: Any) -> Tensor:
    """Torch has none."""
    return torch.where((x >= -lambd) & (x <= lambd), torch.zeros_like(grad), grad)


# The Programs of this process: each new trace is lowered once, by one thread at a time. No user code runs here. A
# fork waits until a lowering ends, so that a child process finds nothing half done.


T = TypeVar("T")


class _ProgramCache:
    """Programs by the keys of traces, and by their identities."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.programs: BoundedCache[Any, Program] = BoundedCache(256)
        self.by_identity: weakref.WeakValueDictionary[str, Program] = weakref.WeakValueDictionary()
        self.lowered = 0

    def program(self, trace: Trace, name: str) -> Program:
        key = name, trace.key
        program = self.programs.get(key)
        if program is None:
            with self.lock:
                program = self.programs.get(key) or self.programs.put(key, self._lower(trace, name))
        return program

    def _lower(self, trace: Trace, name: str) -> Program:
        self.lowered += 1
        # Equal programs are one, so that they share what is compiled.
        return self.unique(_in_thread(lambda: Program(name, lower(trace), trace.tape.dtype)))

    def derive(self, program: Program, key: str, make: Callable[[], Any]) -> Any:
        """What `make` returns, once for each program. It runs as a lowering does."""
        if key not in program.emitted:
            with self.lock:
                if key not in program.emitted:
                    program.emitted[key] = _in_thread(make)
        return program.emitted[key]

    def adopt(self, identity: str, make: Callable[[], Program]) -> None:
        """Keeps a Program under the name that graphs of another process have for it."""
        with self.lock:
            program = self.by_identity.get(identity) or self.unique(_in_thread(make))
            pinned[identity] = self.by_identity[identity] = program

    def unique(self, program: Program) -> Program:
        return self.by_identity.setdefault(program.identity, program)


def _in_thread(make: Callable[[], T]) -> T:
    """Calls `make` in a thread of its own. What fails there is refused."""

    def lowered() -> T:
        # Anomaly detection is one mode for all threads. It finds nothing in derivatives of stand-ins.
        quiet = torch.autograd.set_detect_anomaly(False) if torch.is_anomaly_enabled() else nullcontext()
        try:
            with quiet:
                return make()
        except Refused:
            raise
        except Exception as failed:  # such as an operation without a derivative
            text = error_text(failed)
        raise Refused(text)

    return in_thread(lowered, "saccade lowers a score function")


cache = _ProgramCache()
os.register_at_fork(before=cache.lock.acquire, after_in_parent=cache.lock.release, after_in_child=cache.lock.release)
pinned: dict[str, Program] = {}
"""Programs that compiled and exported graphs name, which do not keep them alive."""


def program_of(identity: str) -> Any:
    """The Program of this name, or None."""
    return cache.by_identity.get(identity)


def cache_info() -> CacheInfo:
    """How many traces of score functions were known, and how many had to be traced.

    >>> cache_info().maxsize
    256
    """
    return cache.programs.info()._replace(misses=cache.lowered)


def cache_clear() -> None:
    """Forgets all traced score functions; those in use stay."""
    with cache.lock:
        cache.programs.clear()
        cache.lowered = 0


# Programs as text, which exported graphs carry into other processes, and back.
#
# The text is the graph of aten operations that a trace became. Reading it traces the same operations again, with the
# checks of every trace: nothing else in a file is run.


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
