"""Runs another library's own test files through saccade's faces of it, from a checkout that you have.

    python tests/upstream/run.py flash-attn-2 PATH [--device cpu] [--sample 8] [--longest 600] [pytest's arguments]

The files are copied to a temporary folder, where "cuda" becomes the device asked for. `plugin.py` puts saccade under
the library's names and draws a sample of each test's cases. README.md tells the rest.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent


class Suite(NamedTuple):
    """Test files of one library."""

    faces: tuple[str, ...]
    """What `saccade.compat.install` takes."""

    files: tuple[str, ...]
    """Tests, relative to the checkout."""

    helpers: tuple[str, ...] = ()
    """What tests import from beside them."""


SUITES = {
    "flash-attn-2": Suite(("flash_attn",), ("tests/test_flash_attn.py",)),
    "flash-attn-3": Suite(
        ("flash_attn", "flash_attn_interface"),
        ("hopper/test_flash_attn.py",),
        ("hopper/padding.py", "hopper/test_util.py"),
    ),
    "flash-attn-4": Suite(("flash_attn", "flash_attn.cute"), ("tests/cute/test_flash_attn.py",)),
}


def main(arguments: list[str]) -> int:
    """Copies the files, runs pytest on them, and returns its exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suite", choices=SUITES)
    parser.add_argument("checkout", type=Path, help="the library's repository, or its unpacked source distribution")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    given, rest = parser.parse_known_args(arguments)
    suite, checkout = SUITES[given.suite], given.checkout.resolve()
    missing = [name for name in (*suite.files, *suite.helpers) if not (checkout / name).is_file()]
    if missing:
        parser.error(f"{given.suite} needs {', '.join(missing)}, which {checkout} has not")
    with tempfile.TemporaryDirectory() as folder:
        for name in (*suite.files, *suite.helpers):
            text = (checkout / name).read_text(encoding="utf-8")
            Path(folder, Path(name).name).write_text(on_device(text, given.device), encoding="utf-8")
        Path(folder, "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
        tests = [str(Path(folder, Path(name).name)) for name in suite.files]
        command = [sys.executable, "-m", "pytest", *_options(suite, given.device), *rest, *tests]
        return subprocess.run(command, env=_environment(folder, checkout), check=False).returncode


def on_device(text: str, device: str) -> str:
    """The text of a test, with the strings "cuda" replaced."""
    return text.replace('"cuda"', f'"{device}"').replace("'cuda'", f"'{device}'")


def _options(suite: Suite, device: str) -> list[str]:
    faces = [argument for name in suite.faces for argument in ("--face", name)]
    return ["-p", "plugin", "--upstream-device", device, *faces, "-p", "no:cacheprovider"]


def _environment(folder: str, checkout: Path) -> dict[str, str]:
    """The faces come first, the copies next, and what the faces lack from the checkout."""
    paths = [str(HERE), str(HERE.parents[1] / "src"), folder, str(checkout), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "FLASH_ATTENTION_DISABLE_FP8": os.environ.get("FLASH_ATTENTION_DISABLE_FP8", "TRUE"),
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
