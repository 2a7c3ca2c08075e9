"""Other libraries' names, which leave the backend to the dispatch."""

from __future__ import annotations

import pytest


@pytest.fixture
def device(torch_device):
    return torch_device
