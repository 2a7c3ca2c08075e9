"""Score functions that mask keys by distance: their window, and the call with that window in its mask."""

# pyright: reportAttributeAccessIssue=false, reportOptionalMemberAccess=false, reportArgumentType=false
# pyright: reportGeneralTypeIssues=false, reportIndexIssue=false, reportOptionalSubscript=false, reportCallIssue=false
# pyright: reportOptionalIterable=false, reportReturnType=false, reportOperatorIssue=false

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import fx

from saccade.call import Call
from saccade.masks import UNBOUNDED, And, Blocked, Documents, Mask, Or, Prefix, Window
from saccade.scores import Score, Traced
from saccade.scores.codegen.program import Program, cache, constant_of
from saccade.scores.codegen.ranges import LONGEST, spread
from saccade.scores.tracing.lowering import name_of, shallow
from saccade.util.caches import BoundedCache

# Scores that mask keys by their distance: `where(q_idx >= kv_idx, rest, -inf)` is a window, and a rest.
#
# The visible keys are an interval of `kv_idx - q_idx`. Where a window sees to that, the comparisons in the function
# are true on all that is computed: what they select replaces the selects, in the value and in a derivative of the
# user's own.

# torch.fx types the arguments of nodes as unions of everything.

MASKED = -1e8
"""Finite numbers up to here mask as -inf does: in rows that see a key their weight is zero."""
SCORES = 1e7
"""No scaled product of a query and a key is larger: where finite numbers mask keys, that is taken for granted."""


class DistanceBound(NamedTuple):
    """`sign (kv_idx - q_idx) <= constant + sum of factor times number`."""

    sign: int
    constant: int
    terms: tuple[tuple[int, int], ...]
    """(which of the program's numbers, factor)"""

    def limit(self, numbers: Sequence[Any]) -> int:
        return self.constant + sum(factor * numbers[i] for i, factor in self.terms)


class VisibleBand(NamedTuple):
    """Query i sees keys `i - left <= j <= i + right`, both counted from the first; None is unbounded."""

    left: int | None
    right: int | None
    empty_rows: bool
    """Whether a row that sees no key is as a mask has it. Otherwise it would see all keys alike."""


class ScoreSplit(NamedTuple):
    """A score function as distance bounds and a rest."""

    bounds: tuple[DistanceBound, ...]
    values: tuple[float | int, ...]
    """The score of masked keys: a float, or the index of one of the program's numbers."""
    complete: bool
    """Whether the bounds alone decide. Otherwise some keys inside of them are masked too, and only -inf will do."""
    rest: Program | None
    """None: the score itself."""
    picks: tuple[int, ...]
    """Which of the program's numbers the rest takes."""
    alike: tuple[tuple[DistanceBound, DistanceBound], ...]
    """Bounds that were taken for one another, as their numbers were equal: the rest is right where they are."""
    bands: BoundedCache[Any, VisibleBand | None]
    """The bounds at the program's numbers."""

    def band(self, numbers: tuple[Any, ...]) -> VisibleBand | None:
        """None where masked keys might have a weight."""
        return self.bands.get_or_make(numbers, lambda: self._band(numbers))

    def _band(self, numbers: Sequence[Any]) -> VisibleBand | None:
        if any(x.limit(numbers) != y.limit(numbers) for x, y in self.alike):
            return None
        if not all(_is_whole(numbers[i]) for x in self.bounds for i, _ in x.terms):
            return None
        empty_rows = self._empty_rows(numbers)
        if empty_rows is None:
            return None
        left, right = ([int(x.limit(numbers)) for x in self.bounds if x.sign == sign] for sign in (-1, 1))
        return VisibleBand(min(left, default=None), min(right, default=None), empty_rows)

    def _empty_rows(self, numbers: Sequence[Any]) -> bool | None:
        """Of VisibleBand; None where masked keys might have a weight."""
        values = [numbers[x] if isinstance(x, int) else x for x in self.values]
        if not all(x <= MASKED for x in values):
            return None
        if (top := max(values)) == -math.inf:
            return True
        size = SCORES if self.rest is None else _largest(self.rest, [numbers[i] for i in self.picks])
        return False if self.complete and top <= -4 * size else None


def _is_whole(x: Any) -> bool:
    """Whether a number is an integer, and a float such that no sum with an index is rounded."""
    return isinstance(x, int) or (x.is_integer() and abs(x) <= LONGEST)


def split_score(score: Score) -> tuple[VisibleBand, Score | None] | None:
    """The keys that a score leaves visible, and the rest of it, None for the score itself. None: it masks no keys."""
    if not isinstance(score, Traced):
        return None
    program, numbers = score.program, score.numbers
    split = cache.derive(program, "split", lambda: _Analysis(program, numbers).split())
    if split is None or (band := split.band(tuple(numbers))) is None:
        return None
    return band, split.rest and Traced(split.rest, score.tensors, [numbers[i] for i in split.picks])


class _Select(NamedTuple):
    """A select between a number that masks and something else, or, added to a score, between such a number and 0."""

    bounds: list[DistanceBound]
    value: float | int
    complete: bool


_AND = ("bitwise_and", "logical_and", "__and__")
_OR = ("bitwise_or", "logical_or", "__or__")
_NOT = ("bitwise_not", "logical_not")
_SAME = ("alias", "clone", "detach", "positive")
_OPPOSITE = {"ge": "lt", "lt": "ge", "gt": "le", "le": "gt"}


class _Analysis:
    """Peels selects off a program, from the outermost on. The graph that the program was made of becomes the rest's."""

    def __init__(self, program: Program, numbers: Sequence[Any]) -> None:
        """numbers: those of the first call."""
        self.program, self.raw, self.numbers = program, program.raw, numbers
        self.bounds: list[DistanceBound] = []
        self.alike: list[tuple[DistanceBound, DistanceBound]] = []
        self.contradictory = False
        """Whether a select masks all keys that the bounds leave: no window says so."""

    def split(self) -> ScoreSplit | None:
        program, graph = self.program, self.raw.module.graph
        values: list[float | int] = []
        complete = True
        select = self._outermost() if shallow(graph) else None
        while select is not None and not set(select.bounds) <= set(self.bounds):
            self.bounds += select.bounds
            values.append(select.value)
            complete &= select.complete
            self._simplify()
            select = self._outermost()
        if not self.bounds or self.contradictory:
            return None
        graph.eliminate_dead_code()
        rest = Program(program.name, self.raw, program.dtype)
        if rest.tensor_nodes != program.tensor_nodes:  # those of the call are the rest's, one by one
            return None
        picks = tuple(map(program.number_nodes.index, rest.number_nodes))
        rest = None if _is_plain(rest) else cache.unique(rest)
        if rest is not None:
            rest.emitted.setdefault("split", None)
        return ScoreSplit(tuple(self.bounds), tuple(values), complete, rest, picks, tuple(self.alike), BoundedCache(64))

    # Selects

    def _outermost(self) -> _Select | None:
        """The select that is the score function's last operation, if it masks keys."""
        root = self.raw.module.graph.output_node().args[0][0]
        if isinstance(root, fx.Node) and name_of(root) == "add" and root.kwargs.get("alpha", 1) == 1:
            parts = (self._select(x, added=True) for x in root.args if _same_type(x, root))
            return next((x for x in parts if x is not None), None)
        return self._select(root)

    def _select(self, root: Any, added: bool = False) -> _Select | None:
        name = name_of(root) if isinstance(root, fx.Node) and root.op == "call_function" else ""
        if name not in ("where", "masked_fill") or len(root.args) != 3 or not root.meta["val"].is_floating_point():
            return None
        condition, one, other = root.args if name == "where" else (root.args[1], root.args[2], root.args[0])
        for masked, rest, negated in ((other, one, False), (one, other, True)):
            value = self._masking_value(masked)
            fits = self._is_zero(rest) if added else _same_type(rest, root) and rest.meta["kind"] == "tile"
            if value is not None and fits:
                bounds, complete = self._conjunction(condition, negated)
                return _Select(bounds, value, complete) if bounds else None
        return None

    def _is_zero(self, x: Any) -> bool:
        if isinstance(x, fx.Node):
            return x.meta["kind"] == "number" and constant_of(self.raw, x) == 0
        return x == 0

    def _number(self, x: fx.Node) -> tuple[Any, int | None]:
        """A node of numbers as a constant, or as one of the program's numbers."""
        constant, nodes = constant_of(self.raw, x), self.program.number_nodes
        return constant, nodes.index(x) if constant is None and x in nodes else None

    def _masking_value(self, x: Any) -> float | int | None:
        """A float that masks, or which of the program's numbers."""
        if isinstance(x, fx.Node) and x.meta["kind"] == "tile" and name_of(x) == "full_like":
            x = x.args[1]
        if isinstance(x, fx.Node):
            if x.meta["kind"] != "number":
                return None
            x, number_index = self._number(x)
            if x is None:
                return number_index
        return float(x) if isinstance(x, (int, float)) and x <= MASKED else None

    # Conditions

    def _conjunction(self, x: Any, negated: bool) -> tuple[list[DistanceBound], bool]:
        """Bounds that hold wherever x does, or, negated, wherever it does not; and whether they are all of it."""
        name = _boolean(x)
        if name in _SAME or name in _NOT:
            return self._conjunction(x.args[0], negated != (name in _NOT))
        if name in (_OR if negated else _AND):
            parts = [self._conjunction(y, negated) for y in x.args]
            return [bound for bounds, _ in parts for bound in bounds], all(complete for _, complete in parts)
        bounds = self._compared(x, negated)
        return bounds or [], bounds is not None

    def _compared(self, x: Any, negated: bool) -> list[DistanceBound] | None:
        """A comparison as bounds, all of which hold exactly where it does; None for any other value."""
        name = _boolean(x)
        if name not in _OPPOSITE:
            return None
        name = _OPPOSITE[name] if negated else name
        less, more = x.args if name in ("le", "lt") else x.args[::-1]
        has_abs = isinstance(less, fx.Node) and less.op == "call_function" and name_of(less) == "abs"
        inner, limit = self._affine(less.args[0] if has_abs else less), self._affine(more)
        if inner is None or limit is None or (has_abs and (limit.q or limit.kv)):
            return None
        bounds = []
        for sign in (1, -1)[: 1 + has_abs]:
            distance = inner.times(sign).plus(limit.times(-1))
            if distance.q + distance.kv or abs(distance.kv) != 1:
                return None
            constant = -distance.constant - (name in ("lt", "gt"))
            terms = tuple((n, -factor) for n, factor in distance.terms if factor)
            bounds.append(DistanceBound(distance.kv, constant, terms))
        return bounds

    def _affine(self, x: Any) -> _Affine | None:
        """None for anything else, and for what floats may have rounded or narrow integers wrapped."""
        affine = self._sum(x)
        if affine is None or not isinstance(x, fx.Node):
            return affine
        dtype = x.meta["val"].dtype
        if dtype.is_floating_point:
            wide = dtype in (torch.float32, torch.float64)
            return affine if wide and max(map(abs, affine[:3])) <= LONGEST else None
        if dtype == torch.int64 or x.meta["kind"] == "number":
            return affine
        near = max(map(abs, affine[:2])) <= 1 and abs(affine.constant) <= LONGEST and not affine.terms
        return affine if dtype == torch.int32 and near else None

    def _sum(self, x: Any) -> _Affine | None:
        if isinstance(x, fx.Node) and x.meta["kind"] == "number":
            x, number_index = self._number(x)
            if number_index is not None:
                return _Affine(0, 0, 0, ((number_index, 1),))  # a float if it is whole: see `band`
        if isinstance(x, (int, float)) and not isinstance(x, bool):
            return _Affine(0, 0, int(x)) if math.isfinite(x) and int(x) == x else None
        if not isinstance(x, fx.Node) or x.meta["kind"] != "tile" or x.meta["val"].dtype == torch.bool:
            return None
        if x.op == "placeholder":
            number_index = list(self.raw.module.graph.find_nodes(op="placeholder")).index(x)
            return {3: _Affine(1, 0, 0), 4: _Affine(0, 1, 0)}.get(number_index)
        name = name_of(x)
        if name not in ("add", "sub", "rsub", "neg", "_to_copy", *_SAME) or x.kwargs.get("alpha", 1) != 1:
            return None
        parts = [self._affine(y) for y in (x.args[:1] if name == "_to_copy" else x.args)]
        if None in parts or len(parts) > 2:
            return None
        if name in ("sub", "rsub"):
            parts[name == "sub"] = parts[name == "sub"].times(-1)
        return parts[0].times(-1) if name == "neg" else parts[0] if len(parts) == 1 else parts[0].plus(parts[1])

    # What the bounds decide

    def _follows(self, y: DistanceBound) -> bool:
        if any(x[::2] == y[::2] and x.constant <= y.constant for x in self.bounds):
            return True
        equal = (x for x in self.bounds if x.sign == y.sign and x.limit(self.numbers) == y.limit(self.numbers))
        if (x := next(equal, None)) is not None:
            self.alike.append((x, y))
        return x is not None

    def _simplify(self) -> None:  # noqa: C901 (one pass over a graph)
        """Replaces selects by what comparisons that the bounds imply select."""
        truth: dict[Any, bool | None] = {}
        for x in list(self.raw.module.graph.nodes):
            name = name_of(x) if x.op == "call_function" and x.meta["kind"] == "tile" else ""
            known = [truth.get(y) if isinstance(y, fx.Node) else None for y in x.args]
            if name in _OPPOSITE:
                compared = (self._compared(x, negated) for negated in (False, True))
                yes, no = (bounds is not None and all(map(self._follows, bounds)) for bounds in compared)
                truth[x] = True if yes else False if no else None
            elif name in _SAME:
                truth[x] = known[0]
            elif name in _NOT:
                truth[x] = None if known[0] is None else not known[0]
            elif name in _AND or name in _OR:
                neutral = name in _AND  # which of the two leaves the other
                truth[x] = (not neutral) if (not neutral) in known else neutral if known == [neutral, neutral] else None
                if truth[x] is None and neutral in known and _boolean(x):
                    _replace(x, x.args[1 - known.index(neutral)])
            elif name == "where" and known[0] is not None and len(x.args) == 3:
                selected = x.args[1 if known[0] else 2]
                self.contradictory |= self._masking_value(selected) is not None
                if self._is_zero(selected) and all(name_of(user) == "add" for user in x.users):  # of any type
                    x.replace_all_uses_with(selected)
                _replace(x, selected)
            elif name == "masked_fill" and known[1] is not None:
                self.contradictory |= known[1] and self._masking_value(x.args[2]) is not None
                if not known[1]:
                    _replace(x, x.args[0])
            elif name == "add" and len(x.args) == 2:
                for y, other in (x.args, x.args[::-1]):
                    if self._is_zero(other):
                        _replace(x, y)


def _is_plain(program: Program) -> bool:
    """Whether it is the score itself."""
    (value,), (slope,) = (x.graph.output_node().args[0] for x in (program.value, program.slope))
    return isinstance(value, fx.Node) and value.name == "score" and not isinstance(slope, fx.Node) and slope == 1


def _same_type(x: Any, y: fx.Node) -> bool:
    return isinstance(x, fx.Node) and x.meta["val"].dtype == y.meta["val"].dtype


def _replace(x: fx.Node, by: Any) -> None:
    if _same_type(by, x):
        x.replace_all_uses_with(by)


def _boolean(x: Any) -> str:
    """The operation that computes a bool, or ""."""
    computed = isinstance(x, fx.Node) and x.op == "call_function" and x.meta["val"].dtype == torch.bool
    return name_of(x) if computed else ""


class _Affine(NamedTuple):
    """`q q_idx + kv kv_idx + constant + sum of factor times number`, an integer."""

    q: int
    kv: int
    constant: int
    terms: tuple[tuple[int, int], ...] = ()

    def times(self, factor: int) -> _Affine:
        return _Affine(*(factor * x for x in self[:3]), tuple((n, factor * x) for n, x in self.terms))

    def plus(self, other: _Affine) -> _Affine:
        terms = dict(self.terms)
        for n, factor in other.terms:
            terms[n] = terms.get(n, 0) + factor
        return _Affine(*(x + y for x, y in zip(self[:3], other[:3], strict=True)), tuple(sorted(terms.items())))


def _largest(program: Program, numbers: Sequence[Any]) -> float:
    """An upper bound of a program's absolute value, by interval arithmetic; inf if unknown."""
    spans: dict[fx.Node, tuple[float, float]] = {}

    def span(x: Any) -> tuple[float, float]:
        return spans[x] if isinstance(x, fx.Node) else (float(x), float(x))

    try:
        for x in program.core.nodes:
            if x.op == "placeholder":
                spans[x] = _input_span(x.name, numbers)
            elif x.op == "call_function":
                args = x.args[1:2] if name_of(x) == "full_like" else x.args[:1] if name_of(x) == "_to_copy" else x.args
                spans[x] = spread(name_of(x), [span(y) for y in args], x.kwargs)
        return max(map(abs, span(program.core_outputs()[0])))
    except (KeyError, TypeError, ValueError):
        return math.inf


def _input_span(name: str, numbers: Sequence[Any]) -> tuple[float, float]:
    if name == "score":
        return -SCORES, SCORES
    if name in ("b", "h", "q_idx", "kv_idx"):
        return 0.0, float(LONGEST)
    return (float(numbers[int(name[1:])]),) * 2  # a read raises: nothing is known of it


# A Call whose score function masks keys by their distance, with a window in its place: tiles that the window masks
# are never visited.


WHOLE_SCORES = ("cudnn", "reference")
"""Backends that take score functions as they were written."""


def move_to_mask(call: Call, backend: str) -> Call:
    """The Call with a window in its mask instead of masking scores, if possible; else the Call itself."""
    split = window_and_rest(call, backend)
    if split is None:
        return call
    window, rest = split
    return call.replace(mask=window if call.mask is None else call.mask & window, score=rest)


def window_and_rest(call: Call, backend: str) -> tuple[Window, Score | None] | None:
    """The window that the score masks by, and the rest of the score; None where a window would not be the same."""
    if call.score is None or backend in WHOLE_SCORES or isinstance(call.mask, Blocked):
        return None
    split = split_score(call.score)
    positioned = call.positions is not None or call.layout.has_pages  # functions and windows alike
    off = 0 if positioned else call.layout.common_offset(call.q.shape[2], call.k.shape[2])
    if split is None or off is None:
        return None
    band, rest = split
    if positioned and not band.empty_rows:
        return None
    window = _window(band.left, band.right, off)
    if window is None or not (band.empty_rows or _every_row_sees_a_key(call, window, off)):
        return None
    return window, rest


@lru_cache(maxsize=1024)
def _window(left: int | None, right: int | None, off: int) -> Window | None:
    """A band that is aligned at the top left as a window, which is aligned at the bottom right. None if the window's
    diagonal is outside of the band."""
    bounds = left if left is None else left + off, right if right is None else right - off
    if any(x is not None and x < 0 for x in bounds):
        return None
    return Window(*(None if x is None or x >= UNBOUNDED else x for x in bounds))


def _every_row_sees_a_key(call: Call, window: Window, off: int) -> bool:
    """Whether every row that sees a key at all sees one in the window too."""
    own = call.mask
    if off == 0 and (own is None or _on_diagonal(own)):
        return True
    if not (own is None or isinstance(own, Window)):
        return False
    s_q, s_k = call.q.shape[2], call.k.shape[2]
    left, right = (UNBOUNDED, UNBOUNDED) if own is None else own.bounds
    first, last = max(0, -off - right), min(s_q - 1, s_k - 1 - off + left)  # of the rows that see a key
    left, right = min(left, window.bounds[0]), min(right, window.bounds[1])
    return first > last or (first + off + right >= 0 and last + off - left <= s_k - 1)


def _on_diagonal(mask: Mask) -> bool:
    """Whether every row sees the key of its own number, of as many rows as keys."""
    if isinstance(mask, And | Or):  # ~ is a Combined too, and masks the diagonal of what contains it
        return (all if isinstance(mask, And) else any)(map(_on_diagonal, mask.parts))
    return isinstance(mask, (Window, Prefix, Documents))
