"""The command line: `saccade` and `python -m saccade`. One module for each command, the application in `app`."""

from __future__ import annotations

import sys


def main() -> None:
    """The entry point; says what to install when the extra `[cli]` is missing."""
    try:
        from saccade.cli.app import app
    except ModuleNotFoundError as missing:
        if missing.name not in ("typer", "rich"):
            raise
        sys.exit(f"saccade's command line needs {missing.name}: pip install 'saccade[cli]'")
    app()
