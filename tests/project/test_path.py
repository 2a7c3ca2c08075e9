"""The path from `attention(` to the dot product in DESIGN.md: each function names the next, as an editor follows it."""

from __future__ import annotations

import ast
import re
from itertools import pairwise
from pathlib import Path

import pytest

from saccade.ops import dispatch

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "saccade"
ROW = re.compile(r"^\| `(\w+)` \| (.+) \|$", re.MULTILINE)
STEPS = 4


def paths() -> dict[str, list[list[str]]]:
    """Backend -> steps, each a list of functions `folder/file.function` in the order of their calls."""
    page = (ROOT / "DESIGN.md").read_text(encoding="utf-8")
    section = page.partition("## 5.")[2].partition("## 6.")[0]
    start = re.findall(r"`([\w/.]+)`", section.partition("share its start:")[2].partition("Then:")[0])
    rows = ROW.findall(section)
    return {name: [start, *(re.findall(r"`([\w/.]+)`", step) for step in steps.split(" | "))] for name, steps in rows}


def module_of(function: str) -> tuple[str, str]:
    """`ops/execution.execute` -> `saccade.ops.execution`, `execute`; a folder stands for its __init__."""
    module, _, name = function.rpartition(".")
    return "saccade." + module.replace("/", "."), name


def tree_of(module: str) -> ast.Module:
    path = ROOT / "src" / module.replace(".", "/")
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return ast.parse(file.read_text(encoding="utf-8"))


def definition(function: str) -> ast.FunctionDef:
    module, name = module_of(function)
    found = [node for node in ast.walk(tree_of(module)) if isinstance(node, ast.FunctionDef) and node.name == name]
    assert found, f"{function} is not defined"
    return found[-1]  # after its overloads


def imports(module: str) -> dict[str, str]:
    """Local name -> full name of the module's imports, those inside functions included."""
    nodes = [node for node in ast.walk(tree_of(module)) if isinstance(node, ast.ImportFrom)]
    return {name.asname or name.name: f"{node.module}.{name.name}" for node in nodes for name in node.names}


def passed_on(name: str) -> str | None:
    """What a package passes on by this name."""
    package, _, own = name.rpartition(".")
    is_package = (ROOT / "src" / package.replace(".", "/")).is_dir()
    return imports(package).get(own) if package.startswith("saccade") and is_package else None


def constants(module: str) -> dict[str, ast.AST]:
    """The values that a module assigns to names, such as tables of kernels."""
    nodes = [node for node in tree_of(module).body if isinstance(node, ast.Assign)]
    return {target.id: node.value for node in nodes for target in node.targets if isinstance(target, ast.Name)}


def refers(caller: str, callee: str) -> bool:
    """Whether the caller names the callee: a function of its module, an imported one, a table's value, or a method."""
    module, _ = module_of(caller)
    target, name = module_of(callee)
    known, tables = imports(module), constants(module)
    nodes = list(ast.walk(definition(caller)))
    nodes += [inner for node in nodes if isinstance(node, ast.Name) for inner in ast.walk(tables.get(node.id, node))]
    for node in nodes:
        if isinstance(node, ast.Name) and known.get(node.id, f"{module}.{node.id}") == f"{target}.{name}":
            return True
        if isinstance(node, ast.Attribute) and node.attr == name:
            of_module = isinstance(node.value, ast.Name) and node.value.id in known
            if not of_module or f"{target}.{name}" in (named := known[node.value.id] + f".{name}", passed_on(named)):
                return True
    return False


PATHS = paths()


def test_every_backend_has_a_path():
    assert {*PATHS} == {*dispatch.NAMES}
    assert all(len(steps) <= STEPS for steps in PATHS.values())


@pytest.mark.parametrize("backend", PATHS)
def test_path_is_true(backend):
    functions = [function for step in PATHS[backend] for function in step]
    assert functions[0] == "api.attention"
    for caller, callee in pairwise(functions):
        definition(callee)
        assert refers(caller, callee), f"{caller} does not refer to {callee}"


PRODUCTS = {"warpgroup_mma", "dot", "matmul", "baddbmm", "bmm", "scaled_dot_product_attention", "sdpa"}


@pytest.mark.parametrize("backend", PATHS)
def test_path_ends_at_the_dot_product(backend):
    nodes = list(ast.walk(definition(PATHS[backend][-1][-1])))
    names = {getattr(node, "attr", getattr(node, "id", None)) for node in nodes}
    assert names & PRODUCTS or any(isinstance(node, ast.MatMult) for node in nodes)
