"""NVIDIA's Python frontend of cuDNN, a package that only this backend needs, imported by the first call."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any


def installed() -> bool:
    return find_spec("cudnn") is not None


@cache
def frontend() -> Any:
    """The module `cudnn`."""
    return import_module("cudnn")
