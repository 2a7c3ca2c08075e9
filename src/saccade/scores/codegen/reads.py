"""Reads of captured tensors in emitted source: where they lie, and what is loaded."""

# torch.fx types the arguments of nodes as unions of everything.
# pyright: reportAttributeAccessIssue=false, reportOptionalMemberAccess=false

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import fx

from saccade.scores.codegen.program import Program
from saccade.scores.codegen.ranges import ANY, limits_of
from saccade.scores.recording.shapes import broadcast_shape
from saccade.scores.recording.tape import Refused
from saccade.scores.recording.trace import K, Q


class EmitOptions(NamedTuple):
    """What the source of a program depends on besides the program."""

    wide_tensors: tuple[bool, ...]
    """Which captured tensors need 64-bit offsets."""
    fast: bool = False
    """tanh is one instruction, to 11 bits, and a quotient by what is not one number for each score a product."""
    wide_integers: frozenset[int] = frozenset()
    """Which captured numbers are integers above LONGEST, and take 64 bits."""
    indices: str = "numbers"
    """`numbers` of rows and keys; their `positions`, which may be negative; `rows`: positions in any order."""
    tables: bool = False
    """Reads by distance come from tables of every distance: see `device.distance_tables`."""
    units: tuple[int, ...] = ()
    """`Score.units`, where every key has an element; () elsewhere."""
    brought: int | None = None
    """The one of `Program.own_elements` of which data's last entry is a tile, as it is for these rows and keys."""


@dataclass(frozen=True)
class Value:
    """A name in the source, with what is known about it."""

    text: str
    kind: str
    """float, int, wide or bool"""
    shape: tuple[int, ...] = ()
    """As in the trace: Q and K where it differs by query and by key."""
    span: tuple[int, int] = ANY
    """Of integers."""
    parts: tuple[str, Value, Value] | None = None
    """Sums and differences: the operation and its operands."""


class Reads:
    """The part of an Emitter that knows where captured tensors lie in `data`."""

    program: Program
    options: EmitOptions
    used: dict[str, str]
    """Unpacking of data: name -> expression."""

    def value(self, x: Any) -> Value:
        raise NotImplementedError

    def keep(self, text: str, kind: str, shape: tuple[int, ...], span: tuple[int, int] = ANY) -> Value:
        raise NotImplementedError

    def start(self, tensor: int) -> int:
        """Where a tensor's data starts."""
        return sum(1 + 2 * rank for rank in self.program.ranks[:tensor])

    def read(self, node: fx.Node, at: Sequence[Any]) -> Value:
        if node.meta["read"] in self._tables:
            return self.table(self._tables.index(node.meta["read"]), (Q, K))
        i = int(str(node.args[0].target)[1:])
        if i == self.options.brought:
            return self.keep(f"data[{self._behind(len(self._tables))}].to(tl.float32)", "float", (Q, K))
        dtype, shape = self.program.dtypes[i], self.place_shape(at)
        self.used[f"t{i}"] = f"data[{self.start(i)}]"
        places = " + ".join(filter(None, (f"t{i}", self.place(i, at))))
        # Where no index is moved the compiler sees which elements lie side by side.
        rest = f", mask={self.inside(i, at, 'kv_idx')}, other=0" if self._by_units(i, at) else ""
        loaded = f"tl.load({places}{rest})"
        if dtype.is_floating_point:
            return self.keep(f"{loaded}.to(tl.float32)", "float", shape)
        if dtype == torch.bool:
            return self.keep(f"({loaded} != 0)", "bool", shape)
        if dtype == torch.uint64:
            raise Refused("captured tensors of uint64 have no device form; capture x.to(torch.int64)")
        if dtype == torch.uint32:
            return self.keep(f"widened({loaded})", "wide", shape, limits_of(dtype))
        wide = dtype == torch.int64
        return self.keep(
            loaded if wide else f"{loaded}.to(tl.int32)", "wide" if wide else "int", shape, limits_of(dtype)
        )

    @property
    def _tables(self) -> list[int]:
        """The reads that come from tables."""
        return [*self.program.distance_reads] if self.options.tables else []

    def _behind(self, tables: int) -> int:
        """The place in `data` behind the tensors, the numbers, and so many tables."""
        return self.start(len(self.program.ranks)) + len(self.program.integral) + 4 * tables

    def table(self, n: int, shape: tuple[int, ...]) -> Value:
        """What a read by distance reads, of the n-th table: float32 (b, h, distances), contiguous but for its b and h.
        An addition to a pointer of the row's is all that an element costs."""
        row, zero = self._table_row(n)
        return self.keep(f"tl.load(({row} + ({zero} - q_idx)) + kv_idx)", "float", shape)

    def table_reach(self, n: int) -> tuple[str, str]:
        """The first two numbers of the n-th table: see `device.distance_tables`."""
        row, _ = self._table_row(n)
        return f"tl.load({row})", f"tl.load({row} + 1)"

    def _table_row(self, n: int) -> tuple[str, str]:
        """A pointer to the table of one head, and the place of distance 0."""
        place = self._behind(n)
        parts = "pointer", "b", "h", "zero"
        pointer, b, h, zero = (f"d{n}_{part}" for part in parts)
        self.used |= {name: f"data[{place + i}]" for i, name in enumerate((pointer, b, h, zero))}
        return f"({pointer} + (b * plain_int({b}) + h * plain_int({h})))", f"plain_int({zero})"

    def place(self, tensor: int, at: Sequence[Any], contiguous: bool = False, alone: bool = False) -> str:
        """The offset of an element from the tensor's first one. Indices count from the end where they are negative, and
        are kept inside: rows and keys that are not in use have indices too. `alone` leaves all as they are."""
        terms = []
        for dim, x in enumerate(at):
            value = self.value(x)
            if value.span == (0, 0):
                continue
            text, last = value.text, dim == len(at) - 1
            if not alone and (contiguous or not last or not self._by_units(tensor, at)):
                text = f"{'inside' if value.span[0] >= 0 else 'wrapped'}({text}, {self._size(tensor, dim, last)})"
            text = f"widened({text})" if self.options.wide_tensors[tensor] else text
            if contiguous:
                text += "".join(f" * {self._size(tensor, i, i == len(at) - 1)}" for i in range(dim + 1, len(at)))
            elif not last or not self._unit(tensor) > 1:
                text += f" * {self._stride(tensor, dim)}"
            terms.append((value.shape.count(1), text))
        # What fewer elements share is added first.
        return " + ".join(text for _, text in sorted(terms, key=lambda term: -term[0]))

    def place_shape(self, at: Sequence[Any]) -> tuple[int, ...]:
        """The shape of `place`, to which indices that are always 0 add nothing."""
        values = map(self.value, at)
        return broadcast_shape((1, 1), *(value.shape for value in values if value.span != (0, 0)))

    def inside(self, tensor: int, at: Sequence[Any], *names: str) -> str:
        """Whether those of the indices are below the tensor's sizes."""
        texts = ((self.value(x).text, self._size(tensor, dim, dim == len(at) - 1)) for dim, x in enumerate(at))
        return " & ".join(f"({text} < {size})" for text, size in texts if text in names)

    def _unit(self, tensor: int) -> int:
        return self.options.units[tensor] if self.options.units else 1

    def _by_units(self, tensor: int, at: Sequence[Any]) -> bool:
        """Whether a read's last index is a key's number itself, in a tensor whose rows are whole units."""
        return self._unit(tensor) > 1 and bool(at) and self.value(at[-1]).text == "kv_idx"

    def _size(self, tensor: int, dim: int, last: bool) -> str:
        unit = self._unit(tensor) if last else 1
        return self._number(f"t{tensor}_n{dim}", self.start(tensor) + 2 + 2 * dim, unit)

    def _stride(self, tensor: int, dim: int) -> str:
        return self._number(f"t{tensor}_s{dim}", self.start(tensor) + 1 + 2 * dim, self._unit(tensor))

    def _number(self, name: str, place: int, unit: int) -> str:
        """A multiple of the unit, as the compiler is to know."""
        text = f"plain_int(data[{place}])"
        self.used[name] = text if unit == 1 else f"{text} // {unit} * {unit}"
        return name


def kind_of(dtype: torch.dtype) -> str:
    return "float" if dtype.is_floating_point else "bool" if dtype == torch.bool else "int"
