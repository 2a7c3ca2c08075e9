"""A hook of mkdocs: README.md and DESIGN.md link to files of the repository, which are not on the site."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
SNIPPET = re.compile(r'^--8<-- "(.+)"$', re.MULTILINE)
LINK = re.compile(r"\[([^\]]+)\]\((?!https?:|#)([^)#]+)(#[^)]*)?\)")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Puts in the page that is included whole, and turns links to what the site does not have into plain code."""
    if not SNIPPET.search(markdown):
        return markdown
    whole = SNIPPET.sub(lambda found: (DOCS.parent / found[1]).read_text(encoding="utf-8"), markdown)
    return LINK.sub(_on_site, whole)


def _on_site(link: re.Match[str]) -> str:
    text, target, anchor = link[1], link[2].removeprefix("docs/"), link[3] or ""
    return f"[{text}]({target}{anchor})" if (DOCS / target).is_file() else f"`{text.strip('`')}`"
