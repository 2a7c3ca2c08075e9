"""The package's description: README.md, whose links to files of the repository become links to its address.

`[project.urls] Repository` in pyproject.toml is that address. While there is none, such links become plain text, so
that the package index shows no dead ones.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?:|#|mailto:)([^)#\s]+)(#[^)\s]*)?\)")


class Readme(MetadataHookInterface):
    def update(self, metadata: dict[str, Any]) -> None:
        text = Path(self.root, "README.md").read_text(encoding="utf-8")
        repository = metadata.get("urls", {}).get("Repository", "")
        text = described(text, repository, metadata.get("version") or "main")
        metadata["readme"] = {"content-type": "text/markdown", "text": text}


def described(text: str, repository: str, version: str) -> str:
    """
    >>> described("[a](b.md#c), [d](https://e), ![f](g.png)", "https://h/i", "1.0")
    '[a](https://h/i/blob/v1.0/b.md#c), [d](https://e), ![f](https://h/i/raw/v1.0/g.png)'
    >>> described("[a](b.md), ![f](g.png)", "", "1.0")
    'a, f'
    """
    ref = version if version == "main" else f"v{version}"

    def absolute(link: re.Match[str]) -> str:
        image, label, target, anchor = link.groups("")
        if not repository:
            return label
        return f"{image}[{label}]({repository.rstrip('/')}/{'raw' if image else 'blob'}/{ref}/{target}{anchor})"

    return LINK.sub(absolute, text)
