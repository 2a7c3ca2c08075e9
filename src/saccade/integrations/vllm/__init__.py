"""vLLM's attention by saccade: the backend `CUSTOM`.

    vllm serve MODEL --attention-backend CUSTOM

vLLM finds it by the entry point `vllm.general_plugins`, in each of its processes. Nothing imports vLLM before that.

Source: https://docs.vllm.ai/en/latest/design/plugin_system/ (vLLM 0.33.0).
"""

from __future__ import annotations

import logging
from importlib import import_module

from saccade.integrations.engine_layers import registering

__all__ = ["BACKEND", "TESTED", "plugin", "register"]

TESTED = ("0.33.0",)
"""Releases of vLLM that the tests ran with."""
BACKEND = "saccade.integrations.vllm.backend.VLLMBackend"
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
