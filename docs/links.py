"""Hooks of mkdocs: README.md and DESIGN.md link to files of the repository, which are not on the site.

Plots are put on it; other links become plain code.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

DOCS = Path(__file__).parent
ROOT = DOCS.parent
PLOTS = {str(path.relative_to(ROOT)): path for path in (ROOT / "benchmarks/plots").rglob("*.png")}
SNIPPET = re.compile(r'^--8<-- "(.+)"$', re.MULTILINE)
LINK = re.compile(r"\[([^\]]+)\]\((?!https?:|#)([^)#]+)(#[^)]*)?\)")


def on_files(files: Files, config: Any) -> Files:
    for uri, path in PLOTS.items():
        files.append(File.generated(config, uri, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Puts in the page that is included whole, and turns links to what the site does not have into plain code."""
    if not SNIPPET.search(markdown):
        return markdown
    whole = SNIPPET.sub(lambda found: (ROOT / found[1]).read_text(encoding="utf-8"), markdown)
    return LINK.sub(_on_site, whole)


def _on_site(link: re.Match[str]) -> str:
    text, target, anchor = link[1], link[2].removeprefix("docs/"), link[3] or ""
    on_site = target in PLOTS or (DOCS / target).is_file()
    return f"[{text}]({target}{anchor})" if on_site else f"`{text.strip('`')}`"
