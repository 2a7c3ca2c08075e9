"""Operands that are DTensors: each rank computes its batch rows and heads of the call, and nothing is exchanged.

`check_call` has checked the whole call. A rank's own call has local tensors in the place of all others, each cut by
what it is: operands as they are sharded, a sink by heads, lengths and bounds by batch rows. Functions get the numbers
of the whole call. Tensors that are not DTensors are the same on all ranks, and gradients are those of the whole call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from saccade import masks, ops, scores
from saccade.backends import Outputs
from saccade.call import Call
from saccade.layouts import Layout, Paged, with_rows
from saccade.masks import Documents, KeyInterval, Mask, MaskMod, Prefix, TensorMask
from saccade.scores import Score
from saccade.util import arguments
from saccade.util.arguments import Unsupported


def run(call: Call, score_mod: Any, backend: str, lse: bool) -> Outputs:
    """The results as DTensors, sharded as q is."""
    cut = _cut_of(call)
    for name, given in (
        ("dropout_p", call.dropout),
        ("out", call.given[3]),
        ("descale, 8-bit operands,", call.descale),
    ):
        if given is not None:
            raise Unsupported(f"{name} beside DTensors: not supported; ranks may call attention of their x.to_local()")
    given = call.given[0]
    q, k, v = (with_rows(_local(x)) for x in call.given[:3])
    own = call.replace(
        given=(q, k, v, None),
        sink=None if call.sink is None else cut.shared("sink", call.sink, {"h": 0}),
        mask=None if call.mask is None else masks.of_leaves(call.mask, lambda leaf: _own_mask(leaf, cut, backend)),
        score=None if call.score is None else _own_score(call.score, score_mod, q, cut, backend),
        layout=_own_layout(call.layout, cut),
    )  # fmt: skip
    out, row_lse, max_scores = ops.run(own, backend, lse)
    of_rows = "bhs" if given.dim() == 4 else "ht"
    return (
        cut.whole(out, _dimensions(call.layout, given, False)),
        cut.whole(row_lse, of_rows) if lse and row_lse is not None else None,
        cut.whole(max_scores, of_rows) if call.max_scores and max_scores is not None else None,
    )


class _Cut(NamedTuple):
    """How ranks divide a call."""

    mesh: DeviceMesh
    coordinate: Sequence[int]
    """This rank's in the mesh."""
    letters: Sequence[str]
    """What each dimension of the mesh divides: "b", batch rows, "h", heads, or "", nothing."""
    b: int
    """Batch rows of the whole call."""
    h: int
    """Its query heads."""

    def part(self, letter: str, n: int) -> tuple[int, int]:
        """This rank's of n rows or heads: the first, and how many. Dimensions of the mesh divide one after another."""
        first = 0
        for i, own in enumerate(self.letters):
            if own == letter:
                n //= self.mesh.size(i)
                first += n * self.coordinate[i]
        return first, n

    def placements(self, dims: dict[str, int], otherwise: Placement) -> tuple[Placement, ...]:
        """Of a tensor with these dimensions; `otherwise` where ranks divide what it has no dimension of."""
        return tuple([Shard(dims[x]) if x in dims else otherwise if x else Replicate() for x in self.letters])

    def whole(self, x: Tensor, order: str) -> Tensor:
        """A rank's result as one of all ranks."""
        dims = {letter: order.index(letter) for letter in "bh" if letter in order}
        return DTensor.from_local(x, self.mesh, self.placements(dims, Replicate()), run_check=False)

    def shared(self, name: str, x: Tensor, dims: dict[str, int]) -> Tensor:
        """This rank's part of what all ranks have; its gradient is the sum over ranks."""
        everywhere, wanted = self.placements({}, Replicate()), self.placements(dims, Replicate())
        if not isinstance(x, DTensor):
            x = DTensor.from_local(x, self.mesh, everywhere, run_check=False)
        elif x.device_mesh != self.mesh or tuple(x.placements) not in (everywhere, wanted):
            choices = " or ".join(dict.fromkeys([str(everywhere), str(wanted)]))
            raise ValueError(f"{name} beside DTensors must be {choices} on their mesh, or plain, got {_described(x)}")
        return _local(x.redistribute(placements=wanted), self.placements(dims, Partial()))

    def constant(self, x: Tensor, dims: dict[str, int]) -> Tensor:
        """The same of a tensor of mask or layout, cut along those of its dimensions that are not 1."""
        if isinstance(x, DTensor):
            if any(not placement.is_replicate() for placement in x.placements):
                raise ValueError(f"tensors of mask and layout must be replicated, or plain, got {_described(x)}")
            x = _local(x)
        for letter, dim in dims.items():
            if letter in self.letters and dim >= 0 and x.shape[dim] != 1:
                x = x.narrow(dim, *self.part(letter, x.shape[dim]))
        return x


def _cut_of(call: Call) -> _Cut:
    """Raises TypeError for q, k and v that are not all DTensors, and ValueError for placements of which no rank can
    compute its part by itself."""
    operands: dict[str, Any] = dict(zip("qkv", call.given, strict=False))

    def got() -> str:
        return ", ".join(f"{name} {_described(x)}" for name, x in operands.items()) + f" in order {call.layout.order}"

    if any(not isinstance(x, DTensor) for x in operands.values()):
        raise TypeError(
            "q, k and v must all be DTensors, or q, k, v, the sink and captured tensors must all be plain: use "
            f"distribute_tensor(x, mesh, placements), or x.to_local(), got {got()}"
        )
    mesh = operands["q"].device_mesh
    if any(x.device_mesh != mesh for x in operands.values()) or (coordinate := mesh.get_coordinate()) is None:
        meshes = [x.device_mesh for x in operands.values()]
        raise ValueError(f"q, k and v must be on one mesh, with this rank in it, got {meshes}")
    letters = []
    for i in range(mesh.ndim):
        own = [_letter(x.placements[i], _dimensions(call.layout, x, name != "q")) for name, x in operands.items()]
        if "s" in own or "t" in own:
            raise ValueError(
                "rows that are sharded over ranks need context=plan: pass each rank's rows as plain tensors, "
                f"attention(q.to_local(), …, context=saccade.distributed.plan(…)), got {got()}"
            )
        if own[0] not in ("", "b", "h") or own[0] != own[1] or own[0] != own[2]:
            raise ValueError(
                "DTensors q, k and v must be sharded alike along batch rows or heads, or be replicated: use "
                f"x.redistribute(placements=…), got {got()}"
            )
        letters.append(own[0])
    q, k, *_ = call.given
    h_q, h_k = (call.layout.canonical(x).shape[1] for x in (q, k))
    cut = _Cut(mesh, coordinate, letters, call.layout.sizes(q, k).b, h_q)
    for letter, words, sizes in (("b", "batch rows", [cut.b]), ("h", "query heads and key heads", [h_q, h_k])):
        ranks = prod([mesh.size(i) for i, own in enumerate(letters) if own == letter])
        if any(n % ranks for n in sizes):
            raise ValueError(
                f"{ranks} ranks divide {words} that are multiples of {ranks}, not {' and '.join(map(str, sizes))}: "
                f"replicate q, k and v, got {got()}"
            )
    return cut


def _dimensions(layout: Layout, x: Tensor, keys: bool) -> str:
    """A letter for each dimension of an operand: b, h, d, s or t for rows, and p for pages."""
    if isinstance(layout, Paged):
        return "pshd" if keys else "bshd" if x.dim() == 4 else "thd"
    return layout.order


def _letter(placement: Placement, dimensions: str) -> str:
    """Which one is divided; "" where none is, and "?" where it is not divided plainly."""
    if placement.is_replicate():
        return ""
    return dimensions[placement.dim] if type(placement) is Shard else "?"


def _own_layout(layout: Layout, cut: _Cut) -> Layout:
    """With the lengths and offsets of this rank's batch rows."""
    record: Any = layout
    tensors = [x.name for x in fields(record) if isinstance(getattr(layout, x.name), Tensor)]
    return replace(record, **{name: cut.constant(getattr(layout, name), {"b": 0}) for name in tensors})


def _own_mask(leaf: Mask, cut: _Cut, backend: str) -> Mask:
    """Of this rank's batch rows and heads."""

    def rows(x: Tensor) -> Tensor:
        return cut.constant(x, {"b": 0})

    if isinstance(leaf, Documents):
        return Documents(*map(rows, leaf.tensors))
    if isinstance(leaf, Prefix) and isinstance(leaf.n, Tensor):
        return Prefix(rows(leaf.n))
    if isinstance(leaf, KeyInterval):
        return leaf.each(rows)
    if isinstance(leaf, TensorMask):
        return TensorMask(cut.constant(leaf.t, {"b": leaf.t.dim() - 4, "h": leaf.t.dim() - 3}))
    if any(letter in leaf.indices for letter in cut.letters if letter):
        raise Unsupported(
            f"the mask {leaf!r} depends on the batch row or the head, along which q, k and v are sharded: not "
            "supported; replicate them, or pass a bool tensor"
        )
    if not arguments.has_dtensor(*leaf.tensors):
        return leaf
    if not isinstance(leaf, MaskMod) or backend == "reference":
        raise Unsupported(f"the mask {leaf!r} has DTensors, with backend={backend!r}: pass plain tensors, x.to_local()")
    return MaskMod(leaf.predicate.reading([cut.constant(x, {}) for x in leaf.tensors]), leaf.form)


def _own_score(score: Score, score_mod: Any, q: Tensor, cut: _Cut, backend: str) -> Score:
    """The score function for this rank's batch rows and heads. It receives their indices in the whole call."""
    if any(letter in score.indices for letter in cut.letters if letter):
        if score.own:
            raise Unsupported(
                f"{score.kind} depends on the batch row or the head, along which q, k and v are sharded, and has a "
                "derivative of its own: not supported; omit bprop"
            )
        b_first, h_first = cut.part("b", cut.b)[0], cut.part("h", cut.h)[0]
        shifted: Any = lambda s, b, h, i, j: score_mod(s, b + b_first, h + h_first, i, j)  # noqa: E731
        score = scores.bind(shifted, q) or score
    if not any(isinstance(x, DTensor) or (x.requires_grad and torch.is_grad_enabled()) for x in score.tensors):
        return score
    if backend == "reference":
        raise Unsupported(
            "backend='reference' calls score_mod itself: beside DTensors its tensors must be plain, without gradients"
        )
    return score.reading([cut.shared("a tensor of score_mod", x, {}) for x in score.tensors])


def _local(x: Any, of_gradient: Sequence[Placement] | None = None) -> Tensor:
    """A DTensor's part here, once what computes it is done."""
    x = x.to_local(grad_placements=of_gradient)
    return x.wait() if arguments.of_torch("AsyncCollectiveTensor", x) else x


def _described(x: Any) -> str:
    return f"{tuple(x.shape)} {tuple(x.placements) if isinstance(x, DTensor) else 'plain'}"
