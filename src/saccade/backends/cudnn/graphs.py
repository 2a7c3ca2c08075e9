"""cuDNN graphs of attention and of score callbacks: built, cached and run."""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor

from saccade.scores import Score, Traced
from saccade.scores.callbacks.graph import OPERATIONS, GraphStep, data_type
from saccade.util.caches import BoundedCache, cached_attribute
from saccade.util.memory_layout import ALIGNMENT

# cuDNN graphs of attention, by NVIDIA's Python frontend, which a call imports first: built, cached and run.


def installed() -> bool:
    return find_spec("cudnn") is not None


@cache
def frontend() -> Any:
    """Returns the module `cudnn`."""
    return import_module("cudnn")


_handles = threading.local()
"""Of this thread, by device: a handle holds the stream of one caller, and is not safe for two threads."""


def handle_of(device: torch.device) -> Any:
    """Returns this thread's cuDNN handle for the current device, set to torch's current stream."""
    cudnn, handles = frontend(), _handles.__dict__
    handle = handles.get(str(device))
    if handle is None:
        handle = handles[str(device)] = cudnn.create_handle()
    cudnn.set_stream(handle=handle, stream=torch.cuda.current_stream(device).cuda_stream)
    return handle


def on_device(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Makes `device` current, because cuDNN creates a handle for the current device."""
    if device.index == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(device)


FRONTEND_KERNELS = ("sdpa_fwd_prefill_sm", "sdpa_bwd_sm")
"""Prefixes of the frontend's own kernels, which stand beside cuDNN's engines and know no score_mod."""


class TensorDesc(NamedTuple):
    """Shape, strides and dtype of a tensor of four dimensions."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @staticmethod
    def of(x: Tensor) -> TensorDesc:
        return TensorDesc(x.dtype, tuple(x.shape), x.stride())


@dataclass(frozen=True)
class GraphKey:
    """The key of a graph in the cache."""

    device: int
    tensors: tuple[tuple[str, TensorDesc], ...]
    """Every operand and result by its name; `stats` is the LSE (b, h_q, s_q, 1), `rows` and `keys` used lengths."""
    scale: float
    window: tuple[int | None, int | None] | None = None
    """How many keys are visible left and right of the diagonal, None for all."""
    bottom_right: bool = False
    deterministic: bool = False
    score: ScoreGraph | None = None
    score_inputs: tuple[TensorDesc, ...] = ()

    @cached_attribute
    def _hash(self) -> int:
        return hash(tuple(getattr(self, field.name) for field in fields(self)))

    def __hash__(self) -> int:
        return self._hash


@dataclass(frozen=True)
class BuiltGraph:
    """A graph with its execution plans."""

    graph: Any
    uids: tuple[int, ...]
    """Of the GraphKey's tensors, in their order, then of the score's inputs."""
    workspace: int
    lock: threading.Lock = field(default_factory=threading.Lock)
    """The frontend keeps what it binds on the graph."""

    def run(self, tensors: dict[str, Tensor], score_inputs: Sequence[Tensor], handle: Any) -> None:
        """`tensors`: by the names of the GraphKey, in its order."""
        workspace = torch.empty(self.workspace, dtype=torch.uint8, device=tensors["q"].device)
        bound = [x.detach() if x.requires_grad else x for x in (*tensors.values(), *score_inputs)]
        with self.lock:
            self.graph.execute(bound, workspace, handle=handle, tensor_uids=self.uids)


class Description(NamedTuple):
    """A described graph that is not built yet, and its tensors by name."""

    graph: Any
    tensors: dict[str, Any]
    replay: GraphReplay | None


def describe(key: GraphKey, **options: Any) -> Description:
    """Returns the Description of `key`: of a backward if `key` has a `dout`. `options` go to `cudnn.pygraph`."""
    cudnn = frontend()
    kinds = {torch.float16: cudnn.data_type.HALF, torch.bfloat16: cudnn.data_type.BFLOAT16}
    kinds |= {torch.float32: cudnn.data_type.FLOAT, torch.int32: cudnn.data_type.INT32}
    descs = dict(key.tensors)
    graph = cudnn.pygraph(
        io_data_type=kinds[descs["q"].dtype],
        intermediate_data_type=cudnn.data_type.FLOAT,
        compute_data_type=cudnn.data_type.FLOAT,
        **options,
    )
    tensors: dict[str, Any] = {}

    def add(name: str, desc: TensorDesc, **more: Any) -> Any:
        tensors[name] = graph.tensor(name=name, dim=desc.shape, stride=desc.stride, data_type=kinds[desc.dtype], **more)
        return tensors[name]

    gradient = "dout" in descs
    results = ("dq", "dk", "dv") if gradient else ("out", "stats")
    for name, desc in descs.items():
        if name not in results:
            add(name, desc)
    arguments: dict[str, Any] = {"attn_scale": key.scale, **_mask_arguments(key, tensors, cudnn)}
    replay = None
    if key.score is not None:
        inputs = [
            add(f"score{i}", desc, is_pass_by_value=read.name != "tensor")
            for i, (desc, read) in enumerate(zip(key.score_inputs, key.score.inputs, strict=True))
        ]
        replay = GraphReplay(key.score, inputs, cudnn.data_type)
        arguments["score_mod"] = replay.forward
        if gradient and key.score.backward is not None:
            arguments["score_mod_bprop"] = replay.backward
    arguments |= {name: tensors[name] for name in ("q", "k", "v")}
    if gradient:
        arguments |= {"o": tensors["out"], "dO": tensors["dout"], "stats": tensors["stats"]}
        outputs = graph.sdpa_backward(
            **arguments, use_deterministic_algorithm=key.deterministic, name="attention_backward"
        )
    else:
        outputs = graph.sdpa(**arguments, generate_stats="stats" in descs, name="attention")
    for name, output in zip(results, outputs, strict=True):
        if name in descs:
            desc = descs[name]
            output.set_output(True).set_dim(list(desc.shape)).set_stride(list(desc.stride))
            tensors[name] = output.set_data_type(kinds[desc.dtype])
    return Description(graph, tensors, replay)


def _mask_arguments(key: GraphKey, tensors: dict[str, Any], cudnn: Any) -> dict[str, Any]:
    arguments: dict[str, Any] = {}
    if key.window is not None:
        left, right = key.window
        alignment = "BOTTOM_RIGHT" if key.bottom_right else "TOP_LEFT"
        arguments["diagonal_alignment"] = getattr(cudnn.diagonal_alignment, alignment)
        if left is not None:
            arguments["diagonal_band_left_bound"] = left + 1  # the first distance that is masked
        if right is not None:
            arguments["diagonal_band_right_bound"] = right
    if "rows" in tensors:
        arguments |= {"use_padding_mask": True, "seq_len_q": tensors["rows"], "seq_len_kv": tensors["keys"]}
    return arguments


def build(key: GraphKey, handle: Any) -> BuiltGraph:
    """Raises cudnn.cudnnGraphNotSupportedError if no engine of this cuDNN runs it."""
    cudnn = frontend()
    graph, tensors, replay = describe(key, handle=handle)
    graph.validate()
    graph.build_operation_graph()
    graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])  # calls the callbacks, if not before
    if replay is not None:
        replay.forget()
    graph.deselect_engines(list(FRONTEND_KERNELS))
    graph.check_support()
    graph.build_plans(cudnn.build_plan_policy.HEURISTICS_CHOICE)
    names = (*(name for name, _ in key.tensors), *(f"score{i}" for i in range(len(key.score_inputs))))
    return BuiltGraph(graph, tuple(tensors[name].get_uid() for name in names), max(graph.get_workspace_size(), 1))


graph_cache: BoundedCache[GraphKey, BuiltGraph] = BoundedCache(128)
"""A built graph holds its compiled kernels."""
_building = threading.Lock()


def built_graph(key: GraphKey, handle: Any) -> BuiltGraph:
    """Returns the cached graph of `key`, or builds it. One thread builds at a time: two would build the same."""
    with _building:
        return graph_cache.get_or_make(key, lambda: build(key, handle))


# A score callback on cuDNN's graph: the operations that it recorded, called again, and what they read.


Steps = tuple[GraphStep, ...]
FLOAT, INT32, BOOLEAN, NOT_SET = data_type.FLOAT, data_type.INT32, data_type.BOOLEAN, data_type.NOT_SET
TILE = 128
"""cuDNN's backward calls score_mod for whole tiles of so many rows and keys."""


class NoCallback(Exception):
    """A score function that cuDNN does not run. The message is a reason that `explain` quotes."""


class Input(NamedTuple):
    """The tensor or number that a step `input` reads."""

    name: str
    """`tensor`; or passed by value: `runtime`, a number of the score, and `number`, a constant."""
    position: int | None
    """Among the score's tensors or its numbers."""
    dtype: torch.dtype | None
    """Of what is passed by value."""


@dataclass(frozen=True)
class ScoreGraph:
    """The steps of a callback and of its derivative. Equal ScoreGraphs build equal cuDNN graphs."""

    forward: Steps
    backward: Steps | None
    """Of dP. None: the identity, which is cuDNN's default."""
    inputs: tuple[Input, ...]
    constants: tuple[Tensor | None, ...] = field(compare=False)
    """The value of each input `number`. It is passed with each call: cuDNN before 9.22 has no constants in graphs."""

    @property
    def operations(self) -> int:
        """Returns an upper bound of the number of nodes in cuDNN's graph."""
        steps = (*self.forward, *(self.backward or ()))
        return sum(step.name not in ("input", "score", "gradient") for step in steps)

    def tensors(self, score: Any) -> list[Tensor]:
        """Returns the inputs of a call with this Score: views with four dimensions, and one-element CPU tensors."""
        tensors = []
        for (name, position, dtype), constant in zip(self.inputs, self.constants, strict=True):
            if constant is not None:
                tensors.append(constant)
            elif name == "runtime":
                tensors.append(_by_value(score.numbers[position], dtype))
            else:
                tensors.append(_view(score.tensors[position].detach()))
        return tensors


def score_graph(score: Score, gradient: bool) -> ScoreGraph:
    """Returns the ScoreGraph of a callback, one for each Program. Raises NoCallback if the score is another function,
    or has no derivative of its own."""
    program = score.program if isinstance(score, Traced) else None
    if program is None or program.callbacks is None:
        raise NoCallback(
            "takes score functions only as callbacks (saccade.compat.cudnn.score_callback) whose tensors combine with "
            f"scores, not {score.kind}"
        )
    forward, backward = program.callbacks
    if gradient and backward is None:
        raise NoCallback(f"needs a score_mod_bprop for the gradients of {score.kind}")
    key = "cudnn", gradient
    if key not in program.emitted:
        program.emitted[key] = _numbered(program, forward.steps, backward.steps if gradient else None)
    return program.emitted[key]


def _numbered(program: Any, forward: Steps, backward: Steps | None) -> ScoreGraph:
    """Returns the steps with everything that they read as inputs. Equal inputs are one."""
    reads: dict[tuple[str, str], Any] = {}

    def numbered(step: GraphStep) -> GraphStep:
        if step.name not in ("tensor", "runtime", "number"):
            return _typed(step)
        key = step.name, repr(step.attributes[0])
        reads.setdefault(key, step.attributes[0])
        return GraphStep("input", (), (list(reads).index(key),))

    forward = tuple(map(numbered, forward))
    if backward is not None:
        backward = None if [step.name for step in backward] == ["gradient"] else tuple(map(numbered, backward))
    inputs, constants = [], []
    for (name, _), x in reads.items():
        whole = isinstance(x, int) if name == "number" else name == "runtime" and program.integral[x]
        dtype = None if name == "tensor" else torch.int32 if whole else torch.float32
        inputs.append(Input(name, None if name == "number" else x, dtype))
        constants.append(_by_value(x, dtype) if name == "number" else None)
    return ScoreGraph(forward, backward, tuple(inputs), tuple(constants))


def _typed(step: GraphStep) -> GraphStep:
    """Returns the step with its data types by name, so that callbacks that leave types out build the same graph.
    Comparisons and logic are FLOAT, because a backward takes no other type for them."""
    if step.name in ("score", "gradient"):
        return step
    position, truth = step.name == "gen_index", step.name.startswith(("cmp_", "logical_"))
    made = step.result_type if step.result_type != NOT_SET else INT32 if position else BOOLEAN if truth else FLOAT
    computed = INT32 if position else FLOAT if step.computed in (NOT_SET, BOOLEAN) else step.computed
    return step._replace(computed=computed, result_type=made)


def within(graph: ScoreGraph, rows: int, keys: int) -> ScoreGraph:
    """Returns the graph with a score of -inf and a gradient of zero outside the first `rows` and `keys`.

    cuDNN's backward calls score_mod for whole tiles, in which scores outside of the tensors are -inf or zero. If those
    become +inf or NaN, so do gradients. Source: PyTorch's issue 196678, for the zeros.
    """
    inputs, constants = [*graph.inputs], [*graph.constants]

    def bounded(steps: Steps, outside: float) -> Steps:
        made = list(steps)

        def add(name: str, *rest: Any) -> int:
            made.append(GraphStep(name, *rest))
            return len(made) - 1

        def constant(value: float, dtype: torch.dtype) -> int:
            inputs.append(Input("number", None, dtype))
            constants.append(_by_value(value, dtype))
            return add("input", (), (len(inputs) - 1,))

        value, inside = len(made) - 1, []
        for axis, bound in ((2, rows), (3, keys)):
            if bound % TILE:
                position = add("gen_index", (), (axis,), INT32, INT32)
                inside.append(add("cmp_lt", (position, constant(bound, torch.int32)), (), FLOAT, BOOLEAN))
        keep = inside[0] if len(inside) == 1 else add("logical_and", tuple(inside), (), FLOAT, BOOLEAN)
        add("binary_select", (value, constant(outside, torch.float32), keep), (), FLOAT, FLOAT)
        return tuple(made)

    forward, backward = bounded(graph.forward, -math.inf), bounded(graph.backward or (GraphStep("gradient"),), 0.0)
    return replace(graph, forward=forward, backward=backward, inputs=tuple(inputs), constants=tuple(constants))


class GraphReplay:
    """The two callbacks of one cuDNN graph. cuDNN calls `forward`, and in a backward then `backward`.

    Operations on the score that both share are one node, as in callbacks that keep values for their derivative.
    """

    def __init__(self, score_graph: ScoreGraph, inputs: Sequence[Any], data_types: Any) -> None:
        """inputs: the cuDNN graph's tensors for `score_graph.inputs`, in their order. data_types: cuDNN's class."""
        self.score_graph, self.inputs, self.data_types = score_graph, inputs, data_types
        self.score: Any = None
        self.nodes: list[Any] = []
        """All nodes of the graph, which keeps their ids apart."""
        self.shared: dict[Any, Any] = {}
        """Nodes by their step and the ids of their operands."""

    def forward(self, graph: Any, score: Any) -> Any:
        self.forget()
        self.score = score
        return self._replay(graph, self.score_graph.forward, score)

    def backward(self, graph: Any, gradient: Any) -> Any:
        assert self.score_graph.backward is not None
        return self._replay(graph, self.score_graph.backward, gradient)

    def forget(self) -> None:
        """Drops the nodes of a built graph: they keep the graph alive, and the graph keeps the callbacks alive."""
        self.score = None
        self.nodes.clear()
        self.shared.clear()

    def _replay(self, graph: Any, steps: Steps, indexed: Any) -> Any:
        """`indexed`: the score or the gradient, whose indices gen_index gives."""
        first = len(self.nodes)
        for step in steps:
            operands = [self.nodes[first + i] for i in step.inputs]
            key = step._replace(inputs=()), *map(id, operands)
            node = self.shared.get(key) if operands else None
            if node is None:
                node = self.shared[key] = self._node(graph, step, operands, indexed)
            self.nodes.append(node)
        return self.nodes[-1]

    def _node(self, graph: Any, step: GraphStep, operands: list[Any], indexed: Any) -> Any:
        if step.name == "input":
            return self.inputs[step.attributes[0]]
        if step.name in ("score", "gradient"):
            return self.score if step.name == "score" else indexed
        if step.name == "gen_index":
            keywords: dict[str, Any] = {"input": indexed, "axis": step.attributes[0]}
        else:
            operation = OPERATIONS[step.name]
            keywords = dict(zip(operation.arguments, operands, strict=True))
            attributes = zip((name for name, _ in operation.attributes), step.attributes, strict=True)
            keywords |= {name: x for name, x in attributes if math.isfinite(x)}
        node = getattr(graph, step.name)(**keywords, compute_data_type=getattr(self.data_types, step.computed.name))
        node.set_data_type(getattr(self.data_types, step.result_type.name))
        return node


def _by_value(x: float, dtype: torch.dtype | None) -> Tensor:
    return torch.full((1, 1, 1, 1), x, dtype=dtype, device="cpu")


_READABLE = frozenset((torch.float16, torch.bfloat16, torch.float32, torch.int32))


def _view(x: Tensor) -> Tensor:
    """Returns x with four dimensions, in a dtype that cuDNN supports."""
    x = x[(None,) * (4 - x.dim())]
    if x.dtype not in _READABLE:
        x = x.to(torch.float32 if x.is_floating_point() else torch.int32)
    if x.data_ptr() % ALIGNMENT or any(n > 1 and m == 0 for n, m in zip(x.shape, x.stride(), strict=True)):
        x = x.clone(memory_format=torch.contiguous_format)
    # Strides of dimensions of one element mean nothing, but have to be multiples of the inner ones.
    shape = x.shape
    stride = [x.stride(i) if shape[i] != 1 else math.prod(shape[i + 1 :]) for i in range(4)]
    return x.as_strided(shape, stride)


# What cuDNN's engines refuse of callbacks, crash on, or compute wrong: reasons for `explain`. Seen on an H200 with
# cuDNN 9.19 and its frontend 1.32. A wrong number is worse than none. To lift a limit, delete its lines once the tests
# of tests/backends/cudnn/test_cudnn_gpu.py pass for it.


MOST_OPERATIONS = 220
"""cuDNN takes graphs of 256 nodes, of which attention itself is about 25."""


def callback_limits(score: Score, graph: ScoreGraph, gradient: bool) -> list[str]:
    """Returns the distinct reasons why cuDNN does not run a callback's graph."""
    reasons = [_input_limits(score, graph, gradient)]
    reasons += [_step_limits(graph, steps) for steps in (graph.forward, graph.backward) if steps is not None]
    found = list(dict.fromkeys(reason for part in reasons for reason in part))
    if graph.operations > MOST_OPERATIONS:
        found.append(f"runs up to {MOST_OPERATIONS} operations on scores, not {graph.operations}")
    return found


def _input_limits(score: Score, graph: ScoreGraph, gradient: bool) -> Iterator[str]:
    for name, position, _ in graph.inputs:
        if name != "tensor" or position is None:
            continue
        x = score.tensors[position]
        if x.dtype == torch.bool:
            yield "does not take bool tensors in a callback: pass int32"
        rows, keys = (1, 1, *x.shape)[-2:]
        if gradient and keys > 1 and rows == 1:
            yield "gives wrong gradients on an H200 for a tensor that depends on the key and not on the row"


def _step_limits(graph: ScoreGraph, steps: tuple[GraphStep, ...]) -> Iterator[str]:
    if steps[-1].name == "input":
        yield "does not take a callback that returns an input unchanged"
    for step in steps:
        operands = [steps[i] for i in step.inputs]
        if operands and operands[0].name == "input":
            yield f"takes a computed value as the first operand of {step.name}, not a tensor or a number"
        if step.name == "binary_select" and not (operands[2].name != "input" and _selectable(graph, operands[1])):
            yield (
                "takes a computed mask in binary_select, and as its second operand a computed value, a tensor of one "
                "element on the CPU, 0, or a number up to -1e9"
            )
        if step.name.startswith("cmp_") and _may_be_negative(graph, operands[1]):
            yield "gives wrong results on an H200 for comparisons with an integer that may be negative: pass a float"
        if step.name in _WRONG:
            yield f"gives wrong results on an H200 for {step.name}: use {_WRONG[step.name]}"
        if step.result_type in (data_type.HALF, data_type.BFLOAT16):
            yield "gives wrong results on an H200 for rounding to fp16 or bf16"


_WRONG = {"logical_not": "the opposite comparison", "scale": "mul"}


def _selectable(graph: ScoreGraph, step: GraphStep) -> bool:
    """Whether `binary_select` of such a value was tested on a GPU."""
    if step.name != "input":
        return True
    position = step.attributes[0]
    constant = graph.constants[position]
    if constant is None:
        return graph.inputs[position].name == "runtime"
    return constant.item() == 0 or constant.item() <= -1e9


def _may_be_negative(graph: ScoreGraph, step: GraphStep) -> bool:
    if step.name != "input" or graph.inputs[step.attributes[0]].dtype != torch.int32:
        return False
    constant = graph.constants[step.attributes[0]]
    return constant is None or constant.item() < 0
