"""The tables of configs: what is shipped is right and fits, what tuning tries fits, and who runs what."""

from __future__ import annotations

import contextlib
import json
from dataclasses import replace
from importlib import import_module, resources
from itertools import product

import pytest
import torch

from saccade import Packed, Spec, causal
from saccade.backends import configs
from saccade.backends.hopper.forward import config as gluon
from saccade.backends.triton import config as triton
from saccade.call import Call

CONFIGS = {"gluon": gluon.ForwardConfig, "triton": triton.TileConfig}
TABLES = [file for file in resources.files(configs).iterdir() if file.name.endswith(".json")]
ROWS = [(file.name, key, row) for file in TABLES for key, row in json.loads(file.read_text()).items()]
DIMS = [(64, 64), (128, 128), (256, 256), (192, 128), (8, 8), (40, 24), (136, 32), (48, 256), (256, 128), (128, 256)]


@pytest.mark.parametrize(("table", "key", "row"), ROWS, ids=[f"{table} {key}" for table, key, _ in ROWS])
def test_shipped_rows(table, key, row):
    made = CONFIGS[key.split()[0]](**row["config"])
    assert bool(made.spill) == bool(row.get("why_spill")), "a row says why it spills"
    assert {"date", "torch", "triton", "case", "mask", "timed", "commit", "ms"} <= row["measured"].keys()


@pytest.mark.parametrize("mask", ["none", "causal"])
@pytest.mark.parametrize(("d", "d_v"), DIMS)
@pytest.mark.parametrize("gpu", ["h200", "a GPU without a table"])
def test_hopper_schedules_fit(gpu, d, d_v, mask):
    made = gluon.forward_config(Spec("bf16", d, d_v, mask=mask), gpu)
    fits(made, d, d_v)


def test_hopper_formulas_fit():
    for d, d_v in product(range(8, 257, 8), repeat=2):
        fits(gluon.formula(d, d_v), d, d_v)


def fits(made: gluon.ForwardConfig, d: int, d_v: int, size: int = 2) -> None:
    assert gluon.shared_bytes(d, d_v, made, size) <= gluon.SHARED_BYTES
    assert 128 * (made.consumers * made.registers + made.loader_registers) <= 65536
    assert made.registers % 8 == made.loader_registers % 8 == 0
    assert made.registers <= 240
    assert made.consumers in (2, 3)
    assert made.slots in (1, 2)
    assert made.stages <= 3


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_rows_are_of_tiles_and_not_of_dims(dtype):
    """Specs with the same tiles share a row."""
    assert gluon.key(Spec(dtype, 192, 128)) == "gluon forward 16bit d192/128 full"
    assert gluon.key(Spec(dtype, 136, 80, mask="window")) == "gluon forward 16bit d192/128 masked"
    assert gluon.key(Spec(dtype, 8)) == "gluon forward 16bit d64/16 full"
    assert triton.key("dkdv", Spec(dtype, 72, mask="causal")) == "triton dkdv 16bit d128/128 masked"
    assert (
        triton.key("dk", Spec(dtype, 64, 320)) == triton.key("dk", Spec(dtype, 512)) == "triton dk 16bit d512/512 full"
    )


@pytest.mark.parametrize(("d", "d_v"), [(64, 64), (128, 128), (256, 256), (192, 128)])
def test_candidates_of_hopper(d, d_v):
    """All of them fit, and the formula's is one of them, up to how registers are shared out."""
    pytest.importorskip("triton", reason="the extra [triton]")
    from saccade.backends.hopper.tuning import rows

    for row in rows([(d, d_v)]):
        found = list(row.candidates())
        spec, size = row.spec(), row.dtype.itemsize
        wanted = gluon.formula(d, d_v) if size == 2 else gluon.eight_bit(spec, "", None)
        assert shape(wanted) in map(shape, found)
        assert len(set(found)) == len(found) <= 64
        for made in found:
            fits(made, d, d_v, size)
        words = f"{8 * size}bit d{d}/{d_v} {'masked' if row.masked else 'full'}"
        assert row.key() == gluon.key(spec) == f"gluon forward {words}"


def shape(made: gluon.ForwardConfig) -> gluon.ForwardConfig:
    return replace(made, registers=0, loader_registers=0, spill=0)


def test_candidates_of_triton():
    pytest.importorskip("triton", reason="the extra [triton]")
    from saccade.backends.triton.tuning import rows

    shipped = configs.table("h200")
    made = rows([(64, 64), (128, 128), (256, 256), (512, 512)])
    assert {row.key() for row in made} == {key for key in shipped if key.startswith("triton ")}
    wide = rows([(512, 512), (320, 320)])
    assert [row.kernel for row in wide[:4]] == ["forward", "dk", "dv", "dq"]
    assert all(list(row.candidates()) for row in wide)
    for row in made:
        assert triton.TileConfig(**{**shipped[row.key()], "spill": 0}) in list(row.candidates())


def test_a_user_s_row_comes_first(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    spec = Spec("bf16", 128)
    made = replace(gluon.formula(128, 128), block_k=64)
    fields = {name: value for name, value in vars(made).items() if name != "spill"}
    gluon.forward_config.cache_clear()
    try:
        configs.save("h200", {gluon.key(spec): {"config": fields, "measured": {}}})
        assert gluon.forward_config(spec, "h200") == made
    finally:
        monkeypatch.undo()
        configs.table.cache_clear()
        gluon.forward_config.cache_clear()


@pytest.mark.parametrize("name", ["h100", "h800", "gh200"])
def test_gpus_alike_have_one_table(name):
    assert configs.table(name) == configs.table("h200") != {}
    assert configs.table("a100") == {}


@pytest.mark.parametrize("backend", ["gluon", "triton"])
def test_the_gate_has_a_row_for_each_tile(backend):
    pytest.importorskip("triton", reason="the extra [triton]")
    rows = import_module(f"tests.gate.{backend}")
    keys = [*rows.configs(), *rows.features()]
    assert len(set(keys)) == len(keys)
    assert {key for key in configs.table(rows.GPU) if key.startswith(f"{backend} ")} <= set(keys)


def test_gate_of_hopper_covers_the_head_dims_that_are_fast():
    pytest.importorskip("triton", reason="the extra [triton]")
    from tests.gate import gluon

    for dims in ("64/64", "128/128", "256/256", "192/128"):
        for edges in ("full", "masked"):
            assert f"gluon forward 16bit d{dims} {edges}" in list(gluon.configs())


@pytest.mark.parametrize(("room", "least", "tried"), [(3, 1, [3]), (2, 1, [3, 2]), (0, 1, [3, 2, 1]), (2, 3, [3])])
def test_kernels_without_room_have_fewer_stages(room, least, tried, monkeypatch):
    """As with tables beside the operands; a candidate of the tuning's, whose least are its own, fits or is none."""
    errors = pytest.importorskip("triton.runtime.errors")
    from saccade.backends.device import launch as launches

    monkeypatch.setattr(launches, "triton_backend", lambda: None)
    seen = []

    class Kernel:
        def __getitem__(self, grid):
            return self

        def __call__(self, *arguments, num_warps, num_stages):
            seen.append(num_stages)
            if num_stages > room:
                raise errors.OutOfResources(num_stages, room, "shared memory")
            return "compiled"

    fits = max(tried) <= room or room in tried
    with contextlib.nullcontext() if fits else pytest.raises(errors.OutOfResources):
        launch = launches.Launch(Kernel(), (1, 1, 1), (), warps=4, stages=3, least_stages=least)
        launch(0, ())
        assert launch.compiled == "compiled"
    assert seen == tried


@pytest.mark.parametrize(
    ("rows", "group", "d", "consumers"),
    [
        (128, 1, 64, 2), (256, 1, 48, 2), (384, 1, 64, 3), (512, 1, 64, 2), (4096, 1, 64, 3), (16, 8, 64, 2),
        (48, 8, 64, 3),
    ],
)  # fmt: skip
def test_short_rows_have_two_consumers(rows, group, d, consumers):
    """Whose 128 rows they fill, where three have 192; with heads that share keys in one tile."""
    pytest.importorskip("triton", reason="the extra [triton]")
    launch = import_module("saccade.backends.hopper.forward.launch")
    q, k = torch.empty(1, 2 * group, rows, d).bfloat16(), torch.empty(1, 2, rows, d).bfloat16()
    call = Call(q, k, k)
    assert launch.for_rows(call, gluon.formula(64, 64), 1).consumers == consumers
    other = replace(gluon.formula(64, 64), block_k=64)
    assert launch.for_rows(call, other, 1) == other
    packed = call.replace(layout=Packed(torch.tensor([0, rows])))
    assert launch.for_rows(packed, gluon.formula(64, 64), 1).consumers == 3


@pytest.mark.parametrize(
    ("b", "rows", "d", "mask", "keys"),
    [
        (64, 257, 88, None, 64), (64, 320, 72, None, 64), (64, 384, 88, None, 128), (64, 577, 80, None, 128),
        (64, 4096, 96, None, 128), (1, 257, 88, None, 128), (64, 257, 88, causal(), 128), (64, 257, 128, None, 128),
    ],
)  # fmt: skip
def test_short_rows_have_tiles_of_64_keys(b, rows, d, mask, keys):
    """If keys then end with fewer empty places, and no program has more rows."""
    pytest.importorskip("triton", reason="the extra [triton]")
    launch = import_module("saccade.backends.hopper.forward.launch")
    q = torch.empty(b, 16, rows, d, dtype=torch.bfloat16, device="meta")
    config = launch.for_rows(Call(q, q, q, mask=mask), gluon.formula(d, d), 132)
    assert (config.consumers, config.block_k) == ((3, 64) if keys == 64 else (2, 128))


@pytest.mark.parametrize(
    ("b", "h", "s", "mask", "consumers"),
    [
        (1, 8, 4096, None, 2), (1, 8, 4096, causal(), 2), (1, 8, 1024, None, 2), (8, 10, 4096, None, 3),
        (1, 16, 4096, causal(), 3), (4, 32, 2048, None, 3), (4, 32, 2048, causal(), 3), (1, 16, 16384, None, 3),
    ],
)  # fmt: skip
def test_few_tiles_have_two_consumers(b, h, s, mask, consumers):
    """Of which each of 132 programs has fewer rows: one tile of 192, or two of 128, in place of two of 192."""
    pytest.importorskip("triton", reason="the extra [triton]")
    launch = import_module("saccade.backends.hopper.forward.launch")
    q = torch.empty(b, h, s, 64, dtype=torch.bfloat16, device="meta")
    call = Call(q, q, q, mask=mask)
    assert launch.for_rows(call, gluon.formula(64, 64), 132).consumers == consumers


@pytest.mark.parametrize(
    ("lengths", "group", "rows"),
    [
        ([16384, 16384], 8, 64), ([4096] * 8, 8, 64), ([700] * 9, 8, 8), ([1, 2000], 8, 8), ([700] * 9, 1, 64),
        ([700] * 9, 4, 16), ([1] * 9, 8, 8),
    ],
)  # fmt: skip
def test_heads_share_tiles_of_short_sequences(lengths, group, rows):
    """Each leaves half a tile empty in the mean, which counts where it has few."""
    pytest.importorskip("triton", reason="the extra [triton]")
    launch = import_module("saccade.backends.hopper.forward.launch")
    q, k = torch.empty(1, 2 * group, sum(lengths), 128).bfloat16(), torch.empty(1, 2, sum(lengths), 128).bfloat16()
    call = Call.of_views(q, k, k, Packed.from_lengths(lengths))
    assert launch.rows_of_a_consumer(call, 2) == rows


@pytest.mark.parametrize(
    ("layout", "loader"), [("dense", 40), *((word, 88) for word in ("padded", "packed", "ranges", "paged"))]
)
def test_producers_that_read_lengths_have_registers(layout, loader):
    assert gluon.forward_config(Spec("bf16", 128, mask="causal", layout=layout), "h200").loader_registers == loader
    if layout != "dense":  # wider queries leave the consumers less
        assert gluon.forward_config(Spec("bf16", 192, 128, mask="causal", layout=layout), "h200").loader_registers == 56
