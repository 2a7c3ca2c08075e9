"""What recorders see of calls, forward and backward: that they allocate memory, fill it, look at it through views, and
launch kernels that are compiled once. Anything else keeps a call from being replayed.

Nothing runs here: a launch does nothing, and results are whatever lies in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from saccade import (
    Dense,
    Descale,
    Packed,
    Paged,
    alibi,
    attention,
    bias,
    causal,
    documents,
    interval,
    mask_mod,
    prefix,
    relative_bias,
    softcap,
    window,
)
from saccade.backends import block_sparsity, triton
from saccade.backends import hopper as gluon
from saccade.backends.device.replay import LaunchRecorder
from saccade.backends.hopper.forward import config
from saccade.layouts import Layout
from saccade.util.caches import derived
from tests.emulator import emulated

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn


@contextmanager
def recorded(monkeypatch: pytest.MonkeyPatch, processors: int) -> Iterator[list[LaunchRecorder]]:
    """What recorders see in the backends' own functions. No kernel runs."""
    recorders = list[LaunchRecorder]()
    with emulated(processors=processors) as emulation, monkeypatch.context() as patch:
        patch.setattr(emulation, "launch", lambda *given: None)
        patch.setattr(triton, "obstacle", lambda: None)

        def inside(run: Callable[..., Any]) -> Callable[..., Any]:
            def recorded_run(*given: Any) -> Any:
                recorders.append(LaunchRecorder())
                with recorders[-1]:
                    return run(*given)

            return recorded_run

        for module in (gluon, triton):
            for name in ("run_forward", "run_backward"):
                patch.setattr(module, name, inside(getattr(module, name)))
        # As on a GPU, whose tensors no host reads.
        fresh = lambda key, tensors, make: make() if tensors else derived(key, (), make)  # noqa: E731
        patch.setattr(block_sparsity, "derived_from_values", fresh)
        for kind in (Layout, Dense, Packed, Paged):
            patch.setattr(kind, "check_lengths", lambda *given: None)
            patch.setattr(kind, "check_positions", lambda *given: None)
        yield recorders


def dense(h_q: int = 4, h_k: int = 2, s: int = 256, d: int = 64) -> list[Tensor]:
    return [torch.zeros(2, h, s, d, dtype=BF16) for h in (h_q, h_k, h_k)]


def packed() -> list[Tensor]:
    return [torch.zeros(256, h, 64, dtype=BF16) for h in (4, 2, 2)]


def wide() -> list[Tensor]:
    return dense(d=192)


def eight_bits() -> list[Tensor]:
    return [x.to(E4M3) for x in dense()]


def pages(s_q: int = 1, dtype: torch.dtype = BF16, d: int = 64, d_v: int = 64, rows: int | None = None) -> list[Tensor]:
    shape = (2, s_q) if rows is None else (rows,)
    k = torch.zeros(64, 16, 2, d).to(dtype)
    v = k[..., :d_v] if d != d_v else torch.zeros(64, 16, 2, d_v).to(dtype)
    return [torch.zeros(*shape, 64, d, dtype=BF16), k, v]


def paged(**more: Any) -> Paged:
    return Paged(torch.arange(64).int().view(2, 32), torch.tensor([200, 400]), **more)


ENDS, USED, BOUNDS = torch.tensor([0, 100, 256]), torch.tensor([90, 156]), torch.randint(0, 200, (2, 2, 256))
LISTED = mask_mod(lambda b, h, q_idx, kv_idx: (q_idx ^ kv_idx) & 64 == 0)
SINK = torch.zeros(4, dtype=BF16, requires_grad=True)


def learned(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(shape, dtype=dtype, requires_grad=True)


CALLS: dict[str, tuple[list[Tensor], dict[str, Any]]] = {
    "plain": (dense(), {}),
    "rows that are not aligned": ([x[..., 1:] for x in dense()], {}),
    "the gradient of a sum": (dense(), {}),
    "causal": (dense(h_k=4), {"mask": causal()}),
    "window sink": (dense(), {"mask": window(99, 0), "sink": SINK}),
    "wide": (wide(), {"mask": causal(), "sink": SINK, "deterministic": True}),
    "deterministic": (dense(), {"mask": causal(), "deterministic": True}),
    "dropout": (dense(), {"dropout_p": 0.1}),
    "sbhd": ([x.permute(2, 0, 1, 3) for x in dense()], {"layout": Dense("sbhd")}),
    "padded": (dense(), {"layout": Dense("bhsd", USED, USED), "sink": SINK}),
    "offset": (dense(), {"layout": Dense(q_offset=3), "mask": causal()}),
    "offsets": (dense(), {"layout": Dense(q_offset=USED, k_offset=USED), "mask": causal()}),
    "positions": (dense(), {"layout": Dense(q_offset=BOUNDS[0]), "mask": causal()}),
    "packed": (packed(), {"layout": Packed(ENDS), "mask": causal()}),
    "packed used sink": (packed(), {"layout": Packed(ENDS, None, None, None, USED, USED), "sink": SINK}),
    "packed deterministic": (packed(), {"layout": Packed(ENDS), "deterministic": True}),
    "packed ranges": (packed(), {"layout": Packed(ENDS, starts_k=USED, seqused_k=USED)}),
    "packed predicate": (packed(), {"layout": Packed(ENDS), "mask": LISTED}),
    "packed predicate deterministic": (packed(), {"layout": Packed(ENDS), "mask": LISTED, "deterministic": True}),
    "interval": (dense(), {"mask": interval(*BOUNDS)}),
    "packed interval": (packed(), {"mask": interval(*BOUNDS[0]), "layout": Packed(ENDS)}),
    "prefixes": (dense(), {"mask": prefix(USED)}),
    "documents": (dense(), {"mask": documents(BOUNDS[0] // 64) & causal()}),
    "tensor": (dense(), {"mask": BOUNDS[0, :, None, None] > BOUNDS[1, :, None, :, None]}),
    "tensor deterministic": (dense(), {"mask": BOUNDS[0, :1] > BOUNDS[1, 0, :, None], "deterministic": True}),
    "predicate": (dense(), {"mask": LISTED & causal()}),
    "softcap": (dense(), {"score_mod": softcap(9.0)}),
    "alibi": (dense(), {"score_mod": alibi(learned(4)), "mask": causal()}),
    "bias": (dense(), {"score_mod": bias(learned(2, 4, 256, 256, dtype=BF16))}),
    "shared bias": (dense(), {"score_mod": bias(learned(256, 256, dtype=BF16))}),
    "relative bias": (dense(), {"score_mod": relative_bias(learned(4, 65, dtype=BF16))}),
    "relative bias deterministic": (dense(), {"score_mod": relative_bias(learned(4, 65)), "deterministic": True}),
    "eight bits": (eight_bits(), {"descale": Descale(0.5, USED[:, None].float().expand(2, 2), torch.ones(2, 2, 2))}),
    "eight bits packed": ([x.to(E4M3) for x in packed()], {"layout": Packed(ENDS)}),
    "decode": (pages(), {"layout": paged()}),
    "decode sink": (pages(), {"layout": paged(num_splits=1), "sink": torch.zeros(64), "mask": window(99, 0)}),
    "decode eight bits": (pages(dtype=E4M3), {"layout": paged(), "descale": Descale(k=0.5, v=torch.ones(2, 2))}),
    "decode packed": (pages(rows=9), {"layout": paged(cu_seqlens_q=torch.tensor([0, 3, 8]))}),
    "prompt": (pages(128), {"layout": paged(), "mask": causal(), "return_max_scores": True}),
    "prompt packed": (pages(rows=256), {"layout": paged(cu_seqlens_q=ENDS), "out": pages(rows=256)[0]}),
    "latent": ([x[..., :1, :] if i else x for i, x in enumerate(pages(1, d=576, d_v=512))], {"layout": paged()}),
}

OTHERS: dict[str, tuple[list[Tensor], dict[str, Any], str]] = {
    # Kernels read numbers that lie side by side.
    "every second length": (dense(), {"layout": Dense("bhsd", *BOUNDS[0, :, ::2].mT[:2])}, "aten.clone.default"),
    # Without keys no kernel runs: each row's LSE is its sink.
    "no keys": (
        [dense()[0], *(x[:, :, :0] for x in dense()[1:])], {"sink": SINK, "layout": Dense("bhsd", USED)},
        "aten.copy_.default",
    ),
}  # fmt: skip
"""Calls that do more, and what first."""


def recorders_of(
    operands: list[Tensor], keywords: dict[str, Any], monkeypatch: pytest.MonkeyPatch, expanded: bool = False
) -> list[LaunchRecorder]:
    """Of the second of two calls, and of its backward."""
    for limit in ("LEAST_ITEMS", "LEAST_ROWS"):
        monkeypatch.setattr(gluon, limit, 1)
    monkeypatch.setattr(config, "LEAST_KEYS", 64)
    trains = operands[1].dtype == BF16 and not isinstance(keywords.get("layout"), Paged)
    leaves = [x.detach().requires_grad_(trains) for x in operands]
    with recorded(monkeypatch, processors=132) as recorders:
        for _ in range(2):
            recorders.clear()
            results = attention(*leaves, return_lse=True, **keywords)[:2]
            if trains:
                dout, dlse = torch.autograd.grad([x.sum() for x in results], results)
                torch.autograd.backward(results, [dout if expanded else dout.contiguous(), dlse.contiguous()])
    assert len(recorders) == 1 + trains
    return recorders


@pytest.mark.parametrize("name", CALLS)
def test_calls_allocate_and_launch(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    operands, keywords = CALLS[name]
    for backend in ("auto", "triton"):
        for recorder in recorders_of(operands, keywords | {"backend": backend}, monkeypatch, "gradient" in name):
            assert recorder.obstacle is None
            assert not recorder.compiles
            assert recorder.started


@pytest.mark.parametrize("name", OTHERS)
def test_others_do_more(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    operands, keywords, known = OTHERS[name]
    assert {x.obstacle for x in recorders_of(operands, keywords, monkeypatch)} >= {known}
