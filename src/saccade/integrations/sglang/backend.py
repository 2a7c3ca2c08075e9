"""SGLang's attention backend over the pages of its pool: see `saccade.integrations.sglang`. Importing it imports
SGLang."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from saccade.api import attention
from saccade.integrations.engine_layers import differences, refuse_differences, score_mod, visible
from saccade.integrations.sglang import TESTED
from saccade.layouts import Paged
from saccade.util.arguments import Unsupported

_base = import_module("sglang.srt.layers.attention.base_attn_backend")
_pools = import_module("sglang.srt.mem_cache.memory_pool")
_context = import_module("sglang.srt.runtime_context")

MODES = ("DECODE", "EXTEND", "MIXED", "SPLIT_PREFILL", "IDLE")
"""What a batch may be: tokens, prompts and chunks of them, or both."""


class SGLangBackend(_base.AttentionBackend):
    """`out = softmax(mask(score_mod(scale q k^T)), with sink) v` of all layers, keys and values from SGLang's pool.

    Windows, soft caps, sinks, other head dims for values, layers that see all keys, the LSE, CUDA graphs of tokens and
    of prompts, and deterministic inference, by `num_splits=1`; any `--page-size`. The host waits for no device and does
    the same work for one request and for many.

    Args:
        model_runner: SGLang's ModelRunner.

    Raises:
        Unsupported: MLA, FP8 and other caches than the model's dtype, models with encoders or chunked attention, pools
            of their own for windows, unified pools, context parallelism, speculative decoding; an argument of a layer
            that is not known here.
    """

    needs_cpu_seq_lens = False

    def __init__(self, model_runner: Any) -> None:
        super().__init__()
        if obstacles := [text for wrong, text in _obstacles(model_runner) if wrong]:
            raise Unsupported(f"saccade's SGLang backend does not run {'; '.join(obstacles)}")
        self.device, self.page_size = model_runner.device, model_runner.page_size
        self.kv_cache_dtype = model_runner.kv_cache_dtype
        self.token_to_kv_pool = model_runner.token_to_kv_pool
        self.context_len = model_runner.model_config.context_len
        self.page_starts: Tensor = model_runner.req_to_token_pool.req_to_token[:, :: self.page_size]
        """(requests, pages) int32: the slot of each page's first row."""
        exact = _context.get_exec().deterministic.enable_deterministic_inference
        self.num_splits = 1 if exact else None
        self.forward_metadata: Paged | None = None
        self.tokens: _Buffers | None = None
        self.prompts: dict[int, _Buffers] = {}
        self.meanings: dict[Any, dict[str, Any]] = {}

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Reads `batch_size`, `req_pool_indices`, `seq_lens`, `seq_lens_cpu` where it is there, and of prompts
        `extend_seq_lens`."""
        _check_mode(forward_batch)
        b, on_host = forward_batch.batch_size, forward_batch.seq_lens_cpu
        longest = self.context_len if on_host is None or not on_host.numel() else int(on_host.max())
        pages = -(-longest // self.page_size)
        rows = forward_batch.forward_mode.is_decode_or_idle()
        buffers = _Buffers(b, self.page_starts[:, :pages], self.device)
        buffers.fill(forward_batch, self.page_size, not rows)
        self.forward_metadata = buffers.layout(b, self.num_splits, not rows)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        self.tokens, self.prompts = _Buffers(max_bs, self.page_starts, self.device), {}

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Fills the memory that a graph reads, before its capture and before each replay."""
        _check_mode(forward_batch)
        b, rows = forward_batch.batch_size, forward_batch.forward_mode.is_decode_or_idle()
        buffers = self.tokens if rows else self.prompts.get(b)
        if buffers is None and in_capture and not rows:
            buffers = self.prompts[b] = _Buffers(b, self.page_starts, self.device)
        if buffers is None or len(buffers.used) < b:
            room = 0 if buffers is None else len(buffers.used)
            raise ValueError(f"no CUDA graph was prepared for {b} requests, but for up to {room}")
        buffers.fill(forward_batch, self.page_size, not rows)
        self.forward_metadata = buffers.layout(b, self.num_splits, not rows)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """Requests that only fill up a batch see one key, of the slot that SGLang keeps for them."""
        return 1

    def forward_decode(
        self, q: Tensor, k: Tensor | None, v: Tensor | None, layer: Any, forward_batch: Any,
        save_kv_cache: bool = True, **kwargs: Any,
    ) -> Any:  # fmt: skip
        """One row for each request; see `forward_extend`."""
        return self._run(q, k, v, layer, forward_batch, save_kv_cache, kwargs)

    def forward_extend(
        self, q: Tensor, k: Tensor | None, v: Tensor | None, layer: Any, forward_batch: Any,
        save_kv_cache: bool = True, **kwargs: Any,
    ) -> Any:  # fmt: skip
        """Requests of any numbers of rows, end to end, then padding, whose result is zero.

        Args:
            q: (tokens, h_q d), or (tokens, h_q, d).
            k: (tokens, h_k, d), written to the pool first; None where another layer has written them. v likewise.
            kwargs: `sinks` (h_q), and `return_lse`.

        Returns:
            (tokens, h_q d_v); with return_lse (tokens, h_q, d_v) and the LSE, (tokens, h_q).
        """
        return self._run(q, k, v, layer, forward_batch, save_kv_cache, kwargs)

    def _run(
        self, q: Tensor, k: Tensor | None, v: Tensor | None, layer: Any, forward_batch: Any, save: bool,
        extra: dict[str, Any],
    ) -> Any:  # fmt: skip
        sinks, with_lse = extra.pop("sinks", None), bool(extra.pop("return_lse", False))
        if unknown := [name for name, value in extra.items() if value is not None]:
            raise Unsupported(f"saccade's SGLang backend does not know {', '.join(unknown)} of layer {layer.layer_id}")
        meaning = self.meanings.get(layer)
        if meaning is None:
            meaning = self.meanings[layer] = _meaning(layer)
        if k is not None and save:
            where = _pools.KVWriteLoc.for_layer(forward_batch, layer)
            self.token_to_kv_pool.set_kv_buffer(layer, where, k, v, layer.k_scale, layer.v_scale)
        keys, values = (self._pages(x) for x in self.token_to_kv_pool.get_kv_buffer(layer.layer_id))
        layout = self.forward_metadata
        assert layout is not None
        rows = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
        tokens = layout.cu_seqlens_q is None
        if tokens:
            rows = rows.unsqueeze(1)
        found = attention(rows, keys, values, layout=layout, sink=sinks, return_lse=with_lse, **meaning)
        if isinstance(found, Tensor):
            return found.flatten(-2).flatten(0, -2)
        out, lse = found.out, found.lse
        assert lse is not None
        return (out.squeeze(1), lse.squeeze(-1)) if tokens else (out, lse.T.contiguous())

    def _pages(self, x: Tensor) -> Tensor:
        """(pages, page_size, h, d) of a pool's (slots, h, d), or (pages, h, page_size, d)."""
        return x.unflatten(0, (-1, self.page_size)) if x.dim() == 3 else x.transpose(1, 2)


class _Buffers:
    """What a batch's layout is made of, at addresses that stay: a graph reads it in each replay."""

    def __init__(self, requests: int, page_starts: Tensor, device: Any) -> None:
        self.page_starts = page_starts
        self.table = torch.zeros(requests, page_starts.shape[1], dtype=torch.int32, device=device)
        self.used = torch.zeros(requests, dtype=torch.int32, device=device)
        self.offsets = torch.zeros(requests + 1, dtype=torch.int32, device=device)

    def fill(self, batch: Any, page_size: int, prompts: bool) -> None:
        """On the device alone; what is beyond a request's keys may be anything."""
        b = batch.batch_size
        table = self.table[:b]
        torch.index_select(self.page_starts, 0, batch.req_pool_indices[:b], out=table)
        if page_size > 1:
            table.floor_divide_(page_size)
        self.used[:b].copy_(batch.seq_lens[:b])
        if prompts:
            torch.cumsum(batch.extend_seq_lens[:b], 0, dtype=torch.int32, out=self.offsets[1 : b + 1])

    def layout(self, b: int, num_splits: int | None, prompts: bool) -> Paged:
        return Paged(self.table[:b], self.used[:b], self.offsets[: b + 1] if prompts else None, num_splits)


def _obstacles(runner: Any) -> list[tuple[bool, str]]:
    """What is wrong with a model or a server, by name, and whether it is there."""
    config, parallel, pool = runner.model_config, _context.get_parallel(), runner.token_to_kv_pool
    dtypes = f"a cache of {runner.kv_cache_dtype} for a model of {runner.dtype} (--kv-cache-dtype)"
    return [
        (bool(runner.use_mla_backend), "MLA"),
        (runner.kv_cache_dtype != runner.dtype, dtypes),
        (bool(config.is_encoder_decoder), "models with an encoder and a decoder"),
        (bool(config.is_local_attention_model), "chunked attention"),
        (getattr(pool, "swa_layer_nums", 0) > 0, "a pool of its own for windows (pass --disable-hybrid-swa-memory)"),
        (bool(runner.kv_index_translator.is_translating), "a unified pool (--enable-unified-memory)"),
        (parallel.attn_cp_size > 1 or bool(parallel.dcp_enabled), "context parallelism"),
        (_context.get_spec().speculative_algorithm is not None, "speculative decoding"),
    ]


def _check_mode(batch: Any) -> None:
    mode = batch.forward_mode.name
    if mode not in MODES or batch.spec_info is not None:
        raise Unsupported(f"saccade's SGLang backend runs {', '.join(MODES)}, without speculation, not {mode}")


def _meaning(layer: Any) -> dict[str, Any]:
    """Mask and score function of a layer. Raises Unsupported for a kind of layer that is not known here."""
    kind, left, capped = layer.attn_type.value, layer.sliding_window_size, bool(layer.logit_cap)
    wrong = {
        "cross attention": layer.is_cross_attention,
        "encoders' attention": kind == "encoder_only",
        f"pos_encoding_mode={layer.pos_encoding_mode!r}": layer.pos_encoding_mode != "NONE",
        f"logit_capping_method={layer.logit_capping_method!r}": capped and layer.logit_capping_method != "tanh",
        "xai_temperature_len": layer.xai_temperature_len > 0,
    }
    if any(wrong.values()):
        names = ", ".join(name for name, found in wrong.items() if found)
        raise Unsupported(f"saccade's SGLang backend does not run {names} of layer {layer.layer_id}")
    left, is_causal = None if left is None or left < 0 else left, kind == "decoder"
    mask, score = visible(left, is_causal), score_mod(layer.logit_cap, None, is_causal)
    return {"mask": mask, "score_mod": score, "scale": layer.scaling}


_DIFFERENCES = list(differences(SGLangBackend, _base.AttentionBackend))
refuse_differences("sglang", "SGLang", TESTED, _DIFFERENCES)
