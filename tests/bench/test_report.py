"""What becomes of measured rows: files, tables, plots, comparisons."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from saccade.bench import cost, report, rows
from saccade.bench.grids import Cell, named
from saccade.bench.machine import Run
from saccade.bench.rows import BenchRow
from saccade.bench.timing import Times
from saccade.testing.cases import Case

TINY = named(Case("", dtype="fp32", b=1, h_q=4, h_k=2, s_q=24, s_k=24, d=8, mask="causal"))
FORWARD = Cell(TINY, "forward")


def made(provider: str, ms: float | None, role: str = "peer", cell: Cell = FORWARD, **fields) -> BenchRow:
    row = rows.empty_row(Run("1", "2026-01-01T00:00:00Z", "abc", "GPU", "2", "3"), cell, "spec", provider, role)
    row = replace(row, error_ratio=0.5, **fields)
    return row if ms is None else row.timed(Times(ms, ms, ms), cost.Cost(10**9, 10**6))


# Rows


def test_a_line_that_is_no_row_is_named(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(made("a", 1.0).json() + '\n\n{"provider": "a"}\n')
    with pytest.raises(ValueError, match=r"a\.jsonl:3"):
        rows.read(path)


def test_fields_of_the_future_are_passed_over(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(json.loads(made("a", 1.0).json()) | {"colour": "blue"}))
    assert rows.read(path) == [made("a", 1.0)]


def test_ratios_are_to_the_fastest_other_peer():
    found = rows.with_ratios([made("mine", 2.0, "saccade"), made("a", 3.0), made("b", 4.0), made("wrong", None)])
    mine, a, b, wrong = found
    assert (mine.ratio, mine.ratio_to) == (1.5, "a")
    assert (a.ratio, a.ratio_to) == (4 / 3, "b")
    assert (b.ratio, b.ratio_to) == (0.75, "a")
    assert wrong.ratio is None


def test_only_the_last_run_of_a_cell_counts():
    old, new = made("a", 1.0), made("a", 2.0, date="2026-02-01T00:00:00Z", run="2")
    other = made("b", 1.0)  # of the old run: never beside the new one
    assert rows.latest([new, old, other]) == [new]
    backward = made("a", 1.0, cell=Cell(TINY, "backward"))
    assert rows.latest([new, old, backward]) == [new, backward]


# Reports


@pytest.fixture
def results(tmp_path):
    folder = tmp_path / "benchmarks" / "results"
    for d in (64, 128):
        for s in (1024, 4096):
            case = named(Case("", b=16384 // s, h_q=8, h_k=8, s_q=s, s_k=s, d=d, mask="causal"))
            for mode in ("forward", "backward"):
                cell = Cell(case, mode)
                found = [
                    made("saccade-triton", 1.0, "saccade", cell),
                    made("fa3", 0.8, cell=cell),
                    made("flex", None, cell=cell, reason="wrong: the error is 9 of the tolerance"),
                    made("matmul", 0.1, "ceiling", cell),
                ]
                rows.append(folder / "h200" / "a.jsonl", rows.with_ratios(found))
    return folder


def test_tables_are_made_between_markers(results):
    page = "# Title\n<!-- bench gpu=h200 mode=forward d=64 -->\nold\n<!-- /bench -->\nafter\n"
    found = report.updated(page, results)
    assert found.startswith("# Title\n<!-- bench")
    assert found.endswith("<!-- /bench -->\nafter\n")
    assert "old" not in found
    assert "| s_q | saccade-triton | fa3 | matmul | saccade / best peer |" in found.replace("| b ", "")
    assert "| 1024 | 1 | 1.25 | 10 | 0.80 |" in found
    assert report.updated(found, results) == found
    with pytest.raises(ValueError, match="no rows"):
        report.updated(page.replace("d=64", "d=65"), results)
    with pytest.raises(ValueError, match="colour"):
        report.updated(page.replace("d=64", "colour=blue"), results)
    chosen = report.updated(page.replace("d=64", "providers=fa3|flex"), results)
    assert "| d | b | s_q | fa3 | flex | saccade / best peer |" in chosen
    assert "| 128 | 4 | 4096 | 1.25 | – | 0.80 |" in chosen


def test_plots_are_made_for_each_head_dim_and_mode(results, tmp_path):
    pytest.importorskip("matplotlib", reason="the extra [bench]")
    report.main(["--results", str(results), "--plots", str(tmp_path / "plots")])
    names = sorted(path.name for path in (tmp_path / "plots" / "h200").iterdir())
    assert names == [f"{mode}-bf16-d{d}-causal.png" for mode in ("backward", "forward") for d in (128, 64)]


def test_comparison_prints_old_over_new():
    old = [made("a", 2.0), made("gone", 1.0), made("b", 1.0)]
    new = [made("a", 1.0, date="2026-02-01T00:00:00Z"), made("b", None, date="2026-02-01T00:00:00Z")]
    lines = report.comparison(new, old).splitlines()
    assert len(lines) == 3
    assert lines[1].split()[0] == "2.000"
    assert lines[1].endswith(f"a: {TINY.name} forward")
    assert lines[2] == "geometric means: a 2.000 (1)"
    assert "no provider" in report.comparison(new, [])
