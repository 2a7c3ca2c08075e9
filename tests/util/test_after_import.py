"""What waits for the import of another module."""

from __future__ import annotations

import sys

import pytest

from saccade.util.imports import after_import


@pytest.fixture
def module(tmp_path, monkeypatch):
    """The name of a module that can be imported."""
    (tmp_path / "some_module.py").write_text("import os\nif os.environ.get('FAILS'): raise ImportError('fails')\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield "some_module"
    sys.modules.pop("some_module", None)


def test_it_waits_for_the_import(module):
    done, finders = [], [*sys.meta_path]
    after_import(module, lambda: done.append(module in sys.modules))
    assert done == []
    __import__(module)
    assert done == [True]
    assert sys.meta_path == finders
    after_import(module, lambda: done.append("at once"))
    assert done == [True, "at once"]


def test_an_import_that_fails_is_not_the_last(module, monkeypatch):
    done = []
    monkeypatch.setenv("FAILS", "1")
    after_import(module, lambda: done.append(1))
    with pytest.raises(ImportError, match="fails"):
        __import__(module)
    assert done == []
    monkeypatch.delenv("FAILS")
    __import__(module)
    assert done == [1]


def test_modules_that_are_not_there_stay_so():
    finders = [*sys.meta_path]
    after_import("no_such_module_anywhere", lambda: None)
    with pytest.raises(ModuleNotFoundError, match="no_such_module_anywhere"):
        __import__("no_such_module_anywhere")
    sys.meta_path[:] = finders


FLOPS = """
import torch
{first}
import saccade, sys
assert ("torch.utils.flop_counter" in sys.modules) == {before}
from torch.utils.flop_counter import FlopCounterMode
q = torch.randn(1, 2, 8, 4)
with FlopCounterMode(display=False) as counter:
    saccade.attention(q, q, q)
print(counter.get_total_flops())
"""


@pytest.mark.slow
@pytest.mark.parametrize("first", ["", "import torch.utils.flop_counter"])
def test_flops_are_counted_whatever_is_imported_first(fresh_process, first):
    assert int(fresh_process(FLOPS.format(first=first, before=bool(first)))) == 2 * 2 * 2 * 8 * 8 * 4
