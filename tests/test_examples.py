"""The examples run."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"


def test_serve_decode(monkeypatch, capsys, device):
    """Requests that wait for slots and for pages; what they say is what the model says without a cache."""
    given = ["serve_decode.py", "--requests", "7", "--slots", "3", "--pages", "18", "--device", device]
    monkeypatch.setattr(sys, "argv", given)
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(EXAMPLES / "serve_decode.py"), run_name="__main__")
    told = capsys.readouterr().out
    assert end.value.code == 0, told
    assert "7 requests" in told
