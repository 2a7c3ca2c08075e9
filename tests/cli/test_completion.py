"""Completion scripts complete, in the shells that are here."""

from __future__ import annotations

import shutil
import subprocess

import pytest

pytest.importorskip("typer", reason="the extra [cli]")
from typer.testing import CliRunner

from saccade.cli.app import app


def script(shell: str) -> str:
    found = CliRunner().invoke(app, ["completion", shell])
    assert found.exit_code == 0
    return found.stdout


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
@pytest.mark.parametrize(
    ("line", "completed"),
    [
        ("saccade do", ["doctor"]),
        ("saccade --v", ["--version"]),
        ("saccade explain caus", ["causal"]),
        ("saccade explain --backend gl", ["gluon"]),
        ("saccade check --le", ["--length"]),
        ("saccade check --cases llama", ["llama3-8b"]),
        ("saccade bench --cases grid-f", ["grid-forward"]),
        ("saccade tune --backend c", []),
        ("saccade completion z", ["zsh"]),
    ],
)
def test_bash_completes(line, completed):
    words = line.split()
    asked = f"COMP_WORDS=({' '.join(words)}); COMP_CWORD={len(words) - 1}; _saccade; echo ${{COMPREPLY[*]}}"
    done = subprocess.run(["bash", "-c", f"{script('bash')}\n{asked}"], capture_output=True, text=True, check=True)
    assert done.stdout.split() == completed


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_every_command_is_in_every_script(shell):
    told = script(shell)
    for command in ("doctor", "info", "explain", "check", "bench", "tune", "warm", "completion"):
        assert command in told
    assert ("bashcompinit" in told) == (shell == "zsh")
