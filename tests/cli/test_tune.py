"""Which candidates `saccade tune` goes on to time."""

from __future__ import annotations

import os
from typing import Any

import pytest
from rich.progress import Progress

from saccade.cli.tune import _able


class Row(str):
    def candidates(self) -> list[int]:
        return [1, 2, 3, 4]


def compiled(task: tuple[Row, int]) -> str | None:
    """Of four candidates one ends its process, and one fails."""
    if task[1] == 2:
        os.abort()
    return "no registers" if task[1] == 3 else None


@pytest.mark.rare
def test_candidates_that_fail_or_end_their_process_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    tuning: Any = pytest.importorskip("saccade.backends.device.tuning", reason="the extra [triton]")
    monkeypatch.setattr(tuning, "compile_one", compiled)
    with Progress(disable=True) as progress:
        assert _able([Row("one"), Row("another")], 2, progress) == {"one": [1, 4], "another": [1, 4]}
