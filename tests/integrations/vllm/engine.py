"""vLLM's engine on a CPU with saccade's backend, beside transformers: what `test_engine.py` runs, a process a case.

    python -m tests.integrations.vllm.engine CASE FOLDER

Prints a JSON list: for each prompt, cold and then with its prefix cached, the tokens that were cached and the largest
distance of the log-probabilities of the tokens that the engine chose from transformers' own.
"""

from __future__ import annotations

import json
import os
import sys
from importlib import import_module
from typing import Any

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "VLLM_HOST_IP": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo",
}  # fmt: skip

import torch

from saccade.integrations.vllm import BACKEND, PREFILL
from tests.integrations.small_model import saved

DRAFTS = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2, "prompt_lookup_min": 1}
LATENTS: dict[str, Any] = {
    "num_key_value_heads": 4, "kv_lora_rank": 512, "q_lora_rank": None, "qk_nope_head_dim": 32, "qk_rope_head_dim": 64,
    "v_head_dim": 32, "head_dim": 64, "first_k_dense_replace": 2, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "n_group": 1, "topk_group": 1,
}  # fmt: skip
PLAIN: dict[str, Any] = {"compilation_config": {"custom_ops": ["none"]}}
"""Without vLLM's rotary kernel for CPUs, which is wrong for float32 where queries are columns of a wider tensor."""
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama": ("llama", {}, {"block_size": 16}),
    "drafts": ("llama", {}, {"block_size": 32, "speculative_config": DRAFTS}),
    "windows": ("mistral", {"sliding_window": 24}, {"block_size": 64}),
    "latents": ("deepseek_v3", LATENTS, {"block_size": 16} | PLAIN),
    "latent drafts": ("deepseek_v3", LATENTS, {"block_size": 32, "speculative_config": DRAFTS} | PLAIN),
    "caps": ("gemma2", {"sliding_window": 24, "attn_logit_softcapping": 5.0}, {"block_size": 16}),
}
"""transformers' name of a model, and what changes its configuration and the engine's."""


def engine_of(case: str, folder: str) -> Any:
    registry: Any = import_module("vllm.v1.attention.backends.registry")
    prompts: Any = import_module("vllm.v1.attention.backends.mla.prefill.registry")
    torch.cpu._is_amx_tile_supported = lambda: True  # or vLLM has neither chunks nor cached prefixes for latents
    for name in ("CPU_ATTN", "AMX_MLA"):  # on a CPU vLLM takes no other names
        registry.register_backend(registry.AttentionBackendEnum[name], BACKEND)
    prompts.register_mla_prefill_backend(prompts.MLAPrefillBackendEnum.CPU, PREFILL)
    vllm: Any = import_module("vllm")
    return vllm.LLM(
        folder,
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        max_model_len=512,
        max_num_seqs=8,
        max_num_batched_tokens=64,  # prompts come in chunks, beside tokens of others
        enable_prefix_caching=True,
        **CASES[case][2],
    )


@torch.no_grad()
def compared(model: Any, engine: Any) -> list[dict[str, Any]]:
    vllm: Any = import_module("vllm")
    g = torch.Generator().manual_seed(0)
    shared = torch.randint(3, 500, (80,), generator=g).tolist()
    prompts = [shared + torch.randint(3, 500, (n,), generator=g).tolist() for n in (1, 40, 100)]
    prompts.append(torch.randint(3, 500, (17,), generator=g).tolist())
    words = vllm.SamplingParams(temperature=0, max_tokens=12, logprobs=0, detokenize=False, ignore_eos=True)
    found = []
    for _ in ("cold", "cached"):
        results = engine.generate([{"prompt_token_ids": x} for x in prompts], words, use_tqdm=False)
        for prompt, result in zip(prompts, results, strict=True):
            chosen = list(result.outputs[0].token_ids)
            told = [x[token].logprob for token, x in zip(chosen, result.outputs[0].logprobs, strict=True)]
            scores = model(torch.tensor([prompt + chosen])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
            right = scores.gather(1, torch.tensor(chosen)[:, None])[:, 0]
            apart = (torch.tensor(told) - right).abs().max().item()
            found.append({"tokens": len(prompt), "cached": result.num_cached_tokens, "apart": apart})
    return found


if __name__ == "__main__":
    given_case, given_folder = sys.argv[1:]
    given_model = saved(CASES[given_case][0], given_folder, **CASES[given_case][1])
    print("RESULT", json.dumps(compared(given_model, engine_of(given_case, given_folder))), flush=True)
    os._exit(0)  # the engine's threads may keep the process alive
