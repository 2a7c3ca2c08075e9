"""cuDNN graphs of attention, by NVIDIA's Python frontend, which a call imports first: built, cached and run."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor

from saccade.backends.cudnn.callbacks import GraphReplay, ScoreGraph
from saccade.util.bounded_cache import BoundedCache
from saccade.util.lazily import lazily


def installed() -> bool:
    return find_spec("cudnn") is not None


@cache
def frontend() -> Any:
    """The module `cudnn`."""
    return import_module("cudnn")


_handles = threading.local()
"""Of this thread, by device: a handle holds the stream of one caller, and is not safe for two threads."""


def handle_of(device: torch.device) -> Any:
    """This thread's handle for the current device, on torch's current stream."""
    cudnn, handles = frontend(), _handles.__dict__
    handle = handles.get(str(device))
    if handle is None:
        handle = handles[str(device)] = cudnn.create_handle()
    cudnn.set_stream(handle=handle, stream=torch.cuda.current_stream(device).cuda_stream)
    return handle


def on_device(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """A handle is created for the current device."""
    if device.index == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(device)


FRONTEND_KERNELS = ("sdpa_fwd_prefill_sm", "sdpa_bwd_sm")
"""Prefixes of the frontend's own kernels, which stand beside cuDNN's engines and know no score_mod."""


class TensorDesc(NamedTuple):
    """How a tensor of four dimensions lies in memory."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @staticmethod
    def of(x: Tensor) -> TensorDesc:
        return TensorDesc(x.dtype, tuple(x.shape), x.stride())


@dataclass(frozen=True)
class GraphKey:
    """All that a graph is built for."""

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

    @lazily
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
    """A graph before cuDNN has seen it, and its tensors by name."""

    graph: Any
    tensors: dict[str, Any]
    replay: GraphReplay | None


def describe(key: GraphKey, **options: Any) -> Description:
    """A backward where `key` has a `dout`. `options` go to `cudnn.pygraph`."""
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
    """
    Raises:
        cudnn.cudnnGraphNotSupportedError: no engine of this cuDNN runs it.
    """
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
    """The graph of the cache. One thread builds at a time: two would build the same."""
    with _building:
        return graph_cache.get_or_make(key, lambda: build(key, handle))
