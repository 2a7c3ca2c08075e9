"""What becomes of measured rows: files, tables, plots, comparisons."""

from __future__ import annotations

import json
import sys
from dataclasses import replace

import pytest
import torch

from benchmarks.harness import cost, report, rows
from benchmarks.harness.grids import BenchGrid, Cell, named
from benchmarks.harness.machine import Run
from benchmarks.harness.rows import BenchRow
from saccade.testing.cases import Case
from saccade.testing.timing import Times

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


def test_what_computes_nothing_is_measured_in_bytes():
    copy = replace(made("copy", 2.0, "ceiling"), tflops=None)
    assert (copy.figure, copy.unit) == ("0.5", "GB/s")
    assert made("a", 2.0).unit == "TFLOP/s"


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


@pytest.fixture
def updated(results, tmp_path):
    """`report.updated` of a text."""

    def of(text: str) -> str:
        page = tmp_path / "page.md"
        page.write_text(text)
        return report.updated(page, results)

    return of


def test_tables_are_made_between_markers(updated):
    page = "# Title\n<!-- bench gpu=h200 mode=forward d=64 -->\nold\n<!-- /bench -->\nafter\n"
    found = updated(page)
    assert found.startswith("# Title\n<!-- bench")
    assert found.endswith("<!-- /bench -->\nafter\n")
    assert "old" not in found
    assert "| s_q | saccade-triton | fa3 | matmul | saccade / best peer |" in found.replace("| b ", "")
    assert "| 1024 | 1 | 1.25 | 10 | 0.80 |" in found
    assert updated(found) == found
    with pytest.raises(ValueError, match="no rows"):
        updated(page.replace("d=64", "d=65"))
    with pytest.raises(ValueError, match="colour"):
        updated(page.replace("d=64", "colour=blue"))
    with pytest.raises(ValueError, match="no grid is named blue"):
        updated(page.replace("d=64", "grid=blue"))
    assert "no rows" not in updated(page.replace("mode=forward d=64", "layout=dense"))
    chosen = updated(page.replace("d=64", "providers=fa3|flex"))
    assert "| d | b | s_q | fa3 | flex | saccade / best peer |" in chosen
    assert "| 128 | 4 | 4096 | 1.25 | – | 0.80 |" in chosen


def test_a_run_without_a_peer_does_not_hide_an_earlier_one_with_it():
    day = {"date": "2026-02-01T00:00:00Z", "run": "2"}
    old = [made("mine", 1.0, "saccade"), made("fa3", 2.0), made("fa4", 3.0)]
    new = [made("mine", 0.5, "saccade", **day), made("fa3", 2.0, **day), made("fa4", None, reason="not here", **day)]
    assert rows.latest([*old, *new], ("mine", "fa3", "fa4")) == old
    assert rows.latest([*old, *new], ("mine", "fa3")) == new
    assert rows.latest([*old, *new]) == new


SPEEDUPS = "<!-- speedups\nAll calls: grid=tiny own=saccade-triton peers=fa3\n-->\n<!-- /speedups -->\n"


@pytest.fixture
def _grid(monkeypatch):
    """Of half of the rows: d = 64."""
    cases = [named(Case("", b=16384 // s, h_q=8, h_k=8, s_q=s, s_k=s, d=64, mask="causal")) for s in (1024, 4096)]
    cells = tuple(Cell(case, mode) for case in cases for mode in ("forward", "backward"))
    monkeypatch.setitem(rows.GRIDS, "tiny", BenchGrid(cells, (), ""))


@pytest.mark.usefixtures("_grid")
def test_speedups_are_of_both_in_one_run(updated, results):
    line = "| All calls | FlashAttention-3 | {} | 0.80 (0.80–0.80) | {} |"
    first = "[4](benchmarks/results/h200/a.jsonl)"
    assert line.format("0.80 (0.80–0.80)", first) in updated(SPEEDUPS)
    assert updated(updated(SPEEDUPS)) == updated(SPEEDUPS)
    cell = next(iter(rows.GRIDS["tiny"].cells))
    day = {"date": "2026-02-01T00:00:00Z", "run": "2"}
    rows.append(results / "h200" / "b.jsonl", [made("saccade-triton", 1.0, "saccade", cell, **day)])
    assert line.format("0.80 (0.80–0.80)", first) in updated(SPEEDUPS)  # nobody beside it
    rows.append(results / "h200" / "b.jsonl", [made("fa3", 3.2, "peer", cell, **day)])
    links = "[3](benchmarks/results/h200/a.jsonl), [1](benchmarks/results/h200/b.jsonl)"
    assert line.format("1.60 (0.80–3.20)", links) in updated(SPEEDUPS)


@pytest.mark.usefixtures("_grid")
def test_speedups_over_the_fastest_peer_with_the_host(updated, results):
    cell = next(iter(rows.GRIDS["tiny"].cells))
    timed = [
        made("saccade-triton", 1.0, "saccade", cell),
        made("fa3", 3.0, "peer", cell),
        made("fa4", 2.0, "peer", cell),
    ]
    modes = {"forward+host": 1, "backward+host": 2}
    for mode, times in modes.items():
        of_mode = [replace(row, mode=mode, ms=row.ms * (times if row.role == "peer" else 1)) for row in timed]
        rows.append(results / "h200" / "b.jsonl", rows.with_ratios(of_mode))
    line = SPEEDUPS.replace("grid=tiny", "mode=forward+host|backward+host").replace("fa3", "best")
    expected = (
        "| All calls | the fastest peer | 2.00 (2.00–2.00) | 4.00 (4.00–4.00) | [2](benchmarks/results/h200/b.jsonl) |"
    )
    assert expected in updated(line)


@pytest.mark.usefixtures("_grid")
@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [("fa3", "fa4", "no rows of saccade-triton beside fa4"), (": ", "", "is not"), ("own", "colour", "colour")],
)
def test_wrong_lines_are_named(old, new, complaint, updated):
    with pytest.raises(ValueError, match=complaint):
        updated(SPEEDUPS.replace(old, new))


def test_comparison_prints_old_over_new():
    old = [made("a", 2.0), made("gone", 1.0), made("b", 1.0)]
    new = [made("a", 1.0, date="2026-02-01T00:00:00Z"), made("b", None, date="2026-02-01T00:00:00Z")]
    lines = report.comparison(new, old).splitlines()
    assert len(lines) == 3
    assert lines[1].split()[0] == "2.000"
    assert lines[1].endswith(f"a: {TINY.name} forward")
    assert lines[2] == "geometric means: a 2.000 (1)"
    assert "no provider" in report.comparison(new, [])


def test_report_names_a_missing_page(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["report", "/nowhere"])
    with pytest.raises(SystemExit) as stop:
        report.main()
    assert stop.value.code not in (0, None)
    assert "/nowhere does not exist" in capsys.readouterr().err.splitlines()[-1]


def test_a_script_adds_rows_with_its_run(tmp_path):
    machine, path = Run.now(torch.device("cpu"), "c0ffee"), tmp_path / "rows.jsonl"
    for ms in (1.5, 2.5):
        machine.append(path, {"ms": ms})
    machine.append(None, {"ms": 3.5})
    found = [json.loads(line) for line in path.read_text().splitlines()]
    assert found == [vars(machine) | {"ms": 1.5}, vars(machine) | {"ms": 2.5}]
    assert found[0]["commit"] == "c0ffee"
