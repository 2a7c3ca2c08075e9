"""Lists of blocks of 64 keys, forward and backward: blocks for each row and key head, as NSA has them, beside FLA's
kernels; and lists of tiles beside the dense call.

    python -m benchmarks.listed_blocks [--seconds 120] [--only 8k] [--fla FOLDER] [--out rows.jsonl] [--commit C]

Rows list 16 blocks up to their own one, which is among them; `local` rows list four fifths of what the row before
lists. FLOP are those of listed pairs that causal rows see: 4 d for each forward, 10 d backward. Each result is first
compared with `backend="reference"` in float64 for some rows. FLA is a folder with its packages `fla` and `einops`.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.harness.machine import Run
from saccade import Dense, attention, causal, selected_blocks
from saccade.testing.accuracy import worst_row_error
from saccade.testing.timing import Clock, Timed, described, measure

D, BLOCK, BLOCKS, CHECKED = 128, 64, 16, 64
Call = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(b, s, h, d) each"""


class Cell(NamedTuple):
    kind: str
    s: int
    h_q: int
    h_k: int
    rows: int = 1
    """of a list; of one row it is causal"""
    blocks: int = BLOCKS

    @property
    def name(self) -> str:
        return f"{self.kind} {self.s >> 10}k {self.h_q}:{self.h_k} {self.blocks} of {self.rows}x{BLOCK}"


def cells() -> Iterator[Cell]:
    """The most important first."""
    for kind in ("local", "random"):
        yield from (Cell(kind, s << 10, 64, 4) for s in (8, 32))
    yield from (Cell("local", 8 << 10, 4 * group, 4) for group in (8, 4))
    yield Cell("tiles", 16 << 10, 16, 16, 16 << 10, 256)  # dense
    yield from (Cell("tiles", 16 << 10, 16, 16, rows, blocks) for rows in (64, 128) for blocks in (16, 64))


def listed(cell: Cell) -> Tensor:
    """(1, h, lists, blocks) int32."""
    h, lists, count = cell.h_k, cell.s // cell.rows, cell.s // BLOCK
    made = torch.full((1, h, lists, cell.blocks), -1, dtype=torch.int32, device="cuda")
    for start in range(0, lists, 1024):
        row = torch.arange(start, min(start + 1024, lists), device="cuda")
        order = torch.rand(h, len(row), count, device="cuda")
        if cell.kind == "local":  # a tenth of a chunk's common order differs in each row
            common = torch.rand(h, len(row) // 16, count, device="cuda").repeat_interleave(16, 1)
            order = torch.where(torch.rand_like(order) < 0.1, order, common)
        if cell.kind != "tiles":
            own, block = (row // BLOCK)[:, None], torch.arange(count, device="cuda")
            order = torch.where(block > own, -1.0, torch.where(block == own, 2.0, order))
        top = order.topk(min(cell.blocks, count))
        part = made[0, :, start : start + len(row), : top.indices.shape[-1]]
        part.copy_(torch.where(top.values < 0, -1, top.indices))
    return made


def pairs(cell: Cell, lists: Tensor) -> int:
    """Of rows and keys, for all query heads."""
    row = torch.arange(cell.s, device="cuda")[:: cell.rows, None]
    seen = (row - lists.long() * BLOCK + 1).clamp(0, BLOCK) if cell.rows == 1 else BLOCK
    return int(torch.where(lists < 0, 0, seen).sum()) * cell.rows * (cell.h_q // cell.h_k)


def providers(cell: Cell, lists: Tensor, fla: Any) -> dict[str, Call]:
    layout = Dense("bshd")
    if cell.rows == cell.s:
        return {"dense": lambda q, k, v: attention(q, k, v, layout=layout)}
    mask = selected_blocks(lists, BLOCK, rows=cell.rows)
    mask = mask & causal() if cell.rows == 1 else mask
    calls: dict[str, Call] = {"saccade": lambda q, k, v: attention(q, k, v, mask=mask, layout=layout)}
    if fla is not None and cell.rows == 1 and cell.h_q // cell.h_k >= 16:
        of_rows = lists.transpose(1, 2).contiguous().long()
        function = fla.ParallelNSAFunction.apply
        calls["fla"] = lambda q, k, v: function(q, k, v, of_rows, BLOCKS, BLOCK, D**-0.5, None)
    return calls


def wrong(cell: Cell, lists: Tensor, given: list[Tensor], out: Tensor) -> str | None:
    """What is wrong with some rows of out."""
    last = slice(cell.s - CHECKED, cell.s)
    mask = None
    if cell.rows < cell.s:
        of_last = lists[:, :, -max(1, CHECKED // cell.rows) :]
        mask = selected_blocks(of_last, BLOCK, rows=min(cell.rows, CHECKED))
        mask = mask & causal() if cell.rows == 1 else mask
    q, k, v = (x.detach().double() for x in (given[0][:, last], *given[1:]))
    exact = attention(q, k, v, mask=mask, layout=Dense("bshd"), backend="reference")
    error = float(worst_row_error(out[:, last].detach(), exact, torch.finfo(torch.bfloat16).eps))
    return None if error <= 1 else f"wrong, {error:.2f} of the tolerance"


def _failed(name: str, problem: Exception) -> None:
    print(f"{name}: {described(problem)}", flush=True)


def run(cell: Cell, fla: Any) -> Iterator[dict[str, Any]]:
    shapes = (1, cell.s, cell.h_q, D), *[(1, cell.s, cell.h_k, D)] * 2
    given = [torch.randn(shape, device="cuda", dtype=torch.bfloat16).requires_grad_() for shape in shapes]
    lists, timed, dout = listed(cell), {}, torch.randn_like(given[0])
    for name, call in providers(cell, lists, fla).items():
        try:
            out = call(*given)
            if (problem := wrong(cell, lists, given, out)) is not None:
                print(f"{cell.name} {name}: {problem}", flush=True)
                continue
            torch.autograd.grad(out, given, dout, retain_graph=True)
        except Exception as problem:  # a peer may raise anything
            _failed(f"{cell.name} {name}", problem)
            continue
        timed[name, "forward"] = Timed(lambda call=call: call(*given))
        timed[name, "backward"] = Timed(lambda out=out: torch.autograd.grad(out, given, dout, retain_graph=True))
    found = measure({" ".join(key): x for key, x in timed.items()}, dout.device, Clock(7), _failed)
    for (name, way), times in ((key, found[" ".join(key)]) for key in timed if " ".join(key) in found):
        flop = pairs(cell, lists) * (4 if way == "forward" else 10) * D
        beside = found[f"fla {way}"].ms / times.ms if f"fla {way}" in found else None
        yield {
            "cell": cell.name, "provider": name, "way": way, "ms": round(times.ms, 4),
            "tflops": round(flop / times.ms / 1e9, 1), "of_fla": beside and round(beside, 3),
        }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--only", default="", help="cells whose name has these words")
    parser.add_argument("--fla", type=Path, help="the folder of FLA's packages")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--commit")
    given = parser.parse_args()
    end, fla = time.monotonic() + given.seconds, None
    if given.fla is not None:
        sys.path.append(str(given.fla))
        from fla.ops.nsa import parallel as fla  # pyright: ignore[reportMissingImports]
    rows, machine = [], Run.now(torch.device("cuda"), given.commit)
    for cell in cells():
        if time.monotonic() < end and all(word in cell.name for word in given.only.split()):
            for row in run(cell, fla):
                rows.append(row)
                machine.append(given.out, row)
            torch.cuda.empty_cache()
    for row in rows:
        print(
            f"{row['cell']:32} {row['provider']:8} {row['way']:9} {row['ms']:9.3f} ms {row['tflops']:7.1f} TF",
            row["of_fla"],
        )


if __name__ == "__main__":
    main()
