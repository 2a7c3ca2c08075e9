"""The machine, versions and date of a run: the fields that its rows share."""

from __future__ import annotations

import json
import re
import secrets
import subprocess
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from saccade.testing.timing import device_name
from saccade.util import hardware


@dataclass(frozen=True)
class Run:
    """One interleaved run on one machine."""

    run: str
    """Random, the same in all rows of the run."""
    date: str
    """When it started: ISO 8601, UTC, seconds."""
    commit: str
    """Of saccade's checkout, with `+` when files differ from it."""
    gpu: str
    """The name of the GPU, or of the processor."""
    torch: str
    triton: str

    @staticmethod
    def now(device: torch.device, commit: str | None = None) -> Run:
        return Run(
            run=secrets.token_hex(4),
            date=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            commit=commit or _commit(),
            gpu=device_name(device),
            torch=str(torch.__version__),
            triton=hardware.triton_version() or "none",
        )

    def append(self, path: Path | None, row: dict[str, Any]) -> None:
        """Adds a row, with these fields, to a file of rows; nothing where there is none."""
        if path is not None:
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(vars(self) | row) + "\n")


def folder(device: torch.device) -> str:
    """The device's folder under `benchmarks/results`: `h200`, `rtx_4090`, `cpu`."""
    if device.type != "cuda":
        return device.type
    words = torch.cuda.get_device_name(device).lower().replace("nvidia", "").replace("geforce", "")
    return re.sub(r"[^a-z0-9]+", "_", words).strip("_") or "gpu"


def _commit() -> str:
    """The commit of the checkout that holds this file; `unknown` for an installed wheel."""

    def git(*words: str) -> str:
        command = ["git", "-C", str(Path(__file__).parent), *words]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no", "--", ".")
        return git("rev-parse", "--short=12", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.SubprocessError):
        return "unknown"
