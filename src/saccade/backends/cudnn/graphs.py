"""cuDNN graphs of attention: described, built, and run."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

import torch
from torch import Tensor

from saccade.backends.cudnn.frontend import frontend
from saccade.backends.cudnn.modification import Modification
from saccade.backends.cudnn.replay import Replay
from saccade.lazily import lazily

OTHERS = ("sdpa_fwd_prefill_sm", "sdpa_bwd_sm")
"""How the frontend's own kernels begin, which stand beside cuDNN's engines and know no score_mod."""


class Place(NamedTuple):
    """How a tensor of (b, h, s, d) lies."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @staticmethod
    def of(x: Tensor) -> Place:
        return Place(x.dtype, tuple(x.shape), x.stride())


@dataclass(frozen=True)
class Form:
    """All that a graph is built for: its key."""

    device: int
    tensors: tuple[tuple[str, Place], ...]
    """Every operand and result by its name; `stats` is the LSE (b, h_q, s_q, 1), `rows` and `keys` used lengths."""
    scale: float
    band: tuple[int | None, int | None] | None = None
    """Bounds of a window, both counted from the diagonal, None where there is none."""
    bottom_right: bool = False
    deterministic: bool = False
    modification: Modification | None = None
    held: tuple[Place, ...] = ()
    """What the modification reads."""

    @lazily
    def _hash(self) -> int:
        return hash(tuple(getattr(self, field.name) for field in fields(self)))

    def __hash__(self) -> int:
        return self._hash


@dataclass(frozen=True)
class Built:
    """A graph with its plans."""

    graph: Any
    uids: tuple[int, ...]
    """What its tensors are called there: the Form's, in its order, then those that the modification reads."""
    workspace: int
    lock: threading.Lock = field(default_factory=threading.Lock)
    """The frontend keeps what it binds on the graph."""

    def run(self, given: dict[str, Tensor], held: Sequence[Tensor], handle: Any) -> None:
        """`given`: by the names of the Form, in its order."""
        workspace = torch.empty(self.workspace, dtype=torch.uint8, device=given["q"].device)
        tensors = [x.detach() if x.requires_grad else x for x in (*given.values(), *held)]
        with self.lock:
            self.graph.execute(tensors, workspace, handle=handle, tensor_uids=self.uids)


class Described(NamedTuple):
    graph: Any
    tensors: dict[str, Any]
    replay: Replay | None


def described(form: Form, **options: Any) -> Described:
    """The graph, before cuDNN has seen it: a backward where `form` has a `dout`. `options` go to `cudnn.pygraph`."""
    cudnn = frontend()
    kinds = {torch.float16: cudnn.data_type.HALF, torch.bfloat16: cudnn.data_type.BFLOAT16}
    kinds |= {torch.float32: cudnn.data_type.FLOAT, torch.int32: cudnn.data_type.INT32}
    places = dict(form.tensors)
    graph = cudnn.pygraph(
        io_data_type=kinds[places["q"].dtype],
        intermediate_data_type=cudnn.data_type.FLOAT,
        compute_data_type=cudnn.data_type.FLOAT,
        **options,
    )
    gradient = "dout" in places
    results = ("dq", "dk", "dv") if gradient else ("out", "stats")
    tensors = {
        name: graph.tensor(name=name, dim=place.shape, stride=place.stride, data_type=kinds[place.dtype])
        for name, place in places.items()
        if name not in results
    }
    arguments: dict[str, Any] = {"attn_scale": form.scale, **_masked(form, tensors, cudnn)}
    replay = None
    if form.modification is not None:
        replay = _replay(graph, form, tensors, kinds, cudnn.data_type)
        arguments["score_mod"] = replay.forward
        if gradient and form.modification.backward is not None:
            arguments["score_mod_bprop"] = replay.backward
    arguments |= {name: tensors[name] for name in ("q", "k", "v")}
    if gradient:
        arguments |= {"o": tensors["out"], "dO": tensors["dout"], "stats": tensors["stats"]}
        found = graph.sdpa_backward(
            **arguments, use_deterministic_algorithm=form.deterministic, name="attention_backward"
        )
    else:
        found = graph.sdpa(**arguments, generate_stats="stats" in places, name="attention")
    for name, made in zip(results, found, strict=True):
        if name in places:
            place = places[name]
            made.set_output(True).set_dim(list(place.shape)).set_stride(list(place.stride))
            tensors[name] = made.set_data_type(kinds[place.dtype])
    return Described(graph, tensors, replay)


def _masked(form: Form, tensors: dict[str, Any], cudnn: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if form.band is not None:
        left, right = form.band
        found["diagonal_alignment"] = getattr(
            cudnn.diagonal_alignment, "BOTTOM_RIGHT" if form.bottom_right else "TOP_LEFT"
        )
        if left is not None:
            found["diagonal_band_left_bound"] = left + 1  # keys from there on are hidden
        if right is not None:
            found["diagonal_band_right_bound"] = right
    if "rows" in tensors:
        found |= {"use_padding_mask": True, "seq_len_q": tensors["rows"], "seq_len_kv": tensors["keys"]}
    return found


def _replay(graph: Any, form: Form, tensors: dict[str, Any], kinds: dict[Any, Any], data_types: Any) -> Replay:
    mod = form.modification
    assert mod is not None
    held = []
    for i, place in enumerate(form.held):
        by_value = i >= len(mod.reads)
        made = graph.tensor(
            name=f"score{i}", dim=place.shape, stride=place.stride, data_type=kinds[place.dtype],
            is_pass_by_value=by_value,
        )  # fmt: skip
        held.append(made)
        tensors[f"score{i}"] = made
    return Replay(mod, held, data_types)


def built(form: Form, handle: Any) -> Built:
    """
    Raises:
        cudnn.cudnnGraphNotSupportedError: no engine of this cuDNN runs it.
    """
    cudnn = frontend()
    graph, tensors, replay = described(form, handle=handle)
    graph.validate()
    graph.build_operation_graph()
    graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])  # calls the callbacks, if not before
    if replay is not None:
        replay.forget()
    graph.deselect_engines(list(OTHERS))
    graph.check_support()
    graph.build_plans(cudnn.build_plan_policy.HEURISTICS_CHOICE)
    names = (*(name for name, _ in form.tensors), *(f"score{i}" for i in range(len(form.held))))
    return Built(graph, tuple(tensors[name].get_uid() for name in names), max(graph.get_workspace_size(), 1))
