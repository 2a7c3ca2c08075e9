"""What the compile gate reads out of PTX."""

from __future__ import annotations

import os
import re
from types import SimpleNamespace

import pytest

from tests.gate import fit
from tests.gate.fit import keys
from tests.gate.machine_code import reused_barriers

MADE = """
	add.s32 	%r2081, %r3680, 197160;
	@%p405 mbarrier.init.shared::cta.b64 [%r2081], 1;
	add.s32 	%r2082, %r3680, 196608;
	@%p405 mbarrier.init.shared::cta.b64 [%r2082], 1;
"""


def test_scratch_memory_where_a_barrier_is_made_is_found():
    scratch = (
        "@%p50 st.shared.b32 [ %r285 + 0 ], %r283;\n bar.warp.sync -1;\n ld.shared.b32 %r286, [global_smem+196608];"
    )
    assert reused_barriers(MADE + scratch) == [196608]


def test_other_reads_of_shared_memory_are_not():
    assert reused_barriers(MADE + "ld.shared.b32 %r286, [global_smem+196880];") == []
    assert reused_barriers("ld.shared.b32 %r286, [global_smem+196608];") == []


def test_a_barrier_where_tiles_begin_is_found():
    assert reused_barriers("mov.b32 %r1, global_smem;\n@%p7 mbarrier.init.shared::cta.b64 [%r1], 2;") == [0]


def test_a_row_whose_process_dies_fails(monkeypatch, capsys):
    pytest.importorskip("triton", reason="the extra [triton]")
    from tests.gate import __main__ as command

    monkeypatch.setattr(fit, "keys", lambda words: ["triton one"])
    monkeypatch.setattr(fit, "fit", _dies)
    with pytest.raises(SystemExit) as ended:
        command.main()
    assert ended.value.code
    assert "FAIL  triton one  its process died" in capsys.readouterr().out


def _dies(key: str) -> None:
    os.abort()


def test_a_kernel_that_triton_does_not_take_is_not_read(monkeypatch):
    knobs = pytest.importorskip("triton", reason="the extra [triton]").knobs
    row = "triton spread_rows 16bit d128/128"
    assert str(fit.read(row)) == f"read  {row}"
    assert knobs.runtime.add_stages_inspection_hook is None

    def wrong(key: str) -> None:
        raise TypeError("initial value for `stride` is of type int32[]")

    monkeypatch.setattr(fit, "_gate", lambda backend: SimpleNamespace(compiled=wrong))
    with pytest.raises(TypeError, match="initial value"):
        fit.read(row)


def test_rows_are_chosen_by_words():
    pytest.importorskip("triton", reason="the extra [triton]")
    assert sorted(keys()) == sorted([*keys(["configs"]), *keys(["features"]), *keys(["combinations"])])
    assert set(keys(["triton"])) == {row for row in keys() if row.startswith("triton ")}
    assert keys(["gluon", "configs", "queued", "d64/64"]) == ["gluon backward 16bit d64/64 queued"]
    with pytest.raises(SystemExit, match=r"no cuda, but .*, sample, read, today, others, and words"):
        keys(["cuda"])


@pytest.mark.parametrize("backend", ["gluon", "triton"])
def test_a_sample_has_every_feature(backend):
    pytest.importorskip("triton", reason="the extra [triton]")
    every, sample = [*keys([backend])], [*keys([backend, "configs", "sample"])]
    assert {word for row in every for word in row.split()} == {word for row in sample for word in row.split()}
    assert {*sample} < {*every}
    assert len({*sample}) == len(sample)


def test_two_halves_are_all_and_others_the_next_day(monkeypatch):
    pytest.importorskip("triton", reason="the extra [triton]")
    every = {*keys(["configs", "sample"])}
    days = {}
    for seed in ("2026-01-01", "2026-01-02"):
        monkeypatch.setenv("SEED", seed)
        first, second = ({*keys(["configs", "sample", word])} for word in ("today", "others"))
        assert first | second == every
        assert not first & second
        assert {*keys(["gluon", "configs", "others"])} <= second  # whatever else is asked for
        days[seed] = first
    assert days["2026-01-01"] != days["2026-01-02"]


@pytest.mark.parametrize("row", ["triton spread_rows 16bit d128/128", "triton rank_sums 16bit d128/128"])
def test_rows_move_16_bytes_at_a_time(row):
    """Masks that Triton does not see through move 2."""
    pytest.importorskip("triton", reason="the extra [triton]")
    compiled, _ = fit._compiled(row)
    moves = set(re.findall(r"(?:ld|st)\.global(?:\.\w+)*", compiled.asm["ptx"]))
    assert moves == {"ld.global.b32", "ld.global.v4.b32", "st.global.v4.b32"}  # the first are of tables
