"""Models of Hugging Face's transformers by saccade and by sdpa: prompts, generation, training.

    python -m benchmarks.transformers [--models llama,mistral] [--work prefill-8k,train-packed] [--rounds 7]
        [--cached] [--out rows.jsonl]

Eight layers of width 1024, 16 query heads on 4 key heads, bf16, random weights. Both implementations have the same
weights and take turns; losses have to agree before a time is printed. Rows have the median and the quartiles in
milliseconds, and `of_sdpa`, the median over the rounds of this time over sdpa's: below 1 is faster. `--cached`
generates into static caches, whose steps transformers compiles.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness.machine import Run
from saccade.integrations.transformers import NAME, register
from saccade.testing.timing import in_turns

SIZES = {
    "vocab_size": 32000, "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 8,
    "num_attention_heads": 16, "num_key_value_heads": 4, "max_position_embeddings": 16384, "pad_token_id": 0,
}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "mistral": ("mistral", {"sliding_window": 1024}),
    "qwen3": ("qwen3", {"head_dim": 128}),
    "gemma3": ("gemma3_text", {"head_dim": 256, "sliding_window": 512}),
}
IMPLEMENTATIONS = "sdpa", NAME
Work = Callable[[Any], Tensor | None]
"""Of a model; gives what has to agree, or None."""


def tokens(b: int, s: int) -> Tensor:
    return torch.randint(3, 32000, (b, s), generator=torch.Generator().manual_seed(b * s)).cuda()


def prefill(model: Any, b: int, s: int) -> None:
    with torch.no_grad():
        model(input_ids=tokens(b, s), use_cache=False, logits_to_keep=1)


def train(model: Any, b: int, s: int, packed: int | None = None) -> Tensor:
    """Forward and backward; `packed`: the length of sequences that lie end to end, told by their positions."""
    model.zero_grad()
    more = {} if packed is None else {"position_ids": torch.arange(s, device="cuda")[None] % packed}
    loss = model(input_ids=tokens(b, s), labels=tokens(b, s), use_cache=False, **more).loss
    loss.backward()
    return loss.detach()


def generate(model: Any, b: int, s: int, padding: int = 0, **options: Any) -> None:
    """48 tokens; `padding`: at the left of the first prompt."""
    seen = torch.ones(b, s, dtype=torch.long, device="cuda")
    seen[0, :padding] = 0
    words = {"max_new_tokens": 48, "min_new_tokens": 48, "do_sample": False} | options
    model.generate(tokens(b, s), attention_mask=seen, **words)


WORK: dict[str, Callable[..., Tensor | None]] = {
    "prefill-8k": partial(prefill, b=1, s=8192),
    "prefill-4x1k": partial(prefill, b=4, s=1024),
    "train-8k": partial(train, b=1, s=8192),
    "train-4x1k": partial(train, b=4, s=1024),
    "train-packed": partial(train, b=1, s=8192, packed=512),
    "generate": partial(generate, b=8, s=1500),
    "generate-padded": partial(generate, b=8, s=1500, padding=300),
}


def model_of(name: str, implementation: str) -> Any:
    transformers: Any = import_module("transformers")
    kind, changes = MODELS[name]
    config = transformers.AutoConfig.for_model(kind, **copy.deepcopy(SIZES | changes))
    torch.manual_seed(0)
    with torch.device("cuda"):
        return transformers.AutoModelForCausalLM.from_config(
            config, attn_implementation=implementation, dtype=torch.bfloat16
        )


def seconds(work: Work, model: Any) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    work(model)
    torch.cuda.synchronize()
    return time.perf_counter() - start


def agree(name: str, found: dict[str, Tensor | None]) -> None:
    """
    Raises:
        SystemExit: losses that are further apart than rounding to bfloat16 explains.
    """
    values = {key: float(x) for key, x in found.items() if x is not None}
    if values and abs(values[NAME] - values["sdpa"]) > 2e-3 * abs(values["sdpa"]):
        raise SystemExit(f"{name}: a loss of {values[NAME]}, where sdpa has {values['sdpa']}")


def rows(model_name: str, names: list[str], cached: bool, rounds: int) -> Iterator[dict[str, Any]]:
    """One for each piece of work and implementation."""
    models = {x: model_of(model_name, x) for x in IMPLEMENTATIONS}

    def failed(implementation: str, problem: Exception) -> None:
        raise RuntimeError(f"{model_name} on {implementation}") from problem

    for name in names:
        work = partial(WORK[name], cache_implementation="static") if cached and "generate" in name else WORK[name]
        agree(f"{model_name} {name}", {x: work(model) for x, model in models.items()})  # kernels compile, too
        samples: dict[str, list[float]] = {x: [] for x in models}
        times = in_turns([*models], rounds, partial(_sample, work, models, samples), failed)
        for implementation, found in times.items():
            row = {"step": "transformers", "model": model_name, "work": name, "cached": cached, "rounds": rounds}
            pairs = zip(samples[implementation], samples["sdpa"], strict=True)
            ratio = statistics.median(x / y for x, y in pairs)  # of one round: a busy host slows both alike
            yield row | {"provider": implementation, **vars(found), "of_sdpa": round(ratio, 4)}


def _sample(work: Work, models: dict[str, Any], samples: dict[str, list[float]], implementation: str) -> float:
    samples[implementation].append(seconds(work, models[implementation]))
    return samples[implementation][-1]


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    listed = partial(str.split, sep=",")
    words.add_argument("--models", type=listed, default=",".join(MODELS))
    words.add_argument("--work", type=listed, default=",".join(WORK))
    words.add_argument("--rounds", type=int, default=7)
    words.add_argument("--cached", action="store_true")
    words.add_argument("--out", type=Path)
    words.add_argument("--commit")
    given = words.parse_args()
    register()
    run = Run.now(torch.device("cuda"), given.commit)
    release = {"transformers": metadata.version("transformers")}
    for model_name in given.models:
        for row in rows(model_name, given.work, given.cached, given.rounds):
            print(*(row[x] for x in ("model", "work", "provider")), f"{row['ms']:.2f} ms", row["of_sdpa"], flush=True)
            run.append(given.out, release | row)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
