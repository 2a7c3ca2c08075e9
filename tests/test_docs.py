"""The pages: their examples run, their links lead somewhere, and what they say of the package is true."""

from __future__ import annotations

import doctest
import re
from pathlib import Path

import pytest

from saccade.testing import support

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "DESIGN.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
LINK = re.compile(r"\]\((?!https?:|#)([^)#]+)")


@pytest.mark.parametrize("page", ["callbacks.md", "masks.md", "scores.md", "packed.md", "contracts.md", "paged.md"])
def test_examples_run(page):
    result = doctest.testfile(str(ROOT / "docs" / page), module_relative=False, encoding="utf-8")
    assert result.attempted
    assert not result.failed


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    missing = [link for link in LINK.findall(page.read_text(encoding="utf-8")) if not (page.parent / link).exists()]
    assert not missing


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
