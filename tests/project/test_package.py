"""The wheel and the sdist: built, installed beside nothing but torch, and used."""

from __future__ import annotations

import doctest
import json
import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email import message_from_string
from importlib import util
from pathlib import Path

import pytest

pytest.importorskip("hatchling", reason="the extra [dev]")

import saccade

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
WHEEL = f"saccade-{saccade.__version__}-py3-none-any.whl"


def run(*words: str, **options) -> str:
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=300, check=False, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A folder with a wheel and an sdist."""
    folder = tmp_path_factory.mktemp("dist")
    run("-m", "hatchling", "build", "-d", str(folder), cwd=ROOT)
    return folder


@pytest.fixture(scope="module")
def outside(built, tmp_path_factory):
    """A folder outside of the clone, and the environment in which Python finds the installed wheel there."""
    folder = tmp_path_factory.mktemp("outside")
    target = folder / "installed"
    run("-m", "pip", "install", "--no-deps", "--no-index", "--no-compile", "--target", str(target), str(built / WHEEL))
    return folder, os.environ | {"PYTHONPATH": str(target), "CUDA_VISIBLE_DEVICES": "", "COLUMNS": "200"}


def test_the_wheel_alone_runs_the_quick_start(outside):
    folder, environment = outside
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    quick_start = re.search(r"^## Quick start\n(.*?)^```\n", readme, re.MULTILINE | re.DOTALL)
    assert quick_start
    code = "".join(example.source for example in doctest.DocTestParser().get_examples(quick_start[1]))
    assert "attention(" in code
    code += "\nimport saccade; print(saccade.__file__, saccade.__version__)"
    place, version = run("-c", code, cwd=folder, env=environment).split()[-2:]
    assert Path(place).is_relative_to(folder)
    assert version == saccade.__version__


COMMANDS = {
    "saccade doctor": (0, "ok  cpu: a small call, forward and backward, on `cpu`", "what is here works"),
    "saccade info": (0, "backend cpu", "runs on cpu"),
    "saccade explain bf16 d64 causal cpu": (0, "bf16 d64 dense causal cpu", "cpu: chosen"),
    "saccade check --cases causal --length 16 --json": (0, '"passed": true', '"sdpa_ms": '),
    "saccade tune": (2, "tuning needs a GPU; torch sees none"),
    'saccade warm "fp16 d16 sm80" --inference --jobs 1 --out kernels': (0, "1: forward_kernel"),
    "saccade completion bash": (0, "complete -o default -F _saccade saccade"),
    "saccade bench --cases host": (2, "clone the repository"),
    "saccade.testing.selfcheck --seconds 0.01": (0, "2 of 2 right", "times as fast", "Peers"),
}
"""What `python -m` runs without a GPU, its exit code, and some of what it prints."""
ALL_OF_THEM = """
import contextlib, io, json, runpy, shlex, sys
told = {}
for command in sys.argv[1:]:
    text = io.StringIO()
    sys.argv = shlex.split(command)
    with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
        try:
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
            code = 0
        except SystemExit as stop:
            code = stop.code or 0
    told[command] = code, text.getvalue()
print(json.dumps([told, [x.__file__ for x in sys.modules.values() if getattr(x, "__file__", None)]]))
"""
"""In one process: starts take longest."""


def test_the_wheel_alone_runs_every_command(outside):
    pytest.importorskip("typer", reason="the extra [cli]")
    pytest.importorskip("triton", reason="the extra [triton]")
    folder, environment = outside
    told, files = json.loads(run("-c", ALL_OF_THEM, *COMMANDS, cwd=folder, env=environment).splitlines()[-1])
    parts = [ROOT / name for name in ("src", "tests", "benchmarks")]
    assert not [file for file in files if any(Path(file).is_relative_to(part) for part in parts)]
    for command, (code, *words) in COMMANDS.items():
        ended, text = told[command]
        assert ended == code, f"{command}\n{text}"
        assert all(word in text for word in words), f"{command}\n{text}"


def test_the_wheel_holds_the_package_and_nothing_else(built):
    with zipfile.ZipFile(built / WHEEL) as wheel:
        names = {name for name in wheel.namelist() if ".dist-info/" not in name}
        metadata = message_from_string(wheel.read(f"saccade-{saccade.__version__}.dist-info/METADATA").decode())
    package = ROOT / "src" / "saccade"
    files = (path for path in package.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    assert names == {f"saccade/{path.relative_to(package).as_posix()}" for path in files}
    assert {"saccade/py.typed", "saccade/backends/configs/h200.json"} <= names
    plain = [line for line in metadata.get_all("Requires-Dist", []) if "extra ==" not in line]
    assert plain == ["torch>=2.11"]
    description = metadata.get_payload()
    assert isinstance(description, str)
    assert "# saccade" in description
    assert not re.findall(r"\]\((?!https?:|#)[^)]+\)", description), "links that the package index cannot follow"


def test_the_sdist_holds_what_tests_need(built):
    with tarfile.open(built / f"saccade-{saccade.__version__}.tar.gz") as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    assert {"conftest.py", "Makefile", "LICENSE", "CITATION.cff", "tests/conftest.py", "mkdocs.yml"} <= names
    assert {"tests/gate/__main__.py", "tests/emulator/launch.py", "benchmarks/harness/cli.py"} <= names
    assert {f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")} <= names
    assert {f"examples/{path.name}" for path in (ROOT / "examples").glob("*.py")} <= names


def test_one_version():
    """`__version__` is the one; what cannot read it says the same."""
    assert "version" in PROJECT["dynamic"]
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"\nversion: {saccade.__version__}\n" in citation
    assert f"\n## [{saccade.__version__}] - " in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_extras_are_named_truly():
    """Every `saccade[extra]` that a page or a message names is there."""
    told = [*(ROOT / "src").rglob("*.py"), *(ROOT / "docs").rglob("*.md"), ROOT / "README.md"]
    named = {
        extra.strip()
        for path in told
        for found in re.findall(r"saccade\[([a-z,]+)\]|-e '?\.\[([a-z,]+)\]", path.read_text(encoding="utf-8"))
        for extra in "".join(found).split(",")
    }
    assert named - {"extra"} <= set(PROJECT["optional-dependencies"])


@pytest.mark.parametrize(
    ("repository", "wanted"),
    [
        ("", "see b and c"),
        ("https://x/y", "see [b](https://x/y/blob/v1.0/b.md#z) and ![c](https://x/y/raw/v1.0/c.png)"),
    ],
)
def test_links_of_the_description(repository, wanted):
    spec = util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    assert spec is not None
    assert spec.loader is not None
    module = util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.described("see [b](b.md#z) and ![c](c.png)", repository, "1.0") == wanted
