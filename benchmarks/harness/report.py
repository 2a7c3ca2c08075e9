"""Tables from committed rows: `python -m benchmarks.harness.report README.md docs/performance.md …`.

A page says where a table goes and what it selects:

    <!-- bench gpu=h200 mode=forward d=128 -->
    <!-- /bench -->

`gpu` is a folder under benchmarks/results, `grid` one of `saccade bench`. Every other word is a field of a BenchRow
and its value; `|` separates alternatives. `providers=` names the columns, and a cell's figures are of the last run that
timed most of them. Speed-ups have a line for each kind of call and peer:

    <!-- speedups
    Packed sequences: grid=varlen own=saccade-gluon peers=fa3|torch-varlen
    -->
    <!-- /speedups -->

A line names the calls, then what it selects: the cells of a grid, one provider of saccade's, the peers, and as many
fields of a BenchRow as it needs. A figure is of the newest run of each cell that timed both; the peer `best` is the
fastest one of each cell. Both write everything between two markers.
"""

from __future__ import annotations

import argparse
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from benchmarks.harness.grids import WITH_HOST
from benchmarks.harness.rows import BenchRow, geometric_mean, latest, parsed, read, selected

RESULTS = Path("benchmarks/results")

_TABLES = re.compile(r"(<!-- bench (?P<query>[^>]*?)-->\n)(?P<old>.*?)(<!-- /bench -->)", re.DOTALL)
_SHAPE = (
    *("mode", "dtype", "layout", "mask", "score", "sink", "deterministic"),
    *("h_q", "h_k", "d", "d_v", "b", "s_q", "s_k", "page_size", "lengths", "cache"),
)
_SAME = {"h_k": "h_q", "d_v": "d", "s_k": "s_q"}
"""Columns that are omitted where they equal another."""
_SPEEDUPS = re.compile(r"(<!-- speedups\n(?P<lines>.*?)-->\n)(.*?)(<!-- /speedups -->)", re.DOTALL)
BEST = "best"
PEERS = {
    "fa3": "FlashAttention-3",
    "fa4": "FlashAttention-4",
    "sdpa-cudnn": "cuDNN",
    "saccade-cudnn": "cuDNN",
    "cudnn-fp8": "cuDNN's FP8",
    "saccade-gluon-bf16": "16 bits",
    "flex": "compiled FlexAttention",
    "torch-varlen": "PyTorch's `varlen_attn`",
    "sdpa-padded": "SDPA on a padded batch",
    BEST: "the fastest peer",
}
"""Providers as people call them."""


def updated(page: Path, results: Path = RESULTS) -> str:
    """A page's text with every marked table as the rows have it.

    Raises:
        ValueError: a marker is malformed, or selects nothing.
    """

    def filled(found: re.Match[str]) -> str:
        query = parsed(found["query"], "providers")
        rows = read(results / query.pop("gpu", ["h200"])[0])
        columns = query.pop("providers", None)
        chosen = latest(selected(rows, query), columns or ())
        if not chosen:
            raise ValueError(f"no rows for <!-- bench {found['query']}-->")
        return f"{found[1]}{table(chosen, columns)}\n{found[4]}"

    text = _TABLES.sub(filled, page.read_text(encoding="utf-8"))
    return _SPEEDUPS.sub(lambda found: f"{found[1]}{speedup_table(found['lines'], results, page)}\n{found[4]}", text)


def table(rows: list[BenchRow], columns: list[str] | None = None) -> str:
    """Markdown: a line for each cell, with each provider's TFLOP/s (GB/s, or time) and saccade's best ratio.

    The columns on the left are the parts of the shape that differ between the cells.
    """
    cells: dict[tuple[str, str, bool], dict[str, BenchRow]] = {}
    for row in rows:
        cells.setdefault(row.cell, {})[row.provider] = row
    shapes = [next(iter(providers.values())) for providers in cells.values()]
    varying = [name for name in _SHAPE if _varies(shapes, name)] or ["s_q"]
    columns = columns or _columns(rows)
    lines = [
        f"| {' | '.join([*varying, *columns, 'saccade / best peer'])} |",
        "|---" * len(varying) + "|---:" * (len(columns) + 1) + "|",
    ]
    ordered = sorted(cells.values(), key=lambda providers: _order(next(iter(providers.values())), varying))
    for providers in ordered:
        shape = next(iter(providers.values()))
        words = [str(getattr(shape, name)).replace("|", "\\|") for name in varying]
        words += [_figure(providers.get(name)) for name in columns]
        lines.append(f"| {' | '.join([*words, _best(providers.values())])} |")
    return "\n".join([*lines, "", _caption(rows)])


class Pair(NamedTuple):
    """One cell, timed of both in one run."""

    mode: str
    ratio: float
    """The peer's time over saccade's: above 1 is faster."""
    file: Path

    @property
    def is_backward(self) -> bool:
        return self.mode.removesuffix(WITH_HOST) == "backward"


def speedup_table(lines: str, results: Path, page: Path) -> str:
    """Markdown: geometric means, with the least and the largest, and links from `page` to the rows.

    Raises:
        ValueError: a line is malformed, or a peer has no rows.
    """
    found = [["calls", "versus", "forward", "backward", "rows"], ["---"] * 5]
    for line in lines.splitlines():
        label, colon, query = line.partition(": ")
        if not colon:
            raise ValueError(f"{line!r} in <!-- speedups --> is not 'calls: field=value …'")
        wanted = parsed(query, "own", "peers")
        folder = results / wanted.pop("gpu", ["h200"])[0]
        (own,), peers = wanted.pop("own"), wanted.pop("peers")
        for peer in peers:
            pairs = list(_pairs(folder, wanted, own, peer))
            if not pairs:
                raise ValueError(f"no rows of {own} beside {peer} for {line!r}")
            forward = [pair.ratio for pair in pairs if not pair.is_backward]
            backward = [pair.ratio for pair in pairs if pair.is_backward]
            files = Counter(pair.file for pair in pairs)
            links = ", ".join(f"[{n}]({_link(file, page)})" for file, n in sorted(files.items()))
            found.append([label, PEERS.get(peer, peer), _mean(forward), _mean(backward), links])
            label = ""
    shown = [i for i in range(5) if any(words[i] for words in found[2:])]  # a column for backwards, if there are any
    return "\n".join(f"| {' | '.join(words[i] for i in shown)} |" for words in found)


def _pairs(folder: Path, query: dict[str, list[str]], own: str, peer: str) -> Iterator[Pair]:
    files: dict[str, Path] = {}
    rows: list[BenchRow] = []
    for file in sorted(folder.glob("*.jsonl")):
        of_file = [row for row in selected(read(file), query) if row.provider in (own, peer)]
        files |= {row.run: file for row in of_file}
        rows += of_file
    times: dict[tuple[str, str, bool], dict[str, BenchRow]] = {}
    for row in latest(rows, (own, peer)):
        times.setdefault(row.cell, {})[row.provider] = row
    for cell, by_provider in times.items():
        ours, theirs = by_provider.get(own), by_provider.get(peer)
        if peer == BEST and ours and ours.ratio:
            yield Pair(cell[1], ours.ratio, files[ours.run])
        elif ours and theirs and ours.ms and theirs.ms:
            yield Pair(cell[1], theirs.ms / ours.ms, files[ours.run])


def _mean(ratios: list[float]) -> str:
    """
    >>> _mean([0.5, 2.0, 1.0])
    '1.00 (0.50–2.00)'
    """
    return f"{geometric_mean(ratios):.2f} ({min(ratios):.2f}–{max(ratios):.2f})" if ratios else ""


def _link(file: Path, page: Path) -> str:
    return Path(os.path.relpath(file.resolve(), page.resolve().parent)).as_posix()


def comparison(new: Iterable[BenchRow], old: Iterable[BenchRow]) -> str:
    """A line for each provider and cell in both: the old time over the new; above 1 is faster now.

    The ratio of the ceilings shows how far the machines or their clocks differ.
    """
    before = {(*row.cell, row.provider): row for row in latest(old) if row.ms}
    lines, ratios = [], {}
    for row in latest(new):
        was = before.get((*row.cell, row.provider))
        if was is None or not was.ms or not row.ms:
            continue
        ratio = was.ms / row.ms
        ratios.setdefault(row.provider, []).append(ratio)
        lines.append(f"{ratio:6.3f}  {was.ms:10.4f} -> {row.ms:10.4f} ms  {row.provider}: {row.case} {row.mode}")
    if not lines:
        return "no provider and case is in both"
    means = [f"{name} {geometric_mean(found):.3f} ({len(found)})" for name, found in ratios.items()]
    return "\n".join(["old / new time:", *sorted(lines), "geometric means: " + ", ".join(means)])


def speedups(rows: list[BenchRow]) -> list[str]:
    """A line for each mode, saccade backend and peer: mean and least speed-up over the cells that both have."""
    times = {(*row.cell, row.provider): row.ms for row in rows if row.ms}
    roles = {row.provider: row.role for row in rows if row.ms}
    lines = []
    for mode in dict.fromkeys(row.mode for row in rows):
        cells = dict.fromkeys(row.cell for row in rows if row.mode == mode)
        for own in (name for name, role in roles.items() if role == "saccade"):
            for peer in (name for name, role in roles.items() if role == "peer"):
                pairs = [(times.get((*cell, peer)), times.get((*cell, own))) for cell in cells]
                ratios = [other / ms for other, ms in pairs if other and ms]
                if ratios:
                    mean = geometric_mean(ratios)
                    lines.append(
                        f"{mode}: {own} / {peer}: mean {mean:.3f}, least {min(ratios):.3f}, {len(ratios)} cells"
                    )
    return lines


def _varies(shapes: list[BenchRow], name: str) -> bool:
    values = [getattr(row, name) for row in shapes]
    return len(set(values)) > 1 and values != [getattr(row, _SAME.get(name, "case")) for row in shapes]


def _columns(rows: Iterable[BenchRow]) -> list[str]:
    """Providers with a time: saccade's first, then peers, then the matrix product."""
    roles = {row.provider: row.role for row in rows if row.ms and row.provider != "copy"}
    return sorted(roles, key=lambda name: (("saccade", "peer", "ceiling").index(roles[name]), name))


def _figure(row: BenchRow | None) -> str:
    if row is None:
        return ""
    if row.ms is None:
        return "wrong" if row.error_ratio is not None and not row.error_ratio <= 1 else "–"
    return row.figure


def _best(rows: Iterable[BenchRow]) -> str:
    ratios = [row.ratio for row in rows if row.role == "saccade" and row.ratio]
    return f"{max(ratios):.2f}" if ratios else ""


def _order(row: BenchRow, names: list[str]) -> tuple[tuple[bool, float, str], ...]:
    """Numbers as numbers, `none` before other masks."""

    def key(value: object) -> tuple[bool, float, str]:
        number = isinstance(value, (int, float))
        return (not number, float(value) if number else 0.0, "" if value == "none" else str(value))

    return tuple(key(getattr(row, name)) for name in names)


def _caption(rows: list[BenchRow]) -> str:
    """The unit of the figures, and their runs."""
    unit = ", ".join(sorted({row.unit for row in rows if row.role != "ceiling"}))
    commits: dict[str, set[str]] = {}
    for row in rows:
        place = f"{row.gpu}, torch {row.torch}, triton {row.triton}"
        commits.setdefault(f"{unit} on {place}, {row.date[:10]}", set()).add(
            row.commit[:7] + "+" * row.commit.endswith("+")
        )
    return "; ".join(f"{run}, commit {', '.join(sorted(held))}" for run, held in sorted(commits.items()))


def main(arguments: list[str] | None = None) -> None:
    name = "python -m benchmarks.harness.report"
    parser = argparse.ArgumentParser(prog=name, description="Tables from committed rows.")
    parser.add_argument("pages", nargs="+", type=Path, help="pages whose marked tables are updated")
    parser.add_argument("--results", type=Path, default=RESULTS)
    given = parser.parse_args(arguments)
    for path in (*given.pages, given.results):
        if not path.exists():
            parser.error(f"{path} does not exist")
    for page in given.pages:
        page.write_text(updated(page, given.results), encoding="utf-8")


if __name__ == "__main__":
    main()
