"""vLLM's attention by saccade: the backend `CUSTOM`.

    vllm serve MODEL --attention-backend CUSTOM

vLLM finds it by the entry point `vllm.general_plugins`, in each of its processes. Nothing imports vLLM before that.
For models of latent attention (MLA) the same name stands for other classes, and prompts have a second one:

    vllm serve MODEL --attention-backend CUSTOM --attention-config.mla_prefill_backend CUSTOM

Source: https://docs.vllm.ai/en/latest/design/plugin_system/ (vLLM 0.33.0).
"""

from __future__ import annotations

import logging
from importlib import import_module
from typing import Any

from saccade.integrations.engine_layers import registering

__all__ = ["BACKEND", "TESTED", "plugin", "register"]

TESTED = ("0.33.0",)
"""Releases of vLLM that the tests ran with."""
BACKEND = "saccade.integrations.vllm.Backend"
"""The class that vLLM finds under this name is `backend.VLLMBackend`; for a model of latents `mla.MLABackend`, or
`sparse_mla.SparseMLABackend` if the model has an indexer."""
PREFILL = "saccade.integrations.vllm.mla.MLAPrefill"
_log = logging.getLogger(__name__)


def register() -> None:
    """From now on vLLM's attention backend `CUSTOM` is saccade, in this process, in the place of any other.

    The entry point does the same in every process of vLLM, so only a program that replaces another `CUSTOM` calls it.
    Any number of calls are one. A release of vLLM that is none of `TESTED` is noted in the log.

    Raises:
        ImportError: no vLLM, or one without a registry of attention backends.
    """
    with registering("vllm", "vLLM", TESTED, _log):
        registry = import_module("vllm.v1.attention.backends.registry")
        registry.register_backend(registry.AttentionBackendEnum.CUSTOM, BACKEND)
        prompts = import_module("vllm.v1.attention.backends.mla.prefill.registry")
        prompts.register_mla_prefill_backend(prompts.MLAPrefillBackendEnum.CUSTOM, PREFILL)


def __getattr__(name: str) -> Any:
    """`Backend`, for the model that vLLM is about to make."""
    if name != "Backend":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    config = import_module("vllm.config").get_current_vllm_config_or_none()
    model = None if config is None else config.model_config
    if model is None or not model.use_mla:
        return import_module("saccade.integrations.vllm.backend").VLLMBackend
    if hasattr(model.hf_text_config, "index_topk"):
        return import_module("saccade.integrations.vllm.sparse_mla").SparseMLABackend
    return import_module("saccade.integrations.vllm.mla").MLABackend


def plugin() -> None:
    """`register`, as the entry point calls it: it never fails, and leaves a `CUSTOM` that is another's."""
    try:
        registry = import_module("vllm.v1.attention.backends.registry")
        custom = registry.AttentionBackendEnum.CUSTOM
        if custom.is_overridden() and custom.get_path() != BACKEND:
            _log.warning(
                "vLLM's attention backend CUSTOM is %s: call saccade.integrations.vllm.register() to have saccade's",
                custom.get_path(),
            )
            return
        register()
    except Exception as error:  # a server that uses another backend starts all the same
        _log.warning("saccade is no attention backend of this vLLM: %s", error)
