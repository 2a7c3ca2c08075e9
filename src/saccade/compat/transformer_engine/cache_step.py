"""One layer's call with a cache: what is written, and how its rows lie for a paged layout."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from saccade.compat.transformer_engine.call import FORMATS, WrongCall
from saccade.kept_memory import capturing
from saccade.kv_cache import append_kv
from saccade.layouts import Paged

if TYPE_CHECKING:
    from saccade.compat.transformer_engine.inference import InferenceParams


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
        self.places = None if whole or self.s is None else self._places(offsets, self.s)

    def _places(self, offsets: Tensor, s: int) -> Tensor:
        """(rows,): where each one is end to end; padding comes last."""
        column = torch.arange(s, device=offsets.device)
        padding = column >= offsets.diff()[:, None]
        after = offsets[-1] - 1 + padding.flatten().cumsum(0).view_as(padding)
        places = torch.where(padding, after, offsets[:-1, None] + column)
        return (places if self.order == "bshd" else places.T).flatten()

    def append(self, k: Tensor, v: Tensor) -> None:
        """Writes new keys and values after those of the sequences."""
        self.params.input_qkv_format = self.order
        append_kv(*self.params.caches(self.layer), self.before, self.to_rows(k), self.to_rows(v))

    def to_rows(self, x: Tensor) -> Tensor:
        """The call's rows as the layouts take them."""
        if self.places is None:
            return x.transpose(0, 1) if self.order == "sbhd" else x
        x = x.flatten(0, 1)
        return torch.empty_like(x).index_copy_(0, self.places, x)

    def from_rows(self, out: Tensor) -> Tensor:
        """The rows of a result as the call's were."""
        if self.places is None or self.s is None:
            return out.transpose(0, 1) if self.order == "sbhd" else out
        sizes = (self.b, self.s) if self.order == "bshd" else (self.s, self.b)
        return out[self.places].unflatten(0, sizes)
