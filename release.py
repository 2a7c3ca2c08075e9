"""What has to hold before a release, one line each; it uploads nothing: `make release`.

It runs after `make release-check`, which built dist/ and tried it on the oldest and on the newest PyTorch.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import saccade

ROOT = Path(__file__).parent
VERSION = saccade.__version__


def checks() -> Iterator[tuple[bool, str, str]]:
    """Whether it holds, what, and what to do where it does not."""
    project = tomllib.loads(_text("pyproject.toml"))["project"]
    yield bool(re.fullmatch(r"\d+\.\d+\.\d+", VERSION)), f"version {VERSION}", "src/saccade/__init__.py: like 1.2.3"
    heading = rf"^## \[{re.escape(VERSION)}\] - \d{{4}}-\d\d-\d\d$"
    changelog = bool(re.search(heading, _text("CHANGELOG.md"), re.MULTILINE))
    yield changelog, "the changelog has this version, with its date", f"CHANGELOG.md: ## [{VERSION}] - YYYY-MM-DD"
    cited = f"version: {VERSION}\n" in _text("CITATION.cff")
    yield cited, "the citation has this version", f"CITATION.cff: version: {VERSION}"
    dated = bool(re.search(r"^date-released: ", _text("CITATION.cff"), re.MULTILINE))
    yield dated, "the citation has a date", "CITATION.cff: date-released: YYYY-MM-DD"
    urls = project.get("urls", {})
    yield "Repository" in urls, "the package has an address", "pyproject.toml: [project.urls] Repository = …"
    yield not _git("status", "--porcelain"), "everything is committed", "git status"
    yield _git("rev-parse", "--abbrev-ref", "HEAD") == "main", "the branch is main", "git switch main"
    tag = f"v{VERSION}"
    yield not _git("tag", "--list", tag), f"{tag} is not tagged yet", "a new version in src/saccade/__init__.py"
    built = {path.name for path in (ROOT / "dist").glob("*")}
    wanted = {f"saccade-{VERSION}.tar.gz", f"saccade-{VERSION}-py3-none-any.whl"}
    yield built == wanted, "dist/ has wheel and sdist of this version alone", "make clean release"


def _text(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def _git(*words: str) -> str:
    done = subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=False)
    return done.stdout.strip()


def main() -> None:
    missing = 0
    for holds, what, remedy in checks():
        missing += not holds
        print(f"ok  {what}" if holds else f"!!  {what}: {remedy}")
    print(f"{missing} to be mended" if missing else f"ready: git tag v{VERSION}, and twine upload dist/*")
    sys.exit(1 if missing else 0)


if __name__ == "__main__":
    main()
