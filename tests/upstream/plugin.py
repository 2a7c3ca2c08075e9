"""A pytest plugin: saccade under another library's names, and a sample of each test's cases."""

from __future__ import annotations

import math
import random
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import probabilities
import pytest
import rotary
import torch

from saccade.compat import install


def pytest_addoption(parser: Any) -> None:
    """What `run.py` passes on."""
    group = parser.getgroup("upstream")
    group.addoption("--face", action="append", default=[], help="a name that saccade.compat.install takes")
    group.addoption("--upstream-device", default="cuda", help="cpu or cuda")
    group.addoption("--sample", type=int, default=8, help="how many cases of each test; 0 for all")
    group.addoption("--seed", type=int, default=0, help="which sample")
    group.addoption("--longest", type=int, default=0, help="leave out cases with longer sequences; 0 for none")


def pytest_configure(config: Any) -> None:
    """Before any test is imported."""
    for name in config.getoption("--face"):
        install(name)
    if config.getoption("--upstream-device") == "cpu":
        _stand_in_for_a_gpu()
    if "flash_attn" in config.getoption("--face"):
        _complete(sys.modules["flash_attn"])


def _stand_in_for_a_gpu() -> None:
    """What tests ask of a GPU: they are to take the path of Hopper."""
    cuda: Any = torch.cuda
    cuda.get_device_capability = lambda *_: (9, 0)
    cuda.get_device_properties = lambda *_: SimpleNamespace(total_memory=80 << 30, multi_processor_count=132)
    cuda.synchronize = cuda.empty_cache = lambda *_: None


def _complete(module: Any) -> None:
    """What tests use besides these functions: rotation, a kernel's block size, and the dropped probabilities."""
    stand_in: Any = ModuleType("flash_attn.ops.triton.rotary")
    stand_in.apply_rotary = rotary.apply_rotary
    sys.modules["flash_attn.ops.triton.rotary"] = stand_in
    module.flash_attn_interface._get_block_size_n = lambda *_: 64
    for name in module.__all__:
        if "kvcache" not in name:
            function = probabilities.returned_by(getattr(module, name), module)
            setattr(module, name, function)
            setattr(module.flash_attn_interface, name, function)


@pytest.hookimpl(wrapper=True)
def pytest_pycollect_makeitem(collector: Any) -> Any:
    """The probabilities of `probabilities.py` are normal ones already."""
    if hasattr(collector.obj, "normalize_flash_attn_S"):
        collector.obj.normalize_flash_attn_S = lambda attention, *_, **__: attention
    return (yield)


@pytest.hookimpl(tryfirst=True)
def pytest_generate_tests(metafunc: Any) -> None:
    """Draws cases from the product of a test's parameters, which would have thousands."""
    marks = list(metafunc.definition.iter_markers("parametrize"))
    config = metafunc.config
    if not marks or not config.getoption("--sample"):
        return
    names = [_names(mark.args[0]) for mark in marks]
    values = [
        [row for row in mark.args[1] if _short(each, _row(row, each), config.getoption("--longest"))]
        for each, mark in zip(names, marks, strict=True)
    ]
    count = math.prod(map(len, values))
    chosen = random.Random(f"{config.getoption('--seed')} {metafunc.definition.name}")
    places = sorted(chosen.sample(range(count), min(count, config.getoption("--sample"))))
    metafunc.definition.own_markers = [x for x in metafunc.definition.own_markers if x.name != "parametrize"]
    metafunc.parametrize([name for each in names for name in each], [_case(place, names, values) for place in places])


def _case(place: int, names: list[list[str]], values: list[list[Any]]) -> Any:
    case, marks = [], []
    for each, rows in zip(names, values, strict=True):
        place, index = divmod(place, len(rows))
        case += _row(rows[index], each)
        marks += getattr(rows[index], "marks", ())
    return pytest.param(*case, marks=marks)


def _names(text: Any) -> list[str]:
    return [name.strip() for name in text.split(",")] if isinstance(text, str) else list(text)


def _row(row: Any, names: list[str]) -> list[Any]:
    row = getattr(row, "values", row) if hasattr(row, "marks") else row if len(names) > 1 else (row,)
    return list(row)


def _short(names: list[str], row: list[Any], longest: int) -> bool:
    lengths = [x for name, x in zip(names, row, strict=True) if "seqlen" in name and type(x) is int]
    return not longest or all(length <= longest for length in lengths)
