"""The arguments of one call, by TransformerEngine's names."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from saccade.ops.dispatch import Unsupported
from saccade.util import arguments

FORMATS = ("sbhd", "bshd", "thd")
MASK_TYPES = (
    "no_mask", "padding", "causal", "padding_causal", "causal_bottom_right", "padding_causal_bottom_right", "arbitrary",
)  # fmt: skip
BIAS_TYPES = ("no_bias", "pre_scale_bias", "post_scale_bias", "alibi")


class WrongCall(ValueError, AssertionError):
    """A ValueError, as everywhere in saccade, and an AssertionError, as in TransformerEngine."""


class Settings(NamedTuple):
    """What the constructor and a call both take; None in a call stands for the constructor's."""

    qkv_format: Any
    attn_mask_type: Any
    window_size: Any
    bottom_right_diagonal: Any
    softcap: Any

    def check(self) -> None:
        """
        Raises:
            WrongCall, TypeError, ValueError: something of another type.
        """
        for name, x in (("attn_mask_type", self.attn_mask_type), ("qkv_format", self.qkv_format)):
            if x is not None and not isinstance(x, str):
                raise WrongCall(f"{name} must be a string, got {arguments.describe(x)}")
        if self.window_size is not None:
            if not isinstance(self.window_size, (tuple, list)) or len(self.window_size) != 2:
                raise WrongCall(f"window_size is (left, right), got {arguments.describe(self.window_size)}")
            for bound in self.window_size:
                arguments.integer("window_size", bound, -(1 << 62))
        arguments.flags(bottom_right_diagonal=self.bottom_right_diagonal)
        if self.softcap is not None and not 0 <= arguments.number("softcap", self.softcap) < math.inf:
            raise WrongCall(f"softcap must be finite and not negative, got {self.softcap}")

    def within(self, defaults: Settings) -> Settings:
        """A call's, with the constructor's in the place of None; the constructor has checked those."""
        if self == _NONE_GIVEN:
            return defaults
        self.check()
        kind = defaults.attn_mask_type if self.attn_mask_type is None else mask_type(self.attn_mask_type)
        own = self._replace(attn_mask_type=kind)
        return Settings(*(mine if mine is not None else default for mine, default in zip(own, defaults, strict=True)))


_NONE_GIVEN = Settings(None, None, None, None, None)


class CallArguments(NamedTuple):
    """What `DotProductAttention`'s forward takes.

    Args:
        query_layer: (s_q, b, h_q, d), (b, s_q, h_q, d) or packed (t_q, h_q, d), as qkv_format says.
        key_layer: (s_k, b, h_k, d), …
        value_layer: (s_k, b, h_k, d_v), …
        attention_mask: True where an element is masked: for padding (b, 1, 1, s_q), or two of them, for queries and
            keys; for "arbitrary" any shape that broadcasts to (b, h_q, s_q, s_k). Other mask types do not read it.
            Padding may be anywhere. Padding at the end runs as lengths, which is faster; to find that out, the host
            waits for the GPU once for each mask.
        qkv_format: "sbhd", "bshd" or "thd". None stands for the constructor's, also in the arguments below.
        cu_seqlens_q: (b + 1,) int32, sums of the used lengths. For "thd", and for padding.
        cu_seqlens_kv: the same for the keys.
        cu_seqlens_q_padded: where the sequences of "thd" begin, if there is padding between them.
        cu_seqlens_kv_padded: the same for the keys.
        max_seqlen_q: an upper bound of the lengths, for "thd".
        max_seqlen_kv: the same for the keys.
        attn_mask_type: "no_mask", "padding", "causal" and "padding_causal" (aligned at the top left),
            "causal_bottom_right", "padding_causal_bottom_right", "arbitrary".
        window_size: (left, right), -1 for unbounded. Causal masks have no keys on the right: they read (left, right) as
            (left, 0), with a warning, and refuse (-1, right).
        bottom_right_diagonal: where windows and ALiBi are aligned, for masks that do not say it; True by default.
        softcap: `softcap tanh(score / softcap)` after score_mod and before the bias; 0 for none.
        checkpoint_core_attention: compute the attention again in the backward, instead of saving what it needs.
        core_attention_bias_type: "no_bias", "pre_scale_bias": `scale (q k + bias)`, "post_scale_bias":
            `scale q k + bias`, "alibi": `-slope |i + s_k - s_q - j|`.
        core_attention_bias: what broadcasts to (b, h_q, s_q, s_k); it gets a gradient if it requires one.
        alibi_slopes: (h_q) or (b, h_q); those of the paper when None.
        fast_zero_fill: not read.
        inference_params: an `InferenceParams`. key_layer and value_layer then belong to query_layer's tokens, which
            attend to all keys in the cache. "padding_causal" is then aligned at the bottom right, the lengths are those
            of `pre_step`, and cu_seqlens_q only gives the number of sequences.
        pad_between_seqs: not read; cu_seqlens_*_padded say it.
        fp8_output: refused, and so is bf16_backward.
        num_splits: with inference_params, how many parts a GPU splits the keys into. With 1, results do not depend on
            the batch. With None or 0 the backend chooses, which is faster for few sequences. Not read without
            inference_params: keys are not split.
        score_mod: `score_mod(graph, score, tensors) -> score`, as `saccade.compat.cudnn.score_callback` takes it; the
            same holds for the other three.
        qkv_layer: q, k and v as one tensor, with a dimension of 3 at qkv_interleave_dim, instead of the three.
        kv_layer: k and v as one tensor.
        qkv_interleave_dim: -3 or -2.
        thd_attention_policies: refused.
    """

    query_layer: Tensor | None = None
    key_layer: Tensor | None = None
    value_layer: Tensor | None = None
    attention_mask: Tensor | tuple[Tensor, Tensor] | None = None
    qkv_format: str | None = None
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_kv: Tensor | None = None
    cu_seqlens_q_padded: Tensor | None = None
    cu_seqlens_kv_padded: Tensor | None = None
    max_seqlen_q: int | None = None
    max_seqlen_kv: int | None = None
    attn_mask_type: str | None = None
    window_size: tuple[int, int] | None = None
    bottom_right_diagonal: bool | None = None
    softcap: float | None = None
    checkpoint_core_attention: bool = False
    core_attention_bias_type: str = "no_bias"
    core_attention_bias: Tensor | None = None
    alibi_slopes: Tensor | None = None
    fast_zero_fill: bool = True
    inference_params: Any = None
    pad_between_seqs: bool | None = None
    fp8_output: bool | None = False
    bf16_backward: bool | None = False
    num_splits: int | None = 1
    score_mod: Callable[..., Any] | None = None
    score_mod_bprop: Callable[..., Any] | None = None
    score_mod_tensors: dict[str, Tensor] | None = None
    score_mod_bprop_tensors: dict[str, Tensor] | None = None
    qkv_layer: Tensor | None = None
    kv_layer: Tensor | None = None
    qkv_interleave_dim: int = -3
    thd_attention_policies: Any = None
    thd_attention_policy_dispatch: str = "auto"

    def settled(self, defaults: Settings) -> CallArguments:
        """With q, k and v apart, and the constructor's settings where the call has none. Raises WrongCall for names and
        tensors that do not fit one another, and Unsupported for what saccade does not have yet."""
        self._refuse()
        self._check_types()
        own = self.qkv_format, self.attn_mask_type, self.window_size, self.bottom_right_diagonal, self.softcap
        settings = Settings(*own).within(defaults)
        for name, value, known in (
            ("qkv_format", settings.qkv_format, FORMATS),
            ("core_attention_bias_type", self.core_attention_bias_type, BIAS_TYPES),
        ):
            if value not in known:
                raise WrongCall(f"{name} is one of {', '.join(known)}, got {value!r}")
        self._check_bias()
        self._check_score_mod()
        values = list(self)
        values[: len(_OPERANDS)] = q, k, v = self._separated()
        for at, x in zip(_SETTINGS, settings, strict=True):
            values[at] = x
        check_tensors(q, k, v, settings.qkv_format)
        return CallArguments._make(values)

    @property
    def operands(self) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v of a settled call."""
        return self[:3]  # pyright: ignore[reportReturnType]

    @property
    def order(self) -> str:
        """qkv_format of a settled call."""
        return self.qkv_format  # pyright: ignore[reportReturnType]

    def _check_types(self) -> None:
        for name in _TENSORS:
            x = getattr(self, name)
            if x is not None and not isinstance(x, Tensor):
                raise WrongCall(f"{name} must be a tensor, got {type(x).__name__}")
        arguments.flags(checkpoint_core_attention=self.checkpoint_core_attention)
        for name in ("max_seqlen_q", "max_seqlen_kv"):
            if getattr(self, name) is not None:
                arguments.integer(name, getattr(self, name))

    def _refuse(self) -> None:
        for value, reason in (
            (self.thd_attention_policies, "thd_attention_policies: all sequences have one mask type and window"),
            (self.fp8_output, "fp8_output: FP8 is not supported"),
            (self.bf16_backward, "bf16_backward is for FP8, which no backend has yet"),
        ):
            if value is not None and value is not False:
                raise Unsupported(f"DotProductAttention: {reason}")

    def _separated(self) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v, also of projections that come as one tensor."""
        names = [name for name in (*_OPERANDS, "qkv_layer", "kv_layer") if getattr(self, name) is not None]
        if names == list(_OPERANDS):
            return self.operands
        if names == ["qkv_layer"]:
            packed, apart, parts = self.qkv_layer, (), 3
        elif names == ["query_layer", "kv_layer"]:
            packed, apart, parts = self.kv_layer, (self.query_layer,), 2
        else:
            raise WrongCall(
                "give query_layer, key_layer and value_layer, or query_layer and kv_layer, or qkv_layer alone, got "
                f"{', '.join(names) or 'none'}"
            )
        at = self.qkv_interleave_dim
        assert packed is not None
        if at not in (-3, -2) or packed.dim() < 4 or packed.shape[at] != parts:
            shape = tuple(packed.shape)
            raise WrongCall(f"qkv_interleave_dim={at} must be -3 or -2, and have {parts} elements in {shape}")
        return (*apart, *packed.unbind(at))  # pyright: ignore[reportReturnType]

    def _check_bias(self) -> None:
        kind = self.core_attention_bias_type
        if (self.core_attention_bias is not None) != (kind in ("pre_scale_bias", "post_scale_bias")):
            raise WrongCall(
                "core_attention_bias belongs to pre_scale_bias and post_scale_bias, which need it; got "
                f"core_attention_bias_type={kind!r} {'without' if self.core_attention_bias is None else 'with'} it"
            )
        if self.alibi_slopes is not None and kind != "alibi":
            raise WrongCall(f"core_attention_bias_type must be 'alibi' in order to use alibi_slopes, got {kind!r}")

    def _check_score_mod(self) -> None:
        for name, other in (
            ("score_mod_bprop", "score_mod"),
            ("score_mod_tensors", "score_mod"),
            ("score_mod_bprop_tensors", "score_mod"),
            ("score_mod_bprop_tensors", "score_mod_bprop"),
        ):
            if getattr(self, name) is not None and getattr(self, other) is None:
                raise WrongCall(f"{name} requires {other}!")
        for name, function in (("score_mod", self.score_mod), ("score_mod_bprop", self.score_mod_bprop)):
            if function is not None and not callable(function):
                raise WrongCall(f"{name} must be callable, got {function!r}")
        for name in ("score_mod_tensors", "score_mod_bprop_tensors"):
            tensors = getattr(self, name)
            if tensors is not None and not (
                isinstance(tensors, dict)
                and all(isinstance(key, str) and isinstance(x, Tensor) for key, x in tensors.items())
            ):
                raise WrongCall(f"{name} must be a dict that maps names to tensors, got {type(tensors).__name__}")


_OPERANDS = CallArguments._fields[:3]
_SETTINGS = [CallArguments._fields.index(name) for name in Settings._fields]
_TENSORS = tuple(name for name, kind in CallArguments.__annotations__.items() if kind == "Tensor | None")


def mask_type(name: Any) -> str:
    """The one spelling of a mask type. Raises WrongCall for a mask type that does not exist."""
    if name in MASK_TYPES:
        return name
    spelled = name.replace(",", "_") if isinstance(name, str) else name
    spelled = "padding_causal" if spelled == "causal_padding" else spelled
    if spelled not in MASK_TYPES:
        raise WrongCall(f"attn_mask_type is one of {', '.join(MASK_TYPES)}, got {arguments.describe(name)}")
    return spelled


def check_tensors(q: Tensor, k: Tensor, v: Tensor, order: str) -> None:
    """Raises Unsupported for FP8, and WrongCall for tensors of other dimensions than qkv_format says."""
    right = True
    for x in (q, k, v):  # in the hot path of small calls
        right &= x.dim() == len(order) and x.dtype not in _FP8 and not hasattr(x, "_quantizer")
    if right:
        return
    for x in (q, k, v):
        if x.dtype in _FP8:
            raise Unsupported(f"DotProductAttention: {x.dtype} tensors: FP8 is not supported")
        if hasattr(x, "_quantizer"):
            raise Unsupported(f"DotProductAttention: {type(x).__name__}: FP8 is not supported")
    shapes = ", ".join(str(tuple(x.shape)) for x in (q, k, v))
    raise WrongCall(f"qkv_format={order!r} wants tensors of {len(order)} dimensions, got {shapes}")


_FP8 = {x for x in vars(torch).values() if isinstance(x, torch.dtype) and x.is_floating_point and x.itemsize < 2}
