"""The examples run."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_serve_decode(monkeypatch, capsys, device):
    """Requests that wait for slots and for pages; what they say is what the model says without a cache."""
    given = ["serve_decode.py", "--requests", "7", "--slots", "3", "--pages", "18", "--device", device]
    monkeypatch.setattr(sys, "argv", given)
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(EXAMPLES / "serve_decode.py"), run_name="__main__")
    told = capsys.readouterr().out
    assert end.value.code == 0, told
    assert "7 requests" in told


@pytest.mark.parametrize("drawn", [True, False], ids=["matplotlib", "no matplotlib"])
def test_train_bytes(monkeypatch, capsys, tmp_path, drawn):
    """One step of each model, the comparison with the oracle, and a picture, or how to get one."""
    picture = tmp_path / "picture.png"
    monkeypatch.setattr(sys, "argv", ["train_bytes.py", "--seconds", "0", "--device", "cpu", "--out", str(picture)])
    if drawn:
        pytest.importorskip("matplotlib")
    else:
        monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(EXAMPLES / "train_bytes.py"), run_name="__main__")
    told = capsys.readouterr().out
    assert end.value.code == 0, told
    assert picture.exists() == drawn
    assert ("The picture is" if drawn else "pip install matplotlib") in told
