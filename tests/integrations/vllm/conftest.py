"""vLLM's classes, or stubs of them: one of both in a process, since a class is derived once."""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from saccade.integrations.engine_layers import release
from saccade.integrations.vllm import TESTED

INSTALLED = find_spec("vllm") is not None
OURS, LATENTS = "saccade.integrations.vllm.backend", "saccade.integrations.vllm.mla"
LISTS = "saccade.integrations.vllm.sparse_mla"
PREFILL = "vllm.v1.attention.backends.mla.prefill"
STUBBED = (
    "vllm.config", "vllm.v1.attention.backend", "vllm.v1.attention.backends.registry", f"{PREFILL}.base",
    f"{PREFILL}.registry", "vllm.model_executor.layers.attention.mla_attention",
    "vllm.model_executor.layers.attention.sparse_mla_attention", "vllm.v1.attention.backends.mla.sparse_utils",
)  # fmt: skip


@pytest.fixture(scope="package", params=["vllm" if INSTALLED else "stub"])
def vllm(request):
    """`ours`: the module of our classes; `latents`: that of latent attention; `theirs`: vLLM's; `registry`."""
    if INSTALLED:
        theirs = import_module("vllm.v1.attention.backend")
        registry = import_module("vllm.v1.attention.backends.registry")
        import_module("vllm.config")
        yield SimpleNamespace(
            ours=import_module(OURS), latents=import_module(LATENTS), theirs=theirs, registry=registry
        )
        return
    stub, envs = ModuleType("vllm.v1.attention.backend"), ModuleType("vllm.envs")
    vars(envs)["VLLM_BATCH_INVARIANT"] = False
    for name in (OURS, LATENTS, LISTS):
        sys.modules.pop(name, None)  # an empty one, where pytest looked for examples in it and could not import it
    with pytest.MonkeyPatch.context() as patch:
        for name in STUBBED:
            parts = name.split(".")
            for end in range(1, len(parts)):
                patch.setitem(sys.modules, ".".join(parts[:end]), ModuleType(".".join(parts[:end])))
        for name in STUBBED:
            patch.setitem(sys.modules, name, stub)
        patch.setitem(sys.modules, "vllm.envs", envs)
        path = Path(__file__).parent / "vllm_stub.py"
        exec(compile(path.read_text(), path, "exec"), vars(stub))
        yield SimpleNamespace(ours=import_module(OURS), latents=import_module(LATENTS), theirs=stub, registry=stub)
    for name in (OURS, LATENTS, LISTS):
        sys.modules.pop(name, None)


@pytest.fixture
def lists(vllm):
    """The module of latent attention over listed keys, whose classes another release of vLLM has otherwise."""
    if INSTALLED and release("vllm") not in TESTED:
        with pytest.raises(ImportError, match="choose another attention backend"):
            import_module(LISTS)
        pytest.skip(f"vLLM {release('vllm')} is refused, as it should be")
    return import_module(LISTS)


class Layer:
    """A layer with its cache, as vLLM has them: (pages, h_k, page_size, d + d_v), in any order of memory."""

    def __init__(self, vllm, requests, order=(0, 1, 2, 3), **arguments):
        heads, backend = requests.heads, vllm.ours.VLLMBackend
        self.vllm, self.heads = vllm, heads
        self.impl = backend.get_impl_cls()(heads.q, heads.d, 0.3, heads.k, **arguments)
        config = SimpleNamespace(speculative_config=None)
        self.builder = backend.get_builder_cls()(None, ["layer"], config, torch.device(requests.device))
        shape = requests.pages, heads.k, requests.page_size, heads.d + heads.d_v
        memory = torch.empty([shape[i] for i in order], device=requests.device, dtype=requests.dtype)
        self.cache = memory.permute([order.index(i) for i in range(4)]).fill_(torch.nan)

    def common(self, step, actual=None, **changes):
        """What vLLM's runner tells a builder; `actual` counts tokens, padding for a graph included."""
        given = {
            "query_start_loc": step.offsets, "query_start_loc_cpu": step.offsets.cpu(), "seq_lens": step.used,
            "num_reqs": len(step.used), "num_actual_tokens": step.rows if actual is None else actual,
            "max_query_len": step.longest, "max_seq_len": 130, "block_table_tensor": step.table,
            "slot_mapping": step.slots, "causal": True,
        }  # fmt: skip
        return self.vllm.theirs.CommonAttentionMetadata(**given | changes)

    def metadata(self, step, **changes):
        return self.builder.build(0, self.common(step, **changes))

    def update(self, step, slots=None):
        self.impl.do_kv_cache_update(None, step.k_new, step.v_new, self.cache, step.slots if slots is None else slots)

    def run(self, metadata):
        """A function of q and out, as `Step.assert_right` takes it."""

        def forward(q, out):
            assert self.impl.forward(None, q, None, None, self.cache, metadata, out) is out
            return out

        return forward


@pytest.fixture
def layer_of(vllm):
    return lambda requests, *order, **arguments: Layer(vllm, requests, *order, **arguments)
