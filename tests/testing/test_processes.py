"""Tasks in processes: one that dies takes no other with it."""

from __future__ import annotations

import pytest

from saccade.testing.offline import Died, in_processes

DIES = "__import__('os').abort()"
PROCESS = "__import__('os').getpid()"


@pytest.mark.parametrize("fresh", [False, True])
def test_a_process_that_dies_is_told_by_its_task(fresh):
    tasks = ["1 + 1", DIES, "2 + 2", "3 + 3"]
    assert list(in_processes(eval, tasks, 2, fresh=fresh)) == list(zip(tasks, [2, Died(), 4, 6], strict=True))


def test_a_fresh_process_for_each_task():
    found = [{number for _, number in in_processes(eval, [PROCESS] * 2, 1, fresh=fresh)} for fresh in (False, True)]
    assert [len(numbers) for numbers in found] == [1, 2]


def test_what_a_task_raises_is_raised():
    with pytest.raises(ZeroDivisionError):
        list(in_processes(eval, ["1 / 0", "1"], 1))
