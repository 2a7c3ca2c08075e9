"""SGLang's registry: SGLang 0.5.23's own where it is installed, else tested against stubs."""

from __future__ import annotations

import logging
from importlib import metadata

import pytest

from saccade.integrations import engine_layers
from saccade.integrations import sglang as integration

LISTS = (
    "ATTENTION_BACKEND_CHOICES",
    "DETERMINISTIC_ATTENTION_BACKEND_CHOICES",
    "RADIX_SUPPORTED_DETERMINISTIC_ATTENTION_BACKEND",
)


@pytest.fixture(autouse=True)
def _nothing_registered(sglang):
    yield
    sglang.registry.ATTENTION_BACKENDS.pop("saccade", None)
    for name in LISTS:
        if "saccade" in getattr(sglang.choices, name):
            getattr(sglang.choices, name).remove("saccade")


@pytest.mark.parametrize("version", ["0.5.23", "0.5.24", None])
def test_the_name_is_ours(version, sglang, requests_of, engine_of, monkeypatch, caplog):
    def answer(package):
        if version is None:
            raise metadata.PackageNotFoundError(package)
        return version

    monkeypatch.setattr(engine_layers.metadata, "version", answer)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            integration.plugin()
    for name in LISTS:
        assert getattr(sglang.choices, name).count("saccade") == 1
    made = sglang.registry.ATTENTION_BACKENDS["saccade"]
    runner = engine_of(requests_of(1, 16, "cpu")).runner
    assert isinstance(made(runner), sglang.ours.SGLangBackend)
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == (0 if version == "0.5.23" else 2)
    wanted = f"saccade was tested with SGLang 0.5.23, and this is SGLang {version or 'of an unknown version'}"
    assert all(text.startswith(wanted) for text in told)


WITHOUT = """
import sys
sys.modules["sglang"] = None
from saccade.integrations import sglang
sglang.plugin()
try:
    sglang.register()
except ImportError as error:
    print(error)
assert not {"saccade.integrations.sglang.backend", "saccade.backends.triton"} & {*sys.modules}
"""


def test_without_sglang(fresh_process):
    assert "written for SGLang 0.5.23, and SGLang" in fresh_process(WITHOUT)
