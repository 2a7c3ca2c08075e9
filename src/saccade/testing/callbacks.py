"""Score callbacks for cuDNN as users write them, shared by tests: those of its documentation, and every operation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from saccade.compat.cudnn import data_type, score_callback
from saccade.scores import ScoreMod

FLOAT, INT32, BOOLEAN = data_type.FLOAT, data_type.INT32, data_type.BOOLEAN


class CallbackCase(NamedTuple):
    """The four arguments of a call, by TransformerEngine's names."""

    score_mod: Callable[..., Any]
    score_mod_bprop: Callable[..., Any] | None = None
    score_mod_tensors: dict[str, Tensor] | None = None
    score_mod_bprop_tensors: dict[str, Tensor] | None = None

    def score(self) -> ScoreMod:
        return score_callback(*self)

    def learned(self, requires_grad: bool) -> CallbackCase:
        """The same, with or without gradients of those tensors that learn."""
        if requires_grad or self.score_mod_tensors is None:
            return self
        return self._replace(score_mod_tensors={name: x.detach() for name, x in self.score_mod_tensors.items()})


def _row_and_column(graph: Any, like: Any) -> tuple[Any, Any]:
    row, column = (graph.gen_index(input=like, axis=axis) for axis in (2, 3))
    for index in (row, column):
        index.set_data_type(INT32)
    return row, column


def _keep(graph: Any, like: Any) -> Any:
    """Whether a key is no later than its query."""
    row, column = _row_and_column(graph, like)
    keep = graph.cmp_ge(input=row, comparison=column, compute_data_type=BOOLEAN)
    keep.set_data_type(BOOLEAN)
    return keep


def causal(graph: Any, score: Any, tensors: Any) -> Any:
    return graph.binary_select(input0=score, input1=tensors["neg_inf"], mask=_keep(graph, score))


def causal_bprop(graph: Any, dP: Any, tensors: Any) -> Any:
    return graph.binary_select(input0=dP, input1=tensors["zero"], mask=_keep(graph, dP))


def scaled_causal(graph: Any, score: Any, tensors: Any) -> Any:
    return causal(graph, graph.mul(a=score, b=tensors["factor"], compute_data_type=FLOAT), tensors)


def scaled_causal_bprop(graph: Any, dP: Any, tensors: Any) -> Any:
    return graph.mul(a=causal_bprop(graph, dP, tensors), b=tensors["factor"], compute_data_type=FLOAT)


class SoftcapCallback:
    """Keeps what it computed in the forward for the backward."""

    def __init__(self) -> None:
        self.inner: Any = None

    def score_mod_graph_cache_key(self) -> Any:
        return {"layers": 1, "kind": ["softcap"]}

    def forward(self, graph: Any, score: Any, tensors: Any) -> Any:
        self.inner = graph.div(a=score, b=tensors["cap"], compute_data_type=FLOAT)
        self.inner.set_data_type(FLOAT)
        out = graph.tanh(input=self.inner)
        out.set_data_type(FLOAT)
        return graph.mul(a=out, b=tensors["cap"], compute_data_type=FLOAT)

    def backward(self, graph: Any, dP: Any, tensors: Any) -> Any:
        loss = graph.mul(a=dP, b=tensors["cap"], compute_data_type=FLOAT)
        return graph.div(a=graph.tanh_backward(loss=loss, input=self.inner), b=tensors["cap"])


def post_scale_bias(graph: Any, score: Any, tensors: Any) -> Any:
    row, column = _row_and_column(graph, score)
    bias = graph.sub(a=row, b=column, compute_data_type=FLOAT)
    bias.set_data_type(FLOAT)
    return graph.add(a=score, b=bias, compute_data_type=FLOAT)


def identity_bprop(graph: Any, dP: Any, tensors: Any) -> Any:
    return dP


def alibi(graph: Any, score: Any, tensors: Any) -> Any:
    distance = graph.sub(graph.gen_index(score, 3), graph.gen_index(score, 2))
    return graph.add(score, graph.mul(distance, tensors["slopes"]))


def added(graph: Any, score: Any, tensors: Any) -> Any:
    return graph.bias(input=score, bias=tensors["bias"])


def band(graph: Any, score: Any, tensors: Any) -> Any:
    """Learned values: for three distances one per head and query, for all others one."""
    distance = graph.sub(a=graph.gen_index(score, 2), b=graph.gen_index(score, 3))
    near = graph.logical_and(graph.cmp_ge(distance, -1), graph.cmp_le(distance, 1))
    value = graph.mul(tensors["near"], tensors["rows"])
    return graph.scale(score, graph.binary_select(value, tensors["far"], graph.logical_not(graph.logical_not(near))))


_UNARY = (
    "abs", "ceil", "cos", "elu", "erf", "floor", "gelu", "gelu_approx_tanh", "identity", "neg", "sigmoid", "sin",
    "softplus", "swish", "tanh", "relu",
)  # fmt: skip
_BACKWARD = ("elu", "gelu", "gelu_approx_tanh", "sigmoid", "softplus", "tanh", "relu", "swish")
_CLIPS = {"negative_slope": 0.1, "lower_clip": -0.5, "upper_clip": 2.0}


def everything(graph: Any, score: Any, tensors: Any) -> Any:
    """Every operation."""
    total = graph.mul(score, tensors["small"])
    above = graph.add_square(tensors["one"], score)
    for name in _UNARY:
        total = graph.add(total, getattr(graph, name)(input=score))
    for name in ("exp", "log", "reciprocal", "rsqrt", "sqrt", "tan"):
        total = graph.add(total, getattr(graph, name)(graph.div(tensors["one"], above)))
    row, column = graph.gen_index(input=score, axis=2), graph.gen_index(input=score, axis=3)
    total = graph.add(total, graph.relu(input=score, **_CLIPS))
    total = graph.sub(total, graph.leaky_relu(score, 0.2))
    total = graph.max(input0=graph.min(total, tensors["large"]), input1=graph.neg(tensors["large"]))
    total = graph.add(total, graph.pow(input0=above, input1=tensors["small"]))
    total = graph.add(total, graph.mod(input0=total, input1=tensors["large"]))
    half = graph.div(a=row, b=graph.tensor_scalar(2), compute_data_type=INT32)
    for i, name in enumerate(("cmp_eq", "cmp_neq", "cmp_gt", "cmp_lt", "cmp_ge", "cmp_le")):
        met = getattr(graph, name)(input=half if i % 2 else score, comparison=column)
        total = graph.add(total, graph.mul(met, tensors["small"]))
    seen = graph.logical_or(a=graph.cmp_gt(score, 0.0), b=graph.cmp_eq(graph.mod(column, 3), 0))
    batch, head = graph.gen_index(score, 0), graph.gen_index(score, 1)
    return graph.binary_select(total, graph.add(score, graph.add(batch, head)).set_data_type(data_type.HALF), seen)


def derivatives(graph: Any, score: Any, tensors: Any) -> Any:
    """What `derivatives_bprop` is the derivative of."""
    total = graph.leaky_relu(input=score, negative_slope=0.3)
    for name in _BACKWARD:
        total = graph.add(total, getattr(graph, name)(score))
    return graph.add(total, graph.add(graph.relu(score, **_CLIPS), graph.swish(score, swish_beta=0.5)))


def derivatives_bprop(graph: Any, dP: Any, tensors: Any) -> Any:
    """Every backward operation, of the score that the forward kept."""
    score = tensors["kept"]()
    total = graph.leaky_relu_backward(loss=dP, input=score, negative_slope=0.3)
    for name in _BACKWARD:
        total = graph.add(total, getattr(graph, f"{name}_backward")(loss=dP, input=score))
    total = graph.add(total, graph.relu_backward(dP, score, **_CLIPS))
    return graph.add(total, graph.swish_backward(dP, score, swish_beta=0.5))


class Derivatives:
    """Has no cache key, so each call records it."""

    def __init__(self) -> None:
        self.score: Any = None

    def forward(self, graph: Any, score: Any, tensors: Any) -> Any:
        self.score = score
        return derivatives(graph, score, tensors)

    def backward(self, graph: Any, dP: Any, tensors: Any) -> Any:
        return derivatives_bprop(graph, dP, {"kept": lambda: self.score})


def one(x: float) -> Tensor:
    return torch.full((1, 1, 1, 1), x)


def case(name: str, h: int, s_q: int, s_k: int, device: torch.device | str = "cpu", b: int = 2) -> CallbackCase:
    """One of `NAMES`, its tensors on a device; those that learn require a gradient."""
    drawn = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=drawn).to(device).requires_grad_()

    softcap, all_backward = SoftcapCallback(), Derivatives()
    makers: dict[str, Callable[[], CallbackCase]] = {
        "causal": lambda: CallbackCase(causal, causal_bprop, {"neg_inf": one(-1e9)}, {"zero": one(0.0)}),
        "scaled_causal": lambda: CallbackCase(
            scaled_causal,
            scaled_causal_bprop,
            {"neg_inf": one(-1e9), "factor": one(1.5)},
            {"zero": one(0.0), "factor": one(1.5)},
        ),
        "softcap": lambda: CallbackCase(softcap.forward, softcap.backward, {"cap": one(0.8)}, {"cap": one(0.8)}),
        "post_scale_bias": lambda: CallbackCase(post_scale_bias, identity_bprop),
        "alibi": lambda: CallbackCase(alibi, identity_bprop, {"slopes": normal(1, h, 1, 1)}),
        "added": lambda: CallbackCase(added, identity_bprop, {"bias": normal(b, 1, s_q, s_k)}),
        "band": lambda: CallbackCase(
            band, None, {"near": normal(h, 1, 1), "rows": normal(1, s_q, 1), "far": normal(1)}
        ),
        "everything": lambda: CallbackCase(
            everything, None, {"one": one(1.0), "small": one(0.25), "large": one(7.5).to(device)}
        ),
        "derivatives": lambda: CallbackCase(all_backward.forward, all_backward.backward),
    }
    return makers[name]()


USUAL = "causal", "scaled_causal", "softcap", "post_scale_bias", "alibi", "band"
"""What users write; these are timed."""
NAMES = (*USUAL, "added", "everything", "derivatives")
