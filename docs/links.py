"""Hooks of mkdocs: pages that are files of the repository, and links to what is not on the site.

A page that says `--8<-- "NAME"` is that file. Links to files that are pages lead to them, rows of benchmarks and
examples are put on the site, and any other link becomes plain code. A picture X-light.svg has its X-dark.svg beside it.
In code in tables `\\|` is a bar, as it is where repositories are shown.
"""

from __future__ import annotations

import html
import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

DOCS = Path(__file__).parent
ROOT = DOCS.parent
SHOWN = {
    path: str(path.relative_to(ROOT))
    for folder in ("benchmarks/results", "benchmarks/tables", "examples")
    for path in (ROOT / folder).rglob("*.*")
    if "__pycache__" not in path.parts
}
"""Files -> their places on the site."""
SNIPPET = re.compile(r'^--8<-- "(.+)"$', re.MULTILINE)
LINK = re.compile(r"\[([^\]]+)\]\((?!https?:|#|mailto:)([^)#\s]+)(#[^)\s]*)?\)")
CODE = re.compile(r"`([^`\n]+)`")
BOTH = re.compile(r"(!\[[^\]]*\]\(\S+)-light\.svg\)")
WHOLE = {
    ROOT / found[1]: page.name
    for page in DOCS.glob("*.md")
    if (found := SNIPPET.search(page.read_text(encoding="utf-8")))
}
"""Files of the repository -> the pages that they are."""


def on_files(files: Files, config: Any) -> Files:
    for path, uri in SHOWN.items():
        files.append(File.generated(config, uri, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    source = DOCS / page.file.src_uri
    folder = source.parent
    if found := SNIPPET.search(markdown):
        folder = (ROOT / found[1]).parent
        markdown = SNIPPET.sub(lambda found: (ROOT / found[1]).read_text(encoding="utf-8"), markdown)
    parts = re.split(r"(^```.*?^```)", markdown, flags=re.MULTILINE | re.DOTALL)  # odd ones are code
    parts[::2] = [BOTH.sub(r"\1-light.svg#only-light)\n\1-dark.svg#only-dark)", part) for part in parts[::2]]
    parts[::2] = [CODE.sub(_with_bars, part) for part in parts[::2]]
    parts[::2] = [LINK.sub(lambda link: _on_site(link, folder, source.parent), part) for part in parts[::2]]
    return "".join(parts)


def _with_bars(code: re.Match[str]) -> str:
    bar = r"\|"
    return "<code>" + html.escape(code[1]).replace(bar, "&#124;") + "</code>" if bar in code[1] else code[0]


def _on_site(link: re.Match[str], folder: Path, page: Path) -> str:
    text, target, anchor = link[1], Path(os.path.normpath(folder / link[2])), link[3] or ""
    if target in WHOLE:
        place = DOCS / WHOLE[target]
    elif target in SHOWN:
        place = DOCS / SHOWN[target]
    elif target.is_relative_to(DOCS) and target.is_file():
        place = target
    else:
        return f"`{text.strip('`')}`"
    return f"[{text}]({os.path.relpath(place, page)}{anchor})"
