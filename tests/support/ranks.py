"""A call over many ranks beside the same call in one process.

>>> from tests.support.ranks import Pool, differences  # doctest: +SKIP
>>> with Pool(4) as pool:  # doctest: +SKIP
...     print(differences(pool, Case("", dtype="fp64", order="thd", lengths=(37, 5, 64), mask="causal"), 4))
"""

from __future__ import annotations

import importlib.util
import io
import multiprocessing
import traceback
from collections.abc import Callable
from datetime import timedelta
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from saccade import distributed, masks
from saccade.api import attention
from saccade.call.partial import Partial
from saccade.layouts import Dense, Packed
from saccade.testing.accuracy import check
from saccade.testing.cases import Case, Inputs

SIZES = 1, 2, 3, 4, 5, 8
"""The numbers of ranks that groups are made for, beside that of all."""


class Pool:
    """Processes that stay: starting them takes longer than what they do. Rank i of a call is process i."""

    def __init__(self, size: int, backend: str = "gloo") -> None:
        self.size, self.backend = size, backend
        self._workers: list[Any] = []
        self._store: Any = None

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def run(self, work: Callable[..., Any] | tuple[str, str], ranks: int, *arguments: Any, seconds: float = 120) -> Any:
        """What `work(group, *arguments)` returns in each of the first ranks: a function of a module, or the path of a
        file and a name in it.

        Raises:
            RuntimeError: with the words of each rank that failed.
        """
        if not self._workers:
            self._start()
        sent = pickled((work, ranks, arguments))
        for _, pipe in self._workers[:ranks]:
            pipe.send_bytes(sent)
        results, errors = [], []
        for rank, (_, pipe) in enumerate(self._workers[:ranks]):
            if not pipe.poll(seconds):
                self.stop()
                raise RuntimeError(f"rank {rank} of {ranks} has not answered in {seconds} seconds")
            try:
                error, result = unpickled(pipe.recv_bytes())
            except EOFError:
                error, result = "the process has ended", None
            results.append(result)
            if error is not None:
                errors.append(f"rank {rank}: {error}")
        if errors:
            self.stop()  # groups may be broken
            raise RuntimeError("\n".join(errors))
        return results

    def _start(self) -> None:
        methods = multiprocessing.get_all_start_methods()
        context: Any = multiprocessing.get_context("forkserver" if "forkserver" in methods else "spawn")
        if "forkserver" in methods:
            context.set_forkserver_preload(["tests.support.ranks", "torch.distributed.fsdp", "torch._dynamo"])
        # Here, so that no port is chosen before somebody listens to it.
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # pyright: ignore[reportPrivateImportUsage]
        for rank in range(self.size):
            mine, its = context.Pipe()
            process = context.Process(
                target=_serve, args=(its, rank, self.size, self.backend, self._store.port), daemon=True
            )
            process.start()
            its.close()
            self._workers.append((process, mine))

    def stop(self) -> None:
        for process, pipe in self._workers:
            pipe.close()
            process.kill()
            process.join()
        self._workers, self._store = [], None


def pickled(x: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(x, stream)
    return stream.getvalue()


def unpickled(x: bytes) -> Any:
    return torch.load(io.BytesIO(x), weights_only=False)


def _serve(pipe: Any, rank: int, size: int, backend: str, port: int) -> None:
    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)  # pyright: ignore[reportPrivateImportUsage]
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timedelta(seconds=60))
    groups = {n: dist.new_group(list(range(n))) for n in sorted({*SIZES, size}) if n <= size}
    while True:
        try:
            work, ranks, arguments = unpickled(pipe.recv_bytes())
        except (EOFError, OSError):
            return
        try:
            answer = None, _function(work)(groups[ranks], *arguments)
        except BaseException:
            answer = traceback.format_exc(), None
        pipe.send_bytes(pickled(answer))


def _function(work: Any) -> Callable[..., Any]:
    return work if callable(work) else getattr(_module(work[0]), work[1])


@cache
def _module(path: str) -> Any:
    spec = importlib.util.spec_from_file_location("saccade_ranks_work", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# One call on ranks


Settings = dict[str, Any]
"""What `plan` and `attention` take besides a Case: `method`, `mesh` (parts, heads), `rows`, `backend`,
`deterministic`."""


def differences(pool: Pool, case: Case, ranks: int, **settings: Any) -> dict[str, float]:
    """`max |x - y| / max(1, max |y|)` for each result and gradient of the ranks, x, and of one process, y. Gradients of
    what all ranks have, sinks and captured tensors, are the sum over ranks."""
    found = pool.run(part, ranks, case, settings)
    torch.manual_seed(case_seed(0))
    one = results(_inputs(case), {}, settings)
    worst: dict[str, float] = {}
    for name, y in one.items():
        if name in _OF_ROWS:
            x = torch.full_like(y, torch.nan)
            for rows, values in found:
                x.index_copy_(_OF_ROWS[name](case), rows, values[name])
        else:
            x = torch.stack([values[name] for _, values in found]).sum(0)
        same = x == y  # infinities too
        worst[name] = 0.0
        if y.numel():
            error = (x - y).abs() / y.masked_fill(y.isinf(), 0).abs().amax().clamp(min=1)
            worst[name] = float(torch.where(same, 0, error).nan_to_num(nan=torch.inf).amax())
    return worst


_OF_ROWS: dict[str, Callable[[Case], int]] = {
    **dict.fromkeys(("out", "dq", "dk", "dv"), lambda case: 0 if case.order == "thd" else case.order.index("s")),
    **dict.fromkeys(("lse", "max_scores"), lambda case: 1 if case.order == "thd" else 2),
}


def case_seed(rank: int) -> int:
    """Ranks draw other numbers, of which those of rank 0 count."""
    return 17 + rank


def part(group: Any, case: Case, settings: Settings) -> tuple[Tensor, dict[str, Tensor]]:
    """One rank's rows, and its part of results and gradients."""
    made = _inputs(case)
    plan = plan_of(group, case, made, settings)
    torch.manual_seed(case_seed(dist.get_rank(group)))
    found = results(sharded(case, made, plan), {"context": plan}, settings)
    for name, dim in _OF_ROWS.items():
        rows = found[name].movedim(dim(case), 0)
        nothing = -torch.inf if name in ("lse", "max_scores") else 0
        assert bool((rows[plan.used_rows :] == nothing).all()), f"{name} of padding is not {nothing}"
        found[name] = rows[: plan.used_rows].movedim(0, dim(case))
    return plan.row_indices, found


def _inputs(case: Case) -> Inputs:
    """With sinks and captured tensors in float64 where operands are: gradients are rounded to the dtypes of tensors."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64 if case.dtype == "fp64" else before)
    try:
        return case.inputs(requires_grad=True)
    finally:
        torch.set_default_dtype(before)


def plan_of(group: Any, case: Case, made: Inputs, settings: Settings) -> distributed.ContextPlan:
    of = list(case.lengths) if case.order == "thd" else (case.b, case.s_q)
    if "mesh" in settings:
        group = mesh_of(settings["mesh"])
    options = {name: settings[name] for name in ("method", "rows", "debug", "timeout") if name in settings}
    return distributed.plan(of, group, mask=made.keywords.get("mask"), **options)


@cache
def mesh_of(shape: tuple[int, int]) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", shape)


def sharded(case: Case, made: Inputs, plan: distributed.ContextPlan) -> Inputs:
    rows = 0 if case.order == "thd" else case.order.index("s")
    nan = torch.nan  # of which nothing may remain
    q, k, v, dout = (plan.shard(x, rows, nan).detach() for x in (made.q, made.k, made.v, made.dout))
    dlse = plan.shard(made.dlse, 1 if case.order == "thd" else 2, nan)
    keywords = {name: x for name, x in made.keywords.items() if name != "layout"}
    if isinstance(layout := made.keywords["layout"], Dense):
        keywords["layout"] = layout
    if case.order != "thd" and "interval" in case.mask:
        keywords["mask"] = _bounds_of_rows(keywords["mask"], plan.row_indices)
    assert isinstance(layout, (Dense, Packed))
    return Inputs(q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), dout, dlse, keywords)


def _bounds_of_rows(mask: Any, rows: Tensor) -> Any:
    """With the bounds that are this rank's."""
    if isinstance(mask, masks.KeyInterval):
        return mask.each(lambda x: x[:, rows] if x.shape[1] > 1 else x)
    return type(mask)(tuple(_bounds_of_rows(x, rows) for x in mask.parts)) if hasattr(mask, "parts") else mask


def results(made: Inputs, keywords: dict[str, Any], settings: Settings) -> dict[str, Tensor]:
    """Results and gradients of a call."""
    keywords = made.keywords | keywords
    keywords |= {name: settings[name] for name in ("backend", "deterministic") if name in settings}
    out, lse, max_scores = attention(made.q, made.k, made.v, return_lse=True, return_max_scores=True, **keywords)
    assert lse is not None
    captured = getattr(keywords.get("score_mod"), "tensors", ())
    shared = {"dsink": keywords.get("sink"), **{f"dcaptured{i}": x for i, x in enumerate(captured)}}
    shared = {name: x for name, x in shared.items() if x is not None and x.requires_grad}
    of = {"dq": made.q, "dk": made.k, "dv": made.v, **shared}
    gradients = torch.autograd.grad([out, lse], list(of.values()), [made.dout, _finite(made.dlse, lse)])
    found = {"out": out, "lse": lse, "max_scores": max_scores, **dict(zip(of, gradients, strict=True))}
    return {name: x.detach() for name, x in found.items()}


def _finite(dlse: Tensor, lse: Tensor) -> Tensor:
    """No gradient of what is infinite."""
    return dlse.masked_fill(lse.isinf(), 0)


# A call on ranks as a function of whole tensors, for `check`


def measured(group: Any, case: Case, settings: Settings) -> dict[str, float]:
    """The ratios of `check` for a call over the group's ranks, on each of them."""
    device = settings.get("device", "cpu")
    made = case.inputs(device)
    plan = plan_of(group, case, made, settings)
    keywords = made.keywords | {name: settings[name] for name in ("deterministic",) if name in settings}
    report = check(made.q, made.k, made.v, dout=made.dout, dlse=made.dlse, function=over_ranks(plan, case), **keywords)
    return report.ratios


def over_ranks(plan: distributed.ContextPlan, case: Case) -> Callable[..., Any]:
    """`attention` of tensors that all ranks have whole, each of which gets all results and gradients."""
    rows, of_lse = (0, 1) if case.order == "thd" else (case.order.index("s"), 2)

    def function(q: Tensor, k: Tensor, v: Tensor, layout: Any, return_lse: bool = False, **keywords: Any) -> Any:
        if isinstance(keywords.get("sink"), Tensor):
            keywords["sink"] = _Whole.apply(keywords["sink"], plan)
        mine = [plan.shard(_Whole.apply(x, plan), rows) for x in (q, k, v)]
        if isinstance(layout, Dense):
            keywords["layout"] = layout
        found = attention(*mine, return_lse=True, context=plan, **keywords)
        out = plan.unshard(found.out, rows)
        return Partial(out, plan.unshard(found.lse, of_lse)) if return_lse else out

    return function


class _Whole(torch.autograd.Function):
    """A tensor of all ranks, which all take the same loss of it: its gradient is the mean of theirs, as each has the
    sum over all losses of its part."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, plan: distributed.ContextPlan) -> Tensor:
        ctx.plan = plan
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        total = dx.float() if dx.dtype != torch.float64 else dx.clone()
        for transport in (ctx.plan.rows_transport(), ctx.plan.heads_transport()):
            if transport.size > 1:
                dist.all_reduce(total, group=transport.group("a sum"))
        return (total / ctx.plan.size).to(dx.dtype), None
