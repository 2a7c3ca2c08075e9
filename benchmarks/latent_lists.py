"""Latent attention over lists of tokens, d 576/512 of one key head, beside a copy, a matrix product and FlashMLA.

    python -m benchmarks.latent_lists [--seconds 240] [--only prompts] [--flashmla LIBRARY] [--out rows.jsonl]

Prompts: 4,096 rows that list 2,048 tokens of 8k to 64k; `local` lists share 80 % with the neighbouring row. Decoding:
rows of sequences of 32k each, in pages of 64; `records`: over FP8 records of 656 bytes.
Each result is first compared with a gather in float64. Calls are CUDA
graphs in turns, with as many sets of lists as exceed the L2 cache. `bound` is the larger of what the bytes take at the
copy's rate and what the products take at the matrix product's, over the time. FlashMLA's library is that of vLLM
0.22.1's wheel, which torch 2.11 loads; it takes 64 heads or more, so queries are padded for it.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.harness.machine import Run
from saccade import Dense, LatentCache, Paged, append_kv, attention, selected
from saccade.testing.accuracy import worst_row_error
from saccade.testing.timing import Clock, Timed, described, measure

D, D_V, TOKENS, PAGE = 576, 512, 2048, 64
CACHES = 256 << 20
"""Bytes that calls gather in turns at least, more than an L2 cache holds."""
CHECKED = 64
"""Rows that are compared."""
Call = Callable[[Tensor, Tensor], Any]
"""(q (rows, h, d), lists (rows, n)) -> out (rows, h, d_v), or out first"""


class Cell(NamedTuple):
    """One shape."""

    kind: str
    rows: int
    heads: int
    tokens: int
    """of a prompt, or of each row's sequence"""
    lists: str = "random"

    @property
    def name(self) -> str:
        return f"{self.kind} {self.rows}x{self.heads} {self.tokens >> 10}k {self.lists}"

    @property
    def flop(self) -> float:
        return 2.0 * self.rows * self.heads * TOKENS * (D + D_V)

    @property
    def bytes(self) -> float:
        row = 656 if self.kind == "records" else 2 * D
        return 1.0 * self.rows * (TOKENS * row + 2 * self.heads * (D + D_V))


def cells() -> Iterator[Cell]:
    """The most important first."""
    yield Cell("prompts", 4096, 128, 32 << 10)
    yield from (Cell("decode", rows, heads, 32 << 10) for heads in (128, 16) for rows in (128, 32, 1))
    yield from (Cell("prompts", 4096, 16, 32 << 10, lists) for lists in ("random", "local"))
    yield from (Cell("decode", rows, heads, 32 << 10) for heads in (64, 8) for rows in (128, 32, 1))
    yield from (Cell("prompts", 4096, 128, tokens << 10) for tokens in (8, 64))
    yield Cell("prompts", 4096, 64, 32 << 10)
    yield from (Cell("prompts", 4096, 8, 32 << 10, lists) for lists in ("random", "local"))
    yield from (Cell("records", rows, 128, 32 << 10) for rows in (128, 32))


def listed(rows: int, tokens: int, local: bool) -> Tensor:
    """(rows, TOKENS) different tokens in no order. Of local lists a fifth differs from the row before."""
    column = torch.randperm(TOKENS, device="cuda")
    apart = tokens // TOKENS
    drawn = torch.randint(0, apart, (rows, TOKENS), device="cuda")
    if local:
        row = torch.arange(rows, device="cuda")[:, None]
        drawn = drawn.gather(0, (row + column % 5) // 5)
    return (column * apart + drawn).int()


def exact(q: Tensor, cache: Tensor, lists: Tensor) -> Tensor:
    """(rows, h, d_v) by a gather in float64."""
    keys = cache.view(-1, D)[lists.long()].double()
    return torch.softmax(q.double() @ keys.mT * D**-0.5, -1) @ keys[..., :D_V]


def providers(cell: Cell, cache: Tensor, flashmla: bool) -> dict[str, Call]:
    def slots(backend: str) -> Call:
        used = torch.full((cell.rows,), TOKENS, device="cuda", dtype=torch.int32)

        def call(q: Tensor, lists: Tensor) -> Tensor:
            layout = Paged(slots=lists, seqused_k=used)
            return attention(q, cache, cache[..., :D_V], layout=layout, backend=backend)

        return call

    def dense(q: Tensor, lists: Tensor) -> Tensor:
        kv = cache.view(1, -1, 1, D)
        out = attention(q[None], kv, kv[..., :D_V], mask=selected(lists[None, None]), layout=Dense("bshd"))
        return out[0]

    def peer(q: Tensor, lists: Tensor) -> Tensor:
        if (short := -cell.heads % 64) != 0:
            q = F.pad(q, (0, 0, 0, short))
        op = torch.ops._flashmla_C.sparse_prefill_fwd
        found = op(q, cache.view(-1, 1, D), lists[:, None], D**-0.5, D_V, None, None, None)
        return found[0][:, : cell.heads]

    if cell.kind == "records":
        return of_records(cell, cache, flashmla)
    calls = {"slots": slots("auto"), "triton": slots("triton")}
    if cell.kind == "prompts":
        calls["selected"] = dense
    if flashmla:
        calls["flashmla"] = peer
    return calls


def of_records(cell: Cell, cache: Tensor, flashmla: bool) -> dict[str, Call]:
    """The same over FP8 records, whose rows `cache` has afterwards."""
    size = cache.shape[0] * PAGE
    records = LatentCache(torch.zeros(size // PAGE, PAGE, 656, device="cuda", dtype=torch.uint8), "v3.2")
    for at in torch.arange(size, device="cuda").split(1 << 17):
        rows = cache.view(-1, 1, D)[at]
        append_kv(records, records, None, rows, None, slot_mapping=at)
        cache.view(-1, D)[at] = records.rows(at, cache.dtype)
    used = torch.full((cell.rows,), TOKENS, device="cuda", dtype=torch.int32)

    def call(q: Tensor, lists: Tensor) -> Tensor:
        return attention(q, records, records, layout=Paged(slots=lists, seqused_k=used))

    def peer(q: Tensor, lists: Tensor) -> Tensor:
        k = records.bytes[:, :, None]
        op, nothing = torch.ops._flashmla_C.sparse_decode_fwd, (None,) * 7
        return op(q[:, None], k, lists[:, None], *nothing, D_V, D**-0.5, None)[0][:, 0]

    return {"records": call} | ({"flashmla": peer} if flashmla else {})


def captured(call: Call, sets: list[tuple[Tensor, Tensor]]) -> Timed:
    """All sets of a call as one graph."""
    call(*sets[0])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for given in sets:
            call(*given)
    return Timed(graph.replay)


def ceilings() -> dict[str, float]:
    """TFLOP/s of a matrix product and GB/s of a copy."""
    x, y = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    timed = {"matmul": Timed(lambda: x @ y), "copy": Timed(lambda: target.copy_(source))}
    found = measure(timed, x.device, Clock(9), _failed)
    return {"matmul": 2 * 8192**3 / found["matmul"].ms / 1e9, "copy": 2 * source.numel() / found["copy"].ms / 1e6}


def _failed(name: str, problem: Exception) -> None:
    print(f"{name}: {described(problem)}", flush=True)


def run(cell: Cell, flashmla: bool, of: dict[str, float]) -> Iterator[dict[str, Any]]:
    pool = cell.tokens * (cell.rows if cell.kind != "prompts" else 1)
    cache = torch.randn(pool // PAGE, PAGE, 1, D, device="cuda", dtype=torch.bfloat16)
    sets = []
    for _ in range(max(1, min(64, -int(-CACHES // cell.bytes)))):
        lists = listed(cell.rows, cell.tokens, cell.lists == "local")
        if cell.kind != "prompts":
            lists += torch.arange(cell.rows, device="cuda", dtype=torch.int32)[:, None] * cell.tokens
        sets.append((torch.randn(cell.rows, cell.heads, D, device="cuda", dtype=torch.bfloat16), lists))
    at = torch.randperm(cell.rows, device="cuda")[:CHECKED]
    calls, timed = providers(cell, cache, flashmla), {}
    wanted = exact(sets[0][0][at], cache, sets[0][1][at])
    for name, call in calls.items():
        try:
            error = float(worst_row_error(call(*sets[0])[at], wanted, torch.finfo(torch.bfloat16).eps))
            if error <= 1:
                timed[name] = captured(call, sets)
            else:
                print(f"{cell.name} {name}: wrong, {error:.2f} of the tolerance", flush=True)
        except Exception as problem:  # a peer may raise anything
            _failed(f"{cell.name} {name}", problem)
    found = measure(timed, cache.device, Clock(7), _failed)
    best = max(cell.flop / of["matmul"] / 1e9, cell.bytes / of["copy"] / 1e6)
    for name, times in found.items():
        ms = times.ms / len(sets)
        beside = found["flashmla"].ms / times.ms if "flashmla" in found else None
        yield {
            "cell": cell.name, "provider": name, "ms": round(ms, 4), "tflops": round(cell.flop / ms / 1e9, 1),
            "gbps": round(cell.bytes / ms / 1e6), "bound": round(best / ms, 3),
            "of_flashmla": beside and round(beside, 3),
        }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=240)
    parser.add_argument("--only", default="", help="cells whose name has these words")
    parser.add_argument("--flashmla", type=Path, help="_flashmla_C.abi3.so")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--commit")
    given = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a GPU")
    end, rows = time.monotonic() + given.seconds, []
    if given.flashmla:
        try:
            torch.ops.load_library(str(given.flashmla))
        except OSError as problem:
            _failed("flashmla", problem)
            given.flashmla = None
    torch.manual_seed(0)
    machine, of = Run.now(torch.device("cuda"), given.commit), ceilings()
    for cell in cells():
        if all(word in cell.name for word in given.only.split()) and time.monotonic() < end:
            for row in run(cell, bool(given.flashmla), of):
                rows.append(row)
                machine.append(given.out, of | row)
                print(row, flush=True)
            torch.cuda.empty_cache()
    print(f"\n{machine.gpu}: matmul {of['matmul']:.0f} TFLOP/s, copy {of['copy']:.0f} GB/s")
    print(f"{'cell':32} {'provider':9} {'ms':>8} {'TFLOP/s':>8} {'GB/s':>6} {'bound':>6} {'of FlashMLA':>11}")
    form = "{cell:32} {provider:9} {ms:8.4f} {tflops:8.1f} {gbps:6} {bound:6}"
    for row in rows:
        print(form.format(**row), f"{row['of_flashmla'] or '':>11}")


if __name__ == "__main__":
    main()
