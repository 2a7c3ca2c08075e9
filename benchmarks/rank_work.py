"""What each rank of ranks.py does for a cell: one GPU's call on the whole, then every provider's, checked and timed."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks import ring_peers
from benchmarks.rank_cells import MASKS, Cell, asked, methods, predicted
from saccade import Dense, Packed, attention
from saccade.distributed import plan
from tests.support.mapped_files import mapped_files

MODES = ("forward", "backward")
LEAD = 6_000_000
"""Clock cycles that devices wait for the host: three milliseconds."""
FARTHEST = 1e-2
"""Of a result from one GPU's, relative, in the root of the sum of squares."""
FEWEST = 2
"""Rounds, however long they take."""


class Options(NamedTuple):
    """Of a run."""

    device: str
    dtype: torch.dtype
    rounds: int
    seconds: float
    """For the rounds of one direction, of which there are fewer then."""
    peers: str | None
    """A folder with the package ring_flash_attn."""
    skipped: dict[str, str]
    """Providers that are not to run, and why."""
    progress: str
    """A file that says which provider is at work."""


class Local(NamedTuple):
    """A call of one rank, and what its results are of the whole."""

    operands: list[Tensor]
    """q, k, v and dout."""
    call: Callable[..., Tensor]
    """out of q, k, v and what the score function captures."""
    rows: Callable[[Tensor], Tensor]
    """Of a whole result (rows, h, d), what this rank has in the form of its own."""


def over_ranks(method: str) -> Callable[[Cell, list[Tensor]], Local]:
    """saccade's."""

    def prepare(cell: Cell, whole: list[Tensor]) -> Local:
        group = _mesh(whole[0].device.type, method) if "x" in method else None
        mask = MASKS[cell.mask]
        made = plan([*cell.lengths], group, mask=mask, heads=cell.heads, head_dim=cell.d, method=asked(method))

        def call(q: Tensor, k: Tensor, v: Tensor, *captured: Tensor) -> Tensor:
            return attention(q, k, v, mask=mask, score_mod=cell.score_mod([*captured]), context=made)

        return Local([made.shard(x) for x in whole], call, made.shard)

    return prepare


@cache
def _mesh(device: str, method: str) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh(device, tuple(map(int, method.split("x"))))


def on_one(cell: Cell, whole: list[Tensor]) -> Local:
    """All of it on each GPU."""
    layout = Dense("bshd") if cell.dense else Packed.from_lengths(cell.lengths, device=whole[0].device)

    def call(q: Tensor, k: Tensor, v: Tensor, *captured: Tensor) -> Tensor:
        return attention(q, k, v, mask=MASKS[cell.mask], score_mod=cell.score_mod([*captured]), layout=layout)

    return Local([x[None] for x in whole], call, lambda x: x[None]) if cell.dense else Local(whole, call, lambda x: x)


class Work:
    """One provider's forward and backward of a cell."""

    def __init__(self, local: Local, captured: list[Tensor], whole: bool = False) -> None:
        *operands, self.dout = local.operands
        self.leaves = [x.detach().clone().requires_grad_() for x in (*operands, *captured)]
        self.local, self.whole = local, whole
        self.out = local.call(*self.leaves)

    def forward(self) -> Tensor:
        return self.local.call(*self.leaves)

    def backward(self) -> tuple[Tensor, ...]:
        return torch.autograd.grad(self.out, self.leaves, self.dout, retain_graph=True)

    def results(self) -> list[Tensor]:
        """out, dq, dk and dv of this rank's rows; of captured tensors the sum over ranks."""
        found = [self.forward().detach(), *self.backward()]
        if not self.whole:
            for x in found[4:]:
                dist.all_reduce(x)
        return found

    def farthest(self, whole: list[Tensor]) -> float:
        """Results from those of the whole."""
        found = self.results()
        expected = [*map(self.local.rows, whole[:4]), *whole[4:]]
        sums = torch.stack([squares(x, y) for x, y in zip(found, expected, strict=True)])
        dist.all_reduce(sums)  # rows of short documents have no gradient but rounding: of all ranks together
        error, total = sums.unbind(1)
        return float((error / total).sqrt().nan_to_num(nan=torch.inf).amax())


def squares(x: Tensor, y: Tensor) -> Tensor:
    """The sums of squares of `x - y` and of `y`."""
    sums = torch.zeros(2, dtype=torch.float64, device=x.device)
    x, y = (a.reshape(-1, a.shape[-1]) for a in (x, y.reshape(x.shape)))
    for a, b in zip(x.split(1 << 18), y.split(1 << 18), strict=True):
        sums += torch.stack([(a.float() - b.float()).square().sum(), b.float().square().sum()])
    return sums


def sampled(work: Callable[[], Any], device: torch.device) -> float:
    """Milliseconds of the slowest rank."""
    flag = torch.zeros(1, device=device)
    if device.type == "cuda":
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        torch.cuda._sleep(LEAD)
        dist.all_reduce(flag)
        start.record()
        work()
        stop.record()
        torch.cuda.synchronize()
        ms = start.elapsed_time(stop)
    else:
        dist.all_reduce(flag)
        began = time.perf_counter()
        work()
        ms = 1e3 * (time.perf_counter() - began)
    took = torch.tensor(ms, device=device)
    dist.all_reduce(took, dist.ReduceOp.MAX)
    return float(took)


def measured(_: Any, cell: Cell, options: Options) -> list[dict[str, Any]]:
    """Rows of a cell: of each provider and direction. Every rank returns them."""
    if options.device == "cpu":
        with mapped_files():
            return _measured(cell, options)
    try:
        return _measured(cell, options)
    finally:
        torch.cuda.empty_cache()


def _measured(cell: Cell, options: Options) -> list[dict[str, Any]]:
    device = torch.device(f"cuda:{torch.cuda.current_device()}" if options.device == "cuda" else "cpu")
    generator = torch.Generator(device).manual_seed(7)
    h_q, h_k = cell.heads

    def made(h: int) -> Tensor:
        return torch.randn(cell.rows, h, cell.d, device=device, dtype=options.dtype, generator=generator)

    whole, captured = [made(h) for h in (h_q, h_k, h_k, h_q)], cell.captured(torch.empty(0, device=device))
    _tell(options, "one GPU")
    one = Work(on_one(cell, whole), captured, whole=True)
    results = one.results()
    results[:4] = [x.reshape(y.shape) for x, y in zip(results[:4], [whole[0], *whole[:3]], strict=True)]
    works, errors, reasons = {"one GPU": one}, {"one GPU": 0.0}, dict(options.skipped)
    for name, prepare in _providers(options.peers).items():
        if name in reasons:
            continue
        _tell(options, name)
        try:
            work = Work(prepare(cell, whole), captured)
            errors[name] = work.farthest(results)
            if errors[name] > FARTHEST:
                reasons[name] = f"differs from one GPU by {errors[name]:.1e}"
            else:
                works[name] = work
        except Exception as problem:  # one that fails does not end the others
            reasons[name] = f"{type(problem).__name__}: {str(problem).partition(chr(10))[0][:200]}"
    del results, whole
    rows = [{"provider": name, "mode": mode, "reason": reason} for name, reason in reasons.items() for mode in MODES]
    return [row for mode in MODES for row in _timed(cell, mode, works, errors, options)] + rows


def _tell(options: Options, name: str) -> None:
    if dist.get_rank() == 0:
        Path(options.progress).write_text(name, encoding="utf-8")


@cache
def _providers(peers: str | None) -> dict[str, Callable[..., Local]]:
    own = {name: over_ranks(name) for name in methods(dist.get_world_size())}
    return own | ring_peers.providers(None if peers is None else Path(peers), Local)


def _timed(
    cell: Cell, mode: str, works: dict[str, Work], errors: dict[str, float], options: Options
) -> list[dict[str, Any]]:
    """Rows of one direction."""
    samples: dict[str, list[float]] = {name: [] for name in works}
    rounds, i = options.rounds, 0
    while i <= rounds:
        for name in [*works] if i % 2 else [*works][::-1]:
            _tell(options, name)
            took = sampled(getattr(works[name], mode), works[name].dout.device)
            samples[name].append(took)
        if i == 1:  # the same on all ranks
            whole = sum(taken[-1] for taken in samples.values()) / 1e3
            rounds = min(rounds, max(FEWEST, int(options.seconds / whole)))
        i += 1
    ranks, backward = dist.get_world_size(), mode == "backward"
    ideal, found = statistics.median(samples["one GPU"][1:]) / ranks, []  # the first round is not counted
    for name, (_, *taken) in samples.items():
        low, ms, high = statistics.quantiles(taken, n=4, method="inclusive")
        row = {"provider": name, "mode": mode, "ms": ms, "ms_q1": low, "ms_q3": high, "error": errors[name]}
        gpus = 1 if name == "one GPU" else ranks
        row["efficiency"] = None if name == "one GPU" else ideal / ms
        row["tflops"] = cell.operations * (2.5 if backward else 1) / gpus / ms / 1e9
        if name in methods(ranks):
            row["predicted"] = predicted(cell, name, ranks, backward)
            # Whether keys come while the kernel runs.
            row["arrives"] = name == "pull" and not backward and cell.mask == "causal" and cell.score is None
        found.append(row)
    return found
