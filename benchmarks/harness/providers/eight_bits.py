"""Peers of 8-bit q, k and v: cuDNN's attention of 8 bits, and our 16-bit kernels on the values that the bytes are."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from benchmarks.harness.grids import Cell
from benchmarks.harness.providers.base import PeerInputs, Prepared, Provider, Results
from benchmarks.harness.providers.saccade import Saccade
from saccade.backends.cudnn.graphs import frontend, handle_of
from saccade.testing.cases import Inputs

EIGHT_BITS = "fp8_e4m3", "fp8_e5m2"


class WiderValues(Saccade):
    """A backend on q, k and v in bfloat16, which holds every 8-bit number: what 8 bits have to be faster than."""

    def supports(self, cell: Cell, inputs: Inputs) -> str | None:
        if cell.case.dtype not in EIGHT_BITS or cell.call != "forward":
            return "is for forwards of 8-bit operands"
        return super().supports(cell, _wider(inputs))

    def prepare(self, cell: Cell, inputs: Inputs) -> Prepared:
        return super().prepare(cell, _wider(inputs))


def _wider(inputs: Inputs) -> Inputs:
    q, k, v = (x.bfloat16() for x in (inputs.q, inputs.k, inputs.v))
    return Inputs(q, k, v, inputs.dout, inputs.dlse, inputs.keywords)


class CudnnFp8(Provider):
    """`sdpa_fp8` of cuDNN's frontend: one factor for each tensor, and a result in e4m3.

    Nothing in it promotes its sums (notes/fp8.md), so it is timed whatever its error, which is in the row. That
    of the result's own 8 bits is in it too: cuDNN has no wider result on Hopper.
    """

    name = "cudnn-fp8"
    calls = ("forward",)
    dtypes = ("fp8_e4m3",)
    module = "cudnn"
    timed_if_wrong = True
    needs_cuda = True

    def supports(self, cell: Cell, inputs: Inputs) -> str | None:
        case = cell.case
        if case.mask not in ("none", "causal") or (case.mask == "causal" and case.s_q != case.s_k):
            return "this adapter takes no mask, or a causal one of as many rows as keys"
        return super().supports(cell, inputs)

    def prepare(self, cell: Cell, inputs: Inputs) -> Prepared:
        call = PeerInputs.of(inputs, "bshd")
        q, k, v = (x.transpose(1, 2) for x in (call.q, call.k, call.v))
        out = torch.empty_like(call.q[..., : v.shape[3]]).transpose(1, 2)
        graph, uids = _graph(q, k, v, out, cell.case.mask == "causal")
        # A result is a mean of values, so a quarter of the largest number of e4m3 for one of 4 is room enough.
        numbers = {"scale_s": P_SCALE, "descale_s": 1 / P_SCALE, "scale_o": OUT_SCALE}
        given: dict[str, Tensor] = {"q": q, "k": k, "v": v, "out": out}
        for name in uids.keys() - given.keys():
            given[name] = torch.full((1, 1, 1, 1), numbers.get(name, 1.0), device=q.device)
        pack = {uids[name]: x for name, x in given.items()}
        workspace = torch.empty(max(1, graph.get_workspace_size()), dtype=torch.uint8, device=q.device)

        def function() -> Results:
            graph.execute(pack, workspace, handle=handle_of(q.device))
            return (out,)

        def values(results: Results) -> Results:
            return ((results[0].float() / OUT_SCALE).bfloat16(),)

        return Prepared(function, after=values)


P_SCALE, OUT_SCALE = 256.0, 64.0


def _graph(q: Tensor, k: Tensor, v: Tensor, out: Tensor, causal: bool) -> tuple[Any, dict[str, int]]:
    """A graph with its plans, and the number of each of its tensors."""
    cudnn = frontend()
    kinds = cudnn.data_type
    graph = cudnn.pygraph(
        io_data_type=kinds.FP8_E4M3,
        intermediate_data_type=kinds.FLOAT,
        compute_data_type=kinds.FLOAT,
        handle=handle_of(q.device),
    )

    def described(name: str, x: Tensor | None) -> object:
        shape, stride = ((1, 1, 1, 1), (1, 1, 1, 1)) if x is None else (tuple(x.shape), x.stride())
        kind = kinds.FLOAT if x is None else kinds.FP8_E4M3
        return graph.tensor(name=name, dim=shape, stride=stride, data_type=kind)

    tensors = {name: described(name, x) for name, x in {"q": q, "k": k, "v": v}.items()}
    factors = ("descale_q", "descale_k", "descale_v", "descale_s", "scale_s", "scale_o")
    tensors |= {name: described(name, None) for name in factors}
    edges = {"diagonal_alignment": cudnn.diagonal_alignment.TOP_LEFT, "right_bound": 0} if causal else {}
    result, _, *largest = graph.sdpa_fp8(**tensors, attn_scale=q.shape[3] ** -0.5, generate_stats=False, **edges)
    result.set_output(True).set_dim(tuple(out.shape)).set_stride(out.stride()).set_data_type(kinds.FP8_E4M3)
    for x in largest:
        x.set_output(True).set_dim((1, 1, 1, 1)).set_stride((1, 1, 1, 1)).set_data_type(kinds.FLOAT)
    graph.validate()
    graph.build_operation_graph()
    graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
    graph.check_support()
    graph.build_plans(cudnn.build_plan_policy.HEURISTICS_CHOICE)
    named = {**tensors, "out": result, "amax_s": largest[0], "amax_o": largest[1]}
    return graph, {name: x.get_uid() for name, x in named.items()}
