"""Ready score modifications: each a line or two of torch, and `compose`."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor

from saccade.scores.codegen.ranges import LONGEST
from saccade.scores.score_mod import Function, Score, ScoreMod
from saccade.scores.tracing.guards import PARTS
from saccade.util import arguments


@dataclass(frozen=True)
class Softcap(Score):
    """`cap tanh(score / cap)`."""

    kind = identity = "softcap"
    cap: float

    @property
    def floats(self) -> list[float]:
        return [self.cap]

    def __call__(self, score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return self.cap * torch.tanh(score / self.cap)

    def tile(self, score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score.div_(self.cap).tanh_().mul_(self.cap)

    def derivative(self, score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return 1 - torch.tanh(score / self.cap).square()


def softcap(cap: float | Tensor) -> Softcap | ScoreMod:
    """`score -> cap tanh(score / cap)`: keeps scores inside (-cap, cap), as Gemma 2 does.

    Args:
        cap: positive and finite as a float32, in units of the scaled score. A runtime value: a new one never
            recompiles. A tensor of no dimensions is read in each call, and gets a gradient if it requires one.

    Raises:
        ValueError: a cap that is not positive and finite as a float32, as far as the host knows a tensor's number.

    Source: Gemma 2 report, arXiv 2408.00118, section 2.

    >>> softcap(50.0)
    Softcap(cap=50.0)
    """
    if isinstance(cap, Tensor):
        _check("softcap", cap, "a cap, a float or a float tensor of no dimensions", lambda: cap.dim() == 0)
        _check_positive("softcap needs a positive, finite cap", cap)
        return Ready("softcap", _softcap, cap)
    cap = arguments.number("cap", cap)
    if not arguments.LEAST_FLOAT32 <= cap <= arguments.MOST_FLOAT32:
        raise ValueError(f"softcap needs a positive, finite cap, {_RANGE}, got {cap}")
    return Softcap(cap)


def _check_positive(wanted: str, x: Tensor) -> None:
    """Where the host has the numbers: it waits for no device, and compiled code takes others."""
    if torch.compiler.is_compiling() or x.device.type != "cpu" or type(x) not in (Tensor, torch.nn.Parameter):
        return
    if torch._C._len_torch_dispatch_stack() or is_functorch_wrapped_tensor(x):
        return
    wide = x.detach().double()
    if not bool(((wide >= arguments.LEAST_FLOAT32) & (wide <= arguments.MOST_FLOAT32)).all()):
        raise ValueError(f"{wanted}, {_RANGE}, got {x.tolist()}")


_RANGE = "from 2^-126 to float32's largest number"


def _softcap(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor, cap: Tensor) -> Tensor:
    return cap * torch.tanh(score / cap)


class Ready(ScoreMod):
    """A ScoreMod that a Spec calls by its own word."""

    def __init__(
        self, kind: str, fn: Function, *tensors: Tensor, heads: int | None = None, shares: bool = False
    ) -> None:
        """heads: the dimension of the first tensor that has an element for each query head, or, if it shares, one for
        all; None: it broadcasts to (b, h_q, s_q, s_k)."""
        super().__init__(fn, *tensors)
        self.kind, self.heads, self.shares = kind, heads, shares

    @property
    def parts(self) -> tuple[Callable[..., Tensor], ...]:
        """What it is composed of."""
        return self.fn.mods if isinstance(self.fn, _Composed) else ()


def alibi(slopes: Tensor) -> ScoreMod:
    """`score -> score + slopes[h] (kv_idx - q_idx)`: attention with linear biases.

    Args:
        slopes: (h_q), one for each query head; it gets a gradient if it requires one.

    Raises:
        ValueError: slopes that are not one float for each head.

    Source: Press, Smith, Lewis, arXiv 2108.12409.

    >>> q, k, v = (torch.randn(1, 2, 8, 4) for _ in range(3))
    >>> attention(q, k, v, mask=causal(), score_mod=alibi(torch.tensor([0.5, 0.25]))).shape
    torch.Size([1, 2, 8, 4])
    """
    _check("alibi", slopes, "one slope for each query head, (h_q)", lambda: slopes.dim() == 1)
    return Ready("alibi", _alibi, slopes, heads=0)


def _alibi(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor, slopes: Tensor) -> Tensor:
    slopes = slopes.to(score.dtype)  # products of 16 bits would round distances
    return score + slopes[h] * (kv_idx - q_idx)


def relative_bias(table: Tensor) -> ScoreMod:
    """`score -> score + table[h, clamp(kv_idx - q_idx, -r, r) + r]`: a learned bias for every distance up to r.

    Args:
        table: (h_q, 2 r + 1) or (1, 2 r + 1); the middle column is distance 0. It gets a gradient if it requires one.

    Raises:
        ValueError: a table of another rank, or with an even number of columns.

    Source: Shaw, Uszkoreit, Vaswani, arXiv 1803.02155, as a bias on the score.

    >>> q, k, v = (torch.randn(1, 2, 8, 4) for _ in range(3))
    >>> table = torch.zeros(2, 2 * 5 + 1, requires_grad=True)
    >>> attention(q, k, v, score_mod=relative_bias(table)).sum().backward()
    >>> table.grad.shape
    torch.Size([2, 11])
    """
    wanted = "a table (h_q, 2 r + 1) or (1, 2 r + 1)"
    _check("relative_bias", table, wanted, lambda: table.dim() == 2 and table.shape[0] > 0 and table.shape[1] % 2 == 1)
    shared = table.shape[0] == 1
    return Ready(
        "relative_bias", partial(_relative_bias, reach=table.shape[1] // 2, shared=shared), table, heads=0, shares=True
    )


def _relative_bias(
    score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor, table: Tensor, *, reach: int, shared: bool
) -> Tensor:
    return score + table[0 if shared else h, _column(q_idx, kv_idx, reach)]


def _column(q_idx: Tensor, kv_idx: Tensor, reach: int) -> Tensor:
    """clamp(kv_idx - q_idx, -reach, reach) + reach, in a form that is plainly never negative."""
    return (kv_idx - q_idx + reach).clamp(min=0).clamp(max=2 * reach)


def t5_bias(table: Tensor, bidirectional: bool = True, max_distance: int = 128) -> ScoreMod:
    """`score -> score + table[bucket(kv_idx - q_idx), h]`: T5's learned bias, one value for each bucket of distances.

    Half of the buckets hold one distance each. The others grow by a constant factor up to `max_distance`. The last one
    also holds all larger distances. T5 scales by 1: pass `scale=1.0` to `attention` for its own checkpoints.

    Args:
        table: (buckets, h_q), as T5's `relative_attention_bias.weight`; it gets a gradient if it requires one.
        bidirectional: True uses half of the buckets for keys after the query, as encoders do. False puts all of these
            into bucket 0.
        max_distance: from here on all distances share a bucket.

    Raises:
        ValueError: a table of another rank, or fewer than 2 buckets (4 if bidirectional).

    Source: Raffel et al., arXiv 1910.10683, section 2.1; buckets as in its released code.

    >>> q, k, v = (torch.randn(1, 2, 8, 4) for _ in range(3))
    >>> attention(q, k, v, score_mod=t5_bias(torch.randn(32, 2)), scale=1.0).shape
    torch.Size([1, 2, 8, 4])
    """
    arguments.flags(bidirectional=bidirectional)
    least = 4 if bidirectional else 2
    wanted = f"a table (buckets, h_q) of {least} buckets or more"
    _check("t5_bias", table, wanted, lambda: table.dim() == 2 and table.shape[0] >= least)
    exact = table.shape[0] // least
    if isinstance(max_distance, bool) or not isinstance(max_distance, int) or not exact < max_distance <= LONGEST:
        raise ValueError(
            f"t5_bias with {table.shape[0]} buckets needs a max_distance above {exact}, the distances that have a "
            f"bucket each, up to {LONGEST}, got {max_distance!r}"
        )
    buckets = t5_buckets(table.shape[0], bidirectional, max_distance).to(table.device)
    return Ready("t5_bias", partial(_t5_bias, reach=max_distance), table, buckets, heads=1)


def _t5_bias(
    score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor, table: Tensor, buckets: Tensor, *, reach: int
) -> Tensor:
    # The table for every distance, made once: rounding in a logarithm may move a distance to the next bucket.
    return score + table[buckets].mT[h, _column(q_idx, kv_idx, reach)]


def t5_buckets(buckets: int, bidirectional: bool, max_distance: int) -> Tensor:
    """The bucket of each distance kv_idx - q_idx from -max_distance to max_distance.

    >>> t5_buckets(8, True, 6).tolist()
    [3, 3, 3, 2, 2, 1, 0, 5, 6, 6, 7, 7, 7]
    """
    distance = -torch.arange(-max_distance, max_distance + 1, device="cpu")
    ahead = torch.zeros_like(distance)
    if bidirectional:
        buckets //= 2
        ahead = (distance < 0) * buckets
        distance = distance.abs()
    else:
        distance = distance.clamp(min=0)
    exact = buckets // 2
    growth = (distance.clamp(min=1).float() / exact).log() / math.log(max_distance / exact) * (buckets - exact)
    far = (exact + growth.long()).clamp(max=buckets - 1)
    return ahead + torch.where(distance < exact, distance, far)


def bias(t: Tensor) -> ScoreMod:
    """`score -> score + t`: an additive bias.

    Args:
        t: any shape that broadcasts to (b, h_q, s_q, s_k), any float dtype; it gets a gradient if it requires one,
            summed where it broadcasts.

    Raises:
        ValueError: more than four dimensions.

    >>> q, k, v = (torch.randn(1, 2, 8, 4) for _ in range(3))
    >>> attention(q, k, v, score_mod=bias(torch.randn(2, 1, 8))).shape
    torch.Size([1, 2, 8, 4])
    """
    _check("bias", t, "a tensor that broadcasts to (b, h_q, s_q, s_k)", lambda: t.dim() <= 4)
    own = [True] * (4 - t.dim()) + [n != 1 for n in t.shape]
    if all(own):
        return Ready("bias", partial(_whole_bias, rank=t.dim()), t)
    batch, head, row, key = own
    return Ready("bias", partial(_bias, rank=t.dim(), batch=batch, head=head, row=row, key=key), t)


# Guards (`tracing.guards`) read no comprehension, no tuple among keywords, and no name of torch that is not called.
def _bias(
    score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor, t: Tensor,
    *, rank: int, batch: bool, head: bool, row: bool, key: bool,
) -> Tensor:  # fmt: skip
    b_at = b if batch else torch.zeros_like(b)
    h_at = h if head else torch.zeros_like(h)
    q_at = q_idx if row else torch.zeros_like(q_idx)
    k_at = kv_idx if key else torch.zeros_like(kv_idx)
    return _whole_bias(score, b_at, h_at, q_at, k_at, t, rank=rank)


def _whole_bias(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor, t: Tensor, *, rank: int) -> Tensor:
    if rank == 4:
        return score + t[b, h, q_idx, kv_idx]
    if rank == 3:
        return score + t[h, q_idx, kv_idx]
    if rank == 2:
        return score + t[q_idx, kv_idx]
    return score + t[kv_idx] if rank else score + t


def temperature(t: Tensor) -> ScoreMod:
    """`score -> score / t[h]`: a temperature for each query head.

    Args:
        t: (h_q), positive; it gets a gradient if it requires one.

    Raises:
        ValueError: not one float for each head; on a CPU, one that is not positive and finite.

    >>> q, k, v = (torch.randn(1, 2, 8, 4) for _ in range(3))
    >>> attention(q, k, v, score_mod=temperature(torch.tensor([0.5, 2.0]))).shape
    torch.Size([1, 2, 8, 4])
    """
    _check("temperature", t, "one temperature for each query head, (h_q)", lambda: t.dim() == 1)
    _check_positive("temperature needs positive, finite temperatures", t)
    return Ready("temperature", _temperature, t, heads=0)


def _temperature(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor, t: Tensor) -> Tensor:
    return score / t[h]


class _Composed:
    def __init__(self, mods: tuple[Callable[..., Tensor], ...]) -> None:
        self.mods = mods

    def __call__(self, score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        for mod in self.mods:
            # torch.compile of torch 2.11 calls no dataclass that is made inside, but its method.
            call = mod.__call__ if isinstance(mod, Score) else mod
            score = call(score, b, h, q_idx, kv_idx)
        return score


def compose(*mods: Callable[..., Tensor]) -> ScoreMod:
    """A score function that applies the given ones one after another, in this order.

    Raises:
        TypeError: something that cannot be called.

    >>> mod = compose(alibi(torch.tensor([0.5, 0.25])), softcap(20.0))
    >>> q, k, v = (torch.randn(1, 2, 8, 4) for _ in range(3))
    >>> attention(q, k, v, score_mod=mod).shape
    torch.Size([1, 2, 8, 4])
    """
    for mod in mods:
        if not callable(mod):
            raise TypeError(f"compose takes score modifications, got {mod!r}")
    words = [getattr(mod, "kind", None) for mod in mods]
    return Ready("+".join(word for word in words if word) if all(words) and words else "composed", _Composed(mods))


def _check(name: str, t: Any, wanted: str, fits: Callable[[], bool]) -> None:
    if not isinstance(t, Tensor):
        raise TypeError(f"{name} needs {wanted}, got {type(t).__name__}")
    if not fits() or not t.is_floating_point():
        raise ValueError(f"{name} needs {wanted}, of floats, got {t.dtype} {tuple(t.shape)}")


PARTS[ScoreMod] = ("fn", "bprop"), ("tensors",)
PARTS[Ready] = ("fn", "bprop", "kind", "heads", "shares"), ("tensors",)  # all that checks of its arguments read
PARTS[_Composed] = (), ("mods",)
PARTS[Softcap] = ("cap",), ()
KINDS = ("softcap", "alibi", "bias", "relative_bias", "t5_bias", "temperature")
"""What a Spec calls the ready ones; any other function is `score(its name)`."""
