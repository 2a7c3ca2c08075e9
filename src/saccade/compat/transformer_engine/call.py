"""The arguments of one call, by TransformerEngine's names."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from saccade import arguments
from saccade.dispatch import Unsupported

FORMATS = ("sbhd", "bshd", "thd")
MASK_TYPES = (
    "no_mask", "padding", "causal", "padding_causal", "causal_bottom_right", "padding_causal_bottom_right", "arbitrary",
)  # fmt: skip
BIAS_TYPES = ("no_bias", "pre_scale_bias", "post_scale_bias", "alibi")


class WrongCall(ValueError, AssertionError):
    """A ValueError, as everywhere in saccade, and an AssertionError, as in TransformerEngine."""


@dataclass(frozen=True)
class Call:
    """What `DotProductAttention`'s forward takes.

    Args:
        query_layer: (s_q, b, h_q, d), (b, s_q, h_q, d) or packed (t_q, h_q, d), as qkv_format says.
        key_layer: (s_k, b, h_k, d), …
        value_layer: (s_k, b, h_k, d_v), …
        attention_mask: True where nothing is seen: for padding (b, 1, 1, s_q), or two of them, of queries and keys;
            for "arbitrary" what broadcasts to (b, h_q, s_q, s_k). Other mask types do not read it. Padding may be
            anywhere; at the end it runs as lengths, which is faster, and which a GPU is asked for once for each mask.
        qkv_format: "sbhd", "bshd" or "thd"; None: the constructor's, as for the following that may be None.
        cu_seqlens_q: (b + 1,) int32, sums of the lengths that are in use. With "thd", and for padding.
        cu_seqlens_kv: the same of the keys.
        cu_seqlens_q_padded: where the sequences of "thd" begin, if there is padding between them.
        cu_seqlens_kv_padded: the same of the keys.
        max_seqlen_q: an upper bound of the lengths, for "thd".
        max_seqlen_kv: the same of the keys.
        attn_mask_type: "no_mask", "padding", "causal" and "padding_causal" (aligned at the top left),
            "causal_bottom_right", "padding_causal_bottom_right", "arbitrary".
        window_size: (left, right), -1 for unbounded. Causal masks have nothing on the right: (left, right) is (left, 0)
            there, with a warning, and (-1, right) is refused.
        bottom_right_diagonal: where windows and ALiBi are aligned, for masks that do not say it: True unless given.
        softcap: `softcap tanh(score / softcap)` after score_mod and before the bias; 0 for none.
        checkpoint_core_attention: compute the attention again in the backward, instead of saving what it needs.
        core_attention_bias_type: "no_bias", "pre_scale_bias": `scale (q k + bias)`, "post_scale_bias":
            `scale q k + bias`, "alibi": `-slope |i + s_k - s_q - j|`.
        core_attention_bias: what broadcasts to (b, h_q, s_q, s_k); it gets a gradient if it requires one.
        alibi_slopes: (h_q) or (b, h_q); those of the paper when None.
        fast_zero_fill: not read.
        inference_params: an `InferenceParams`: key_layer and value_layer are those of query_layer's tokens, which
            attend to all that the cache has. "padding_causal" is aligned at the bottom right then, lengths are those of
            `pre_step`, and of cu_seqlens_q only their number is read.
        pad_between_seqs: not read; cu_seqlens_*_padded say it.
        fp8_output: refused, and so is bf16_backward.
        num_splits: with inference_params, into how many parts a GPU cuts keys: 1, and results never depend on the
            batch; None or 0, and the backend chooses, which is faster for few sequences. Else not read: keys are not
            split.
        score_mod: `score_mod(graph, score, tensors) -> score`, as `saccade.compat.cudnn.score_callback` takes it, and
            so the other three.
        qkv_layer: q, k and v as one tensor, with a dimension of 3 at qkv_interleave_dim, in the place of the three.
        kv_layer: k and v as one.
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

    def settled(self, defaults: dict[str, Any]) -> Call:
        """With q, k and v apart, the constructor's values where None is, and every name checked.

        Raises:
            WrongCall: names and tensors that do not fit one another.
            Unsupported: what saccade does not have yet.
        """
        self._refuse()
        self._check_types()
        given = {name: value for name, value in defaults.items() if getattr(self, name) is None}
        settled = replace(self, **given, **self._apart())
        settled = replace(settled, attn_mask_type=mask_type(settled.attn_mask_type or "causal"))
        for name, value, known in (
            ("qkv_format", settled.qkv_format, FORMATS),
            ("core_attention_bias_type", settled.core_attention_bias_type, BIAS_TYPES),
        ):
            if value not in known:
                raise WrongCall(f"{name} is one of {', '.join(known)}, got {value!r}")
        settled._check_bias()
        settled._check_score_mod()
        return settled

    def _check_types(self) -> None:
        tensors = (
            "query_layer", "key_layer", "value_layer", "cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded",
            "cu_seqlens_kv_padded", "core_attention_bias", "alibi_slopes", "qkv_layer", "kv_layer",
        )  # fmt: skip
        for name in tensors:
            x = getattr(self, name)
            if x is not None and not isinstance(x, Tensor):
                raise WrongCall(f"{name} must be a tensor, got {type(x).__name__}")
        check_settings(self.attn_mask_type, self.window_size, self.bottom_right_diagonal, self.softcap, self.qkv_format)
        arguments.flags(checkpoint_core_attention=self.checkpoint_core_attention)
        for name in ("max_seqlen_q", "max_seqlen_kv"):
            if getattr(self, name) is not None:
                arguments.integer(name, getattr(self, name))

    def _refuse(self) -> None:
        refused = {
            "thd_attention_policies: one mask type and window serves all sequences": self.thd_attention_policies,
            "fp8_output: no backend has FP8 yet": self.fp8_output,
            "bf16_backward is for FP8, which no backend has yet": self.bf16_backward,
        }
        for told, value in refused.items():
            if value is not None and value is not False:
                raise Unsupported(f"DotProductAttention: {told}")

    def _apart(self) -> dict[str, Tensor]:
        """q, k and v of packed projections."""
        at = self.qkv_interleave_dim
        three = {"query_layer": self.query_layer, "key_layer": self.key_layer, "value_layer": self.value_layer}
        found = {name: x for name, x in three.items() if x is not None}
        packed = self.qkv_layer if self.qkv_layer is not None else self.kv_layer
        names = list(three) if self.qkv_layer is not None else list(three)[1:]
        if packed is None:
            names = []
        elif at not in (-3, -2) or packed.dim() < 4 or packed.shape[at] != len(names):
            shape = tuple(packed.shape)
            raise WrongCall(f"qkv_interleave_dim={at} must be -3 or -2, and have {len(names)} elements in {shape}")
        if (self.qkv_layer is not None and self.kv_layer is not None) or found.keys() != three.keys() - set(names):
            given = ", ".join(
                [*found, *(name for name in ("qkv_layer", "kv_layer") if getattr(self, name) is not None)]
            )
            raise WrongCall(
                "give query_layer, key_layer and value_layer, or query_layer and kv_layer, or qkv_layer alone, got "
                f"{given or 'none'}"
            )
        apart = packed.unbind(at) if packed is not None else ()
        return {**found, **dict(zip(names, apart, strict=True))}

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
        needs = {
            "score_mod_bprop": "score_mod",
            "score_mod_tensors": "score_mod",
            "score_mod_bprop_tensors": "score_mod" if self.score_mod is None else "score_mod_bprop",
        }
        for name, other in needs.items():
            if getattr(self, name) is not None and getattr(self, other) is None:
                raise WrongCall(f"{name} requires {other}!")
        for name in ("score_mod", "score_mod_bprop"):
            given = getattr(self, name)
            if given is not None and not callable(given):
                raise WrongCall(f"{name} must be callable, got {given!r}")
        for name in ("score_mod_tensors", "score_mod_bprop_tensors"):
            given = getattr(self, name)
            if given is None:
                continue
            pairs = given.items() if isinstance(given, dict) else [(None, given)]
            if not all(isinstance(key, str) and isinstance(x, Tensor) for key, x in pairs):
                raise WrongCall(f"{name} must be a dict that maps names to tensors, got {type(given).__name__}")

    @property
    def order(self) -> str:
        assert self.qkv_format is not None
        return self.qkv_format


def check_settings(
    attn_mask_type: Any, window_size: Any, bottom_right_diagonal: Any, softcap: Any, qkv_format: Any
) -> None:
    """What constructor and call both take; None stands for the other's.

    Raises:
        WrongCall, TypeError, ValueError: something of another type.
    """
    for name, x in (("attn_mask_type", attn_mask_type), ("qkv_format", qkv_format)):
        if x is not None and not isinstance(x, str):
            raise WrongCall(f"{name} must be a string, got {arguments.told(x)}")
    if window_size is not None:
        if not isinstance(window_size, (tuple, list)) or len(window_size) != 2:
            raise WrongCall(f"window_size is (left, right), got {arguments.told(window_size)}")
        for bound in window_size:
            arguments.integer("window_size", bound, -(1 << 62))
    arguments.flags(bottom_right_diagonal=bottom_right_diagonal)
    if softcap is not None and not 0 <= arguments.number("softcap", softcap) < math.inf:
        raise WrongCall(f"softcap must be from 0 on and finite, got {softcap}")


def mask_type(given: str) -> str:
    """Its one spelling.

    Raises:
        WrongCall: a mask type that does not exist.
    """
    if not isinstance(given, str):
        raise WrongCall(f"attn_mask_type is one of {', '.join(MASK_TYPES)}, got {arguments.told(given)}")
    found = given.replace(",", "_")
    found = "padding_causal" if found == "causal_padding" else found
    if found not in MASK_TYPES:
        raise WrongCall(f"attn_mask_type is one of {', '.join(MASK_TYPES)}, got {given!r}")
    return found


def check_tensors(q: Tensor, k: Tensor, v: Tensor, order: str) -> None:
    """
    Raises:
        Unsupported: FP8.
        WrongCall: tensors of other dimensions than qkv_format says.
    """
    if any(x.dtype.is_floating_point and x.element_size() < 2 for x in (q, k, v)):
        raise Unsupported(f"DotProductAttention: {q.dtype} tensors: no backend has FP8 yet")
    if any(type(x) not in (Tensor, torch.nn.Parameter) and hasattr(x, "_quantizer") for x in (q, k, v)):
        raise Unsupported(f"DotProductAttention: {type(q).__name__}: no backend has FP8 yet")
    if any(x.dim() != len(order) for x in (q, k, v)):
        shapes = ", ".join(str(tuple(x.shape)) for x in (q, k, v))
        raise WrongCall(f"qkv_format={order!r} wants tensors of {len(order)} dimensions, got {shapes}")
