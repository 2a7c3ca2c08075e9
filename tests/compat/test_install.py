"""Other libraries' names, in processes of their own."""

from __future__ import annotations

import pytest

from saccade.compat import install

INSTALL = "import torch, sys; from saccade.compat import install; install('flash_attn')\n"


def test_what_people_import(fresh_process):
    """As in transformers, ring-flash-attn and axolotl."""
    told = fresh_process(
        INSTALL
        + """
from flash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache, __version__
from flash_attn.bert_padding import pad_input, unpad_input, index_first_axis
from flash_attn.flash_attn_interface import _flash_attn_forward, _flash_attn_varlen_backward
import flash_attn, flash_attn.flash_attn_interface as interface, importlib.util, inspect
assert flash_attn.flash_attn_func is interface.flash_attn_func is flash_attn_func
assert importlib.util.find_spec("flash_attn") and importlib.util.find_spec("flash_attn.bert_padding")
assert "softcap" in inspect.signature(flash_attn_func).parameters
x = torch.randn(1, 8, 2, 4)
print(flash_attn_func(x, x, x, causal=True).shape, __version__)
"""
    )
    assert told.strip() == "torch.Size([1, 8, 2, 4]) 2.8.4"


def test_what_is_not_attention(fresh_process):
    told = fresh_process(
        INSTALL
        + """
import importlib, importlib.util
for name in ("ops.triton.layer_norm", "layers.rotary", "losses.cross_entropy", "modules.mha", "cute"):
    try:
        importlib.import_module("flash_attn." + name)
    except ModuleNotFoundError as error:
        print(error.name)
print(importlib.util.find_spec("flash_attn.cute"))
try:
    from flash_attn import flash_attn_func_that_never_was
except ImportError as error:
    print(type(error).__name__)
"""
    )
    names = ["ops", "layers", "losses", "modules", "cute"]
    assert told.split() == [*(f"flash_attn.{name}" for name in names), "None", "ImportError"]


PARTS = {
    "one package": {"a/flash_attn/__init__.py": "raise SystemExit('hidden')"},
    "a namespace": {},
    "two packages": {
        "b/flash_attn/__init__.py": "from pkgutil import extend_path; __path__ = extend_path(__path__, __name__)",
        "b/flash_attn/layers/__init__.py": "rotary = 2",
    },
}


ORDERS = [(name, first) for name in PARTS for first in ("before", "after")][1:]  # the first one hides what it has


@pytest.mark.slow
@pytest.mark.parametrize(("name", "first"), ORDERS)
def test_an_installed_library_is_not_hidden(name, first, fresh_process, tmp_path):
    """flash-attn-4 shares the name with flash-attn 2."""
    for file, text in ({"a/flash_attn/cute/__init__.py": "cute = 4"} | PARTS[name]).items():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(text)
    code = f"import sys; sys.path[:0] = [{str(tmp_path / 'b')!r}, {str(tmp_path / 'a')!r}]\n"
    look = "import flash_attn.cute\nassert flash_attn.cute.cute == 4\n"
    if name == "two packages":
        look += "import flash_attn.layers\nassert flash_attn.layers.rotary == 2\n"
    code += (look + INSTALL if first == "before" else INSTALL) + look
    code += "from flash_attn import flash_attn_func, cute\nprint(flash_attn_func.__module__, cute.cute)"
    assert fresh_process(code).split() == ["saccade.compat.flash_attn.flash_attn_interface", "4"]


def test_a_second_time_and_patches(fresh_process):
    """A patch of the installed module stays, and reaches nothing here."""
    told = fresh_process(
        INSTALL
        + """
import flash_attn
flash_attn.flash_attn_func = None
assert install("flash_attn") is flash_attn
from saccade.compat.flash_attn import flash_attn_func
print(flash_attn.flash_attn_func, flash_attn_func.__name__)
"""
    )
    assert told.split() == ["None", "flash_attn_func"]


@pytest.mark.parametrize("also", [False, True])
def test_version_4(also, fresh_process):
    """With or without the package that it is a part of."""
    told = fresh_process(
        (INSTALL if also else "import torch; from saccade.compat import install\n")
        + """
install("flash_attn.cute"); install("flash_attn_interface")
import flash_attn.cute, flash_attn_interface
from flash_attn.cute.interface import flash_attn_func
assert flash_attn.cute.flash_attn_func is flash_attn_func
print(flash_attn_func.__module__, flash_attn_interface.flash_attn_func.__module__)
print(hasattr(flash_attn, "flash_attn_func"))
"""
    )
    assert told.split() == ["saccade.compat.flash_attn_cute", "saccade.compat.flash_attn_interface", str(also)]


def test_another_name():
    with pytest.raises(ValueError, match=r"install takes one of 'flash_attn'.*got 'flash_attention'"):
        install("flash_attention")
