"""vLLM's engine on a CPU, its scheduler, runner, pages, prefix caching and chunks, with saccade's backend: `make
test-vllm`."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.integrations.vllm.conftest import INSTALLED
from tests.integrations.vllm.engine import CASES

APART = 1e-4
"""Of log-probabilities in float32, whose sums have other orders."""


@pytest.mark.skipif(not INSTALLED, reason="needs vLLM, which `make test-vllm` brings")
@pytest.mark.parametrize("case", CASES)
def test_tokens_have_the_log_probabilities_of_transformers(case: str, tmp_path) -> None:
    words = [sys.executable, "-m", "tests.integrations.vllm.engine", case, str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=900)
    told = [line.removeprefix("RESULT ") for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert told, done.stdout[-2000:] + done.stderr[-4000:]
    results = json.loads(told[0])
    assert len(results) == 8
    assert all(x["apart"] < APART for x in results), results
    assert all(x["cached"] > x["tokens"] // 2 for x in results[4:7]), results
