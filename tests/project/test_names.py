"""A class name stands for one class, and functions have few parameters."""

from __future__ import annotations

import ast
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import TypeGuard

PACKAGE = Path(__file__).parents[2] / "src" / "saccade"
FILES = {str(file.relative_to(PACKAGE)): file for file in sorted(PACKAGE.rglob("*.py"))}

MOST_PARAMETERS = {"helper": 12, "kernel": 28}

NO_SYMBOLS = "backends", "testing", "scores/tracing/lowering.py"
"""What torch.compile and exports never follow: it runs inside of operators, or on small tensors of known shapes."""


GONE = {
    "place places Place _place _places": "index, offset, row or slot: what it counts",
    "lie": "memory_layout",
    "Found": "CallKey",
    "Recorder Repeat shortcut shortcuts repeats_of": "LaunchRecorder, Replay",
    "Recording recording recordings": "Trace, trace",
    "Proof proof proven": "Guards, guards, guarded",
    "told": "describe, or what the text says",
    "lower": "has_lower_bound",
    "listed": "block_sparse",
    "by_row": "bounds_per_row",
    "vast": "large_scores",
    "steady": "unit_slope",
    "brought": "tma_tile",
    "rules": "mask, score, …: each by its name",
    "LoadTile WorkTile work_tile": "LoadItem, WorkItem",
    "plainly once lasting lazily": "without_shortcuts, cached_method, cached_attribute",
}
"""Names that said nothing to a reader, and what says it."""
STANDS = {"lower": "a method of str, and the lower half of columns", "outrun": "an attribute that users read"}


@cache
def every_node() -> list[tuple[str, ast.AST]]:
    trees = ((name, ast.parse(file.read_text(encoding="utf-8"))) for name, file in FILES.items())
    return [(name, node) for name, tree in trees for node in ast.walk(tree)]


def nodes(kind: type[ast.AST]) -> Iterator[tuple[str, ast.AST]]:
    """Nodes of the package's files, each with its file."""
    return ((name, node) for name, node in every_node() if isinstance(node, kind))


def test_a_class_name_stands_for_one_class():
    places: dict[str, list[str]] = {}
    for name, node in nodes(ast.ClassDef):
        assert isinstance(node, ast.ClassDef)
        places.setdefault(node.name, []).append(name)
    assert not {name: files for name, files in places.items() if len(files) > 1}


def test_device_functions_have_few_parameters():
    """More than 12 of a helper, or 28 of a kernel, constexpr ones included, become a record or an aggregate."""
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


def test_kernels_take_no_tuples():
    """A tuple in place of several parameters hides their names: a kernel takes tensors, numbers and records."""
    indexed = []
    for name, node in nodes(ast.FunctionDef):
        assert isinstance(node, ast.FunctionDef)
        given = {x.arg for x in node.args.args}
        for inner in ast.walk(node) if node.name.endswith("_kernel") else ():
            if isinstance(inner, ast.Subscript) and isinstance(inner.slice, ast.Constant):
                indexed += [f"{name}: {ast.unparse(inner)}"] if ast.unparse(inner.value) in given else []
    assert not indexed


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
                record = ast.unparse(value.value).split(".")[-1] in ("data", "records")
            if record:
                assigned.append(f"{name}: {ast.unparse(inner)}")
    assert not assigned


def test_sizes_are_not_looked_up():
    """`n in (1, m)` is False in Dynamo where n is a number and m a symbol that equals it, and symbols have no hash:
    `arguments.broadcasts` and `arguments.is_one_of` compare sizes and shapes. Names in capitals are numbers."""

    def collection(x: ast.AST) -> TypeGuard[ast.Tuple | ast.List | ast.Set]:
        return isinstance(x, (ast.Tuple, ast.List, ast.Set))

    def known(x: ast.AST) -> bool:
        if collection(x):
            return all(map(known, x.elts))
        return isinstance(x, ast.Constant) or (isinstance(x, ast.Name) and x.id.isupper())

    def of_shape(x: ast.AST) -> bool:
        return any(isinstance(y, ast.Attribute) and y.attr == "shape" for y in ast.walk(x))

    def may_be_sizes(x: ast.AST, among: ast.AST) -> bool:
        """A size or a shape, by what it is or by what it is looked up in: a whole number or a tuple beside others."""
        if not collection(among):
            return of_shape(among) and not known(x)
        whole = any(collection(y) or type(getattr(y, "value", None)) is int for y in among.elts)
        return not known(among) and (whole or of_shape(x) or of_shape(among))

    found = []
    for name, node in nodes(ast.AST):
        if name.startswith(NO_SYMBOLS):
            continue
        if isinstance(node, ast.Compare):
            terms = zip([node.left, *node.comparators], node.ops, node.comparators, strict=False)
            wrong = any(isinstance(op, (ast.In, ast.NotIn)) and may_be_sizes(x, among) for x, op, among in terms)
        else:
            wrong = isinstance(node, (ast.Set, ast.SetComp)) and of_shape(node)
        found += [f"{name}: {ast.unparse(node)}"] if wrong else []
    assert not found


def test_gone_names_stay_gone() -> None:
    gone = {word for words in GONE for word in words.split()} - set(STANDS)
    found = []
    for name, file in FILES.items():
        with file.open("rb") as text:
            found += [f"{name}:{x.start[0]}: {x.string}" for x in tokenize.tokenize(text.readline) if x.string in gone]
    assert not found
