"""vLLM's registry and what it asks before it takes a backend: vLLM 0.33.0's own where it is installed, else tested
against stubs."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from importlib import metadata

import pytest
import torch

from saccade.integrations import engine_layers
from saccade.integrations import vllm as integration


@pytest.fixture(autouse=True)
def _nothing_registered(vllm):
    vllm.registry.AttentionBackendEnum.CUSTOM.clear_override()
    yield
    vllm.registry.AttentionBackendEnum.CUSTOM.clear_override()


@pytest.fixture
def found(monkeypatch):
    """Sets the version that is found."""

    def set_version(version):
        def answer(package):
            if version is None:
                raise metadata.PackageNotFoundError(package)
            return version

        monkeypatch.setattr(engine_layers.metadata, "version", answer)

    return set_version


def test_custom_is_ours(vllm, found, caplog):
    found("0.33.0")
    custom = vllm.registry.AttentionBackendEnum.CUSTOM
    for _ in range(2):
        integration.plugin()
        assert custom.get_path() == integration.BACKEND == "saccade.integrations.vllm.Backend"
    assert integration.Backend is vllm.ours.VLLMBackend
    assert not caplog.records
    assert vllm.ours.VLLMBackend.get_name() == custom.name


@pytest.mark.parametrize("version", ["0.34.1", None])
def test_other_versions_are_noted(version, vllm, found, caplog):
    found(version)
    with caplog.at_level(logging.WARNING):
        integration.plugin()
    assert vllm.registry.AttentionBackendEnum.CUSTOM.is_overridden()
    wanted = f"saccade was tested with vLLM 0.33.0, and this is vLLM {version or 'of an unknown version'}"
    assert [record.getMessage().startswith(wanted) for record in caplog.records] == [True]


def test_anothers_custom_stays_until_we_are_asked(vllm, found, caplog):
    found("0.33.0")
    custom = vllm.registry.AttentionBackendEnum.CUSTOM
    vllm.registry.register_backend(custom, "another.Backend")
    integration.plugin()
    assert custom.get_path() == "another.Backend"
    assert "CUSTOM is another.Backend: call saccade.integrations.vllm.register()" in caplog.text
    integration.register()
    assert custom.get_path() == integration.BACKEND


WITHOUT = """
import sys
sys.modules["vllm"] = None
from saccade.integrations import vllm
vllm.plugin()
try:
    vllm.register()
except ImportError as error:
    print(error)
assert not {"saccade.integrations.vllm.backend", "saccade.backends.triton"} & {*sys.modules}
"""


def test_without_vllm(fresh_process):
    assert "written for vLLM 0.33.0, and vLLM" in fresh_process(WITHOUT)


def reasons(vllm, **changes):
    capability = type("DeviceCapability", (), {"major": 9, "minor": 0})()
    asked = {
        "head_size": 128, "dtype": torch.bfloat16, "kv_cache_dtype": "auto", "block_size": 16, "use_mla": False,
        "has_sink": False, "use_sparse": False, "use_mm_prefix": False, "device_capability": capability,
    }  # fmt: skip
    return vllm.ours.VLLMBackend.supports_combination(**asked | changes)


def test_what_runs(vllm):
    for changes in (
        {}, {"has_sink": True}, {"head_size": 512}, {"head_size": 80}, {"dtype": torch.float32}, {"block_size": 1},
        {"kv_cache_dtype": "fp8"}, {"kv_cache_dtype": "fp8_e5m2", "head_size": 80}, {"kv_cache_dtype": "bfloat16"},
        {"kv_cache_dtype": None}, {"device_capability": None},
    ):  # fmt: skip
        assert reasons(vllm, **changes) is None, changes
    backend = vllm.ours.VLLMBackend
    assert backend.supports_sink()
    assert backend.supports_sliding_window()
    assert backend.supports_non_causal()
    assert backend.supports_batch_invariance()
    assert backend.supports_head_size(72)
    assert vllm.ours.VLLMMetadataBuilder._cudagraph_support is vllm.theirs.AttentionCGSupport.ALWAYS


def test_what_does_not_run_is_explained(vllm):
    assert "triton: takes head dims up to 576/512, not 640/640" in reasons(vllm, head_size=640)
    assert "triton: runs on sm80+" in reasons(vllm, device_capability=type("T4", (), {"major": 7, "minor": 5})())
    assert "pointers and strides of q, k and v at multiples of 16 bytes" in reasons(
        vllm, kv_cache_dtype="fp8", head_size=72
    )
    assert "cache of the model's dtype torch.bfloat16 or of 8 bits, not float16" in reasons(
        vllm, kv_cache_dtype="float16"
    )
    assert not vllm.ours.VLLMBackend.supports_head_size(100)


def test_another_contract_is_refused():
    """A release that calls a method with more than ours takes, or asks for one that ours lacks."""

    class Base:
        def forward(self, q, k): ...

        def other(self, x): ...

    class Wider(Base):
        def forward(self, q, k, extra=None): ...

    class Narrower(Base):
        __abstractmethods__ = frozenset({"other"})

        def forward(self, q): ...

    assert not [*engine_layers.differences(Wider, Base)]
    found = [*engine_layers.differences(Narrower, Base)]
    assert found == ["Base.other is not known here", "Base.forward has k"]
    with pytest.raises(
        ImportError, match=r"written for vLLM 0.33.0, and vLLM .* differs: Base.other is not known here"
    ):
        engine_layers.refuse_differences("vllm", "vLLM", integration.TESTED, found)
    engine_layers.refuse_differences("vllm", "vLLM", integration.TESTED, [])


def test_modules_hold_what_answers_for_its_attributes():
    """vLLM on a CPU asks all that modules hold for `vars`, and takes a mapping for granted."""
    held = [(name, x) for name, x in sys.modules.items() if name.startswith("saccade.")]
    wrong = [
        f"{name}.{key}"
        for name, module in held
        for key, value in vars(module).items()
        if hasattr(value, "__dict__") and not isinstance(vars(value), Mapping)
    ]
    assert held
    assert not wrong
