"""SGLang's attention by saccade: the backend `saccade`.

    python -m sglang.launch_server --model-path MODEL --attention-backend saccade

SGLang finds it by the entry point `sglang.srt.plugins`, in each of its processes. Nothing imports SGLang before that.

Source: https://docs.sglang.io/advanced_features/attention_backend.html (SGLang 0.5.23).
"""

from __future__ import annotations

import logging
from importlib import import_module
from typing import Any

from saccade.integrations.engine_layers import registering

__all__ = ["NAME", "TESTED", "plugin", "register"]

NAME = "saccade"
TESTED = ("0.5.23",)
"""Releases of SGLang that the tests ran with."""
_CHOICES = (
    "ATTENTION_BACKEND_CHOICES", "DETERMINISTIC_ATTENTION_BACKEND_CHOICES",
    "RADIX_SUPPORTED_DETERMINISTIC_ATTENTION_BACKEND",
)  # fmt: skip
"""Lists of names that SGLang's arguments may have: of all, and of those for deterministic inference, with cached
prefixes too."""
_log = logging.getLogger(__name__)


def register() -> None:
    """From now on `--attention-backend saccade` is known to SGLang in this process.

    The entry point does the same in every process of SGLang. Any number of calls are one. A release of SGLang that is
    none of `TESTED` is noted in the log.

    Raises:
        ImportError: no SGLang, or one without a registry of attention backends.
    """
    with registering("sglang", "SGLang", TESTED, _log):
        registry = import_module("sglang.srt.layers.attention.attention_registry")
        choices = import_module("sglang.srt.arg_groups.choices")
        for name in _CHOICES:
            known = getattr(choices, name)
            known.extend(word for word in (NAME,) if word not in known)
        registry.register_attention_backend(NAME)(_backend)


def plugin() -> None:
    """`register`, as the entry point calls it: it never fails."""
    try:
        register()
    except Exception as error:  # a server that uses another backend starts all the same
        _log.warning("saccade is no attention backend of this SGLang: %s", error)


def _backend(runner: Any) -> Any:
    """The backend of a ModelRunner: SGLang calls this when it has chosen."""
    return import_module("saccade.integrations.sglang.backend").SGLangBackend(runner)
