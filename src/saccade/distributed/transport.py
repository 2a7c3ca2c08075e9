"""The collectives of a plan, and the words of their errors: which rank, which stage, which exchange."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d


@dataclass
class Transport:
    """One group of ranks, and how they exchange rows."""

    group_name: str
    rank: int
    size: int
    fingerprint: str
    """What must be equal on all ranks."""
    timeout: float | None = None
    """Seconds for an exchange; None leaves it to the group's."""
    debug: bool = False
    """Whether ranks compare fingerprints, stages and shapes before each exchange."""
    exchanges: int = field(default=0, init=False)

    def all_to_all(
        self, x: Tensor, received: Sequence[int], sent: Sequence[int], stage: str, of: Sequence[Tensor] | None = None
    ) -> Tensor:
        """Rows of x, `sent[i]` of them to rank i in order; returns the rows of all others, `received[i]` of rank i.
        `of` is what x is made of, for errors."""
        of = of or [x]
        group = self.begin(of, stage)
        flat, out = _numbers(x.contiguous()), _numbers(x.new_empty(sum(received), *x.shape[1:]))
        arguments = out, flat, list(received), list(sent)
        self._run(stage, of, lambda: dist.all_to_all_single(*arguments, group=group, async_op=True))
        return out.view(x.dtype)

    def broadcast(self, x: Tensor, stage: str) -> Tensor:
        """Rank 0's x, in place."""
        group = self.begin([x], stage)
        self._run(stage, [x], lambda: dist.broadcast(x, group=group, group_src=0, async_op=True))
        return x

    def begin(self, xs: Sequence[Tensor], stage: str) -> Any:
        """The group, before an exchange; compared with the other ranks' if asked."""
        self.exchanges += 1
        group = self.group(stage)
        if self.debug:
            self._compare(group, xs, stage)
        return group

    def group(self, stage: str) -> Any:
        """The process group, which is as it was when the plan was made."""
        if not self.group_name:
            raise RuntimeError(
                f"{stage}: the plan was made for {self.size} ranks without processes: pass plan(…, group) a group"
            )
        group = distributed_c10d._resolve_process_group(self.group_name)  # pyright: ignore[reportPrivateImportUsage, reportArgumentType]
        if (group.rank(), group.size()) != (self.rank, self.size):
            raise RuntimeError(
                f"{stage}: the plan is for rank {self.rank} of {self.size}, and its group now has rank {group.rank()} "
                f"of {group.size()}: make a new plan"
            )
        return group

    def _run(self, stage: str, xs: Sequence[Tensor], start: Any) -> None:
        try:
            work = start()
            # With a timeout NCCL's wait would block the host: its own watchdog ends what takes too long.
            if self.timeout is None or xs[0].device.type == "cuda":
                work.wait()
            else:
                work.wait(timedelta(seconds=self.timeout))
        except RuntimeError as error:
            raise RuntimeError(self.told(stage, xs, error)) from error

    def told(self, stage: str, xs: Sequence[Tensor], error: object) -> str:
        return (
            f"rank {self.rank} of {self.size}: {stage}, exchange {self.exchanges} of this plan, of {_named(xs)}, "
            f"failed; another rank has failed, or is not in the same call: {error}"
        )

    def _compare(self, group: Any, xs: Sequence[Tensor], stage: str) -> None:
        """
        Raises:
            RuntimeError: ranks that are elsewhere, or have another plan.
        """
        mine = f"plan {self.fingerprint}, exchange {self.exchanges}, {stage}, rows of {_named(xs, 1)}"
        found: list[Any] = [None] * self.size
        try:
            dist.all_gather_object(found, mine, group=group)
        except RuntimeError as error:
            raise RuntimeError(self.told(f"comparing plans before {stage}", xs, error)) from error
        if len({*found}) > 1:
            told = "\n".join(f"  rank {i}: {text}" for i, text in enumerate(found))
            raise RuntimeError(f"ranks are in different exchanges:\n{told}")


def _named(xs: Sequence[Tensor], first: int = 0) -> str:
    return f"{xs[0].dtype} {' and '.join(str(tuple(x.shape[first:])) for x in xs)}"


def _numbers(x: Tensor) -> Tensor:
    """x as a dtype that gloo has; nothing is computed."""
    return x.view(torch.float16) if x.dtype == torch.bfloat16 else x
