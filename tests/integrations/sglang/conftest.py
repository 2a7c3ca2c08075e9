"""SGLang's classes, or stubs of them: one of both in a process, since a class is derived once."""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

INSTALLED = find_spec("sglang") is not None
OURS = "saccade.integrations.sglang.backend"
PARTS = {
    "base": "sglang.srt.layers.attention.base_attn_backend",
    "registry": "sglang.srt.layers.attention.attention_registry",
    "choices": "sglang.srt.arg_groups.choices",
    "context": "sglang.srt.runtime_context",
    "pools": "sglang.srt.mem_cache.memory_pool",
    "modes": "sglang.srt.model_executor.forward_batch_info",
    "layers": "sglang.srt.layers.radix_attention",
}


@pytest.fixture(scope="package", params=["sglang" if INSTALLED else "stub"])
def modules(request):
    """`ours`: the module of our class; SGLang's by the names above."""
    if INSTALLED:
        yield SimpleNamespace(ours=import_module(OURS), **{name: import_module(path) for name, path in PARTS.items()})
        return
    stub = ModuleType("sglang")
    path = Path(__file__).parent / "sglang_stub.py"
    sys.modules.pop(OURS, None)  # an empty one, where pytest looked for examples in it and could not import it
    with pytest.MonkeyPatch.context() as patch:
        for name in {part for path in PARTS.values() for part in packages(path)}:
            patch.setitem(sys.modules, name, ModuleType(name))
        for name in ("sglang", *PARTS.values()):
            patch.setitem(sys.modules, name, stub)
        exec(compile(path.read_text(), path, "exec"), vars(stub))
        yield SimpleNamespace(ours=import_module(OURS), **dict.fromkeys(PARTS, stub))
    sys.modules.pop(OURS, None)


def packages(path):
    parts = path.split(".")
    return (".".join(parts[:i]) for i in range(1, len(parts)))


@pytest.fixture
def sglang(modules, monkeypatch):
    """SGLang as a server with default arguments has it; `exact` switches deterministic inference on."""
    server = SimpleNamespace(exact=False, cp=1, dcp=False, speculation=None)
    context = modules.ours._context
    parallel = lambda: SimpleNamespace(attn_cp_size=server.cp, dcp_enabled=server.dcp)  # noqa: E731
    monkeypatch.setattr(context, "get_parallel", parallel)
    monkeypatch.setattr(context, "get_spec", lambda: SimpleNamespace(speculative_algorithm=server.speculation))
    exact = lambda: SimpleNamespace(deterministic=SimpleNamespace(enable_deterministic_inference=server.exact))  # noqa: E731
    monkeypatch.setattr(context, "get_exec", exact)
    return SimpleNamespace(server=server, **vars(modules))


class Pool:
    """A layer's keys and values, (slots, h_k, d): slots of a page follow one another."""

    def __init__(self, requests, hnd=False):
        heads, self.hnd = requests.heads, hnd
        slots = requests.pages * requests.page_size
        sizes = (slots, heads.k, heads.d), (slots, heads.k, heads.d_v)
        self.both = [torch.full(size, torch.nan, device=requests.device, dtype=requests.dtype) for size in sizes]
        self.page_size = requests.page_size

    def get_kv_buffer(self, layer_id):
        if self.hnd:
            return tuple(x.unflatten(0, (-1, self.page_size)).transpose(1, 2) for x in self.both)
        return tuple(self.both)

    def set_kv_buffer(self, layer, loc_info, k, v, k_scale=None, v_scale=None):
        kept = loc_info.loc >= 0
        for x, new in zip(self.both, (k, v), strict=True):
            x[loc_info.loc[kept]] = new[kept]


class Engine:
    """A runner and one layer."""

    def __init__(self, sglang, requests, hnd=False, layer=(), **changes):
        heads, self.requests, self.modes = requests.heads, requests, sglang.modes.ForwardMode
        width = requests.width * requests.page_size
        table = torch.full((len(requests.cached) + 4, width), 1 << 20, dtype=torch.int32)
        rows = torch.arange(width)
        slots = requests.tables[:, rows // requests.page_size] * requests.page_size + rows % requests.page_size
        table[1 : len(slots) + 1] = slots.int()  # request i is row i + 1 of the pool of requests
        config = {"context_len": width, "is_encoder_decoder": False, "is_local_attention_model": False}
        given = {
            "model_config": SimpleNamespace(**config), "req_to_token_pool": SimpleNamespace(
                req_to_token=table.to(requests.device)), "token_to_kv_pool": Pool(requests, hnd),
            "page_size": requests.page_size, "device": requests.device, "dtype": requests.dtype,
            "kv_cache_dtype": requests.dtype, "use_mla_backend": False,
            "kv_index_translator": SimpleNamespace(is_translating=False),
        }  # fmt: skip
        self.runner = SimpleNamespace(**given | changes)
        self.backend = sglang.ours.SGLangBackend(self.runner)
        self.layer = sglang.layers.RadixAttention(heads.q, heads.d, 0.3, heads.k, 5, v_head_dim=heads.d_v)
        for name, value in dict(layer).items():
            setattr(self.layer, name, value)

    def batch(self, step, mode=None, **changes):
        """SGLang's record of a step; requests that only fill up the batch are row 0 of the pool of requests."""
        count, b = len(self.requests.cached), len(step.used)
        indices = torch.tensor([*range(1, count + 1), *[0] * (b - count)], device=step.q.device)
        lengths = step.offsets.diff()
        tokens = mode is None and step.longest == 1 and int(lengths.min()) == 1
        given = {
            "forward_mode": self.modes[mode or ("DECODE" if tokens else "EXTEND")], "batch_size": b,
            "req_pool_indices": indices, "seq_lens": step.used.long(), "seq_lens_cpu": None, "spec_info": None,
            "extend_seq_lens": lengths, "out_cache_loc": step.slots, "out_cache_loc_is_physical": True,
        }  # fmt: skip
        return SimpleNamespace(**given | changes)

    def run(self, step, batch, save=True, **kwargs):
        """A function of q and out, as `Step.assert_right` takes it."""

        def forward(q, out):
            k, v = (step.k_new, step.v_new) if save else (None, None)
            found = self.backend.forward(q.flatten(1), k, v, self.layer, batch, **kwargs)
            assert found.shape == (len(q), out.shape[1] * out.shape[2])
            assert not found[step.rows :].any()  # padding is zero
            out[: step.rows] = found[: step.rows].view(out[: step.rows].shape)
            return out

        return forward


@pytest.fixture
def engine_of(sglang):
    return lambda requests, **arguments: Engine(sglang, requests, **arguments)
