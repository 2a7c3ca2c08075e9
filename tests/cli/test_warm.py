"""`saccade warm`: kernels that are compiled beforehand, without a GPU, are those that calls look for."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("typer", reason="the extra [cli]")
pytest.importorskip("triton")
from typer.testing import CliRunner

from saccade.backends import configs
from saccade.call.spec import Spec
from saccade.cli.app import app
from saccade.testing import warm
from saccade.testing.offline import cuda_library
from saccade.testing.warm import Made, Task, TaskShape, call_of, case_of

CALLS = """
import sys
from saccade.testing.offline import stand_in
stand_in("sm80")
import torch
from triton import knobs
from saccade import Dense, causal
from saccade.ops import dispatch
from saccade.call import check_call

knobs.compilation.listener = lambda **what: print(what["src"].name, what["cache_hit"])
calls = ((1, 3, 200, 64), "bhsd", 300), ((4, 128, 16, 64), "bshd", 128), ((1, 1024, 1, 64), "bshd", 17)
for shape, order, s_k in calls:
    q = torch.zeros(shape).half()
    shape = [s_k if i == (2 if order == "bhsd" else 1) else n for i, n in enumerate(shape)]
    k, v = torch.zeros(2, *shape).half()
    problem = check_call(q, k, v, mask=causal(), layout=Dense(order), scale=0.3)
    plan, problem = dispatch.planned(problem, "auto")
    plan.module.run_forward(problem, plan.launches, False)
    print(plan.backend, "ran")
"""


def environment(folder: Path) -> dict[str, str]:
    return os.environ | {"TRITON_CACHE_DIR": str(folder), "CUDA_VISIBLE_DEVICES": ""}


@pytest.mark.rare
def test_calls_of_other_shapes_find_the_kernels_where_they_were_moved(tmp_path):
    made, moved = tmp_path / "made", tmp_path / "moved"
    words = "warm", "fp16 d64 causal sm80", "--out", str(made), "--at", f"{moved}/", "--inference", "--jobs", "1"
    done = subprocess.run(
        [sys.executable, "-m", "saccade", *words], env=environment(made), capture_output=True, check=False, text=True
    )
    assert not done.returncode, done.stdout + done.stderr
    assert "1: forward_kernel" in done.stdout
    assert f"TRITON_CACHE_DIR={moved}" in done.stderr.replace("\n", "")
    made.rename(moved)
    called = subprocess.run(
        [sys.executable, "-c", CALLS], env=environment(moved), capture_output=True, check=False, text=True
    )
    assert not called.returncode, called.stderr
    # Later calls find the kernel in the process.
    assert called.stdout.split("\n")[:2] == ["forward_kernel True", "triton ran"]
    assert "False" not in called.stdout
    assert called.stdout.count("ran") == 3


@pytest.mark.parametrize(
    ("spec", "complaint"),
    [
        ("bf16 d128 cpu", "not for 'cpu'"), ("bf16 d128 gfx942", "not for 'gfx942'"), ("d128 sm90", "lacks dtype"),
        ("bf16 d64 sm999", "no GPU that this version knows is sm999"),
        ("bf16 d128 paged sm90", "kernels of paged"), ("bf16 d128 mask_mod sm90", "kernels of mask_mod"),
        ("bf16 d128 score(own) sm90", "kernels of score(own)"), ("bf16 d64 offsets sm90", "kernels of offsets"),
    ],
)  # fmt: skip
def test_what_a_spec_does_not_say(spec, complaint):
    found = CliRunner().invoke(app, ["warm", spec])
    assert found.exit_code == 2
    assert complaint in " ".join(found.output.replace("│", " ").split())


def said(*words: str) -> tuple[int, str]:
    """The exit code, and what was printed, without the box's lines."""
    found = CliRunner().invoke(app, ["warm", *words])
    return found.exit_code, " ".join(found.output.replace("│", " ").split())


def test_places_that_cannot_be_a_folder(tmp_path):
    file = tmp_path / "file"
    file.touch()
    for place, complaint in ((file, "a file is there"), (file / "x", "Not a directory"), (Path("/proc/x"), "No such")):
        code, printed = said("bf16 d64 sm90", "--out", str(place))
        assert code == 2
        assert complaint in printed


def test_gpus_without_a_table(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    code, printed = said("bf16 d64 sm90", "--gpu", "nosuch", "--out", str(tmp_path / "none"))
    assert code == 2
    assert "there are h200, and sm90 for a GPU that has none" in printed
    assert not (tmp_path / "none").exists()
    tables = tmp_path / "saccade"
    tables.mkdir()
    (tables / "b200.json").write_text("{}")
    assert configs.names() == ["b200", "h200"]


def dies_at_d64(task: Task) -> Made:
    """In place of what compiles."""
    return os.abort() if task.spec.d == 64 else Made("triton", ["forward_kernel"], [], None)


@pytest.mark.rare
def test_the_others_are_compiled_when_a_process_dies(tmp_path, monkeypatch):
    monkeypatch.setattr(warm, "compile_task", dies_at_d64)
    words = "bf16 d64 sm90", "bf16 d128 sm90", "--inference", "--out", str(tmp_path)
    code, printed = said(*words)
    assert code == 1
    assert "bf16 d64 dense aligned sm90, inference: its process died" in printed
    assert "1: forward_kernel" in printed


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spec", "reasons"),
    [
        ("bf16 d64 sm70", ["gluon: runs on sm90, not on sm70", "triton: runs on sm80+", "cpu: runs on cpu"]),
        ("fp64 d64 sm90", ["gluon: takes fp16", "triton: takes fp16", "cpu: runs on cpu, not on sm90"]),
    ],
)
def test_a_spec_that_no_backend_runs_is_told_why(spec, reasons, tmp_path):
    code, printed = said(spec, "--out", str(tmp_path))
    assert code == 1
    assert "no backend runs" in printed
    assert all(reason in printed for reason in reasons)


@pytest.mark.rare
def test_kernels_that_are_not_whole_are_compiled_again(tmp_path):
    words = "fp16 d64 causal sm80", "--inference", "--out", str(tmp_path)
    assert said(*words)[0] == 0
    (cubin,) = tmp_path.glob("*/*.cubin")
    whole = cubin.read_bytes()
    cubin.write_bytes(b"")
    code, printed = said(*words)
    assert code == 0
    assert f"{cubin.parent.name}/forward_kernel.cubin" in printed
    assert "1: forward_kernel │ 0" in printed or "1: forward_kernel 0" in printed
    assert len(cubin.read_bytes()) == len(whole)
    assert "0 1: forward_kernel" in said(*words)[1]


def test_wrong_shapes(tmp_path):
    for shape in ("2", "2,0,5", "a,b,c"):
        found = CliRunner().invoke(app, ["warm", "bf16 d64 sm90", "--shape", shape, "--out", str(tmp_path / "none")])
        assert found.exit_code == 2
        assert "b,s_q,s_k" in found.output
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    "text",
    [
        "bf16 d64 dense aligned sm90", "fp16 group4 d128 dense causal softcap sink deterministic aligned sm90",
        "bf16 d192/128 packed causal dropout aligned sm90", "bf16 d64 padded window alibi max_scores aligned sm90",
        "fp8_e4m3 d128 dense causal aligned sm90", "bf16 group2 kv_fp8_e5m2 d64 dense aligned sm90",
        "bf16 d64 dense documents&causal relative_bias+softcap aligned sm90",
        "bf16 d64 ranges prefix t5_bias aligned sm90",
    ],
)  # fmt: skip
def test_a_problem_is_of_its_spec(text, monkeypatch):
    monkeypatch.setattr("saccade.util.hardware.name", lambda device: "sm90")
    spec = Spec.parse(text)
    assert call_of(spec, TaskShape(2, 64, 64)).spec == spec
    assert case_of(spec, TaskShape(2, 64, 64)).name == str(spec)


def test_the_library_that_stands_in_for_the_driver_has_its_functions(tmp_path):
    library = ctypes.CDLL(str(cuda_library(str(tmp_path))))
    for name in ("cuLaunchKernelEx", "cuModuleLoadData", "cuTensorMapEncodeTiled", "cuMemAlloc_v2"):
        assert getattr(library, name)


def test_parts_that_a_spec_may_have():
    assert warm.parts_of(Spec.parse("bf16 d128 causal aligned sm90")) == ["inference", "training", "backward"]
    assert warm.parts_of(Spec.parse("fp8_e4m3 d128 causal aligned sm90")) == ["inference"]
