"""The names that docstring examples use without importing them, and `--shard` to spread tests over processes."""

import pytest
import torch

import saccade


@pytest.fixture(autouse=True)
def _names(doctest_namespace):
    doctest_namespace["torch"] = torch
    doctest_namespace.update({name: getattr(saccade, name) for name in saccade.__all__})


def pytest_addoption(parser):
    parser.addoption(
        "--shard", default="0/1", help="i/n: every n-th test from the i-th on; tests/gpu.sh runs n at once"
    )


def pytest_collection_modifyitems(config, items):
    i, n = map(int, config.getoption("--shard").split("/"))
    items[:] = items[i::n]
