"""From a Python function of the score to a Program: graphs of pointwise operations and of reads of captured tensors.

The function runs once on small fake tensors: score (Q, K), b and h (1, 1), q_idx (Q, 1), kv_idx (1, K), the shapes of a
tile with broadcasting indices. What depends on no index and on no score is computed beforehand, by torch, once for each
call: of captured tensors (`before`), and of numbers (`numbers`). All else must be pointwise, or a read of a captured
tensor at computed indices.
"""

# torch.fx types the arguments of nodes as unions of everything.
# pyright: reportAttributeAccessIssue=false, reportOptionalMemberAccess=false, reportArgumentType=false
# pyright: reportGeneralTypeIssues=false, reportIndexIssue=false, reportOptionalSubscript=false, reportCallIssue=false
# pyright: reportOptionalIterable=false, reportReturnType=false, reportOperatorIssue=false

from __future__ import annotations

import linecache
import logging
import operator
import sys
import threading
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
Q, K = 61, 67
"""Of the tile that is traced: primes, so that no captured tensor fits it by accident."""
TILE = ("score", "b", "h", "q_idx", "kv_idx")

POINTWISE = frozenset((
    "abs", "add", "alias", "bitwise_and", "bitwise_left_shift", "bitwise_not", "bitwise_or", "bitwise_right_shift",
    "bitwise_xor", "ceil", "celu", "clamp", "clamp_max", "clamp_min", "clone", "cos", "detach", "div", "elu", "eq",
    "erf", "erfc", "exp", "exp2", "expm1", "fill", "floor", "floor_divide", "fmax", "fmin", "fmod", "full_like", "ge",
    "gelu", "gt", "hardsigmoid", "hardswish", "hardtanh", "isfinite", "isinf", "isnan", "le", "leaky_relu", "lerp",
    "log", "log10", "log1p", "log2", "log_sigmoid_forward", "logaddexp", "logaddexp2", "logical_and", "logical_not",
    "logical_or", "logical_xor", "logit", "lt", "masked_fill", "maximum", "minimum", "mish", "mul", "nan_to_num", "ne",
    "neg", "ones_like", "pow", "positive", "reciprocal", "relu", "relu6", "remainder", "round", "rsqrt", "rsub",
    "scalar_tensor", "sgn", "sigmoid", "sign", "silu", "sin", "softplus", "sqrt", "square", "sub", "tanh", "trunc",
    "where", "xlogy", "zeros_like", "__and__", "__or__", "__xor__", "__lshift__", "__rshift__", "_to_copy",
    "lift_fresh", "lift_fresh_copy", "threshold", "hypot", "selu",
))  # fmt: skip
_ADVICE = {
    "select": "index with tensors, one for each dimension: table[h, kv_idx]",
    "slice": "index with tensors, one for each dimension: table[h, kv_idx]",
    "gather": "index with brackets: table[h, kv_idx]",
    "embedding": "index with brackets: table[h, kv_idx]",
    "index_select": "index with brackets: table[h, kv_idx]",
    **dict.fromkeys(
        ("rand", "rand_like", "randn_like", "randint_like", "bernoulli", "native_dropout"),
        "dropout_p of attention drops probabilities at random",
    ),
    "view": "scores keep their shape: b, h, q_idx and kv_idx broadcast against it",
    "expand": "scores keep their shape: b, h, q_idx and kv_idx broadcast against it",
    "unsqueeze": "scores keep their shape: b, h, q_idx and kv_idx broadcast against it",
    "_softmax": "the softmax is attention's own; a score function sees single scores",
}
_REDUCTION = "a score function sees one tile of scores at a time, so it cannot reduce over them; do it beforehand"


class Refused(ValueError):
    """A function that cannot be traced; `line` is where, if it is known."""

    def __init__(self, told: str, line: str | None) -> None:
        super().__init__(told)
        self.told, self.line = told, line

    def __str__(self) -> str:
        return f"{self.told}\n  {self.line}" if self.line else self.told


class Raw:
    """One run of the function as a graph, its nodes sorted: `tile` depends on score or indices, `tensor` on captured
    tensors alone, `number` on numbers alone."""

    def __init__(
        self, fn: Callable[..., Tensor], tensors: Sequence[Tensor], numbers: Sequence[Any], dtype: torch.dtype
    ) -> None:
        lines = _Lines()

        def run(
            score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor, *captured: Tensor
        ) -> tuple[Tensor, ...]:
            with lines:
                out = fn(captured)(score, b, h, q_idx, kv_idx)
            out = out if isinstance(out, tuple) else (out,)
            if not all(isinstance(x, Tensor) for x in out):
                raise Refused(
                    "a score function returns the modified score, a tensor, and a mask function one of bools; got "
                    f"{out[0]!r}",
                    None,
                )
            return out

        int64 = torch.int64
        tile = torch.zeros(Q, K, dtype=dtype), *(torch.zeros(s, dtype=int64) for s in ((1, 1), (1, 1), (Q, 1), (1, K)))
        fakes = [torch.zeros((), dtype=x.dtype).expand(x.shape) for x in tensors]
        zeros = [torch.zeros((), dtype=int64 if isinstance(x, int) else torch.float32) for x in numbers]
        self.inputs = len(tensors), len(numbers)
        with torch.no_grad():
            self.module = make_fx(run, tracing_mode="fake", _allow_non_fake_inputs=True)(*tile, *fakes, *zeros)
        _constants_from_nothing(self.module.graph)
        self.module.graph.eliminate_dead_code()
        self.lines = lines
        self.sort()

    def sort(self) -> None:
        nodes = list(self.module.graph.nodes)
        for i, node in enumerate(x for x in nodes if x.op == "placeholder"):
            node.meta["kind"] = "tile" if i < 5 else "tensor" if i < 5 + self.inputs[0] else "number"
        met: dict[Any, int] = {}
        for node in nodes:
            if node.op == "get_attr":
                node.meta["kind"] = "number" if getattr(self.module, node.target).numel() == 1 else "tensor"
                node.meta["val"] = getattr(self.module, node.target)
            if node.op != "call_function":
                continue
            kinds = {x.meta["kind"] for x in node.all_input_nodes}
            scalar = isinstance(node.meta["val"], Tensor) and node.meta["val"].dim() == 0
            kind = "tile" if "tile" in kinds else "tensor" if "tensor" in kinds or not scalar else "number"
            node.meta["kind"] = kind
            met[node.target] = met.get(node.target, 0) + 1
            if kind == "tile":
                self._check(node, met[node.target] - 1)

    def _check(self, node: fx.Node, nth: int) -> None:
        name = name_of(node)
        shape = tuple(node.meta["val"].shape) if isinstance(node.meta["val"], Tensor) else None
        if node.target is operator.getitem:
            return
        if name.endswith("_") and not name.endswith("__"):
            told = f"{name} writes in place; write a new value, such as x = x.{name[:-1]}(…)"
            raise Refused(told, self.lines.of(node.target, nth))
        if name == "index":
            table, at = node.args
            if table.meta["kind"] == "tile":
                told = "the score and the indices are one value each, and cannot be indexed; captured tensors can"
                raise Refused(told, self.lines.of(node.target, nth))
            if len(at) != table.meta["val"].dim() or any(i is None for i in at):
                told = f"a captured tensor of shape {tuple(table.meta['val'].shape)} is read with {len(at)} indices"
                raise Refused(f"{told}; it needs one for each dimension", self.lines.of(node.target, nth))
            return
        if name not in POINTWISE:
            told = f"{name} cannot be part of a score function"
            reduces = shape is not None and len(shape) < 2
            advice = _ADVICE.get(name, _REDUCTION if reduces else "scores are changed by pointwise operations")
            raise Refused(f"{told}: {advice}", self.lines.of(node.target, nth))
        for x in node.all_input_nodes:
            val = x.meta["val"]
            if x.meta["kind"] == "tensor" and val.numel() != 1:
                told = f"a captured tensor of shape {tuple(val.shape)} meets the score without an index"
                raise Refused(
                    f"{told}: write table[b, h, q_idx, kv_idx], as its dimensions are", self.lines.of(node.target, nth)
                )
        if shape is not None and (len(shape) > 2 or shape not in {(Q, K), (Q, 1), (1, K), (1, 1)}):
            raise Refused(f"{name} makes the shape {shape} of tiles", self.lines.of(node.target, nth))


def _constants_from_nothing(graph: fx.Graph) -> None:
    """`b.new_ones(())` depends on b by its device alone."""
    for node in list(graph.nodes):
        name = name_of(node) if node.op == "call_function" else ""
        if name in ("new_ones", "new_zeros", "new_full") and node.meta["val"].dim() == 0:
            dtype = node.meta["val"].dtype
            value = node.args[2] if name == "new_full" else name == "new_ones"
            with graph.inserting_before(node):
                number = bool(value) if dtype == torch.bool else float(value) if dtype.is_floating_point else int(value)
                made = graph.call_function(aten.scalar_tensor.default, (number,), {"dtype": dtype})
            made.meta = dict(node.meta)
            node.replace_all_uses_with(made)


def traced(fn: Callable[..., Tensor], tensors: Sequence[Tensor], numbers: Sequence[Any], dtype: torch.dtype) -> Raw:
    """`fn(captured)` is the function with these fakes in the place of its leaves.

    Raises:
        Refused: it cannot be traced; says what to write instead.
    """
    log = logging.getLogger("torch._subclasses.fake_tensor")
    with _lock:
        silent, log.disabled = log.disabled, True  # it tells of every operation that fails; so do we
        try:
            return Raw(fn, tensors, numbers, dtype)
        except Refused:
            raise
        except Exception as failed:
            raise Refused(_told(failed), _user_line(failed)) from failed
        finally:
            log.disabled = silent


_lock = threading.RLock()
"""Tracing sets modes that are the process's own."""


def _told(failed: Exception) -> str:
    text = str(failed).splitlines()[0] if str(failed) else type(failed).__name__
    if "DataDependent" in type(failed).__name__ or "data-dependent" in text or "is ambiguous" in text:
        return (
            "the function branches in Python on values that only the kernel knows; "
            "write torch.where(condition, a, b), and keep to tensors (no int(), float(), bool(), math.*)"
        )
    if "broadcast" in text or "must match the size" in text:
        return f"{text}; captured tensors meet the score by indices: table[b, h, q_idx, kv_idx], as its dimensions are"
    if isinstance(failed, TypeError) and "positional argument" in text:
        return (
            "a score function is called with (score, b, h, q_idx, kv_idx), and a ScoreMod's tensors, a mask function "
            f"with (b, h, q_idx, kv_idx); {text}"
        )
    return f"{type(failed).__name__}: {text}"


def _user_line(failed: BaseException) -> str | None:
    """The last line of the traceback that is neither torch's nor ours."""
    found, at = None, failed.__traceback__
    while at is not None:
        file, number = at.tb_frame.f_code.co_filename, at.tb_lineno
        if not _inside(file) and linecache.getline(file, number):
            found = _line(file, number)
        at = at.tb_next
    return found


_TORCH = torch.__path__[0]
_HERE = __file__.rpartition("/")[0]


def _inside(file: str) -> bool:
    return file.startswith((_TORCH, "<frozen")) or file in (__file__, f"{_HERE}/function.py")


def _line(file: str, number: int) -> str:
    return f"{file}:{number}: {linecache.getline(file, number).strip()}"


class _Lines(TorchDispatchMode):
    """Where in the user's code each operation is called."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[Any, list[tuple[str, int] | None]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        frame = sys._getframe(1)
        while frame is not None and _inside(frame.f_code.co_filename):
            frame = frame.f_back
        self.found.setdefault(func, []).append(frame and (frame.f_code.co_filename, frame.f_lineno))
        return func(*args, **(kwargs or {}))

    def of(self, func: Any, nth: int) -> str | None:
        places = self.found.get(func, [])
        place = places[nth] if nth < len(places) else None
        return _line(*place) if place else None


def name_of(node: fx.Node) -> str:
    target: Any = node.target
    return target._schema.name.partition("::")[2] if hasattr(target, "_schema") else str(target)


def shallow(graph: fx.Graph) -> bool:
    """Whether patterns are looked for in a graph, which is done by recursion."""
    return len(graph.nodes) <= 200


def behind(node: fx.Node, needed: Callable[[fx.Node], Iterable[Any]], made: Container[fx.Node]) -> Iterator[fx.Node]:
    """What a node needs, and what that needs, and the node itself, each behind its own and once, but for what is made
    already. No recursion: a score function may be a chain of more operations than Python has frames."""
    waiting = [] if node in made else [node]
    while waiting:
        missing = [x for x in needed(waiting[-1]) if isinstance(x, fx.Node) and x not in made]
        if missing:
            waiting += reversed(missing)
        elif (last := waiting.pop()) not in made:
            yield last
