"""FlashAttention-3's operators, FlashAttention-4's functions, and saccade's face of version 2, all in (b, s, h, d), or
packed in (t, h, d)."""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import os
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from benchmarks.harness.grids import Cell
from benchmarks.harness.providers.base import PeerInputs, Prepared, Provider, Results, prepared
from saccade.masks import Mask, Window
from saccade.scores import Softcap
from saccade.testing.cases import Inputs


class _Flash(Provider):
    """What the two have in common."""

    layouts = "dense", "packed"
    dtypes = "bf16", "fp16"
    masks = Window
    deterministic = True


class FlashAttention3(_Flash):
    """`torch.ops.flash_attn_3`, from an installed `flash_attn_3` or from the library that FA3_LIBRARY names.

    A library that was built for CUDA 12 needs its runtime beside a torch for CUDA 13: CUDART12 names it.
    """

    name = "fa3"
    layouts = "dense", "packed", "paged"

    def available(self, device: torch.device) -> str | None:
        if device.type != "cuda" or torch.cuda.get_device_capability(device) != (9, 0):
            return "runs on sm90"
        try:
            return None if self._load() else "not installed: no flash_attn_3 package, and FA3_LIBRARY is not set"
        except (OSError, ImportError, RuntimeError) as problem:
            return f"does not load: {_line(problem)}"

    def prepare(self, cell: Cell, inputs: Inputs) -> Prepared:
        self._load()
        if cell.layout == "paged":
            return self._paged(cell, inputs)
        call = PeerInputs.of(inputs, "bshd")
        operators = torch.ops.flash_attn_3
        left, right = _window(call.mask, -1)
        options: dict[str, Any] = {"softmax_scale": call.q.shape[-1] ** -0.5, "is_causal": cell.case.mask == "causal"}
        if not options["is_causal"]:
            options |= {"window_size_left": left, "window_size_right": right}
        options |= _lengths(call)

        def forward() -> Results:
            return operators.fwd(call.q, call.k, call.v, num_splits=1, **options)[:2]

        def backward(out: Tensor, lse: Tensor) -> Results:
            flags = options | {"deterministic": cell.deterministic}
            return operators.bwd(call.dout, call.q, call.k, call.v, out, lse, **flags)[:3]

        if cell.with_host:
            return prepared(partial(_differentiable, options), cell, call)
        if cell.call == "forward":
            return Prepared(lambda: forward()[:1], order=call.order)
        if cell.call == "forward+backward":
            return Prepared(lambda: backward(*forward()), order=call.order)
        out, lse = forward()
        return Prepared(lambda: backward(out, lse), order=call.order)

    @staticmethod
    def _paged(cell: Cell, inputs: Inputs) -> Prepared:
        layout = inputs.keywords["layout"]
        options = {"seqused_k": layout.seqused_k, "page_table": layout.block_table, "num_splits": 0}
        options |= {"softmax_scale": cell.case.d**-0.5, "is_causal": cell.case.mask == "causal"}
        q, k, v = inputs.q, inputs.k, inputs.v
        if cell.case.cache == "latent":  # apart: what is keys and values, and what is keys alone
            q, k, options["q_v"] = q[..., cell.case.d_v :], k[..., cell.case.d_v :], q[..., : cell.case.d_v]
        return Prepared(lambda: torch.ops.flash_attn_3.fwd(q, k, v, **options)[:1], order="paged")

    @staticmethod
    def _load() -> bool:
        """Whether the operators are loaded now."""
        if hasattr(torch.ops.flash_attn_3, "fwd"):
            return True
        if library := os.environ.get("FA3_LIBRARY"):
            if runtime := os.environ.get("CUDART12"):
                ctypes.CDLL(runtime, mode=ctypes.RTLD_GLOBAL)
            torch.ops.load_library(library)
        elif importlib.util.find_spec("flash_attn_3"):
            importlib.import_module("flash_attn_3._C")
        return hasattr(torch.ops.flash_attn_3, "fwd")


class _Fa3(torch.autograd.Function):
    """Its operators in autograd, as its package wraps them."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> Tensor:
        out, lse = torch.ops.flash_attn_3.fwd(q, k, v, num_splits=1, **options)[:2]
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.options = options
        return out

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        return *torch.ops.flash_attn_3.bwd(*grad_outputs, *ctx.saved_tensors, **ctx.options)[:3], None


def _differentiable(options: dict[str, Any], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return cast(Tensor, _Fa3.apply(q, k, v, options))


class FlashAttention4(_Flash):
    """`flash_attn.cute`, which compiles its kernels at their first call."""

    name = "fa4"
    scores = ("softcap",)
    sinks = True

    def available(self, device: torch.device) -> str | None:
        if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] < 9:
            return "runs on sm90 and newer"
        try:
            importlib.import_module("flash_attn.cute")
        except ImportError as missing:
            return f"not installed: {_line(missing)}"
        except Exception as problem:  # a foreign package may raise anything at import
            return f"does not load: {_line(problem)}"
        return None

    def prepare(self, cell: Cell, inputs: Inputs) -> Prepared:
        call, functions = PeerInputs.of(inputs, "bshd"), importlib.import_module("flash_attn.cute")
        lengths = _lengths(call)
        attend = functions.flash_attn_varlen_func if lengths else functions.flash_attn_func
        options: dict[str, Any] = {"causal": cell.case.mask == "causal", "deterministic": cell.deterministic, **lengths}
        if call.mask is not None and not options["causal"]:
            options["window_size"] = _window(call.mask, None)
        if call.sink is not None:  # it asks for this dtype, to which the benchmark rounds every provider's sink
            options["learnable_sink"] = call.sink.detach().bfloat16()
        if isinstance(call.score, Softcap):
            options["softcap"] = call.score.cap

        def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            result = attend(q, k, v, **options)
            return result[0] if isinstance(result, tuple) else result

        return prepared(function, cell, call)


class FlashAttnFace(Provider):
    """`saccade.compat.flash_attn`: what flash-attn's names cost beside the own call of `auto`."""

    name = "flash-attn-face"
    role = "saccade"
    layouts = "dense", "packed"
    masks = Window
    scores = ("softcap",)
    deterministic = True

    def prepare(self, cell: Cell, inputs: Inputs) -> Prepared:
        from saccade.compat import flash_attn

        call = PeerInputs.of(inputs, "bshd")
        lengths = _lengths(call)
        attend = flash_attn.flash_attn_varlen_func if lengths else flash_attn.flash_attn_func
        window = _window(call.mask, -1)
        options: dict[str, Any] = {"window_size": window, "deterministic": cell.deterministic, **lengths}
        if isinstance(call.score, Softcap):
            options["softcap"] = call.score.cap

        def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return attend(q, k, v, **options)

        return prepared(function, cell, call)


def _lengths(call: PeerInputs) -> dict[str, Any]:
    """The offsets and longest sequences of packed operands, by the names that both use; none for others."""
    names = "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"
    return dict(zip(names, call.lengths(), strict=True)) if call.layout.ragged_keys else {}


def _window(mask: Mask | None, unbounded: int | None) -> tuple[int | None, int | None]:
    if not isinstance(mask, Window):
        return unbounded, unbounded
    left, right = (unbounded if bound is None else bound for bound in (mask.left, mask.right))
    return left, right


def _line(problem: BaseException) -> str:
    return f"{type(problem).__name__}: {problem}".splitlines()[0][:200]
