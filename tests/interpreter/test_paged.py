"""The kernels over pages against the oracle."""

from __future__ import annotations

import pytest

from saccade.testing import paged
from saccade.testing.accuracy import check

CASES = {case.name: case for case in paged.named()}


@pytest.mark.parametrize("name", CASES)
def test_named_case(name):
    case = CASES[name].replace(dtype="fp16")
    given = case.inputs()
    check(given.q, given.k, given.v, backend="triton", **given.keywords).assert_ok()
