"""Entry points name what exists, and cost nothing that an engine does not have already."""

from __future__ import annotations

import tomllib
from importlib import import_module
from pathlib import Path

import pytest

PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
GROUPS = {"vllm.general_plugins": "vllm", "sglang.srt.plugins": "sglang"}


@pytest.mark.parametrize("group", GROUPS)
def test_entry_points(group):
    assert PROJECT["entry-points"][group] == {"saccade": f"saccade.integrations.{GROUPS[group]}:plugin"}
    assert callable(import_module(f"saccade.integrations.{GROUPS[group]}").plugin)
