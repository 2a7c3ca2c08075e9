"""The command line, `saccade` or `python -m saccade`: commands, and the application in `app`."""

from __future__ import annotations

import io
import sys


def main() -> None:
    """The entry point; without the extra `[cli]` it says what to install."""
    try:
        from saccade.cli.app import app
    except ModuleNotFoundError as missing:
        if missing.name not in ("typer", "rich"):
            raise
        sys.exit(f"saccade's command line needs {missing.name}: pip install 'saccade[cli]'")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # terminals that have no µ
    app()
