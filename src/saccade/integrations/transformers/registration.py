"""Saccade's names among the attention implementations of transformers."""

from __future__ import annotations

import inspect
from importlib import import_module
from typing import Any

from saccade.integrations.transformers.attention import attention_forward
from saccade.integrations.transformers.mask import attention_mask_of

NAME = "saccade"
FOR_BATCHES = "saccade_flash2"
"""The name for continuous batching, which takes names with "flash" in them alone, and block tables with "flash…2"."""


def register() -> None:
    """Makes `attn_implementation="saccade"` known to transformers: every layer computes
    `out = dropout(softmax(mask(scale q k^T))) v` here, forward and backward.

    Masks keep their structure: padding, windows, chunks, packed sequences and caches are intervals of keys, and no
    tensor of rows by keys is made. `generate_batch` of transformers 5 needs the name "saccade_flash2". A second call
    changes nothing.

    Raises:
        ImportError: transformers is missing, or is older than 4.57.
        RuntimeError: a version whose loader of flash attention is unknown, for "saccade_flash2".
    """
    try:
        transformers: Any = import_module("transformers")
        interfaces = transformers.AttentionInterface, transformers.AttentionMaskInterface
    except (ImportError, AttributeError) as error:
        raise ImportError(f"saccade.integrations.transformers needs transformers 4.57 or newer: {error}") from error
    for name in (NAME, FOR_BATCHES):
        for interface, function in zip(interfaces, (attention_forward, attention_mask_of), strict=True):
            interface.register(name, function)
    _announce()


def _announce() -> None:
    """Transformers 5 loads whatever has "flash" in its name from a package or a hub; ours is loaded already."""
    loader: Any = import_module("transformers.modeling_flash_attention_utils")
    load: Any = getattr(loader, "_lazy_imports", None)
    if getattr(load, "knows_saccade", False):
        return
    if load is None or next(iter(inspect.signature(load).parameters), None) != "implementation":
        raise RuntimeError(f"cannot announce {FOR_BATCHES!r}: transformers' _lazy_imports is not as expected")

    count = 5 if hasattr(loader, "_flash_with_kvcache_fn") else 4

    def lazy_imports(implementation: Any, *arguments: Any, **options: Any) -> Any:
        if implementation == FOR_BATCHES:
            # For attention, the third with block tables; and for padding.
            return (*[attention_forward] * (count - 2), None, None)
        return load(implementation, *arguments, **options)

    lazy_imports.knows_saccade = True  # pyright: ignore[reportFunctionMemberAccess]
    loader._lazy_imports = lazy_imports
