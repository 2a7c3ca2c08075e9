"""Speed-ups in a page: a line for each kind of call and peer, from committed rows.

    <!-- speedups
    Packed sequences: grid=varlen own=saccade-gluon peers=fa3|torch-varlen
    -->
    <!-- /speedups -->

A line names the calls, then what it selects: the cells of a grid of `saccade bench`, one provider of saccade's, the
peers, and as many fields of a BenchRow and their values as it needs. A figure is of the newest run of each cell that
timed both.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from saccade.bench.rows import BenchRow, geometric_mean, latest, parsed, read, selected

MARKED = re.compile(r"(<!-- speedups\n(?P<lines>.*?)-->\n)(.*?)(<!-- /speedups -->)", re.DOTALL)
NAMES = {
    "fa3": "FlashAttention-3",
    "fa4": "FlashAttention-4",
    "sdpa-cudnn": "cuDNN",
    "saccade-cudnn": "cuDNN",
    "cudnn-fp8": "cuDNN's FP8",
    "saccade-gluon-bf16": "16 bits",
    "flex": "compiled FlexAttention",
    "torch-varlen": "PyTorch's `varlen_attn`",
    "sdpa-padded": "SDPA on a padded batch",
}
"""Providers as people call them."""


class Pair(NamedTuple):
    """One cell, timed of both in one run."""

    mode: str
    ratio: float
    """The peer's time over saccade's: above 1 is faster."""
    file: Path


def table(lines: str, results: Path, page: Path) -> str:
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
            forward = [pair.ratio for pair in pairs if pair.mode != "backward"]
            backward = [pair.ratio for pair in pairs if pair.mode == "backward"]
            files = Counter(pair.file for pair in pairs)
            links = ", ".join(f"[{n}]({_link(file, page)})" for file, n in sorted(files.items()))
            found.append([label, NAMES.get(peer, peer), _figure(forward), _figure(backward), links])
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
        if ours and theirs and ours.ms and theirs.ms:
            yield Pair(cell[1], theirs.ms / ours.ms, files[ours.run])


def _figure(ratios: list[float]) -> str:
    """
    >>> _figure([0.5, 2.0, 1.0])
    '1.00 (0.50–2.00)'
    """
    return f"{geometric_mean(ratios):.2f} ({min(ratios):.2f}–{max(ratios):.2f})" if ratios else ""


def _link(file: Path, page: Path) -> str:
    return Path(os.path.relpath(file.resolve(), page.resolve().parent)).as_posix()
