"""Decoding over a paged cache: GB/s beside FlashAttention-3 on the same pages and a copy on the device, as JSON lines.

    python -m saccade.bench.decode [name ...]

Each call is captured as a CUDA graph, so that the host's time does not count; all are timed in turns. The rate is of
the keys and values in use. Names are regular expressions of cells: `b8-s8192-h32-page64`.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from saccade import Paged, Partial, alibi, attention
from saccade.bench.providers.base import Prepared
from saccade.bench.providers.flash import FlashAttention3
from saccade.bench.timing import Clock, measure
from saccade.testing import check

D, H_K = 128, 8
CHECKED = 3
"""Sequences whose result is held against the oracle."""


@dataclass(frozen=True)
class Cell:
    b: int
    s: int
    """keys of each sequence, or, below 0, at most: mixed from 100 on"""
    h_q: int = 32
    page_size: int = 64
    score: bool = False
    """ALiBi"""

    def __str__(self) -> str:
        length = f"s{self.s}" if self.s > 0 else f"mixed{-self.s}"
        return f"b{self.b}-{length}-h{self.h_q}-page{self.page_size}{'-alibi' if self.score else ''}"


LENGTHS = (1, 65536), (8, 8192), (64, 4096), (128, 8192), (256, -16384)
CELLS = [
    *(Cell(b, s, h_q) for h_q in (32, 64) for b, s in LENGTHS),
    *(Cell(b, s, page_size=size) for size in (1, 16) for b, s in LENGTHS),
    Cell(64, 4096, score=True),
    Cell(1, 2048),
]


class Problem:
    """The tensors of a cell, in bf16: a cache of which every page is used, in any order."""

    def __init__(self, cell: Cell, device: str) -> None:
        made = torch.Generator().manual_seed(0)
        used = (
            torch.full((cell.b,), cell.s) if cell.s > 0 else torch.randint(100, -cell.s + 1, (cell.b,), generator=made)
        )
        width = -(-int(used.max()) // cell.page_size)
        pages = -(-used // cell.page_size)
        table = torch.zeros(cell.b, width, dtype=torch.int32)
        mapped = torch.arange(width) < pages[:, None]
        table[mapped] = torch.randperm(int(pages.sum()), generator=made, dtype=torch.int32)
        self.keys = int(used.sum())
        self.table, self.used = table.to(device), used.int().to(device)
        shape = int(pages.sum()), cell.page_size, H_K, D
        self.k, self.v = (torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(2))
        self.q = torch.randn(cell.b, 1, cell.h_q, D, device=device, dtype=torch.bfloat16)
        self.score = (
            alibi(2.0 ** (-8 * torch.arange(1, cell.h_q + 1, device=device) / cell.h_q)) if cell.score else None
        )

    def saccade(self) -> Partial:
        layout = Paged(self.table, self.used)
        return attention(self.q, self.k, self.v, layout=layout, score_mod=self.score, return_lse=True)

    def fa3(self) -> Partial:
        given = {"seqused_k": self.used, "page_table": self.table, "softmax_scale": D**-0.5, "num_splits": 0}
        return Partial(*torch.ops.flash_attn_3.fwd(self.q, self.k, self.v, **given)[:2])

    def error(self, call: Callable[[], Partial]) -> float:
        """Over the tolerance, of the first sequences in a call of all."""
        first = slice(0, CHECKED)

        def function(q: Tensor, k: Tensor, v: Tensor, return_lse: bool = False, **keywords: Any) -> Any:
            found = Partial(*(x[first] for x in call()))
            return found if return_lse else found.out

        layout = Paged(self.table[first], self.used[first])
        return check(self.q[first], self.k, self.v, layout=layout, score_mod=self.score, function=function).ratio


def captured(call: Callable[[], Any], device: str) -> Callable[[], Any]:
    if device != "cuda":
        return call
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


@torch.no_grad()
def rows(cells: list[Cell], device: str = "cuda", clock: Clock | None = None) -> Iterator[dict[str, Any]]:
    peer = FlashAttention3()
    for cell in cells:
        made, ways, errors = Problem(cell, device), {}, {}
        calls = {"saccade": made.saccade}
        if peer.available(torch.device(device)) is None and not cell.score:
            calls["fa3"] = made.fa3
        for name, call in calls.items():
            errors[name] = made.error(call)
            if errors[name] <= 1:
                ways[name] = Prepared(captured(call, device), "bshd")
        bytes_read = made.keys * H_K * 2 * D * 2
        source = torch.empty(max(bytes_read // 2, 1), dtype=torch.uint8, device=device)  # read and written
        target = torch.empty_like(source)
        # Not captured: in a graph the copy engines do it, at 0.6 of the rate.
        ways["copy"] = Prepared(lambda target=target, source=source: (target.copy_(source),), "bshd")
        failed: dict[str, Exception] = {}
        times = measure(ways, torch.device(device), clock or Clock(), failed.__setitem__)
        gpu = torch.cuda.get_device_name() if device == "cuda" else device
        for name in (*calls, "copy"):
            row = {"what": "decode", "cell": str(cell), "provider": name, "gpu": gpu, "torch": torch.__version__}
            row |= {"error_ratio": errors.get(name)}
            if name in times:
                row |= {"ms": times[name].ms, "gb_s": bytes_read / times[name].ms / 1e6}
            yield row | ({"failed": str(failed[name])} if name in failed else {})


def main() -> None:
    patterns = sys.argv[1:] or [".*"]
    cells = [cell for cell in CELLS if any(re.fullmatch(pattern, str(cell)) for pattern in patterns)]
    for row in rows(cells):
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
