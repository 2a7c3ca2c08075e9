from __future__ import annotations

import importlib

import pytest


@pytest.fixture(params=["saccade.compat.xformers.attn_bias", "xformers.ops.fmha.attn_bias"], ids=["ours", "xformers"])
def module(request):
    """The biases: ours, and those of an installed xformers."""
    pytest.importorskip(request.param.split(".")[0])
    return importlib.import_module(request.param)
