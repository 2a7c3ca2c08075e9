"""Measured tile configs: `<gpu>.json` beside this file, or that of a GPU with the same multiprocessors, and the user's
own from `saccade tune`, which come first.

Each row maps a key, such as `triton forward bf16 d128/128 full`, to the fields of a backend's Config and to the
measurement that chose it.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
import warnings
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import Any

import torch

MEASURED = {"h100": "h200", "h800": "h200", "h20": "h200", "gh200": "h200"}
"""GPUs whose multiprocessors are those of one that was measured: its table is theirs."""


@lru_cache
def gpu_name(device: int) -> str:
    """`NVIDIA H200` -> `h200`: the name of the table."""
    words = torch.cuda.get_device_name(device).lower().replace("nvidia", "").split()
    return re.sub(r"[^a-z0-9]+", "_", words[0] if words else "unknown")


def gpu_of(device: torch.device) -> str:
    """That of a device; a CPU, on which Triton's interpreter runs, has none."""
    return gpu_name(device.index) if device.type == "cuda" else device.type


@lru_cache
def table(gpu: str) -> dict[str, dict[str, int]]:
    """key -> Config fields, for one GPU; the user's measurements on it override the shipped ones."""
    shipped = resources.files(__name__) / f"{MEASURED.get(gpu, gpu)}.json"
    rows = json.loads(shipped.read_text()) if shipped.is_file() else {}
    rows |= _user_rows(gpu)
    return {key: row["config"] for key, row in rows.items()}


def names() -> list[str]:
    """The GPUs that have a table, shipped or the user's."""
    files = [*resources.files(__name__).iterdir(), *user_file("").parent.glob("*.json")]
    return sorted({file.name.removesuffix(".json") for file in files if file.name.endswith(".json")})


def user_file(gpu: str) -> Path:
    """Where `saccade tune` keeps what it measured: the user's cache folder."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "saccade" / f"{gpu}.json"


def save(gpu: str, rows: dict[str, Any]) -> Path:
    """Adds rows to the user's table, atomically, readable by its owner alone."""
    path = user_file(gpu)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as made:
        json.dump(_user_rows(gpu) | rows, made, indent=1, sort_keys=True)
        made.flush()
        os.fsync(made.fileno())
    os.replace(made.name, path)
    table.cache_clear()
    return path


def _user_rows(gpu: str) -> dict[str, Any]:
    """What the user's file holds; a file that is missing, damaged or another user's counts as empty."""
    path = user_file(gpu)
    try:
        if hasattr(os, "getuid") and path.stat().st_uid != os.getuid():
            raise PermissionError("it belongs to another user")
        rows = json.loads(path.read_text())
        for key, row in rows.items():
            if not isinstance(key, str) or not all(type(value) is int for value in row["config"].values()):
                raise ValueError(f"{key!r} is not a row of tile sizes")
        return rows
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as problem:
        warnings.warn(f"ignoring the tuned configs in {path}: {problem}", stacklevel=2)
        return {}
