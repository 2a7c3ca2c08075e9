"""An extension of griffe, for the site: examples in docstrings become sections of code under a heading; else they are
text, and brackets in them links. Arguments of a NamedTuple are its attributes.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

EXAMPLE = r"^>>> .*\n?(?:(?!\s*$).*\n?)*"
RUN = re.compile(rf"{EXAMPLE}(?:\n+{EXAMPLE})*", re.MULTILINE)
"""Examples, with nothing but blank lines between them."""


def _section(found: re.Match[str]) -> str:
    lines = (f"    {line}".rstrip() for line in found[0].rstrip().splitlines())
    return "Examples:\n" + "\n".join(lines) + "\n"


class Examples(griffe.Extension):
    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if not obj.docstring:
            return
        text = RUN.sub(_section, obj.docstring.value)
        if isinstance(obj, griffe.Class) and any("NamedTuple" in str(base) for base in obj.bases):
            text = re.sub(r"^Args:$", "Attributes:", text, flags=re.MULTILINE)
        obj.docstring.value = text
