"""The processes that tests of many ranks share."""

from __future__ import annotations

import pytest

from tests.support.ranks import Pool


@pytest.fixture(scope="session")
def pool():
    with Pool(8) as pool:
        yield pool
