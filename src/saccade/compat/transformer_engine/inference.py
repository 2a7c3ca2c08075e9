"""TransformerEngine's `InferenceParams`: which sequences are in a cache and where, and one layer's call with it."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Hashable, Mapping
from typing import Any

import torch
from torch import Tensor

from saccade.compat.transformer_engine.call import FORMATS, CallArguments, WrongCall
from saccade.compat.transformer_engine.masks import Visibility, window_bounds
from saccade.layouts import Paged
from saccade.masks import window
from saccade.ops.dispatch import Unsupported
from saccade.ops.kv_cache import append_kv
from saccade.util import arguments
from saccade.util.kept_memory import capturing

Sequences = OrderedDict[Hashable, int]
"""Lengths by the names that the caller gives sequences, in the order of the batch."""


MASK_TYPES = "padding", "padding_causal", "padding_causal_bottom_right"
"""Those of a call with a cache."""


class CacheManager:
    """The pages, which sequence has which, and one pair of caches for each layer: `InferenceParams.cache_manager`.

    Attributes:
        cache: by layer number, k (pages, page_size, h_k, d) and v (pages, page_size, h_k, d_v).
        page_table: (max_batch_size, pages of a sequence) int32; row i has the pages of the batch's sequence i, then -1.
        sequences: the lengths.
    """

    def __init__(self, pages: int, page_size: int, table: Tensor) -> None:
        self.page_size, self.page_table = page_size, table
        self.cache: dict[int, tuple[Tensor, Tensor]] = {}
        self.pages = pages
        self.reset()

    def reset(self) -> None:
        self.free = list(reversed(range(self.pages)))
        self.sequences = Sequences()
        self.taken: dict[Hashable, list[int]] = {}
        self.page_table.fill_(-1)

    def take(self, lengths: Sequences) -> None:
        """Takes pages for these sequences; those of all others become free. If there are not enough, raises
        RuntimeError, and nothing has changed."""
        left = [page for name in self.taken.keys() - lengths.keys() for page in self.taken[name]]
        missing = {name: -(-n // self.page_size) - len(self.taken.get(name, ())) for name, n in lengths.items()}
        if sum(missing.values()) > len(self.free) + len(left):
            raise RuntimeError(
                f"the cache is full: {sum(missing.values())} more pages of {self.page_size} rows are needed, "
                f"{len(self.free) + len(left)} are free. Step with fewer sequences, or give more total_num_pages"
            )
        self.free += left
        self.taken = {
            name: [*self.taken.get(name, ()), *(self.free.pop() for _ in range(n))] for name, n in missing.items()
        }
        self.sequences = lengths
        table = torch.full(self.page_table.shape, -1, dtype=torch.int32, device="cpu")
        for row, pages in zip(table, self.taken.values(), strict=False):
            row[: len(pages)] = torch.tensor(pages, dtype=torch.int32, device="cpu")
        self.page_table.copy_(table)

    def print_cache(self) -> None:
        """Logs it, at the debug level."""
        logging.getLogger(__name__).debug("%d of %d pages are free; %s", len(self.free), self.pages, self.taken)


class InferenceParams:
    """A cache of keys and values for `DotProductAttention`, and which sequences the next step has.

        params = InferenceParams(64, 8192, h_k, d, torch.bfloat16, is_paged=True, page_size=64)
        while sequences:
            params.pre_step({name: how many tokens it has in this step, …})
            for layer in layers:
                core(q, k, v, inference_params=params)  # q, k and v of these tokens

    `pre_step` names the sequences of a step, in the order of the batch. New names enter, names that are missing leave
    and free their pages. A sequence may have any number of tokens: a prompt, a chunk of one, a single token. Each
    layer's call then appends its new keys and values to those of the sequences, and attends to all of them. Tensors of
    the state keep their addresses, so that a CUDA graph of the calls can be replayed after another `pre_step`.

    Args:
        max_batch_size: the most sequences of a step.
        max_sequence_length: the most tokens of a sequence.
        num_heads_kv: h_k.
        head_dim_k: d.
        dtype: of queries, keys and values.
        head_dim_v: d_v; d when None.
        is_paged: sequences take pages of page_size rows as they grow; else each has room for max_sequence_length.
        total_num_pages: for all sequences; `max_batch_size * max_sequence_length / page_size` when None. Fewer will do.
        page_size: rows of a page; divides max_sequence_length.
        max_ctx_len: not read.
        qkv_format: of a step's tensors, until a call says it.
        custom_cache_manager: refused.
        device: of the caches; the current CUDA device, or the CPU where there is none.

    Attributes:
        batch_size: how many sequences the step has.
        sequences: their lengths after it.
        sequences_pre_step: their lengths before it.
        cu_seqlens_q: (max_batch_size + 1,) int32, sums of the step's tokens.
        cu_seqlens_kv: sums of the lengths after it.
        cache_manager: a `CacheManager`.

    Raises:
        WrongCall: numbers that do not fit.
        Unsupported: custom_cache_manager.

    >>> from saccade.compat.transformer_engine import DotProductAttention
    >>> params = InferenceParams(2, 64, 2, 16, torch.float32, is_paged=True, page_size=8, device="cpu")
    >>> core = DotProductAttention(4, 16, 2, qkv_format="bshd", attn_mask_type="padding_causal", layer_number=1)
    >>> for step in ({"a": 5, "b": 3}, {"a": 1, "b": 1}, {"b": 1, "c": 9}):
    ...     params.pre_step(step)
    ...     q, k, v = (torch.randn(2, max(step.values()), h, 16) for h in (4, 2, 2))
    ...     print(tuple(core(q, k, v, inference_params=params).shape), dict(params.sequences))
    (2, 5, 64) {'a': 5, 'b': 3}
    (2, 1, 64) {'a': 6, 'b': 4}
    (2, 9, 64) {'b': 5, 'c': 9}
    """

    def __init__(
        self, max_batch_size: int, max_sequence_length: int, num_heads_kv: int | None = None,
        head_dim_k: int | None = None, dtype: torch.dtype | None = None, head_dim_v: int | None = None,
        is_paged: bool = False, total_num_pages: int | None = None, page_size: int | None = None,
        max_ctx_len: int | None = None, qkv_format: str = "bshd", custom_cache_manager: Any = None, *,
        device: torch.device | str | None = None,
    ) -> None:  # fmt: skip
        if custom_cache_manager is not None:
            raise Unsupported("InferenceParams: omit custom_cache_manager: the caches are saccade's own")
        if num_heads_kv is None or head_dim_k is None or not isinstance(dtype, torch.dtype):
            raise WrongCall("InferenceParams needs num_heads_kv, head_dim_k and dtype")
        arguments.flags(is_paged=is_paged)
        for name, n in (
            *(("max_batch_size", max_batch_size), ("max_sequence_length", max_sequence_length)),
            *(("num_heads_kv", num_heads_kv), ("head_dim_k", head_dim_k), ("head_dim_v", head_dim_v)),
            *(("total_num_pages", total_num_pages), ("page_size", page_size)),
        ):
            if n is not None or name.startswith("max"):
                arguments.integer(name, n, 1)
        device = arguments.device_of(device)
        if is_paged and (page_size is None or max_sequence_length % page_size):
            raise WrongCall(
                f"a paged cache needs a page_size that divides max_sequence_length={max_sequence_length}, "
                f"got {page_size}"
            )
        self.max_batch_size, self.max_sequence_length = max_batch_size, max_sequence_length
        self.num_heads_kv, self.head_dim_k, self.dtype = num_heads_kv, head_dim_k, dtype
        self.head_dim_v = head_dim_k if head_dim_v is None else head_dim_v
        # Without pages, a page holds a whole sequence.
        self.is_paged, self.page_size = is_paged, page_size if is_paged and page_size else max_sequence_length
        width = max_sequence_length // self.page_size
        given = total_num_pages if is_paged else None
        self.total_num_pages = max_batch_size * width if given is None else given
        self.input_qkv_format, self.batch_size = qkv_format, 0
        self.sequences, self.sequences_pre_step = Sequences(), Sequences()
        if device is None:
            device = "cuda" if torch.cuda.is_available() else "cpu"
        self.device = torch.empty(0, device=device).device  # with its index

        def zeros(n: int) -> Tensor:
            return torch.zeros(n, dtype=torch.int32, device=self.device)

        self.cu_seqlens_q, self.cu_seqlens_kv = zeros(max_batch_size + 1), zeros(max_batch_size + 1)
        self.pre_step_seqlens, self.post_step_seqlens = zeros(max_batch_size), zeros(max_batch_size)
        self.cache_manager = CacheManager(
            self.total_num_pages, self.page_size, zeros(max_batch_size * width).view(-1, width)
        )

    @property
    def output_qkv_format(self) -> str:
        """TransformerEngine's word for the queries of a step with a cache."""
        return "bshd" if self.input_qkv_format == "bshd" else f"{self.input_qkv_format}_2bshd"

    def reset(self) -> None:
        """No sequences; layers keep their memory."""
        self.cache_manager.reset()
        self._follow(Sequences())

    def allocate_memory(self, layer_number: int) -> None:
        """Makes a layer's caches, as the layer's first call does too. Nothing is read before it is written."""
        sizes = self.total_num_pages, self.page_size, self.num_heads_kv
        self.cache_manager.cache[layer_number] = (
            torch.empty(*sizes, self.head_dim_k, dtype=self.dtype, device=self.device),
            torch.empty(*sizes, self.head_dim_v, dtype=self.dtype, device=self.device),
        )

    def caches(self, layer_number: int) -> tuple[Tensor, Tensor]:
        """k and v of a layer, (pages, page_size, h_k, d); without pages a page is as long as a sequence may be."""
        if layer_number not in self.cache_manager.cache:
            self.allocate_memory(layer_number)
        return self.cache_manager.cache[layer_number]

    def pre_step(self, step_dict: Mapping[Any, int]) -> None:
        """Sets which sequences the step has, and how many tokens of each, at least 1.

        Raises:
            WrongCall: too many sequences, or too long ones.
            RuntimeError: too few pages. Neither changes anything.
        """
        if not isinstance(step_dict, Mapping):
            raise TypeError(f"pre_step takes lengths by name, a dict, got {arguments.describe(step_dict)}")
        for name, n in step_dict.items():
            arguments.integer(f"the length of {name!r}", n, -(1 << 62))
        if len(step_dict) > self.max_batch_size:
            raise WrongCall(f"a step has up to max_batch_size={self.max_batch_size} sequences, got {len(step_dict)}")
        lengths = Sequences((name, self.sequences.get(name, 0) + int(n)) for name, n in step_dict.items())
        for name, n in step_dict.items():
            if n < 1 or lengths[name] > self.max_sequence_length:
                raise WrongCall(
                    "a sequence has at least one token in a step, and at most "
                    f"max_sequence_length={self.max_sequence_length} in all; {name!r} has {n} and {lengths[name]}"
                )
        self.cache_manager.take(lengths)
        self._follow(lengths)

    def _follow(self, lengths: Sequences) -> None:
        """Sets the state of a step after which sequences have these lengths."""
        before = Sequences((name, self.sequences.get(name, 0)) for name in lengths)
        self.sequences, self.sequences_pre_step, self.batch_size = lengths, before, len(lengths)
        none = [0] * (self.max_batch_size - len(lengths))
        vectors = torch.tensor(
            [[0, *x, *none] for x in (before.values(), lengths.values(), self.step_lengths)], device="cpu"
        )
        self.pre_step_seqlens.copy_(vectors[0, 1:])
        self.post_step_seqlens.copy_(vectors[1, 1:])
        self.cu_seqlens_kv.copy_(vectors[1].cumsum(0))
        self.cu_seqlens_q.copy_(vectors[2].cumsum(0))

    @property
    def step_lengths(self) -> list[int]:
        """Tokens of each sequence in this step."""
        return [n - self.sequences_pre_step[name] for name, n in self.sequences.items()]

    def get_seqlens_pre_step(self) -> Tensor:
        """The lengths before the step, (max_batch_size,) int32, 0 where there is no sequence. They are the rotary
        positions of its first tokens."""
        return self.pre_step_seqlens

    def step(
        self, layer_number: int, new_k: Tensor, new_v: Tensor, qkv_format: str
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, int, str]:
        """Writes a layer's new keys and values, as `DotProductAttention` does by itself.

        Args:
            layer_number: the layer.
            new_k: (b, s, h_k, d), (s, b, h_k, d) or (t, h_k, d), as qkv_format says.
            new_v: with d_v.
            qkv_format: "bshd", "sbhd" or "thd".

        Returns:
            k and v, the caches, or copies (b, max_sequence_length, h_k, d) in the order of the batch if there are no
            pages; cu_seqlens_q, cu_seqlens_kv, max_sequence_length and the format of queries with a cache.
        """
        CacheStep(self, layer_number, qkv_format, new_k.shape).append(new_k, new_v)
        caches = self.caches(layer_number) if self.is_paged else self.convert_paged_to_nonpaged(layer_number)
        return *caches, self.cu_seqlens_q, self.cu_seqlens_kv, self.max_sequence_length, self.output_qkv_format

    def convert_paged_to_nonpaged(self, layer_number: int) -> tuple[Tensor, Tensor]:
        """Copies of k and v, (batch_size, max_sequence_length, h_k, d); rows after a sequence's last hold anything."""
        table = self.cache_manager.page_table[: self.batch_size].long().clamp(min=0)
        k, v = (x[table].flatten(1, 2) for x in self.caches(layer_number))
        return k, v

    def __repr__(self) -> str:
        pages = f"{self.total_num_pages} pages of {self.page_size}" if self.is_paged else "no pages"
        return (
            f"InferenceParams({self.batch_size} of {self.max_batch_size} sequences of up to "
            f"{self.max_sequence_length} tokens, {pages}, {self.num_heads_kv} heads of {self.head_dim_k} and "
            f"{self.head_dim_v}, {self.dtype})"
        )


class CacheStep:
    """The rows of one call, (b, s, h, d), (s, b, h, d) or (t, h, d), and the pages that they belong to.

    A batch whose rows are all in use is one of the layout's own. Any other is put end to end, with its padding after
    the last sequence, where results are zero. The device finds which rows those are, so that a CUDA graph may be
    replayed after another `pre_step`.
    """

    def __init__(
        self, params: InferenceParams, layer: int | None, order: str, shape: torch.Size,
        sequences: int | None = None, num_splits: int | None = None,
    ) -> None:  # fmt: skip
        if not params.batch_size:
            raise WrongCall("inference_params has no sequences: call pre_step before the layers' calls")
        if layer is None:
            raise WrongCall("a cache belongs to a layer: give layer_number to DotProductAttention")
        if order not in FORMATS or len(shape) != len(order):
            raise WrongCall(f"qkv_format is one of {', '.join(FORMATS)}, got {order!r} with {tuple(shape)}")
        self.params, self.layer, self.order = params, layer, order
        self.lengths = params.step_lengths
        captured = capturing()  # into a graph, which may see other lengths
        if order == "thd":
            most = params.max_batch_size if captured else params.batch_size
            self.b, self.s = most if sequences is None else sequences, None
            fits = sum(self.lengths) <= shape[0]
        else:
            self.b, self.s = shape[order.index("b")], shape[order.index("s")]
            fits = max(self.lengths) <= self.s
        if not fits or not params.batch_size <= self.b <= params.max_batch_size:
            raise WrongCall(
                f"a step of {params.batch_size} sequences with up to {max(self.lengths)} tokens, altogether "
                f"{sum(self.lengths)}, and room for {params.max_batch_size} sequences does not fit into {self.b} "
                f"sequences in {order}, {tuple(shape)}"
            )
        # A single row is in use, or its sequence has no keys and no pages.
        whole = self.s == 1 or (not captured and self.lengths == [self.s] * self.b)
        table, offsets = params.cache_manager.page_table[: self.b], params.cu_seqlens_q[: self.b + 1]
        flat = None if whole else offsets
        self.before = Paged(table, params.pre_step_seqlens[: self.b], flat)
        self.layout = Paged(table, params.post_step_seqlens[: self.b], flat, num_splits)
        self.row_indices = None if whole or self.s is None else self._positions(offsets, self.s)

    def _positions(self, offsets: Tensor, s: int) -> Tensor:
        """(rows,): where each one is end to end; padding comes last."""
        column = torch.arange(s, device=offsets.device)
        padding = column >= offsets.diff()[:, None]
        after = offsets[-1] - 1 + padding.flatten().cumsum(0).view_as(padding)
        row_indices = torch.where(padding, after, offsets[:-1, None] + column)
        return (row_indices if self.order == "bshd" else row_indices.T).flatten()

    def append(self, k: Tensor, v: Tensor) -> None:
        """Writes new keys and values after those of the sequences."""
        self.params.input_qkv_format = self.order
        append_kv(*self.params.caches(self.layer), self.before, self.to_rows(k), self.to_rows(v))

    def to_rows(self, x: Tensor) -> Tensor:
        """The call's rows as the layouts take them."""
        if self.row_indices is None:
            return x.transpose(0, 1) if self.order == "sbhd" else x
        x = x.flatten(0, 1)
        return torch.empty_like(x).index_copy_(0, self.row_indices, x)

    def from_rows(self, out: Tensor) -> Tensor:
        """The rows of a result as the call's were."""
        if self.row_indices is None or self.s is None:
            return out.transpose(0, 1) if self.order == "sbhd" else out
        sizes = (self.b, self.s) if self.order == "bshd" else (self.s, self.b)
        return out[self.row_indices].unflatten(0, sizes)


def cached_visibility(call: CallArguments, layer: int | None) -> tuple[CacheStep, Visibility]:
    """What a call with inference_params writes and sees. Raises WrongCall for masks, lengths and shapes that do not fit
    one another, and Unsupported for windows that are aligned at the top left."""
    params, kind, (q, k, _) = call.inference_params, call.attn_mask_type, call.operands
    if not isinstance(params, InferenceParams):
        raise WrongCall(
            "inference_params must be a saccade.compat.transformer_engine.InferenceParams, got "
            f"{type(params).__module__}.{type(params).__qualname__}"
        )
    if kind not in MASK_TYPES:
        raise WrongCall(f"inference_params needs an attn_mask_type of {', '.join(MASK_TYPES)}, got {kind!r}")
    aligned = call.window_size or call.core_attention_bias_type == "alibi"
    if kind == "padding" and call.bottom_right_diagonal is False and aligned:
        raise Unsupported(
            "DotProductAttention: omit bottom_right_diagonal=False with inference_params: with a cache, windows and "
            "ALiBi are aligned at the bottom right"
        )
    for name in ("q", "kv"):
        padded = getattr(call, f"cu_seqlens_{name}_padded")
        if padded is not None and padded is not getattr(call, f"cu_seqlens_{name}"):
            raise Unsupported(
                f"DotProductAttention: cu_seqlens_{name}_padded with inference_params: in thd the sequences of a step "
                "must have no gaps; put unused tokens after the last one, or give bshd"
            )
    if q.shape[:-2] != k.shape[:-2]:
        raise WrongCall(
            f"queries and new keys of a step must be the same tokens, got {tuple(q.shape)}, {tuple(k.shape)}"
        )
    sequences = None if call.cu_seqlens_q is None else call.cu_seqlens_q.shape[0] - 1
    step = CacheStep(params, layer, call.order, q.shape, sequences, call.num_splits or None)
    left, right = window_bounds(kind, call.window_size)
    mask = None if left is None and right is None else window(left, right)
    longest = step.s or call.max_seqlen_q or max(step.lengths)
    shape = step.b, longest, params.max_sequence_length
    return step, Visibility(step.layout, mask, None, None, step.before.seqused_k, right == 0, True, shape)
