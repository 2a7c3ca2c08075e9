"""The examples run."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize("prefix", [0, 37])
def test_serve_decode(monkeypatch, capsys, device, prefix):
    """Requests that wait for slots and for pages; what they say is what a plain loop says: the example asserts it."""
    given = ["serve_decode.py", "--requests", "7", "--slots", "3", "--pages", "22", "--device", device]
    monkeypatch.setattr(sys, "argv", [*given, "--prefix", str(prefix)])
    runpy.run_path(str(EXAMPLES / "serve_decode.py"), run_name="__main__")
    told = capsys.readouterr().out
    assert "7 requests" in told
    assert "tokens are those of a plain loop" in told


def test_what_is_said_depends_on_nobody_else(device):
    """One by one, in batches of any size, and with and without a shared prefix, requests say the same."""
    example = runpy.run_path(str(EXAMPLES / "serve_decode.py"))
    torch.manual_seed(0)
    model, prefix = example["Model"]().to(device), list(range(50))
    said = []
    for slots, pages, shared in ((1, 20, prefix), (5, 60, prefix), (3, 60, [])):
        requests = example["drawn_requests"](5, prefix)
        example["serve"](requests, slots, pages, shared, model)
        said.append([request.said for request in requests])
    assert said[0] == said[1] == said[2]
    assert said[0] == [example["plain_loop"](model, request) for request in requests]


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
