"""The ranks of a plan, from a process group, a mesh or a number of ranks; and what a plan computes once."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from saccade.util import arguments
from saccade.util.caches import callable_of, compile_constant
from saccade.util.kept_memory import keep

# What a plan makes once, and what torch.compile meets of it.

Method = TypeVar("Method", bound=Callable[..., Any])


def cached_method(make: Method) -> Method:
    """A method of a plan, or of an exchange, that runs once for its arguments."""
    name = make.__name__

    def kept(self: Any, *arguments: Any) -> Any:
        if (key := (name, *arguments)) not in self._kept:
            if torch.compiler.is_dynamo_compiling():
                raise RuntimeError(
                    f"torch.compile cannot make {name}{arguments} of {self!r}: pass plan(…, heads=(h_q, h_k)), or call "
                    "the function once before it is compiled"
                )
            self._kept[key] = keep(lambda: make(self, *arguments))
        return self._kept[key]

    return wraps(make)(kept)  # pyright: ignore[reportReturnType]


@compile_constant
def constant(address: int, name: str, *arguments: Any) -> Any:
    """The result of a plan's method, as a constant of torch.compile, which may compute it while it compiles."""
    return getattr(callable_of(address), name)(*arguments)


# Who takes part: process groups, meshes, or a number of ranks to plan for.


class Ranks(NamedTuple):
    """The ranks that share sequences, as `parts` groups of `heads` ranks: rank `i` is number `i % heads` of part
    `i // heads`. Ranks of a part share its rows and divide its heads. Names stand for groups, so that nothing keeps a
    group alive."""

    size: int
    rank: int
    heads: int = 1
    """The ranks that divide heads among them."""
    rows_group: str = ""
    """The name of the group of the ranks with this one's heads, one of each part; empty without processes."""
    heads_group: str = ""
    device: str = "cpu"

    @property
    def parts(self) -> int:
        return self.size // self.heads

    @property
    def part(self) -> int:
        return self.rank // self.heads


def ranks_of(group: Any, rank: int | None, ulysses: bool) -> Ranks:
    """The ranks of a group, a mesh, or a number. Raises TypeError for what is none of these, and ValueError for a mesh
    of more dimensions, a rank beside a group, or a process that is not in the group. ulysses: whether all ranks of a
    group divide heads; of a mesh of two dimensions those of its last do."""
    if dist.is_available() and group is dist.GroupMember.NON_GROUP_MEMBER:  # which is a number
        raise ValueError("this process is not a rank of the group: call plan in the group's processes only")
    if isinstance(group, int) and not isinstance(group, bool):
        return _without_processes(group, rank, ulysses)
    if rank is not None:
        raise ValueError(
            f"rank= goes with a number of ranks, as in plan(…, 8, rank={rank!r}): a group knows its own, omit it"
        )
    if not dist.is_available() or not dist.is_initialized():
        raise ValueError(
            "plan needs torch.distributed.init_process_group first; or pass a number of ranks, plan(…, 8, rank=0), to "
            "look at a plan without processes"
        )
    if hasattr(group, "mesh_dim_names") and hasattr(group, "get_group"):
        return _of_mesh(group, ulysses)
    group = dist.group.WORLD if group is None else group
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"group must be a ProcessGroup, a DeviceMesh, a number of ranks or None, got {group!r}")
    return _of_groups(group if not ulysses else None, group if ulysses else None)


def _without_processes(size: int, rank: int | None, ulysses: bool) -> Ranks:
    arguments.integer("a number of ranks", size, least=1)
    rank = arguments.integer("rank", 0 if rank is None else rank)
    if rank >= size:
        raise ValueError(f"rank must be below the number of ranks, got {rank} of {size}")
    return Ranks(size, rank, size if ulysses else 1)


def _of_mesh(mesh: Any, ulysses: bool) -> Ranks:
    if mesh.get_coordinate() is None:
        raise ValueError(f"this process is not a rank of the mesh {mesh}: call plan in the mesh's processes only")
    if mesh.ndim == 1:
        return _of_groups(None if ulysses else mesh.get_group(0), mesh.get_group(0) if ulysses else None)
    if mesh.ndim != 2:
        raise ValueError(
            "a mesh for one plan has one dimension, or two if the last one divides heads: pass a submesh such as "
            f"mesh['context'], got {mesh.ndim} dimensions"
        )
    return _of_groups(mesh.get_group(0), mesh.get_group(1))


def check_order(group: Any) -> None:
    """Raises ValueError for a mesh in which a rank's place is another than in its groups, which sort their ranks."""
    if getattr(group, "ndim", 0) != 2:
        return
    ranks = group.mesh.cpu()
    rows, columns = ranks.argsort(0), ranks.argsort(1)
    if not (rows == rows[:, :1]).all() or not (columns == columns[:1]).all():
        raise ValueError(
            "a mesh for one plan must have its ranks in the same order in all rows, and in the same order in all "
            f"columns, because process groups sort their ranks, got {ranks.tolist()}"
        )


def _of_groups(rows: Any, heads: Any) -> Ranks:
    """The Ranks of two groups: of the same heads, and of the same rows. None stands for this rank alone."""
    part, parts = (0, 1) if rows is None else (rows.rank(), rows.size())
    number, n = (0, 1) if heads is None else (heads.rank(), heads.size())
    group = rows if rows is not None else heads
    cuda = "nccl" in dist.get_backend(group) and torch.cuda.is_available()
    device = f"cuda:{torch.cuda.current_device()}" if cuda else "cpu"
    names = ("" if x is None else x.group_name for x in (rows, heads))
    return Ranks(parts * n, part * n + number, n, *names, device=device)
