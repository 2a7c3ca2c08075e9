"""ScoreMod, which is public, and Score, which a Call holds: a Program with its captured values."""

from __future__ import annotations

import functools
import re
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from saccade.scores.codegen.program import Program, program_of
from saccade.scores.codegen.ranges import check_numbers
from saccade.scores.tracing.tape import broadcast_shape, refuse
from saccade.util.caches import compile_constant
from saccade.util.memory_layout import ALIGNMENT, address

Function = Callable[..., Tensor]
"""(score, b, h, q_idx, kv_idx) -> score"""


class ScoreMod:
    """`score -> fn(score, b, h, q_idx, kv_idx, *tensors)`: a score function and the tensors that it captures.

    `attention` takes any callable. A ScoreMod may also have its own derivative, and it names its tensors.

    Args:
        fn: a function of pointwise torch operations. `score` and the indices (batch row, query head, query, key) are
            tensors that broadcast to a tile of scores. It may read the tensors at computed indices.
        tensors: the captured tensors, on q's device. Those that require a gradient get one.
        bprop: `bprop(grad, score, b, h, q_idx, kv_idx, *tensors) -> grad of score`, which replaces autograd's. Its
            first use compares it with autograd's.

    Raises:
        TypeError: fn is not callable, or a captured argument is not a tensor.

    >>> slopes = torch.tensor([0.5, 0.25])
    >>> alibi = ScoreMod(lambda score, b, h, q_idx, kv_idx, slopes: score + slopes[h] * (kv_idx - q_idx), slopes)
    >>> q, k, v = (torch.randn(1, 2, 8, 4) for _ in range(3))
    >>> attention(q, k, v, score_mod=alibi).shape
    torch.Size([1, 2, 8, 4])
    """

    kind: str | None = None
    """The word in a Spec; None for `score(name)`."""

    def __init__(self, fn: Function, *tensors: Tensor, bprop: Function | None = None) -> None:
        if not callable(fn) or not (bprop is None or callable(bprop)):
            raise TypeError(f"ScoreMod needs functions, got fn={fn!r}, bprop={bprop!r}")
        for x in tensors:
            if not isinstance(x, Tensor):
                raise TypeError(f"ScoreMod's tensors must be tensors, got {type(x).__name__}; numbers go into closures")
        self.fn, self.tensors, self.bprop = fn, tensors, bprop

    def __call__(self, score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return self.fn(score, b, h, q_idx, kv_idx, *self.tensors)

    def sample(self) -> tuple[int, int]:
        """The numbers of query rows and keys on which the user's derivative is checked."""
        return 16, 16

    def __repr__(self) -> str:
        return f"ScoreMod({name_of(self.fn)}, {len(self.tensors)} tensors)"


class WithDerivative:
    """(score, …) -> the modified score and the user's derivative."""

    def __init__(self, mod: ScoreMod) -> None:
        self.fn, self.tensors, self.bprop = mod.fn, mod.tensors, mod.bprop

    def __call__(self, score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Any:
        modified = self.fn(score, b, h, q_idx, kv_idx, *self.tensors)
        assert self.bprop is not None
        return modified, self.bprop(torch.ones_like(score), score, b, h, q_idx, kv_idx, *self.tensors)


class Predicate:
    """(score, …) -> bool: a mask function in the form of a score function."""

    def __init__(self, fn: Function) -> None:
        self.fn = fn

    def __call__(self, score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        seen = self.fn(b, h, q_idx, kv_idx)
        if isinstance(seen, Tensor) and seen.dtype != torch.bool:
            refuse(f"a mask function returns bools, True where a query sees a key, such as x != 0; got {seen.dtype}")
        return seen


def one_by_one(fn: Function) -> Function:
    """A function of tiles that calls `fn` on single scores, by vmap. Rows of captured tensors are then no dimensions of
    the tile."""

    def mapped(score: Tensor, *at: Tensor) -> Tensor:
        single = fn
        if any(x.numel() > n for x, n in zip(at, score.shape, strict=True)):  # positions that differ by batch row
            return torch.vmap(single)(score.flatten(), *(x.expand(score.shape).flatten() for x in at)).view(score.shape)
        for i in reversed(range(4)):
            dims: list[int | None] = [0, None, None, None, None]
            dims[1 + i] = 0
            single = torch.vmap(single, tuple(dims))
        return single(score, *(x.flatten() for x in at))

    return mapped


def word_of(fn: Any) -> str:
    """The name of a function, or of an object's class; no object is asked. torch.compile follows this code."""
    while isinstance(fn, (ScoreMod, functools.partial)):
        fn = fn.fn if isinstance(fn, ScoreMod) else fn.func
    fn = fn.__func__ if isinstance(fn, types.MethodType) else fn  # torch 2.11 finds the name of that alone
    return fn.__name__ if isinstance(fn, _NAMED) else type(fn).__name__


class Named:
    """A function of saccade's that is an object, and has a name."""

    name: str

    @property
    def __name__(self) -> str:
        return self.name


_NAMED = (types.FunctionType, types.MethodType, types.BuiltinFunctionType, type, Named)


@compile_constant
def plain_word(name: str) -> str:
    return re.sub(r"\W+", "_", name).strip("_") or "score"


def name_of(fn: Any) -> str:
    """A word for a function: what a Spec calls its score."""
    return plain_word(word_of(fn))


class Score:
    """What a Call holds: a score modification with its runtime values."""

    kind: Any
    """Its word in a Spec."""
    identity: Any
    """A text, equal for scores that run the same kernels."""
    tensors: Any = ()
    ints: Any = ()
    floats: Any = ()
    own: bool = False
    """Whether its derivative is the user's own."""
    indices: Any = frozenset()
    """Which of b and h it depends on."""
    units: Any = ()
    """Of each tensor how many elements, one for each key, every row is a multiple of, and aligned to; or 1."""

    def __call__(self, score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        """The modified score, of its shape and dtype; all arguments broadcast to (b, h, q, k)."""
        raise NotImplementedError

    def reading(self, tensors: Sequence[Tensor]) -> Score:
        """The same with other tensors in the place of its own, and without the user's own function."""
        return self

    def tile(self, score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        """The same as a contiguous tensor, which may be score's own memory, without the user's own function."""
        return self(score, b, h, q_idx, kv_idx)

    def derivative(self, score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        """d modified / d score at the *modified* score's input, contiguous, in the score's dtype."""
        raise NotImplementedError

    def accumulate(
        self, sums: Sequence[Tensor | None], gradient: Tensor, score: Tensor, *at: Tensor,
        of: Callable[[Any], Any] | None = None,
    ) -> None:  # fmt: skip
        """Adds d loss / d tensor to `sums`, for those that are there; gradient is d loss / d modified, which `of`
        d modified / d tensor is multiplied by."""


class Traced(Score):
    """A Program with its tensors and numbers."""

    def __init__(
        self, program: Program, tensors: Sequence[Tensor], numbers: Sequence[Any], fn: Function | None = None,
        rows: bool = False,
    ) -> None:  # fmt: skip
        self.program, self.tensors, self.numbers, self.fn, self.rows = program, tensors, numbers, fn, rows
        self.kind, self.identity, self.own = program.name, program.identity, program.own
        self.ints = [int(x) for x, integral in zip(numbers, program.integral, strict=True) if integral]
        self.floats = [float(x) for x, integral in zip(numbers, program.integral, strict=True) if not integral]

    @staticmethod
    def of_tensors(identity: str, tensors: list[Tensor], ints: list[int], floats: list[float]) -> Traced:
        """The inverse of `identity`, `tensors`, `ints` and `floats`; takes from the front of the lists."""
        program = program_of(identity)
        if program is None:
            raise RuntimeError(
                f"the score {identity} was traced in another process, or long ago: call attention with its function"
            )
        numbers = [(ints if integral else floats).pop(0) for integral in program.integral]
        check_numbers(numbers, program.dtype)
        return Traced(program, [tensors.pop(0) for _ in program.ranks], numbers)

    def reading(self, tensors: Sequence[Tensor]) -> Traced:
        return Traced(self.program, tensors, self.numbers)

    def __call__(self, score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        """By the user's own function where there is one; torch.vmap maps none over no scores."""
        if self.fn is None or (self.rows and not score.numel()):
            return self.tile(score, b, h, q_idx, kv_idx)
        fn = one_by_one(self.fn) if self.rows else self.fn
        return fn(score, b, h, q_idx, kv_idx).to(score.dtype).expand_as(score)

    def tile(self, score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        """The same by the graph."""
        return _like(self._run(self.program.value, score, b, h, q_idx, kv_idx)[0], score)

    def derivative(
        self, score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor, derived: bool = False
    ) -> Tensor:
        module = self.program.derived_slope if derived else self.program.slope
        return _like(self._run(module, score, b, h, q_idx, kv_idx)[0], score)

    def accumulate(
        self, sums: Sequence[Tensor | None], gradient: Tensor, score: Tensor, *at: Tensor,
        of: Callable[[Any], Any] | None = None,
    ) -> None:  # fmt: skip
        module, reads = self.program.locals([x is not None for x in sums])
        for read, (local, at_indices) in zip(reads, self._run(module, score, *at), strict=True):
            target = sums[read.tensor]
            assert target is not None
            local = (gradient * (local if of is None else of(local))).to(target.dtype)
            if not at_indices or all(isinstance(x, int) for x in at_indices):
                target += local.sum().view(target.shape)
                continue
            at_indices = [x if isinstance(x, Tensor) else torch.tensor(x, device="cpu") for x in at_indices]
            shape = broadcast_shape(*(x.shape for x in at_indices))
            shape = (1,) * (local.dim() - len(shape)) + shape
            # What the indices do not depend on is summed first: adding at places is what costs.
            if free := [i for i, n in enumerate(shape) if n == 1 and local.shape[i] != 1]:
                local = local.sum(free, keepdim=True)
            target.index_put_([x.expand(shape) for x in at_indices], local, accumulate=True)

    @property
    def units(self) -> tuple[int, ...]:
        """Those in 16 bytes, of tensors that are read at a key's number itself."""
        reads = self.program.reads_of_keys
        return tuple(_unit(x) if i in reads else 1 for i, x in enumerate(self.tensors))

    @property
    def indices(self) -> frozenset[str]:
        return self.program.indices

    def holds(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        """The value of a predicate, which has no score."""
        visible = self._run(self.program.value, torch.zeros((), device=q_idx.device), b, h, q_idx, kv_idx)[0]
        return torch.as_tensor(visible, device=q_idx.device) != 0

    def _run(self, module: Any, score: Tensor, *at: Tensor) -> tuple[Any, ...]:
        wide = torch.float64
        scalars = (
            torch.tensor(x, dtype=torch.int64 if integral else wide, device=score.device)
            for x, integral in zip(self.numbers, self.program.integral, strict=True)
        )
        return module.forward(score, *at, *self.tensors, *self.numbers, *scalars)


def _like(x: Any, score: Tensor) -> Tensor:
    x = x if isinstance(x, Tensor) else torch.full((), x, dtype=score.dtype, device=score.device)
    return x.to(score.dtype).expand_as(score).contiguous()


def _unit(x: Tensor) -> int:
    unit = ALIGNMENT // x.element_size()
    *outer, last = zip(x.shape, x.stride(), strict=True)
    whole = all(n == 1 or stride % unit == 0 for n, stride in outer) and last[0] % unit == 0 and last[1] == 1
    return unit if whole and address(x) % ALIGNMENT == 0 else 1
