"""Paged caches beside FlashAttention-3 on the same pages, as JSON lines: decoding, in GB/s and beside a copy on the
device, and chunks of prompts, in TFLOP/s, of every backend that takes them.

    python -m saccade.bench.decode [name ...]

Each call is captured as a CUDA graph, so that the host's time does not count; all are timed in turns. The rate is of
the keys and values in use, or of the products of those that rows see, under a causal mask. Names are regular
expressions of cells: `b8-s8192-h32-page64`, `b4-s10240-h32-page16-new2048`.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from saccade import Paged, Partial, alibi, attention, causal, dispatch, explain
from saccade.bench.providers.base import Prepared
from saccade.bench.providers.flash import FlashAttention3
from saccade.bench.timing import Clock, measure
from saccade.testing import check

D, H_K = 128, 8
CHECKED = 3
"""Sequences whose result is held against the oracle."""
CHECKED_ROWS = 64
"""Of each of them, the first and the last ones."""


@dataclass(frozen=True)
class Cell:
    b: int
    s: int
    """keys of each sequence, or, below 0, at most: mixed from 100 on"""
    h_q: int = 32
    page_size: int = 64
    score: bool = False
    """ALiBi"""
    new: int = 1
    """query rows of each sequence, the last of its keys"""

    def __str__(self) -> str:
        length = f"s{self.s}" if self.s > 0 else f"mixed{-self.s}"
        more = ("-alibi" if self.score else "") + (f"-new{self.new}" if self.new > 1 else "")
        return f"b{self.b}-{length}-h{self.h_q}-page{self.page_size}{more}"


LENGTHS = (1, 65536), (8, 8192), (64, 4096), (128, 8192), (256, -16384)
CELLS = [
    *(Cell(b, s, h_q) for h_q in (32, 64) for b, s in LENGTHS),
    *(Cell(b, s, page_size=size) for size in (1, 16) for b, s in LENGTHS),
    Cell(64, 4096, score=True),
    Cell(1, 2048),
    *(Cell(4, 8192 + 2048, page_size=size, new=2048) for size in (64, 16)),
    *(Cell(b, s, page_size=size, new=new) for b, s, new in ((1, 32768, 2048), (8, 4096, 4096)) for size in (64, 128)),
    Cell(16, 8192, new=256),
]


class Problem:
    """The tensors of a cell, in bf16: a cache of which every page is used, in any order."""

    def __init__(self, cell: Cell, device: str) -> None:
        made = torch.Generator().manual_seed(0)
        self.cell = cell
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
        self.q = torch.randn(cell.b, cell.new, cell.h_q, D, device=device, dtype=torch.bfloat16)
        # Pairs that see one another: the last row sees all keys.
        self.pairs = self.keys * cell.new - cell.b * cell.new * (cell.new - 1) // 2
        self.mask = causal() if cell.new > 1 else None
        self.score = (
            alibi(2.0 ** (-8 * torch.arange(1, cell.h_q + 1, device=device) / cell.h_q)) if cell.score else None
        )

    def keywords(self) -> dict[str, Any]:
        return {"layout": Paged(self.table, self.used), "score_mod": self.score, "mask": self.mask}

    def saccade(self, backend: str = "auto") -> Partial:
        return attention(self.q, self.k, self.v, return_lse=True, backend=backend, **self.keywords())

    def calls(self) -> dict[str, Callable[[], Partial]]:
        """The one that decodes, or for prompts each backend that "auto" may take."""
        if self.cell.new == 1:
            return {"saccade": self.saccade}
        told = explain(self.q, self.k, self.v, **self.keywords()).reasons
        return {f"saccade-{name}": partial(self.saccade, name) for name in dispatch.BACKENDS if not told[name]}

    def fa3(self) -> Partial:
        given = {"seqused_k": self.used, "page_table": self.table, "softmax_scale": D**-0.5, "num_splits": 0}
        given |= {"is_causal": self.mask is not None}
        return Partial(*torch.ops.flash_attn_3.fwd(self.q, self.k, self.v, **given)[:2])

    def error(self, call: Callable[[], Partial]) -> float:
        """Over the tolerance, of the first sequences' first and last rows in a call of all."""
        found, new = call(), self.cell.new
        ends = {0, max(new - CHECKED_ROWS, 0)}
        return max(self._error(found, start, min(start + CHECKED_ROWS, new)) for start in ends)

    def _error(self, found: Partial, start: int, stop: int) -> float:
        first, rows = slice(0, CHECKED), slice(start, stop)

        def function(q: Tensor, k: Tensor, v: Tensor, return_lse: bool = False, **keywords: Any) -> Any:
            part = Partial(found.out[first, rows], found.lse[first, :, rows])
            return part if return_lse else part.out

        # The last one of these rows stands at the last key that it sees.
        layout = Paged(self.table[first], (self.used[first] - (self.cell.new - stop)).clamp(min=0))
        given = {"layout": layout, "score_mod": self.score, "mask": self.mask}
        return check(self.q[first, rows], self.k, self.v, **given, function=function).ratio


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
        calls = made.calls()
        if peer.available(torch.device(device)) is None and not cell.score:
            calls["fa3"] = made.fa3
        for name, call in calls.items():
            errors[name] = made.error(call)
            if errors[name] <= 1:
                ways[name] = Prepared(captured(call, device), "bshd")
        bytes_read, flops = made.keys * H_K * 2 * D * 2, 4 * D * cell.h_q * made.pairs
        if cell.new == 1:
            source = torch.empty(max(bytes_read // 2, 1), dtype=torch.uint8, device=device)  # read and written
            target = torch.empty_like(source)
            # Not captured: in a graph the copy engines do it, at 0.6 of the rate.
            ways["copy"] = Prepared(lambda target=target, source=source: (target.copy_(source),), "bshd")
        failed: dict[str, Exception] = {}
        times = measure(ways, torch.device(device), clock or Clock(), failed.__setitem__)
        gpu = torch.cuda.get_device_name() if device == "cuda" else device
        for name in dict.fromkeys((*calls, *ways)):
            what = "decode" if cell.new == 1 else "prompt"
            row = {"what": what, "cell": str(cell), "provider": name, "gpu": gpu, "torch": torch.__version__}
            row |= {"error_ratio": errors.get(name)}
            if name in times:
                row |= {"ms": times[name].ms, "gb_s": bytes_read / times[name].ms / 1e6}
                row |= {"tflop_s": flops / times[name].ms / 1e9} if cell.new > 1 else {}
            yield row | ({"failed": str(failed[name])} if name in failed else {})


def main() -> None:
    patterns = sys.argv[1:] or [".*"]
    try:
        cells = [cell for cell in CELLS if any(re.fullmatch(pattern, str(cell)) for pattern in patterns)]
    except re.error as wrong:
        sys.exit(f"python -m saccade.bench.decode: no regular expression: {wrong}")
    if not cells:
        sys.exit(f"python -m saccade.bench.decode: no cell is named {' or '.join(patterns)}; one is {CELLS[0]}")
    if not torch.cuda.is_available():
        sys.exit("python -m saccade.bench.decode: needs a GPU, and torch sees none")
    for row in rows(cells):
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
