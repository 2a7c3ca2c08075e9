"""`saccade doctor`: one line for each thing, and whether it is to be mended."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("typer", reason="the extra [cli]")
from typer.testing import CliRunner

from saccade.cli import doctor
from saccade.cli.app import app
from saccade.testing import accuracy


def told() -> tuple[int, str]:
    found = CliRunner().invoke(app, ["doctor"])
    return found.exit_code, found.stdout


def test_what_is_here_works():
    code, text = told()
    assert code == 0
    assert text.splitlines()[-1] == "what is here works"
    assert "attention runs on `" in text
    assert f"torch {torch.__version__}" in text
    assert all(line[:4] in ("ok  ", "--  ") for line in text.splitlines()[:-1])


def test_wrong_results_are_to_be_mended(monkeypatch):
    monkeypatch.setattr(accuracy, "check", lambda *_, **__: accuracy.Report("spec", "cpu", "call", {"out": 2.0}))
    code, text = told()
    assert code == 1
    assert "!!  cpu: a small call" in text
    assert "2.00 of the tolerance" in text


def test_calls_that_fail_are_named(monkeypatch):
    def fails(*arguments, **keywords):
        raise RuntimeError("no compiler\nsecond line")

    monkeypatch.setattr(accuracy, "check", fails)
    code, text = told()
    assert code == 1
    assert "RuntimeError: no compiler" in text
    assert "second line" not in text


def test_an_old_torch_is_named(monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.10.1+cpu")
    code, text = told()
    assert code == 1
    assert "torch must be 2.11 or newer" in text


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine whose GPU torch does not see")
def test_a_gpu_that_torch_does_not_see_is_named(monkeypatch):
    monkeypatch.setattr(doctor.shutil, "which", lambda name: f"/usr/bin/{name}")
    code, text = told()
    assert code == 1
    assert "a GPU's driver is here (/usr/bin/nvidia-smi)" in text


def test_missing_extras_are_named(monkeypatch):
    monkeypatch.setattr(doctor, "version", lambda package: None)
    assert "pip install 'saccade[transformers]'" in told()[1]
