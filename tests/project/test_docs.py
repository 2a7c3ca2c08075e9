"""The pages: their examples run, their links lead somewhere, and what they say of the package is true."""

from __future__ import annotations

import ast
import doctest
import inspect
import re
from importlib import import_module
from pathlib import Path

import pytest

from saccade.testing import support

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "DESIGN.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
LINK = re.compile(r"\]\((?!https?:|#)([^)#]+)")


WITH_EXAMPLES = (
    "adoption callbacks contracts distributed flash_attn fp8 masks packed paged positions pytorch scores serving "
    "transformers"
)


@pytest.mark.parametrize("page", WITH_EXAMPLES.split())
def test_examples_run(page):
    result = doctest.testfile(str(ROOT / "docs" / f"{page}.md"), module_relative=False, encoding="utf-8")
    assert result.attempted
    assert not result.failed


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    missing = [link for link in LINK.findall(page.read_text(encoding="utf-8")) if not (page.parent / link).exists()]
    assert not missing


def test_interface_is_found_without_an_import():
    """The site is made from the sources: there a name is a definition or an import; an assigned alias is nothing."""
    names = re.findall(r"^::: (\S+)$", (ROOT / "docs/api.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert names
    missing = [name for name in names if not _defined(*name.rpartition(".")[::2])]
    assert not missing


def _defined(module: str, name: str) -> bool:
    source = inspect.getsource(import_module(module))
    nodes = list(ast.walk(ast.parse(source)))
    imported = {x.asname or x.name for node in nodes if isinstance(node, ast.ImportFrom) for x in node.names}
    return name in imported | {node.name for node in nodes if isinstance(node, ast.ClassDef | ast.FunctionDef)}


def test_support_table_is_generated():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert readme == support.updated(readme), "run `python -m saccade.testing.support`"


def test_tree_is_true():
    """The README's tree names what src/saccade holds, all of it and nothing else."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    named = set(re.findall(r"^  (\w+(?:\.py|/)) ", readme, re.MULTILINE))
    files = {path.name for path in (ROOT / "src/saccade").glob("[!_]*.py")}
    folders = {f"{path.parent.name}/" for path in (ROOT / "src/saccade").glob("*/*.py")}
    assert named == files | folders
