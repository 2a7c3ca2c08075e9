"""The benchmark of ranks: tiny lengths on CPUs, with providers that are made to fail."""

from __future__ import annotations

import pytest

from benchmarks import rank_cells, ranks


def pytest_generate_tests(metafunc):
    """A few cells on two ranks, and all on two, four and eight by --everything."""
    if "smoked" in metafunc.fixturenames:
        few = [(2, "documents-8k,table", 1)]
        whole = metafunc.config.getoption("--everything")
        metafunc.parametrize("smoked", [(2, "", 10), (3, "", 1), (4, "", 2), (8, "", 2)] if whole else few, ids=str)


def smoke(path, number, cells, seeds, *more):
    arguments = ["--smoke", "--ranks", number, "--rounds", 2, "--cells", cells, "--seeds", seeds, "--out", path, *more]
    return ranks.main([*map(str, arguments)])


def test_every_cell_runs(tmp_path, smoked):
    number, cells, seeds = smoked
    path = tmp_path / "rows.jsonl"
    assert smoke(path, *smoked) == 0
    rows = ranks.read(path)
    chosen = rank_cells.chosen(number, seeds, cells)
    assert {ranks.key(row) for row in rows} == {(cell.name, cell.seed, number) for cell in chosen}
    for cell in chosen:
        mine = [row for row in rows if (row["cell"], row["seed"]) == (cell.name, cell.seed)]
        for method in rank_cells.methods(number):
            found = [row for row in mine if row["provider"] == method]
            assert [row["mode"] for row in found] == ["forward", "backward"]
            assert all(row["ms"] > 0 and row["predicted"] > 0 and row["error"] < 1e-2 for row in found)
        others = [row for row in mine if row["provider"] not in ("one GPU", *rank_cells.methods(number))]
        assert {row["provider"] for row in others} >= {"zigzag fa3", "llama3 fa3", "zigzag saccade", "torch"}
    written = path.read_text()
    assert smoke(path, *smoked) == 0  # all is there
    assert path.read_text() == written


class Failing:
    """A pool whose cell fails while some providers are at work."""

    size = 2

    def __init__(self, words, progress):
        self.words, self.progress, self.runs = words, progress, []

    def run(self, work, number, cell, options, seconds):
        self.runs.append({*options.skipped})
        for name, word in self.words.items():
            if name not in options.skipped:
                self.progress.write_text(name)
                raise RuntimeError(f"rank 0: Traceback\n  in a file\n{word}")
        rows = [{"provider": "pull", "mode": mode, "ms": 1.0} for mode in ("forward", "backward")]
        return [rows + [{"provider": x, "reason": y} for x, y in options.skipped.items()]] * number


def bench_of(tmp_path, words, budget=100.0):
    progress = tmp_path / "progress"
    pool = Failing(words, progress)
    options = ranks.Options("cpu", None, 2, 1.0, None, {}, str(progress))
    return ranks.Bench(pool, options, 50.0, budget), pool


def test_who_ends_a_process_is_left_out(tmp_path):
    bench, pool = bench_of(tmp_path, {"torch": "OutOfMemoryError: 99 GB", "llama3 fa3": "rank 1 has not answered"})
    rows = bench.rows(rank_cells.cells(2)[0])
    assert pool.runs == [set(), {"torch"}, {"torch", "llama3 fa3"}]
    assert [row["provider"] for row in rows if "ms" in row] == ["pull", "pull"]
    assert {row["provider"]: row["reason"] for row in rows if "reason" in row}["torch"] == "OutOfMemoryError: 99 GB"


def test_a_cell_that_one_gpu_cannot_do(tmp_path):
    bench, pool = bench_of(tmp_path, {"one GPU": "OutOfMemoryError: 150 GB"})
    rows = bench.rows(rank_cells.cells(2)[0])
    assert len(pool.runs) == 1
    assert [(row["provider"], row["reason"]) for row in rows] == [("one GPU", "OutOfMemoryError: 150 GB")] * 2


def test_a_budget_that_is_over(tmp_path, capsys):
    bench, pool = bench_of(tmp_path, {}, budget=10.0)
    assert ranks.measure(bench, rank_cells.cells(2)[:2], {}, None) == []
    assert not pool.runs
    assert capsys.readouterr().out.count("the budget is over") == 2


def test_cells():
    """Those of both issues of context parallelism, in 140 GB."""
    for number in range(2, 9):
        found = rank_cells.cells(number)
        assert len({(cell.name, cell.seed) for cell in found}) == len(found)
        for each in (8192, 32768):
            seeds = [cell.seed for cell in found if cell.name == f"documents-{each // 1024}k"]
            assert sorted(seeds) == [*range(42, 52)]
            assert {cell.rows for cell in found if cell.name == f"documents-{each // 1024}k"} == {number * each}
        works = len(rank_cells.methods(number)) + ranks.OTHERS
        assert max(rank_cells.gigabytes(cell, number, works) for cell in found) < 140
    assert rank_cells.methods(8) == ["pull", "gather", "ulysses", "2x4", "4x2"]
    with pytest.raises(ValueError, match="no cell's name begins with 'nothing'; there are 128k-64:8"):
        rank_cells.chosen(8, 10, "nothing")
