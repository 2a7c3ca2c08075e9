"""The pages: their examples run, their links lead somewhere, and what they say of the package is true."""

from __future__ import annotations

import ast
import doctest
import functools
import inspect
import re
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from pkgutil import walk_packages

import pytest

import saccade
import saccade.compat
import saccade.integrations
from benchmarks.harness import report
from tests.support import support_table

ROOT = Path(__file__).parents[2]
FILES = [ROOT / "README.md", ROOT / "DESIGN.md", ROOT / "CONTRIBUTING.md"]
PAGES = [*FILES, *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "notes").glob("*.md"))]
LINK = re.compile(r"\]\((?!https?:|#)([^)#]+)")


WITH_EXAMPLES = (
    "api citation contracts distributed fp8 get_started masks migrate numerics packed paged performance recipes scores"
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


def documented(page: str) -> list[str]:
    return re.findall(r"^::: (\S+)$", (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8"), re.MULTILINE)


API = documented("api")


def test_interface_is_found_without_an_import():
    """The site is made from the sources: there a name is a definition or an import; an assigned alias is nothing."""
    missing = [name for name in API if not _defined(*name.rpartition(".")[::2])]
    assert not missing


def test_no_name_of_the_interface_is_a_module():
    """Where a package has a module of a function's name, the site takes the module: there its own place is written."""
    hidden = []
    for name in API:
        module, _, word = name.rpartition(".")
        x = getattr(import_module(module), word)
        packages = [
            found for at, found in sys.modules.items() if at.startswith("saccade") and hasattr(found, "__path__")
        ]
        homes = [Path(path) for found in packages if getattr(found, word, None) is x for path in found.__path__]
        if any((home / f"{word}.py").exists() for home in homes) and name != f"{x.__module__}.{word}":
            hidden.append(name)
    assert not hidden


def modules() -> Iterator[str]:
    """Modules with an `__all__`, whose names users import."""
    yield from ("saccade", "saccade.nn", "saccade.distributed", "saccade.testing")
    for package in (saccade.compat, saccade.integrations):
        for module in walk_packages(package.__path__, f"{package.__name__}."):
            if not module.name.endswith((".backend", "mla")):  # which import a serving engine
                yield module.name


def test_interface_is_complete():
    """Every public function and class is in the reference, once: where it is defined, or where one imports it from."""
    wanted = {}
    for name in modules():
        module = import_module(name)
        for word in getattr(module, "__all__", ()):
            x = getattr(module, word)
            ours = getattr(x, "__module__", "").startswith("saccade")
            if ours and not word.startswith("_") and (inspect.isclass(x) or callable(x)):
                wanted[f"{name}.{word}"] = x
    found = {id(getattr(import_module(name.rpartition(".")[0]), name.rpartition(".")[2])) for name in API}
    assert not [name for name, x in wanted.items() if id(x) not in found]
    assert len(API) == len({*API})


def test_every_page_is_on_the_site():
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    missing = [page.name for page in (ROOT / "docs").glob("*.md") if page.name not in navigation]
    assert not missing


WITHOUT_EXAMPLES = {"benchmarks", "changelog", "contributing", "DESIGN", "index", "engines"}
"""Files of the repository, and what only an engine runs; README.md's examples run with the tests."""


def test_every_page_has_examples():
    """Every page of the site has something to run."""
    pages = {page.stem for page in (ROOT / "docs").glob("*.md")}
    assert pages == {*WITH_EXAMPLES.split()} | WITHOUT_EXAMPLES | {"command_line"}, "test_console.py runs the last"


def _defined(module: str, name: str) -> bool:
    source = inspect.getsource(import_module(module))
    nodes = list(ast.walk(ast.parse(source)))
    imported = {x.asname or x.name for node in nodes if isinstance(node, ast.ImportFrom) for x in node.names}
    return name in imported | {node.name for node in nodes if isinstance(node, ast.ClassDef | ast.FunctionDef)}


def test_support_table_is_generated():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert readme == support_table.updated(readme), "run `python -m tests.support.support_table`"


@pytest.fixture(scope="module")
def rows_are_read_once():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report, "read", functools.cache(report.read))
        yield


@pytest.mark.usefixtures("rows_are_read_once")
@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_figures_are_those_of_rows(page):
    """Tables between `<!-- bench … -->` or `<!-- speedups … -->` and their ends."""
    told = report.updated(page, ROOT / "benchmarks" / "results")
    assert page.read_text(encoding="utf-8") == told, "run `python -m benchmarks.harness.report README.md docs/*.md`"
