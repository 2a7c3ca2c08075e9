"""The names that docstring examples use without importing them, and `--share` to spread tests over processes."""

import random
from pathlib import Path

import pytest
import torch

import saccade


@pytest.fixture(autouse=True)
def _names(doctest_namespace):
    doctest_namespace["torch"] = torch
    doctest_namespace.update({name: getattr(saccade, name) for name in saccade.__all__})


def pytest_addoption(parser):
    parser.addoption("--share", help="a folder: processes that name the same one share the tests; see tests/gpu.sh")


BLOCK = 8
"""Tests that follow one another often need the same kernels: one process takes so many at once."""


def pytest_runtestloop(session):
    """With --share, the blocks of tests that nobody else has taken. In a mixed order, so that neighbours, whose kernels
    are the same, seldom compile at the same time."""
    folder = session.config.getoption("--share")
    if not folder or session.config.option.collectonly:
        return None
    claimed = _claimed(session.items, Path(folder))
    item = next(claimed, None)
    while item is not None:
        following = next(claimed, None)
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        if _device_is_lost():  # every other test would fail here, and nobody else would run it
            pytest.exit(f"the device is lost after {item.nodeid}", returncode=1)
        item = following
    return True


def _device_is_lost():
    try:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


def _claimed(items, folder):
    blocks = list(range(0, len(items), BLOCK))
    random.Random(0).shuffle(blocks)
    for start in blocks:
        try:
            (folder / str(start)).touch(exist_ok=False)
        except FileExistsError:
            continue
        yield from items[start : start + BLOCK]
