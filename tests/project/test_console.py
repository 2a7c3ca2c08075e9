"""Blocks of `console` in pages: below `$ saccade …` or `$ python -m saccade…` is what it prints, `…` for anything."""

from __future__ import annotations

import contextlib
import doctest
import io
import re
import runpy
import shlex
import sys
from pathlib import Path
from unittest import mock

import pytest

pytest.importorskip("typer", reason="the extra [cli]")
from typer.testing import CliRunner

from saccade.cli.app import app

BLOCK = re.compile(r"^```console\n(.*?)^```", re.MULTILINE | re.DOTALL)


DOCS = Path(__file__).parents[2] / "docs"
PAGES = [page for page in sorted(DOCS.rglob("*.md")) if BLOCK.search(page.read_text(encoding="utf-8"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_print_what_pages_say(page):
    for block in BLOCK.findall(page.read_text(encoding="utf-8")):
        for command in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            words, _, wanted = command.partition("\n")
            told = _told(shlex.split(words))
            alike = doctest.OutputChecker().check_output(
                wanted.replace("…", "..."), told, doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
            )
            assert alike, f"$ {words}\n{told}"


def _told(words: list[str]) -> str:
    if words[0] == "saccade":
        return CliRunner().invoke(app, words[1:], env={"COLUMNS": "200"}).stdout
    assert words[:2] == ["python", "-m"], words
    told = io.StringIO()
    arguments = mock.patch.object(sys, "argv", words[2:])
    with arguments, contextlib.redirect_stdout(told), contextlib.suppress(SystemExit):
        runpy.run_module(words[2], run_name="__main__", alter_sys=False)
    return told.getvalue()
