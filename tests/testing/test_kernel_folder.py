"""What is not whole in a folder of kernels is found, and no longer counts as compiled."""

from __future__ import annotations

import json
import struct

import pytest

from saccade.testing.warm import drop_broken, whole_elf


def elf() -> bytes:
    """A header, 16 bytes, and a section that is these."""
    header = b"\x7fELF\x02\x01".ljust(16, b"\0") + struct.pack(
        "<HHIQQQIHHHHHH", 2, 190, 1, 0, 0, 80, 0, 64, 0, 0, 64, 1, 0
    )
    return header + bytes(16) + struct.pack("<IIQQQQIIQQ", 0, 1, 0, 0, 64, 16, 0, 0, 1, 0)


@pytest.fixture
def folder(tmp_path):
    place = tmp_path / "KEY"
    place.mkdir()
    files = {"kernel.ptx": b"text", "kernel.cubin": elf(), "kernel.json": b'{"target": {}}'}
    for name, data in files.items():
        (place / name).write_bytes(data)
    listed = {name: f"/elsewhere/KEY/{name}" for name in files}
    (place / "__grp__kernel.json").write_text(json.dumps({"child_paths": listed}))
    (place / "launcher.so").write_bytes(elf())
    return tmp_path


def test_whole_ones_stay(folder):
    assert drop_broken(folder) == []
    assert len(list(folder.glob("KEY/*"))) == 5


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("kernel.ptx", b""), ("kernel.cubin", b""), ("kernel.cubin", elf()[:-1]), ("kernel.cubin", b"text" * 99),
        ("kernel.json", b"{"), ("kernel.json", b"{}"), ("kernel.json", b"\xff"), ("kernel.ptx", None),
        ("__grp__kernel.json", b""), ("__grp__kernel.json", b"[]"), ("__grp__kernel.json", b'{"child_paths": {}}'),
    ],
)  # fmt: skip
def test_a_kernel_that_is_not_whole(folder, name, data):
    file = folder / "KEY" / name
    file.unlink() if data is None else file.write_bytes(data)
    assert drop_broken(folder) == [f"KEY/{name}"]
    assert not (folder / "KEY" / "__grp__kernel.json").exists()
    assert drop_broken(folder) == []


def test_a_launcher_that_is_not_whole(folder):
    (folder / "KEY" / "launcher.so").write_bytes(elf()[:90])
    assert drop_broken(folder) == ["KEY/launcher.so"]
    assert not (folder / "KEY" / "launcher.so").exists()
    assert (folder / "KEY" / "__grp__kernel.json").exists()


def test_sections_without_bytes_in_the_file_may_end_anywhere():
    data = bytearray(elf())
    data[80 + 4 : 80 + 8] = struct.pack("<I", 8)
    data[80 + 32 : 80 + 40] = struct.pack("<Q", 1 << 40)
    assert whole_elf(bytes(data))
