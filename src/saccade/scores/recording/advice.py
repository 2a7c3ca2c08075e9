"""What to write in the place of operations that no function of the score has."""

from __future__ import annotations

_BRACKETS = ("gather", "embedding", "index_select", "take")
_DRAWS = ("rand", "rand_like", "randn_like", "randint_like", "bernoulli", "native_dropout")
_ADVICE = {
    **dict.fromkeys(("select", "slice"), "index with tensors, one for each dimension: table[h, kv_idx]"),
    **dict.fromkeys(_BRACKETS, "index with brackets: table[h, kv_idx]"),
    **dict.fromkeys(_DRAWS, "dropout_p of attention drops probabilities at random"),
    **dict.fromkeys(
        ("view", "expand", "unsqueeze"), "scores keep their shape: b, h, q_idx and kv_idx broadcast against it"
    ),
    **dict.fromkeys(
        ("_softmax", "_log_softmax"), "the softmax is attention's own; a score function sees single scores"
    ),
    "floor_divide": "torch has no derivative of a // b between floats; write torch.floor(a / b)",
    "heaviside": "torch has no derivative of it; write torch.where(score > 0, 1.0, 0.0)",
    "index": "captured tensors are read at integers; write torch.where(condition, a, b)",
}
READS = frozenset(_BRACKETS)
"""Operations that read a tensor at places that are computed, not by brackets."""


BEHIND = (
    "torch computes with values of the score function where nothing sees it, as in torch.func.jvp and vjp, which score "
    "functions may not call on them"
)
NO_DERIVATIVE = "torch has no derivative of it; write others, or a torch.autograd.Function with its derivative"


def refusal_of(name: str, otherwise: str = "scores are changed by pointwise operations") -> str:
    return f"{name} cannot be part of a score function: {_ADVICE.get(name, otherwise)}"
