"""A class name stands for one class, and functions have few parameters."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "src" / "saccade"
FILES = {str(file.relative_to(PACKAGE)): file for file in sorted(PACKAGE.rglob("*.py"))}

MOST_PARAMETERS = {"helper": 12, "kernel": 24}


def nodes(kind: type[ast.AST]) -> Iterator[tuple[str, ast.AST]]:
    """Nodes of the package's files, each with its file."""
    for name, file in FILES.items():
        tree = ast.parse(file.read_text(encoding="utf-8"))
        yield from ((name, node) for node in ast.walk(tree) if isinstance(node, kind))


def test_a_class_name_stands_for_one_class():
    places: dict[str, list[str]] = {}
    for name, node in nodes(ast.ClassDef):
        assert isinstance(node, ast.ClassDef)
        places.setdefault(node.name, []).append(name)
    assert not {name: files for name, files in places.items() if len(files) > 1}


def test_device_functions_have_few_parameters():
    """More than 12 of a helper, or 24 of a kernel, constexpr ones included, become a record or an aggregate."""
    too_many = {}
    for name, node in nodes(ast.FunctionDef):
        assert isinstance(node, ast.FunctionDef)
        decorators = " ".join(ast.unparse(decorator) for decorator in node.decorator_list)
        if "triton.jit" in decorators or "gluon.jit" in decorators:
            kind = "kernel" if node.name.endswith("_kernel") else "helper"
            count = len(node.args.posonlyargs + node.args.args + node.args.kwonlyargs)
            if count > MOST_PARAMETERS[kind]:
                too_many[f"{name}: {node.name}"] = count
    assert not too_many


def test_device_functions_assign_no_record():
    """A record that is assigned to a name loses its constexprs, and one that holds a function does not compile; so
    records go straight from where they are into calls. `data`: of a mask or a score. Items: of records of records."""
    assigned = []
    for name, node in nodes(ast.FunctionDef):
        assert isinstance(node, ast.FunctionDef)
        decorators = " ".join(ast.unparse(decorator) for decorator in node.decorator_list)
        if "triton.jit" not in decorators and "gluon.jit" not in decorators:
            continue
        for inner in ast.walk(node):
            value = inner.value if isinstance(inner, ast.Assign) else None
            record = isinstance(value, ast.Attribute) and value.attr in ("data", "mask", "score")
            if isinstance(value, ast.Subscript) and isinstance(value.slice, ast.Constant):
                record = ast.unparse(value.value).split(".")[-1] in ("rules", "spans", "used", "data", "records")
            if record:
                assigned.append(f"{name}: {ast.unparse(inner)}")
    assert not assigned
