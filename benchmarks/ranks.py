"""Attention over ranks beside one GPU and beside other libraries, of the cells of docs/findings/distributed.md.

    torchrun --nproc-per-node 2 benchmarks/ranks.py --out benchmarks/results/h200      # all cells: a minute
    torchrun --nproc-per-node 2 benchmarks/ranks.py --cells 16k-16:16 --rounds 9
    torchrun --nproc-per-node 2 benchmarks/ranks.py --peers PATH       # with ring-flash-attention, which lies at PATH

A time is that of the slowest rank, from a barrier of all devices to the call's last kernel: exchange included, plan and
shards made before. `efficiency` is one GPU's time on the whole over the ranks' number times that; all GPUs compute the
whole at the same time, by plain `attention`, in turns with the others. A provider whose result is not one GPU's prints
no time. `predicted` is what `saccade.distributed.estimates` says.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import ring_peers
import torch
import torch.distributed as dist
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1] / "docs"))

from simulate_ranks import drawn

from saccade import Dense, Packed, attention, causal
from saccade.bench.machine import Run
from saccade.distributed import estimates, plan

DEVICE, MODES = "cuda", ("forward", "backward")
LEAD = 6_000_000
"""Clock cycles that devices wait for the host: three milliseconds."""
FARTHEST = 1e-2
"""Of a result from one GPU's, relative, in the root of the sum of squares."""


class Cell(NamedTuple):
    """Causal, bfloat16, d = 128."""

    name: str
    lengths: tuple[int, ...]
    heads: tuple[int, int]
    seed: int | None = None
    """Of documents."""

    @property
    def dense(self) -> bool:
        return len(self.lengths) == 1


def cells(ranks: int, seeds: int) -> list[Cell]:
    """16k and 64k rows, and packed documents of 8k and 32k rows a rank."""
    return [
        Cell("16k-16:16", (16384,), (16, 16)),
        Cell("16k-64:8", (16384,), (64, 8)),
        *(Cell("documents-8k", drawn(ranks * 8192, 42 + i), (64, 8), 42 + i) for i in range(seeds)),
        *(Cell("documents-32k", drawn(ranks * 32768, 42 + i), (64, 8), 42 + i) for i in range(min(seeds, 3))),
        Cell("64k-64:8", (65536,), (64, 8)),
        Cell("64k-16:16", (65536,), (16, 16)),
    ]


class Local(NamedTuple):
    """A call of one rank, and what its results are of the whole."""

    operands: list[Tensor]
    """q, k, v and dout."""
    call: Callable[..., Tensor]
    """out of q, k and v."""
    rows: Callable[[Tensor], Tensor]
    """Of a whole result (rows, h, d), what this rank has in the form of its own."""


def over_ranks(cell: Cell, whole: list[Tensor]) -> Local:
    """saccade's."""
    made = plan(list(cell.lengths), mask=causal(), heads=cell.heads, head_dim=128, method="pull")
    return Local(
        [made.shard(x) for x in whole],
        lambda q, k, v: attention(q, k, v, mask=causal(), context=made),
        made.shard,
    )


def on_one(cell: Cell, whole: list[Tensor]) -> Local:
    """All of it on each GPU."""
    if cell.dense:
        operands = [x[None] for x in whole]
        return Local(
            operands, lambda q, k, v: attention(q, k, v, mask=causal(), layout=Dense("bshd")), lambda x: x[None]
        )
    layout = Packed.from_lengths(cell.lengths, device=whole[0].device)
    return Local(whole, lambda q, k, v: attention(q, k, v, mask=causal(), layout=layout), lambda x: x)


class Work:
    """One provider's forward and backward of a cell."""

    def __init__(self, local: Local) -> None:
        *operands, self.dout = local.operands
        self.leaves = [x.detach().clone().requires_grad_() for x in operands]
        self.call, self.rows = local.call, local.rows
        self.out = self.call(*self.leaves)

    def forward(self) -> Tensor:
        return self.call(*self.leaves)

    def backward(self) -> tuple[Tensor, ...]:
        return torch.autograd.grad(self.out, self.leaves, self.dout, retain_graph=True)

    def farthest(self, whole: list[Tensor]) -> float:
        """out, dq, dk and dv from those of the whole."""
        found = [self.forward().detach(), *self.backward()]
        far = [distance(x, self.rows(y)) for x, y in zip(found, whole, strict=True)]
        worst = torch.tensor(max(far), device=self.dout.device)
        dist.all_reduce(worst, dist.ReduceOp.MAX)
        return float(worst)


def distance(x: Tensor, y: Tensor) -> float:
    """Relative; infinite where x is not finite."""
    error = 0.0
    for a, b in zip(x.flatten(0, -3).split(4096), y.reshape(x.shape).flatten(0, -3).split(4096), strict=True):
        error += float((a.float() - b.float()).square().sum())
    far = (error / float(y.float().square().sum())) ** 0.5
    return far if far == far else float("inf")


def sampled(work: Callable[[], Any]) -> float:
    """Milliseconds of the slowest rank."""
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    flag = torch.zeros(1, device=DEVICE)
    torch.cuda.synchronize()
    torch.cuda._sleep(LEAD)
    dist.all_reduce(flag)
    start.record()
    work()
    stop.record()
    torch.cuda.synchronize()
    took = torch.tensor(start.elapsed_time(stop), device=DEVICE)
    dist.all_reduce(took, dist.ReduceOp.MAX)
    return float(took)


def measured(cell: Cell, providers: dict[str, Any], rounds: int) -> list[dict[str, Any]]:
    """Rows of a cell: of each provider and direction."""
    generator = torch.Generator(DEVICE).manual_seed(7)
    h_q, h_k = cell.heads

    def made(h: int) -> Tensor:
        return torch.randn(sum(cell.lengths), h, 128, device=DEVICE, dtype=torch.bfloat16, generator=generator)

    whole = [made(h) for h in (h_q, h_k, h_k, h_q)]
    one = Work(on_one(cell, whole))
    results = [
        x.reshape(y.shape) for x, y in zip([one.out.detach(), *one.backward()], [whole[0], *whole[:3]], strict=True)
    ]
    works, errors, reasons = {"one GPU": one}, {"one GPU": 0.0}, {}
    for name, prepare in providers.items():
        try:
            works[name] = Work(prepare(cell, whole))
            errors[name] = works[name].farthest(results)
            if errors[name] > FARTHEST:
                reasons[name] = f"differs from one GPU by {errors[name]:.1e}"
        except Exception as problem:  # one that fails does not end the others
            reasons[name] = f"{type(problem).__name__}: {str(problem).partition(chr(10))[0][:120]}"
    rows: list[dict[str, Any]] = []
    for name, reason in reasons.items():
        works.pop(name, None)
        rows += [{"provider": name, "mode": mode, "reason": reason} for mode in MODES]
    del results
    for mode in MODES:
        rows += timed(cell, mode, works, errors, rounds)
    return rows


def timed(cell: Cell, mode: str, works: dict[str, Work], errors: dict[str, float], rounds: int) -> list[dict[str, Any]]:
    """Rows of one direction."""
    samples: dict[str, list[float]] = {name: [] for name in works}
    for i in range(rounds + 1):
        for name in [*works] if i % 2 else [*works][::-1]:
            took = sampled(getattr(works[name], mode))
            if i:  # the first is not counted
                samples[name].append(took)
    ideal, found = statistics.median(samples["one GPU"]) / dist.get_world_size(), []
    for name, taken in samples.items():
        low, ms, high = statistics.quantiles(taken, n=4, method="inclusive")
        row = {"provider": name, "mode": mode, "ms": ms, "ms_q1": low, "ms_q3": high, "error": errors[name]}
        row["efficiency"] = None if name == "one GPU" else ideal / ms
        if name == "saccade":
            row["predicted"] = predicted(cell, mode)
        found.append(row)
    return found


def predicted(cell: Cell, mode: str) -> float:
    made = plan(list(cell.lengths), mask=causal(), heads=cell.heads, head_dim=128, method="pull")
    return estimates.of_pull(made.sharding, cell.heads, 128, backward=mode == "backward").efficiency[0]


def told(row: dict[str, Any]) -> str:
    heads = "{}:{}".format(*row["heads"])
    seed = "" if row["seed"] is None else f" seed {row['seed']}"
    head = f"{row['cell']}{seed:9} {heads:6} {row['mode']:9} {row['provider']:18}"
    if row.get("reason"):
        return f"{head} {row['reason']}"
    share = "" if row["efficiency"] is None else f" efficiency {row['efficiency']:.3f}"
    share += f" (predicted {row['predicted']:.3f})" if "predicted" in row else ""
    return f"{head} {row['ms']:9.3f} ms{share}, error {row['error']:.1e}"


def means(rows: list[dict[str, Any]]) -> list[str]:
    """Geometric means over seeds."""
    found: dict[tuple[str, str, str], list[float]] = {}
    for row in rows:
        if row.get("efficiency"):
            found.setdefault((row["cell"], row["mode"], row["provider"]), []).append(row["efficiency"])
    return [
        f"{' '.join(key):50} {statistics.geometric_mean(shares):.3f} of {len(shares)}" for key, shares in found.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure attention over ranks.")
    parser.add_argument("--cells", default="", help="words that a cell's name begins with, with commas")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seeds", type=int, default=10, help="batches of documents")
    parser.add_argument("--peers", type=Path, help="a folder with the package ring_flash_attn; also runs torch's ring")
    parser.add_argument("--out", type=Path, help="a .jsonl file that rows are added to")
    parser.add_argument("--commit", help="where files lie without git")
    args = parser.parse_args()
    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
    ranks, run = dist.get_world_size(), asdict(Run.now(torch.device("cuda", rank), args.commit))
    providers: dict[str, Any] = {"saccade": over_ranks}
    if args.peers is not None:
        providers |= ring_peers.providers(args.peers, Local)
    rows: list[dict[str, Any]] = []
    words = tuple(args.cells.split(","))
    for cell in cells(ranks, args.seeds):
        if not cell.name.startswith(words):
            continue
        fields = {"cell": cell.name, "seed": cell.seed, "heads": cell.heads, "d": 128, "ranks": ranks}
        fields |= {"rows": sum(cell.lengths), "documents": len(cell.lengths)}
        found = [run | fields | row for row in measured(cell, providers, args.rounds)]
        rows += found
        torch.cuda.empty_cache()
        if rank == 0:
            print(*map(told, found), sep="\n", flush=True)
            if args.out is not None:
                with args.out.open("a") as file:
                    file.writelines(json.dumps(row) + "\n" for row in found)
    if rank == 0:
        print(*means(rows), sep="\n", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
