"""The arrows between modules point one way, and what a plain installation lacks is not imported."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "src" / "saccade"

# From the ground up: a module imports from lower layers and from its own folder alone.
LAYERS = [
    {"util"},
    {"scores"},
    {"masks"},
    {"layouts"},
    {"call"},
    {"backends"},
    {"ops"},
    {"distributed"},
    {"api"},
    {"compat", "nn"},
    {"integrations"},
    {"__init__"},
    {"testing"},
    {"cli"},
    {"__main__"},
]
HEIGHT = {name: height for height, layer in enumerate(LAYERS) for name in layer}

SHARED_BY_BACKENDS = "device", "block_sparsity", "key_lists", "configs", "backend_module"

# What besides torch and the standard library may be imported, anywhere in a file.
FOREIGN = {
    "masks/base": {"matplotlib"},  # Mask.plot
    "distributed/context_plan": {"matplotlib"},
    "backends/triton": {"triton"},
    "backends/device": {"triton"},
    "backends/hopper": {"triton"},
    "integrations/transformers": {"transformers"},
    "testing": {"triton"},
    "cli": None,
}

FILES = sorted(PACKAGE.rglob("*.py"))


@cache
def imports(file: Path) -> list[str]:
    return [*_imports(file)]


def _imports(file: Path) -> Iterator[str]:
    """Full names: `saccade.masks`, `torch`, `matplotlib.pyplot`."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: imports are absolute"
            for name in node.names:
                inner = f"{node.module}.{name.name}"
                path = PACKAGE.parent / inner.replace(".", "/")
                is_module = path.is_dir() or path.with_suffix(".py").is_file()
                yield inner if is_module else str(node.module)


def place(file: Path) -> tuple[str, ...]:
    return file.relative_to(PACKAGE).with_suffix("").parts


@pytest.mark.parametrize("file", FILES, ids=lambda file: "/".join(place(file)))
def test_imports_point_down(file):
    here = place(file)
    assert here[0] in HEIGHT, f"{here[0]} has no layer yet"
    for name in imports(file):
        parts = name.split(".")
        if parts[0] != "saccade":
            continue
        there = tuple(parts[1:]) or ("__init__",)
        same_folder = there[0] == here[0] and len(here) > 1
        assert same_folder or HEIGHT[there[0]] < HEIGHT[here[0]], f"{'/'.join(here)} imports {name}"
        if here[0] == there[0] == "backends" and len(there) > 1 and here[1:] != ("__init__",):
            assert there[1] in (here[1], *SHARED_BY_BACKENDS), f"{'/'.join(here)} imports another backend, {name}"


@pytest.mark.parametrize("file", FILES, ids=lambda file: "/".join(place(file)))
def test_torch_is_the_one_dependency(file):
    here = "/".join(place(file))
    allowed = {"torch", "saccade"}
    for folder, names in FOREIGN.items():
        if here == folder or here.startswith(f"{folder}/"):
            if names is None:
                return
            allowed |= names
    foreign = {name.split(".")[0] for name in imports(file)} - allowed - sys.stdlib_module_names
    assert not foreign


WITHOUT_EXTRAS = """
import sys
for name in ("triton", "cudnn", "matplotlib", "typer", "rich", "numpy", "transformers"):
    sys.modules[name] = None  # importing it raises ImportError
import torch, saccade
from saccade.testing import check
q, k, v = torch.randn(3, 1, 2, 8, 4)
check(q, k, v, mask=saccade.causal()).assert_ok()
print(saccade.explain(q, k, v, backend="triton"))
"""


def test_without_any_extra():
    """Not in a fork: torch has found NumPy there."""
    done = subprocess.run([sys.executable, "-c", WITHOUT_EXTRAS], capture_output=True, text=True, check=False)
    assert "triton: " in done.stdout, done.stderr


def test_importing_is_light(fresh_process):
    """No backend's kernels and no optional package is imported before a call needs it; beyond torch, a tenth of a
    second's worth of modules: less than a millisecond each."""
    code = "import torch, sys; mine = {*sys.modules}; import saccade; print('\\n'.join({*sys.modules} - mine))"
    loaded = fresh_process(code).split()
    assert len(loaded) <= 100
    assert {name.partition(".")[0] for name in loaded} <= {"saccade", "torch"}
    slow = {"torch._dynamo", "torch._inductor", "torch.utils.flop_counter"}
    assert not slow & {*loaded}, "which take longer than saccade; the last one imports triton"
    assert not {
        name
        for name in loaded
        if name.startswith(
            ("saccade.backends.triton", "saccade.backends.hopper"),
        )
    }


def test_modules_of_aggregates_evaluate_their_annotations():
    """Triton 3.6 checks a field's value against its annotation, which would be a text."""
    for file in FILES:
        text = file.read_text(encoding="utf-8")
        if re.search(r"^@aggregate$", text, re.MULTILINE) and "hopper" in place(file):
            assert not re.search("^from __future__ import annotations", text, re.MULTILINE), file


def test_picture_is_true():
    """DESIGN's picture has the layers of the library, from the top."""
    page = (PACKAGE.parents[1] / "DESIGN.md").read_text(encoding="utf-8")
    picture = page.partition("## 4.")[2].split("```")[1]
    lines = [line.strip() for line in picture.splitlines() if "│" not in line]
    rows = [set(re.split(r"  +", line)[0].split()) for line in lines]
    named = [{name for name in layer if name not in ("__init__", "__main__")} for layer in reversed(LAYERS)]
    below = [layer for layer in named if layer and not layer & {"testing", "cli", "integrations"}]
    assert [row for row in rows if row] == below


def test_everything_public_is_exported():
    import saccade

    assert sorted(saccade.__all__) == list(saccade.__all__)
    assert all(hasattr(saccade, name) for name in saccade.__all__)


def test_files_are_small():
    for file in FILES:
        lines = len(file.read_text(encoding="utf-8").splitlines())
        assert lines <= 800, f"{file.name}: {lines} lines"


@pytest.mark.parametrize("package", sorted(PACKAGE.rglob("__init__.py")), ids=lambda file: file.parent.name)
def test_no_function_is_named_as_a_submodule(package):
    """Importing the submodule would put it in the place of the function."""
    body = ast.parse(package.read_text(encoding="utf-8")).body
    defined = {node.name for node in body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    assert not defined & {path.stem for path in package.parent.iterdir()}
