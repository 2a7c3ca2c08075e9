"""Scores that hide keys by their distance: `where(q_idx >= kv_idx, rest, -inf)` is a mask, and a rest.

What is visible is an interval of `kv_idx - q_idx`. Where a mask sees to that, the comparisons that made it are true on
all that is computed: what they select, in the value and in a derivative of the user's own, takes the selects' place.
"""

# torch.fx types the arguments of nodes as unions of everything.
# pyright: reportAttributeAccessIssue=false, reportOptionalMemberAccess=false, reportArgumentType=false
# pyright: reportGeneralTypeIssues=false, reportIndexIssue=false, reportOptionalSubscript=false, reportCallIssue=false
# pyright: reportOptionalIterable=false, reportReturnType=false, reportOperatorIssue=false

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from saccade.scores.codegen.program import Program, constant_of
from saccade.scores.codegen.ranges import LONGEST, spread
from saccade.scores.recording.trace import Raw, name_of, shallow

HIDDEN = -1e8
"""Finite numbers up to here hide, as -inf does: of rows that see a key their weight is zero."""


class Bound(NamedTuple):
    """`sign (kv_idx - q_idx) <= constant + sum of factor times number`."""

    sign: int
    constant: int
    terms: tuple[tuple[int, int], ...]
    """(which of the program's numbers, factor)"""

    def limit(self, numbers: Sequence[Any]) -> int:
        return self.constant + sum(factor * numbers[i] for i, factor in self.terms)


class Hidden(NamedTuple):
    """Query i sees keys `i - left <= j <= i + right`, both counted from the first; None is unbounded."""

    left: int | None
    right: int | None
    empty_rows: bool
    """Whether rows that see no key are as a mask has them. Otherwise they would see all keys alike."""


class Hiding(NamedTuple):
    """A score as a window, aligned at the top left, and a rest."""

    bounds: tuple[Bound, ...]
    values: tuple[float | int, ...]
    """What hidden keys score: a float, or which of the program's numbers."""
    complete: bool
    """Whether the window alone decides. Else some of what it leaves is hidden too, and only -inf will do."""
    rest: Program | None
    """None: the score itself."""
    picks: tuple[int, ...]
    """Which of the program's numbers the rest takes."""
    alike: tuple[tuple[Bound, Bound], ...]
    """Bounds that were taken for one another, as their numbers were equal: the rest is right where they are."""
    known: dict[tuple[Any, ...], Hidden | None]
    """For numbers that were met."""

    def hidden(self, numbers: tuple[Any, ...]) -> Hidden | None:
        """None where what is hidden might have a weight."""
        found = self.known.get(numbers, _NEW)
        if found is _NEW:
            if len(self.known) >= _KNOWN:
                self.known.clear()
            same = all(x.limit(numbers) == y.limit(numbers) for x, y in self.alike)
            whole = all(_whole(numbers[i]) for x in self.bounds for i, _ in x.terms)
            empty = self._empty_rows(numbers) if same and whole else None
            found = self.known[numbers] = None if empty is None else Hidden(*self._window(numbers), empty)
        return found

    def _window(self, numbers: Sequence[Any]) -> tuple[int | None, int | None]:
        """`left` and `right` of what is visible."""
        least: list[int | None] = [None, None]
        for sign, constant, terms in self.bounds:
            limit = int(Bound(sign, constant, terms).limit(numbers))
            known = least[sign > 0]
            least[sign > 0] = limit if known is None else min(known, limit)
        return least[0], least[1]

    def _empty_rows(self, numbers: Sequence[Any]) -> bool | None:
        """Of Hidden; None where what is hidden might have a weight."""
        found = [numbers[x] if isinstance(x, int) else x for x in self.values]
        if not all(x <= HIDDEN for x in found):
            return None
        if (top := max(found)) == -math.inf:
            return True
        size = SCORES if self.rest is None else _largest(self.rest, [numbers[i] for i in self.picks])
        return False if self.complete and top <= -4 * size else None


def _whole(x: Any) -> bool:
    """Whether a number is an integer, and a float such that no sum with an index is rounded."""
    return isinstance(x, int) or (x.is_integer() and abs(x) <= LONGEST)


_KNOWN = 64
_NEW: Any = object()
SCORES = 1e7
"""No scaled product of a query and a key is larger: where finite numbers hide keys, that is taken for granted."""


def hiding(program: Program, raw: Raw, numbers: Sequence[Any]) -> Hiding | None:
    """What a program hides. The graph that it was made of becomes that of the rest; `numbers` are those of the
    recording that it was made of, before any are computed."""
    places, module = program.numbers
    given = [] if module is not None else [numbers[i - raw.inputs[0]] for i in places]
    alike: list[tuple[Bound, Bound]] = []
    found = _Select.of(program, raw) if shallow(raw.module.graph) else None
    bounds: list[Bound] = []
    values: list[float | int] = []
    complete = True
    while found is not None and not set(found.bounds) <= set(bounds):
        bounds += found.bounds
        values.append(found.value)
        complete &= found.complete
        _simplify(program, raw, bounds, given, alike)
        found = _Select.of(program, raw)
    if not bounds:
        return None
    raw.module.graph.eliminate_dead_code()
    rest = Program(program.name, raw, program.dtype)
    if rest.tensor_nodes != program.tensor_nodes:  # those of the call are the rest's, one by one
        return None
    picks = tuple(map(program.number_nodes.index, rest.number_nodes))
    return Hiding(tuple(bounds), tuple(values), complete, None if _plain(rest) else rest, picks, tuple(alike), {})


def _plain(program: Program) -> bool:
    """Whether it is the score itself."""
    (value,), (slope,) = (x.graph.output_node().args[0] for x in (program.value, program.slope))
    return isinstance(value, fx.Node) and value.name == "score" and not isinstance(slope, fx.Node) and slope == 1


class _Select(NamedTuple):
    """The outermost operation of a score, where that is a select between a number that hides and something else, or
    where one between such a number and 0 is added."""

    bounds: list[Bound]
    value: float | int
    complete: bool

    @staticmethod
    def of(program: Program, raw: Raw) -> _Select | None:
        root = raw.module.graph.output_node().args[0][0]
        if isinstance(root, fx.Node) and name_of(root) == "add" and root.kwargs.get("alpha", 1) == 1:
            parts = (_Select.at(program, raw, x, added=True) for x in root.args if _same_type(x, root))
            return next((x for x in parts if x is not None), None)
        return _Select.at(program, raw, root)

    @staticmethod
    def at(program: Program, raw: Raw, root: Any, added: bool = False) -> _Select | None:
        """Of a node: the score, or 0 where it is visible if it is added to the score."""
        name = name_of(root) if isinstance(root, fx.Node) and root.op == "call_function" else ""
        if name not in ("where", "masked_fill") or len(root.args) != 3 or not root.meta["val"].is_floating_point():
            return None
        condition, one, other = root.args if name == "where" else (root.args[1], root.args[2], root.args[0])
        for hidden, rest, negated in ((other, one, False), (one, other, True)):
            value = _number(program, raw, hidden)
            left = _zero(raw, rest) if added else _same_type(rest, root) and rest.meta["kind"] == "tile"
            if value is None or not left:
                continue
            made: list[Bound] = []
            complete = _conjunction(program, raw, condition, negated, made)
            return _Select(made, value, complete) if made else None
        return None


def _zero(raw: Raw, x: Any) -> bool:
    if isinstance(x, fx.Node):
        return x.meta["kind"] == "number" and constant_of(raw, x) == 0
    return x == 0


def _same_type(x: Any, y: fx.Node) -> bool:
    return isinstance(x, fx.Node) and x.meta["val"].dtype == y.meta["val"].dtype


def _number(program: Program, raw: Raw, x: Any) -> float | int | None:
    """A float that hides, or which of the program's numbers."""
    if isinstance(x, fx.Node) and x.meta["kind"] == "tile" and name_of(x) == "full_like":
        x = x.args[1]
    if isinstance(x, fx.Node):
        if x.meta["kind"] != "number":
            return None
        known = constant_of(raw, x)
        if known is None:
            return program.number_nodes.index(x) if x in program.number_nodes else None
        x = known
    return float(x) if isinstance(x, (int, float)) and x <= HIDDEN else None


_AND = ("bitwise_and", "logical_and", "__and__")
_OR = ("bitwise_or", "logical_or", "__or__")
_NOT = ("bitwise_not", "logical_not")
_SAME = ("alias", "clone", "detach", "positive")


def _conjunction(program: Program, raw: Raw, x: Any, negated: bool, found: list[Bound]) -> bool:
    """Adds the bounds that hold wherever x does, or, negated, wherever it does not; whether they are all of it."""
    name = _boolean(x)
    if name in _SAME or name in _NOT:
        return _conjunction(program, raw, x.args[0], negated != (name in _NOT), found)
    if name in (_OR if negated else _AND):
        parts = [_conjunction(program, raw, y, negated, found) for y in x.args]
        return all(parts)
    bounds = _compared(program, raw, x, negated)
    found += bounds or ()
    return bounds is not None


def _boolean(x: Any) -> str:
    """Which operation makes it, if it is bool and computed."""
    made = isinstance(x, fx.Node) and x.op == "call_function" and x.meta["val"].dtype == torch.bool
    return name_of(x) if made else ""


_OPPOSITE = {"ge": "lt", "lt": "ge", "gt": "le", "le": "gt"}


def _compared(program: Program, raw: Raw, x: Any, negated: bool) -> list[Bound] | None:
    """A comparison as bounds, all of which hold exactly where it does; None for any other value."""
    name = _boolean(x)
    if name not in _OPPOSITE:
        return None
    name = _OPPOSITE[name] if negated else name
    less, more = x.args if name in ("le", "lt") else x.args[::-1]
    sides = [less]
    if isinstance(less, fx.Node) and less.op == "call_function" and name_of(less) == "abs":
        sides = [less.args[0], less.args[0]]
    limit = _affine(program, raw, more)
    found = []
    for i, side in enumerate(sides):
        inner = _affine(program, raw, side)
        if inner is None or limit is None or (len(sides) == 2 and (limit.q or limit.kv)):
            return None
        distance = inner.times(-1 if i else 1).plus(limit.times(-1))
        if distance.q + distance.kv or abs(distance.kv) != 1:
            return None
        constant = -distance.constant - (name in ("lt", "gt"))
        found.append(Bound(distance.kv, constant, tuple((n, -factor) for n, factor in distance.terms if factor)))
    return found


class _Affine(NamedTuple):
    """`q q_idx + kv kv_idx + constant + sum of factor times number`, an integer."""

    q: int
    kv: int
    constant: int
    terms: tuple[tuple[int, int], ...] = ()

    def times(self, factor: int) -> _Affine:
        made = (factor * x for x in self[:3])
        return _Affine(*made, tuple((n, factor * x) for n, x in self.terms))

    def plus(self, other: _Affine) -> _Affine:
        terms = dict(self.terms)
        for n, factor in other.terms:
            terms[n] = terms.get(n, 0) + factor
        return _Affine(*(x + y for x, y in zip(self[:3], other[:3], strict=True)), tuple(sorted(terms.items())))


def _affine(program: Program, raw: Raw, x: Any) -> _Affine | None:
    """None for anything else, and for what floats may have rounded."""
    found = _sum(program, raw, x)
    if found is not None and isinstance(x, fx.Node) and x.meta["val"].is_floating_point():
        wide = x.meta["val"].dtype in (torch.float32, torch.float64)
        return found if wide and max(map(abs, found[:3])) <= LONGEST else None
    return found


def _sum(program: Program, raw: Raw, x: Any) -> _Affine | None:
    if isinstance(x, fx.Node) and x.meta["kind"] == "number":
        known = constant_of(raw, x)
        if known is None:
            place = program.number_nodes.index(x) if x in program.number_nodes else None
            return None if place is None else _Affine(0, 0, 0, ((place, 1),))  # a float if it is whole: see `hidden`
        x = known
    if isinstance(x, (int, float)) and not isinstance(x, bool):
        return _Affine(0, 0, int(x)) if math.isfinite(x) and int(x) == x else None
    if not isinstance(x, fx.Node) or x.meta["kind"] != "tile" or x.meta["val"].dtype == torch.bool:
        return None
    if x.op == "placeholder":
        place = list(raw.module.graph.find_nodes(op="placeholder")).index(x)
        return {3: _Affine(1, 0, 0), 4: _Affine(0, 1, 0)}.get(place)
    name = name_of(x)
    if name not in ("add", "sub", "rsub", "neg", "_to_copy", *_SAME) or x.kwargs.get("alpha", 1) != 1:
        return None
    given = [_affine(program, raw, y) for y in (x.args[:1] if name == "_to_copy" else x.args)]
    if None in given or len(given) > 2:
        return None
    if name in ("sub", "rsub"):
        given[name == "sub"] = given[name == "sub"].times(-1)
    return given[0].times(-1) if name == "neg" else given[0] if len(given) == 1 else given[0].plus(given[1])


def _simplify(  # noqa: C901 (one pass over a graph)
    program: Program, raw: Raw, known: Sequence[Bound], numbers: Sequence[Any], alike: list[tuple[Bound, Bound]]
) -> None:
    """What is selected by comparisons that are known, in the place of the selects."""
    truth: dict[Any, bool | None] = {}

    def implied(bounds: list[Bound] | None) -> bool:
        return bounds is not None and all(map(follows, bounds))

    def follows(y: Bound) -> bool:
        if any(x[::2] == y[::2] and x.constant <= y.constant for x in known):
            return True
        equal = (x for x in known if numbers and x.sign == y.sign and x.limit(numbers) == y.limit(numbers))
        if (x := next(equal, None)) is not None:
            alike.append((x, y))
        return x is not None

    def replaced(x: fx.Node, by: Any) -> None:
        if _same_type(by, x):
            x.replace_all_uses_with(by)

    for x in list(raw.module.graph.nodes):
        name = name_of(x) if x.op == "call_function" and x.meta["kind"] == "tile" else ""
        given = [truth.get(y) if isinstance(y, fx.Node) else None for y in x.args]
        if name in _OPPOSITE:
            yes, no = (implied(_compared(program, raw, x, negated)) for negated in (False, True))
            truth[x] = True if yes else False if no else None
        elif name in _SAME:
            truth[x] = given[0]
        elif name in _NOT:
            truth[x] = None if given[0] is None else not given[0]
        elif name in _AND or name in _OR:
            neutral = name in _AND  # which of the two leaves the other
            truth[x] = (not neutral) if (not neutral) in given else neutral if given == [neutral, neutral] else None
            if truth[x] is None and neutral in given and _boolean(x):
                replaced(x, x.args[1 - given.index(neutral)])
        elif name == "where" and given[0] is not None and len(x.args) == 3:
            by = x.args[1 if given[0] else 2]
            if _zero(raw, by) and all(name_of(user) == "add" for user in x.users):  # of any type
                x.replace_all_uses_with(by)
            replaced(x, by)
        elif name == "masked_fill" and given[1] is False:
            replaced(x, x.args[0])
        elif name == "add" and len(x.args) == 2:
            for y, other in (x.args, x.args[::-1]):
                if _zero(raw, other):
                    replaced(x, y)


def _largest(program: Program, numbers: Sequence[Any]) -> float:
    """What the absolute of a program's value never exceeds, by interval arithmetic; inf where nothing is known."""
    spans: dict[fx.Node, tuple[float, float]] = {}

    def span(x: Any) -> tuple[float, float]:
        return spans[x] if isinstance(x, fx.Node) else (float(x), float(x))

    try:
        for x in program.core.nodes:
            if x.op == "placeholder":
                spans[x] = _given(x.name, numbers)
            elif x.op == "call_function":
                args = x.args[1:2] if name_of(x) == "full_like" else x.args[:1] if name_of(x) == "_to_copy" else x.args
                spans[x] = spread(name_of(x), [span(y) for y in args], x.kwargs)
        return max(map(abs, span(program.core_outputs()[0])))
    except (KeyError, TypeError, ValueError):
        return math.inf


def _given(name: str, numbers: Sequence[Any]) -> tuple[float, float]:
    if name == "score":
        return -SCORES, SCORES
    if name in ("b", "h", "q_idx", "kv_idx"):
        return 0.0, float(LONGEST)
    return (float(numbers[int(name[1:])]),) * 2  # a read raises: nothing is known of it
