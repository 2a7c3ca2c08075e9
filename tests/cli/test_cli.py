"""The command line."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys

import pytest
import torch

pytest.importorskip("typer", reason="the extra [cli]")
from typer.testing import CliRunner

import saccade
from saccade import cli
from saccade.cli.app import EXIT_CODES, app
from saccade.ops import dispatch
from saccade.testing import accuracy
from saccade.util import hardware


def run(*words: str):
    return CliRunner().invoke(app, list(words), env={"COLUMNS": "200"})


def rows(*words: str):
    found = run("check", "--json", *words)
    return found.exit_code, [json.loads(line) for line in found.stdout.splitlines()]


def test_version():
    found = run("--version")
    assert (found.exit_code, found.stdout) == (0, f"saccade {saccade.__version__}\n")


def test_help_says_what_exit_codes_mean():
    assert " ".join(EXIT_CODES.split()) in " ".join(run("--help").stdout.split())


def test_info_as_json():
    found = json.loads(run("info", "--json").stdout)
    assert found["versions"]["torch"] == torch.__version__
    assert [*found["backends"]] == list(dispatch.NAMES)
    assert found["backends"]["cpu"] == "runs on cpu"


def test_info_names_versions_devices_and_backends():
    found = run("info")
    assert found.exit_code == 0
    for word in (saccade.__version__, torch.__version__, "C compiler", *dispatch.NAMES):
        assert word in found.stdout
    assert "only by name" in found.stdout


def test_explain_prints_what_the_library_says():
    found = run("explain", "bf16 group4 d128 causal cpu")
    assert found.exit_code == 0
    assert found.stdout.strip() == str(saccade.explain("bf16 group4 d128 causal cpu"))
    assert run("explain", "bf16", "group4", "d128", "causal", "cpu").stdout == found.stdout


def test_explain_as_json():
    found = run("explain", "bf16", "d128", "causal", "cpu", "--json")
    told = json.loads(found.stdout)
    assert (found.exit_code, told["backend"], told["gradient"]) == (0, "cpu", "cpu")
    assert told == json.loads(json.dumps(saccade.explain("bf16 d128 causal cpu").as_dict()))


@pytest.mark.skipif(torch.cuda.is_available(), reason="the other machine is one with a GPU")
def test_explain_speaks_of_other_machines(monkeypatch):
    """What is installed here says nothing of them, triton included."""
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.setattr(hardware, "triton_obstacle", lambda: "triton is not installed")
    for words, backend in (("causal aligned sm90", "gluon"), ("causal sm90", "triton"), ("sm80", "triton")):
        found = run("explain", f"bf16 d128 {words}")
        assert found.exit_code == 0
        assert f"{backend}: chosen" in found.stdout
        assert "is not in this machine" in found.stdout
    assert "not in this machine" not in run("explain", "bf16 d128 cpu").stdout


def test_explain_says_what_no_gpu_is():
    told = run("explain", "bf16 d128 sm999").stdout
    assert "sm999 is not in this machine, and no GPU that this version knows" in told
    assert "no GPU that" not in run("explain", "bf16 d128 sm80").stdout


def test_explain_advises_cudnn_for_nvidia_alone():
    assert "cudnn needs saccade[cudnn]" in run("explain", "bf16 d128 sm80").stdout
    assert "saccade[cudnn]" not in run("explain", "bf16 d128 gfx942").stdout


def test_explain_exits_with_1_when_nothing_runs_it():
    found = run("explain", "fp32 d64 sm70")
    assert found.exit_code == 1
    assert "not on sm70" in found.stdout


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["explain", "bf16 d64 nonsense"], "nonsense"),
        (["explain", "d64"], "dtype"),
        (["explain", "bf16 d64 group0"], "unknown word 'group0'"),
        (["explain", "bf16 d0"], "unknown word 'd0'"),
        (["explain"], "spec"),
        (["nonsense"], "No such command"),
        (["completion", "tcsh"], "bash, zsh, fish"),
        (["explain", "bf16 d64", "--backend", "nonsense"], "nonsense"),
        (["check", "--backend", "nonsense"], "nonsense"),
        (["check", "--cases", "llama3-8b,nonsense"], "nonsense"),
        ([], "Usage"),
        (["check", "--length", "-3"], "--length"),
        (["check", "--length", "many"], "--length"),
        (["check", "--length", "100000", "--cases", "causal"], "the longest, of causal, has 129"),
        (["check", "--cases", ""], "names nothing"),
        (["check", "--cases", " ,"], "names nothing"),
        (["bench", "--cases", ""], "names nothing"),
        (["tune", "--dims", "64,0"], "from 1 on"),
        (["tune", "--jobs", "-1"], "--jobs"),
        (["bench", "--device", "nonsense"], "device is cpu or one of the"),
        (["bench", "--device", "cuda:99"], "got 'cuda:99'"),
        (["bench", "--device", "meta"], "got 'meta'"),
        (["bench", "--rounds", "-1"], "--rounds"),
        (["bench", "--minutes", "-1"], "--minutes"),
        (["bench", "--match", "("], "missing )"),
        (["bench", "--cases", "nonsense"], "nonsense"),
        (["bench", "--compare", "/nowhere"], "/nowhere"),
        (["bench", "--cases", "causal", "--out", "/proc/nowhere/rows.jsonl"], "/proc/nowhere"),
    ],
)
def test_wrong_words_are_usage_errors(words, complaint):
    found = run(*words)
    assert found.exit_code == 2
    assert complaint in found.output


def test_check_measures_what_passes():
    code, (plain, softcap, sink) = rows("--cases", "causal, softcap,sink", "--length", "40")
    assert code == 0
    for row in (plain, softcap, sink):
        assert row["passed"]
        assert row["error_ratio"] <= 1
        assert row["ms"] > 0
        assert row["s_q"] == 40
    assert plain["speedup"] > 0
    assert softcap["speedup"] is sink["speedup"] is None  # PyTorch has no such function
    assert "causal" in plain["spec"]


def test_tables_are_whole_in_narrow_terminals():
    found = CliRunner().invoke(app, ["check", "--cases", "causal", "--length", "40"], env={"COLUMNS": "20"})
    assert "…" not in found.stdout
    header, row = found.stdout.splitlines()[:2]
    assert header.split() == ["case", "q", "x", "k", "backend", "error", "ms", "SDPA", "ms", "speed-up"]
    assert row.split()[:5] == ["causal", "40", "x", "40", "cpu"]


CLOSED = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-m", "saccade", "info"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
child.stdout.close()
print(child.wait(), child.stderr.read().decode())
"""


def test_a_closed_pipe_is_exit_code_1_without_a_traceback():
    done = subprocess.run([sys.executable, "-c", CLOSED], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.split() == ["1"]


def test_terminals_without_the_characters_get_others():
    code = "from saccade import causal; print(causal().draw(2, 2)); import sys; from saccade.cli import main; "
    code += "sys.argv[1:] = ['--version']; print('\\u00b5', file=sys.stderr); main()"
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=60, check=True
    )
    assert done.stdout == f"causal\n# .\n# #\nsaccade {saccade.__version__}\n"


def test_check_prints_a_table():
    found = run("check", "--cases", "causal,sink", "--length", "40")
    assert found.exit_code == 0
    assert found.stdout.count(" ok") == 2


def test_a_failing_case_has_no_time(monkeypatch):
    def wrong(*args, **keywords):
        return accuracy.Report("spec", "cpu", "call", {"out": 0.5, "dq": 2.0})

    monkeypatch.setattr(accuracy, "check", wrong)
    code, (row,) = rows("--cases", "causal")
    assert code == 1
    assert not row["passed"]
    assert row["error_ratio"] == 2
    assert row["ms"] is row["sdpa_ms"] is row["speedup"] is None
    assert "FAILS" in run("check", "--cases", "causal").stdout


def test_a_refused_case_says_why(monkeypatch):
    def refuses(*args, **keywords):
        raise saccade.Unsupported("no backend runs it\n  cpu: has no such thing")

    monkeypatch.setattr(accuracy, "check", refuses)
    found = run("check", "--cases", "causal")
    assert found.exit_code == 1
    assert "refused" in found.stdout
    assert "cpu: has no such thing" in found.stdout


def test_a_missing_extra_is_named(monkeypatch):
    monkeypatch.delitem(sys.modules, "saccade.cli.app")
    monkeypatch.setitem(sys.modules, "typer", None)
    with pytest.raises(SystemExit, match=r"needs typer: pip install 'saccade\[cli\]'"):
        cli.main()


def test_python_m_saccade(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["saccade", "explain", "fp32 d64 cpu"])
    with pytest.raises(SystemExit) as stop:
        runpy.run_module("saccade", run_name="__main__")
    assert stop.value.code == 0
    assert capsys.readouterr().out.startswith("fp32 d64 dense cpu\n")
