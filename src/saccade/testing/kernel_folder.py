"""Whether what a folder of Triton's form holds is whole. Triton itself asks only whether the files are there."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_MAGIC = b"\x7fELF\x02\x01"
"""64 bits, low bytes first."""
_SECTION = struct.Struct("<IIQQQQIIQQ")
_EMPTY_SECTION = 8
"""SHT_NOBITS: takes no bytes of the file."""


def drop_broken(folder: Path) -> list[str]:
    """Removes what makes Triton take a kernel or a launcher that is not whole for compiled; names the files."""
    at_fault = []
    for group in sorted(folder.glob("*/__grp__*.json")):
        if (broken := _broken_of(group)) is not None:
            group.unlink()
            at_fault.append(str(broken.relative_to(folder)))
    for library in sorted(folder.glob("*/*.so")):
        if not whole_elf(library.read_bytes()):
            library.unlink()
            at_fault.append(str(library.relative_to(folder)))
    return at_fault


def _broken_of(group: Path) -> Path | None:
    """The first file of a kernel's that is not whole, if any: in the group's own folder, as its list may name the place
    where that will be."""
    listed = _json(group)
    paths = listed.get("child_paths") if isinstance(listed, dict) else None
    if not isinstance(paths, dict) or not any(name.endswith(".json") for name in paths):
        return group
    files = (group.parent / name for name in paths)
    return next((file for file in files if not _whole(file)), None)


def _whole(file: Path) -> bool:
    if not file.is_file() or not file.stat().st_size:
        return False
    if file.suffix == ".json":
        found = _json(file)
        return isinstance(found, dict) and "target" in found
    return file.suffix != ".cubin" or whole_elf(file.read_bytes())


def _json(file: Path) -> Any:
    """None of a file that holds none."""
    try:
        return json.loads(file.read_bytes())
    except ValueError:
        return None


def whole_elf(data: bytes) -> bool:
    """Whether an ELF file of 64 bits has all that its headers name.

    >>> whole_elf(b"")
    False
    """
    if not data.startswith(_MAGIC) or len(data) < 64:
        return False
    programs, sections = struct.unpack_from("<QQ", data, 32)
    program_size, program_count, section_size, section_count = struct.unpack_from("<HHHH", data, 54)
    tables_end = max(programs + program_size * program_count, sections + section_size * section_count)
    if tables_end > len(data) or section_size != _SECTION.size:
        return False
    return all(end <= len(data) for end in _ends(data, sections, section_count))


def _ends(data: bytes, place: int, count: int) -> Iterator[int]:
    """Where each section ends."""
    for index in range(count):
        _, kind, _, _, offset, size, *_ = _SECTION.unpack_from(data, place + index * _SECTION.size)
        yield 0 if kind == _EMPTY_SECTION else offset + size
