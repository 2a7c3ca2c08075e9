"""`DotProductAttention`, for one process and over the ranks of a cp_group."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from saccade.api import Explanation, attention, explain
from saccade.call.partial import Scored
from saccade.compat.transformer_engine.call import CallArguments, Settings, WrongCall, mask_type
from saccade.compat.transformer_engine.inference import CacheStep, cached_visibility
from saccade.compat.transformer_engine.masks import combined_score_mod, layout_of, visibility
from saccade.layouts import Dense, Layout, Packed
from saccade.masks import Mask
from saccade.ops.dispatch import Unsupported
from saccade.scores import Softcap
from saccade.util import arguments
from saccade.util.caches import BoundedCache

# Calls whose sequences the ranks of a cp_group share, as TransformerEngine's loaders lay them: of 2 R chunks of each
# sequence rank r has number r and number 2 R - 1 - r.


TYPES = "p2p", "all_gather", "a2a", "a2a+p2p"
"""TransformerEngine's `cp_comm_type`: how it moves what ranks exchange; rows lie alike for all of them."""


class RanksCall(NamedTuple):
    """What becomes of a call."""

    operands: tuple[Tensor, Tensor, Tensor]
    keywords: dict[str, Any]
    rows: Tensor | None
    """(t, 1, 1) bool: which rows are no padding; None where none is."""


def ranks_of(group: Any) -> int:
    if group is None:
        return 1
    return math.prod(torch.distributed.get_world_size(x) for x in (group if isinstance(group, list) else [group]))


def self_attention(call: CallArguments) -> CallArguments:
    """With the same tensors for both sides of sequences end to end, where the numbers are equal."""
    if call.order != "thd":
        return call
    sides = (call.cu_seqlens_q, call.cu_seqlens_kv), (call.cu_seqlens_q_padded, call.cu_seqlens_kv_padded)
    for q, k in sides:
        if (q is None) != (k is None) or (q is not None and k is not None and q is not k and not torch.equal(q, k)):
            raise Unsupported(
                "DotProductAttention over a cp_group: packed sequences must be self-attention, so cu_seqlens_q and "
                "cu_seqlens_kv must be equal, with and without padding"
            )
    return call._replace(cu_seqlens_kv=call.cu_seqlens_q, cu_seqlens_kv_padded=call.cu_seqlens_q_padded)


def shared(group: Any, operands: tuple[Tensor, Tensor, Tensor], layout: Layout, given: dict[str, Any]) -> RanksCall:
    """Raises Unsupported for what no rank can compute of its rows, WrongCall for sequences that are not 2 R chunks."""
    from saccade import distributed  # for who needs it

    q, k, _ = operands
    score_mod, ranks = given["score_mod"], ranks_of(group)
    subject = f"DotProductAttention over a cp_group of {ranks} ranks:"
    if isinstance(group, list):
        raise Unsupported(f"{subject} two groups are not supported: pass one group of all ranks")
    if not (isinstance(layout, Packed) or (isinstance(layout, Dense) and layout.plain)) or q.shape[:-2] != k.shape[:-2]:
        raise Unsupported(
            f"{subject} calls must be self-attention, in sbhd and bshd without padding, got q {tuple(q.shape)} and k "
            f"{tuple(k.shape)} with {layout!r}: saccade.attention(…, context=plan) takes documents of any lengths"
        )
    if not (score_mod is None or isinstance(score_mod, Softcap)):
        raise Unsupported(f"{subject} biases and score functions are not supported, got {score_mod!r}")
    if given["return_max_scores"]:
        raise Unsupported(f"{subject} return_max_logit is not supported: set it to False")
    if isinstance(layout, Dense):
        b, s = (q.shape[layout.order.index(name)] for name in "bs")
        plan = distributed.plan((b, s * ranks), group, mask=given["mask"], rows="pairs")
        return RanksCall(operands, given | {"context": plan}, None)
    plan = _of_sequences(group, ranks, layout, given["mask"], subject)
    keywords = {name: x for name, x in given.items() if name != "layout"} | {"context": plan}
    if q.shape[0] != plan.rows:
        raise WrongCall(
            f"{subject} offsets must be those of whole sequences: with {sum(plan.lengths)} rows in all a rank has "
            f"{plan.rows}, got q {tuple(q.shape)}"
        )
    if layout.seqused_q is None:
        return RanksCall(operands, keywords, None)
    rows = (plan.position_ids < layout.seqused_q[plan.document_ids])[:, None, None]
    q, k, v = (torch.where(rows, x, 0) for x in operands)  # padding may hold anything
    return RanksCall((q, k, v), keywords, rows)


def _of_sequences(group: Any, ranks: int, layout: Packed, mask: Any, subject: str) -> Any:
    from saccade import distributed
    from saccade.distributed.sharding import reach_of

    if layout.seqused_q is not None and reach_of(mask).right != 0:
        raise Unsupported(
            f"{subject} padding between sequences needs a causal mask, so that no row sees padding, got {mask!r}: "
            "give attn_mask_type='padding_causal', or sequences without cu_seqlens_q_padded"
        )
    try:
        return distributed.plan(layout.cu_seqlens_q, group, mask=mask, rows="pairs")
    except ValueError as error:
        wanted = f"each sequence must divide into {2 * ranks} equal chunks, padding included"
        raise WrongCall(f"{subject} {wanted}: {error}") from error


SOFTMAX_TYPES = ("vanilla", "off-by-one", "learnable")


class CallMeaning(NamedTuple):
    """What the words of a call mean."""

    mask: Mask | None
    score_mod: Any
    layout: Layout | None
    """None where it was kept without the lengths of sequences end to end, which are of each call."""
    keys: int | None
    """No row sees keys from here on."""
    order: str
    checkpoint: bool
    step: CacheStep | None
    """Where new keys and values go; None without inference parameters."""


_MEANINGS: BoundedCache[Any, CallMeaning] = BoundedCache(1024)
_WORDS = {str, bool, type(None)}
_LONGEST = {int, type(None)}
_LENGTHS = "cu_seqlens_q", "cu_seqlens_kv", "max_seqlen_q", "max_seqlen_kv"
_TENSORS = {Tensor, torch.nn.Parameter}


def _keep(key: Any, meaning: CallMeaning) -> None:
    """For later calls, unless tensors of this one are a part of it: of a score, or lengths of a padded batch."""
    if meaning.order == "thd":
        meaning = meaning._replace(layout=None)
    if meaning.score_mod is None and (meaning.layout is None or not meaning.layout.tensors):
        _MEANINGS.put(key, meaning)


class AttentionCall(NamedTuple):
    """One call in saccade's words."""

    new: tuple[Tensor, Tensor, Tensor]
    """q, k and v"""
    operands: tuple[Tensor, Tensor, Tensor]
    """The same without keys that no row sees, or q and the caches"""
    keywords: dict[str, Any]
    """`attention`'s"""
    meaning: CallMeaning
    rows: Tensor | None
    """Which rows are no padding of ranks, (t, 1, 1); None for all."""


class DotProductAttention(torch.nn.Module):
    """`softmax(mask(softcap(score_mod(scale q k)) + bias)) v`, by TransformerEngine's names.

    Args:
        num_attention_heads: h_q, of all tensor-parallel ranks together.
        kv_channels: d, or (d, d_v).
        num_gqa_groups: h_k; h_q when None.
        attention_dropout: the share of probabilities that become zero in training.
        qkv_format: "sbhd", "bshd" or "thd".
        attn_mask_type: "causal" unless given; see `CallArguments`, and so for the next three.
        window_size: (left, right).
        bottom_right_diagonal: how windows are aligned.
        softcap: 0 for none.
        sequence_parallel: not read: q, k and v are whole.
        tp_size: tensor-parallel ranks, each with its own heads.
        get_rng_state_tracker: a function; its result's `fork()` is entered for dropout.
        tp_group: gives tp_size.
        layer_number: which of a cache's layers this one is.
        attention_type: "self" or "cross"; not read: a call has the lengths that it has.
        cp_group: ranks that share each sequence, in the two chunks of TransformerEngine's loaders: in sbhd and bshd
            without padding, in thd with the offsets of whole sequences, as its loaders give them.
        cp_global_ranks: as cp_stream and cp_comm_type see `set_context_parallel_group`.
        softmax_scale: 1/sqrt(d) when None.
        softmax_type: "vanilla"; "off-by-one": `exp / (1 + sum exp)`; "learnable": `exp / (exp(offset_h) + sum exp)`,
            with the parameter `softmax_offset`, (h_q).
        return_max_logit: return (out, max_logit), the largest score that each head sees, (h_q) float32 (float64 for
            float64 inputs).
        name: not read.
        backend: saccade's own: "auto", or the one that runs or raises.

    Forward takes what `CallArguments` lists, by position or by name. It returns out with its last two dimensions as
    one, (s_q, b, h_q d_v), (b, s_q, h_q d_v) or (t_q, h_q d_v). It is deterministic where
    `torch.are_deterministic_algorithms_enabled()`.

    Raises:
        WrongCall: arguments that do not fit, a ValueError and an AssertionError.
        Unsupported: FP8; over a cp_group biases, score functions, padded batches, cross-attention and return_max_logit;
            or no backend runs the call.

    >>> core = DotProductAttention(4, 16, num_gqa_groups=2, qkv_format="bshd", attn_mask_type="padding_causal")
    >>> q, k, v = torch.randn(2, 8, 4, 16), torch.randn(2, 8, 2, 16), torch.randn(2, 8, 2, 16)
    >>> lengths = torch.tensor([0, 8, 11], dtype=torch.int32)
    >>> core(q, k, v, cu_seqlens_q=lengths, cu_seqlens_kv=lengths).shape
    torch.Size([2, 8, 64])
    >>> get_attention_backend(core, q, k, v, cu_seqlens_q=lengths, cu_seqlens_kv=lengths).backend
    'cpu'
    """

    softmax_offset: Tensor | None

    def __init__(
        self, num_attention_heads: int, kv_channels: int | tuple[int, int], num_gqa_groups: int | None = None,
        attention_dropout: float = 0.0, qkv_format: str = "sbhd", attn_mask_type: str = "causal",
        window_size: tuple[int, int] | None = None, bottom_right_diagonal: bool | None = None, softcap: float = 0.0,
        sequence_parallel: bool = False, tp_size: int = 1, get_rng_state_tracker: Callable[[], Any] | None = None,
        tp_group: Any = None, layer_number: int | None = None, attention_type: str = "self", cp_group: Any = None,
        cp_global_ranks: list[int] | None = None, cp_stream: Any = None, cp_comm_type: str = "p2p",
        softmax_scale: float | None = None, softmax_type: str = "vanilla", return_max_logit: bool | None = False,
        name: str | None = None, *, backend: str = "auto",
    ) -> None:  # fmt: skip
        super().__init__()
        self.head_dims = tuple(kv_channels) if isinstance(kv_channels, (tuple, list)) else (kv_channels, kv_channels)
        if len(self.head_dims) != 2:
            raise WrongCall(f"kv_channels is d, or (d, d_v), got {kv_channels!r}")
        groups = num_attention_heads if num_gqa_groups is None else num_gqa_groups
        for name, n in (
            *(("kv_channels", n) for n in self.head_dims),
            *(("num_attention_heads", num_attention_heads), ("tp_size", tp_size), ("num_gqa_groups", groups)),
        ):
            arguments.integer(name, n, 1)
        settings = Settings(qkv_format, attn_mask_type, window_size, bottom_right_diagonal, softcap)
        settings.check()
        if window_size is not None:
            settings = settings._replace(window_size=tuple(window_size))
        self.attention_dropout = arguments.number("attention_dropout", attention_dropout)
        if softmax_scale is not None:
            arguments.number("softmax_scale", softmax_scale, ": multiply query_layer by it, with softmax_scale=1.0")
        arguments.flags(return_max_logit=return_max_logit)
        self.tp_size = tp_size if tp_group is None else torch.distributed.get_world_size(tp_group)
        if num_attention_heads % groups or groups % self.tp_size:
            raise WrongCall(
                "num_attention_heads must be a multiple of num_gqa_groups, and that of tp_size, got "
                f"{num_attention_heads}, {groups} and {self.tp_size}"
            )
        for name, value, known in (
            ("attention_type", attention_type, ("self", "cross")),
            ("softmax_type", softmax_type, SOFTMAX_TYPES),
        ):
            if value not in known:
                raise WrongCall(f"{name} is one of {', '.join(known)}, got {value!r}")
        self.defaults = settings._replace(attn_mask_type=mask_type(attn_mask_type))
        self.num_gqa_groups, self.get_rng_state_tracker = groups, get_rng_state_tracker
        self.softmax_scale = 1 / math.sqrt(self.head_dims[0]) if softmax_scale is None else softmax_scale
        self.layer_number = layer_number
        self.softmax_type, self.return_max_logit, self.backend = softmax_type, return_max_logit, backend
        self.set_context_parallel_group(cp_group, cp_global_ranks, cp_stream, cp_comm_type)
        zeros = torch.zeros(num_attention_heads // self.tp_size, device=torch.get_default_device())
        if softmax_type == "learnable":
            self.softmax_offset = torch.nn.Parameter(zeros)
        else:  # not a part of the state
            offset = zeros if softmax_type == "off-by-one" else None
            self.register_buffer("softmax_offset", offset, persistent=False)

    def set_context_parallel_group(
        self, cp_group: Any, cp_global_ranks: Any = None, cp_stream: Any = None, cp_comm_type: str = "p2p"
    ) -> None:
        """Ranks that share each sequence: rank r of R has its chunks r and 2 R - 1 - r of 2 R.

        Args:
            cp_group: a group; None or one rank for none.
            cp_global_ranks: not read, as the group knows its ranks.
            cp_stream: not read.
            cp_comm_type: "p2p", "all_gather", "a2a" or "a2a+p2p": how TransformerEngine would exchange; here keys are
                gathered.
        """
        if cp_group is not None and cp_comm_type not in TYPES:
            raise WrongCall(f"cp_comm_type is one of {', '.join(TYPES)}, got {cp_comm_type!r}")
        self.cp_group = cp_group

    def forward(self, *arguments: Any, **keywords: Any) -> Tensor | tuple[Tensor, Tensor]:
        new, operands, given, meaning, rows = self._attention_call(arguments, keywords)
        step = meaning.step
        if step is not None:
            step.append(*new[1:])
        if meaning.checkpoint:
            found = checkpoint(self._attend, *operands, given, use_reentrant=False)
        else:
            found = self._attend(*operands, given)
        out = found if isinstance(found, Tensor) else found.out
        if rows is not None:
            out = torch.where(rows, out, 0)
        out = (out if step is None else step.from_rows(out)).flatten(-2)
        if isinstance(found, Tensor):
            return out
        largest = found.max_scores.movedim(-2, 0).flatten(1)  # (h_q, all rows)
        return out, largest.amax(1) if largest.numel() else largest.new_zeros(largest.shape[0])

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, keywords: dict[str, Any]) -> Tensor | Scored:
        tracker = self.get_rng_state_tracker if keywords["dropout_p"] else None
        with tracker().fork() if tracker is not None else nullcontext():
            return attention(q, k, v, **keywords)

    def _attention_call(self, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> AttentionCall:
        """What a call means; nothing is computed or written."""
        key = self._key(arguments, keywords)
        if key is not None and keywords.get("cu_seqlens_q") is not None and ranks_of(self.cp_group) > 1:
            key = None  # which says nothing of the offsets' values
        meaning, new = None if key is None else _MEANINGS.get(key), arguments[:3]
        if meaning is None:
            call = self._settled(arguments, keywords)
            if ranks_of(self.cp_group) > 1:
                call = self_attention(call)
            meaning, new = self._meaning(call), call.operands
            if key is not None:
                _keep(key, meaning)
        layout = meaning.layout
        if layout is None:
            lengths: list[Any] = [keywords.get(name) for name in _LENGTHS]
            layout = layout_of(new[0], new[1], *lengths)
        q, k, v = new
        given = {
            "mask": meaning.mask,
            "score_mod": meaning.score_mod,
            "layout": layout,
            "scale": self.softmax_scale,
            "sink": None if self.softmax_offset is None else self.softmax_offset.to(q.device),
            "dropout_p": self.attention_dropout if self.training else 0.0,
            "return_max_scores": bool(self.return_max_logit),
            "backend": self.backend,
        }
        ranks, rows = ranks_of(self.cp_group), None
        if meaning.step is not None and ranks > 1:
            raise Unsupported(
                "DotProductAttention over a cp_group: inference_params are not supported: call "
                "set_context_parallel_group(None)"
            )
        if meaning.step is not None:
            q, k, v = meaning.step.to_rows(q), *meaning.step.params.caches(meaning.step.layer)
        elif ranks > 1:
            (q, k, v), given, rows = shared(self.cp_group, new, layout, given)
        elif meaning.keys is not None:
            k, v = (x.narrow(meaning.order.index("s"), 0, meaning.keys) for x in (k, v))
        return AttentionCall(new, (q, k, v), given, meaning, rows)

    def _key(self, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        """All that a meaning but its lengths depends on, of a call that gives q, k, v, offsets and longest lengths, and
        else strings, True, False and None alone; None for any other call."""
        if len(arguments) < 3 or torch.compiler.is_compiling():
            return None
        words, lengths = (*arguments[3:], *keywords.values()), None
        if keywords.get("cu_seqlens_q") is not None:
            words = *arguments[3:], *(x for name, x in keywords.items() if name not in _LENGTHS)
            cu_q, cu_k, most_q, most_k = map(keywords.get, _LENGTHS)
            if (
                type(cu_q) is not Tensor
                or type(cu_k) is not Tensor
                or not _LONGEST.issuperset((type(most_q), type(most_k)))
            ):
                return None
            lengths = cu_q is cu_k, cu_q.dtype, cu_k.dtype, cu_q.shape, cu_k.shape, cu_q.device, cu_k.device
        q, k, v = arguments[:3]
        plain = type(q) in _TENSORS and type(k) in _TENSORS and type(v) in _TENSORS
        if not plain or not _WORDS.issuperset(map(type, words)):
            return None
        tensors = q.shape, k.shape, v.shape, q.dtype, k.dtype, v.dtype, q.device, lengths
        return *tensors, self.defaults, self.head_dims, self.num_gqa_groups, self.tp_size, tuple(keywords), words

    def _settled(self, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> CallArguments:
        """The arguments of a call, checked against the constructor's."""
        call = CallArguments(*arguments, **keywords).settled(self.defaults)
        _, k, v = call.operands
        groups = self.num_gqa_groups // self.tp_size
        if (k.shape[-1], v.shape[-1]) != self.head_dims or k.shape[-2] != groups:
            raise WrongCall(
                f"keys and values must have {groups} heads of dims {self.head_dims}, got {tuple(k.shape)} and "
                f"{tuple(v.shape)}"
            )
        return call

    def _meaning(self, call: CallArguments) -> CallMeaning:
        if call.inference_params is None:
            step, visible = None, visibility(call)
        else:
            step, visible = cached_visibility(call, self.layer_number)
        score_mod = combined_score_mod(call, visible, self.softmax_scale)
        checkpoint = call.checkpoint_core_attention
        return CallMeaning(visible.mask, score_mod, visible.layout, visible.keys, call.order, checkpoint, step)


DotProductAttention.forward.__signature__ = inspect.Signature(
    [
        inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD),
        *inspect.signature(CallArguments).parameters.values(),
    ]
)


def get_attention_backend(core: DotProductAttention, *arguments: Any, **keywords: Any) -> Explanation:
    """Which backend runs a call of a module, and why the others do not.

    Args:
        core: the module.
        arguments: what it would be called with.
        keywords: the same.

    Raises:
        WrongCall, Unsupported: as the call itself.
    """
    call = core._attention_call(arguments, keywords)
    return explain(*call.operands, **call.keywords)
