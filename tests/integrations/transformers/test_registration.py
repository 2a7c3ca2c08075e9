"""Registration, with a stub of transformers where its parts matter alone."""

from __future__ import annotations

import re
import sys
from types import ModuleType

import pytest

from saccade.integrations.transformers import FOR_BATCHES, NAME, attention_forward, attention_mask_of, register


class Interface:
    def __init__(self):
        self.known = {}

    def register(self, name, function):
        self.known[name] = function


@pytest.fixture
def stub(monkeypatch):
    """What registration touches."""
    package, loader = ModuleType("transformers"), ModuleType("transformers.modeling_flash_attention_utils")
    package.AttentionInterface, package.AttentionMaskInterface = Interface(), Interface()
    package.modeling_flash_attention_utils = loader
    loader._flash_with_kvcache_fn = None
    loader._lazy_imports = lambda implementation, attention_wrapper=None: f"loads {implementation}"
    for module in (package, loader):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return package


def test_every_name_and_both_functions(stub):
    """Transformers 5.0 to 5.19 put `paged|` before the name for batches."""
    register()
    names = [NAME, FOR_BATCHES, f"paged|{FOR_BATCHES}"]
    assert stub.AttentionInterface.known == dict.fromkeys(names, attention_forward)
    assert stub.AttentionMaskInterface.known == dict.fromkeys(names, attention_mask_of)


def test_nothing_else_changes(stub):
    """A second call changes nothing, and other names are loaded as before."""
    loader = stub.modeling_flash_attention_utils
    register()
    load = loader._lazy_imports
    register()
    assert loader._lazy_imports is load
    assert load("flash_attention_2") == load(implementation="flash_attention_2") == "loads flash_attention_2"
    *functions, pad, unpad = load(FOR_BATCHES)
    assert functions == [attention_forward] * 3  # without the third, no block tables
    assert pad is unpad is None


def test_block_tables_of_a_cache_that_takes_indices(stub):
    """Of 5.5 to 5.19: not announced, so that each step reads by indices."""
    stub.modeling_flash_attention_utils.lazy_import_paged_flash_attention = None
    register()
    functions = stub.modeling_flash_attention_utils._lazy_imports(f"paged|{FOR_BATCHES}")
    assert functions == (attention_forward, attention_forward, None, None, None)


def test_the_name_for_batches():
    """Transformers 5 looks for `flash`, and for block tables for a 2 or a 3 after it."""
    assert re.match(r".*flash.*[23]", FOR_BATCHES)


def test_an_unknown_loader(stub):
    stub.modeling_flash_attention_utils._lazy_imports = lambda name: name
    with pytest.raises(RuntimeError, match="_lazy_imports is not as expected"):
        register()


def test_without_transformers(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match=r"needs transformers 4\.57 or newer"):
        register()
