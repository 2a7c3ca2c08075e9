"""From a recording to a graph of pointwise operations and of reads of captured tensors.

The recording runs again on small fake tensors, of the shapes of a tile with broadcasting indices: score (Q, K), b and h
(1, 1), q_idx (Q, 1), kv_idx (1, K). All of it must be pointwise, or a read of a captured tensor at computed indices.
"""

# torch.fx types the arguments of nodes as unions of everything.
# pyright: reportAttributeAccessIssue=false, reportOptionalMemberAccess=false, reportArgumentType=false
# pyright: reportGeneralTypeIssues=false, reportIndexIssue=false, reportOptionalSubscript=false, reportCallIssue=false
# pyright: reportOptionalIterable=false, reportReturnType=false, reportOperatorIssue=false

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Container, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from saccade.scores.recording.recorder import Recording, line_of, told, user_line
from saccade.scores.recording.replay import replayed
from saccade.scores.recording.tape import Refused

aten = torch.ops.aten
Q, K = 61, 67
"""Of the tile that is traced: primes, so that no captured tensor fits it by accident."""

POINTWISE = frozenset((
    "abs", "add", "alias", "attached", "bitwise_and", "bitwise_left_shift", "bitwise_not", "bitwise_or",
    "bitwise_right_shift",
    "bitwise_xor", "ceil", "celu", "clamp", "clamp_max", "clamp_min", "clone", "cos", "detach", "div", "elu", "eq",
    "erf", "erfc", "exp", "exp2", "expm1", "fill", "floor", "floor_divide", "fmax", "fmin", "fmod", "full_like", "ge",
    "gelu", "gt", "hardsigmoid", "hardswish", "hardtanh", "isfinite", "isinf", "isnan", "le", "leaky_relu", "lerp",
    "log", "log10", "log1p", "log2", "log_sigmoid_forward", "logaddexp", "logaddexp2", "logical_and", "logical_not",
    "logical_or", "logical_xor", "logit", "lt", "masked_fill", "maximum", "minimum", "mish", "mul", "nan_to_num", "ne",
    "neg", "ones_like", "pow", "positive", "reciprocal", "relu", "relu6", "remainder", "round", "rsqrt", "rsub",
    "scalar_tensor", "sgn", "sigmoid", "sign", "silu", "sin", "softplus", "sqrt", "square", "sub", "tanh", "trunc",
    "acos", "acosh", "addcdiv", "addcmul", "asin", "asinh", "atan", "atan2", "atanh", "copysign", "cosh", "deg2rad",
    "digamma", "erfinv", "float_power", "frac", "gcd", "hardshrink", "heaviside", "i0", "igamma", "igammac", "isneginf",
    "isposinf", "lcm", "ldexp", "lgamma", "mvlgamma", "nextafter", "polygamma", "rad2deg", "signbit", "sinc", "sinh",
    "softshrink", "special_scaled_modified_bessel_k0", "special_scaled_modified_bessel_k1",
    "special_bessel_j0", "special_bessel_j1", "special_bessel_y0", "special_bessel_y1", "special_entr", "special_erfcx",
    "special_i0e", "special_i1", "special_i1e", "special_log_ndtr", "special_modified_bessel_i0",
    "special_modified_bessel_i1", "special_modified_bessel_k0", "special_modified_bessel_k1", "special_ndtri",
    "special_spherical_bessel_j0", "special_xlog1py", "special_zeta", "tan",
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


class Raw:
    """One run of the function as a graph, its nodes sorted: `tile` depends on score or indices, `tensor` on captured
    tensors alone, `number` on numbers alone."""

    def __init__(self, recording: Recording) -> None:
        tape, lines = recording.tape, _Lines()

        def run(*given: Tensor) -> tuple[Tensor, ...]:
            tensors, numbers = given[5 : 5 + len(tape.tensors)], given[5 + len(tape.tensors) :]
            with lines:
                return tuple(replayed(tape, recording.outputs, given[:5], tensors, numbers, lines.at))

        int64 = torch.int64
        tile = (
            torch.zeros(Q, K, dtype=tape.dtype),
            *(torch.zeros(s, dtype=int64) for s in ((1, 1), (1, 1), (Q, 1), (1, K))),
        )
        fakes = [torch.zeros((), dtype=x.dtype).expand(x.shape) for x in tape.tensors]
        zeros = [torch.zeros((), dtype=int64 if isinstance(x, int) else torch.float32) for x in tape.numbers]
        self.inputs = len(fakes), len(zeros)
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
            scalar = isinstance(node.meta["val"], Tensor) and node.meta["val"].numel() == 1
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


def traced(recording: Recording) -> Raw:
    """
    Raises:
        Refused: what was recorded cannot be a graph; says what to write instead.
    """
    log = logging.getLogger("torch._subclasses.fake_tensor")
    silent, log.disabled = log.disabled, True  # it tells of every operation that fails; so do we
    try:
        return Raw(recording)
    except Refused:
        raise
    except Exception as failed:
        raise Refused(told(failed), user_line(failed)) from failed
    finally:
        log.disabled = silent


class _Lines(TorchDispatchMode):
    """Where in the user's code each operation is called."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[Any, list[Any]] = {}
        self.line: Any = None

    def at(self, line: Any) -> None:
        self.line = line

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found.setdefault(func, []).append(self.line)
        return func(*args, **(kwargs or {}))

    def of(self, func: Any, nth: int) -> str | None:
        places = self.found.get(func, [])
        return line_of(places[nth]) if nth < len(places) else None


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
