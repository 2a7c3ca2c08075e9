"""SGLang's engine on a CPU with saccade's backend, its scheduler, runner, pools, prefix cache and chunks, beside
transformers. It runs by hand:

    pip install --no-deps --target SITE sglang==0.5.23
    PYTHONPATH=SITE:.venv/vllm .venv/bin/python -m tests.integrations.sglang.engine FOLDER [PAGE_SIZE]

Packages of `ABSENT` become empty modules here and in the processes that the engine starts: SGLang imports them, and a
Llama on a CPU calls none of them. `.venv/vllm` has the other packages. Prints, for each prompt, cold and then with its
prefix cached, its tokens, those that were cached, and the largest distance of the log-probabilities of the tokens that
the engine chose from transformers' own.
"""

from __future__ import annotations

import importlib.abc
import os
import sys
from importlib import import_module
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

from tests.integrations.small_model import saved

ABSENT = {
    "IPython", "torchvision", "torchaudio", "gguf", "sgl_kernel", "uvicorn", "setproctitle", "cutlass", "quack", "cuda",
    "tvm_ffi", "xgrammar",
}  # fmt: skip


class Anything(MagicMock):
    """A class may be derived from it: it has no base then."""

    def __mro_entries__(self, bases: Any) -> tuple[type, ...]:
        return (object,)


class Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds packages of `ABSENT`, whatever is asked of them."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.partition(".")[0] in ABSENT else None

    def create_module(self, spec: ModuleSpec) -> Any:
        made = Anything(name=spec.name)
        for name, value in {"spec": spec, "name": spec.name, "path": [], "file": "", "version": "9.9.9"}.items():
            setattr(made, f"__{name}__", value)
        made.StructuralTag = dict  # the type of a field, for pydantic
        return made

    def exec_module(self, module: ModuleType) -> None: ...


def install() -> None:
    """Also in processes that are spawned, which import `sitecustomize` from here before all else."""
    sys.meta_path.insert(0, Absent())


def main(folder: str, page_size: str = "1") -> None:
    hook = Path(folder) / "sitecustomize.py"
    hook.write_text(
        f"import sys\nsys.path.append({os.getcwd()!r})\n"
        "from tests.integrations.sglang.engine import install\ninstall()\n"
    )
    os.environ |= {"SGLANG_USE_CPU_ENGINE": "1", "PYTHONPATH": f"{folder}:{os.environ['PYTHONPATH']}"}
    install()
    torch, model = import_module("torch"), saved("llama", folder)
    engine = import_module("sglang.srt.entrypoints.engine").Engine(
        model_path=folder, device="cpu", attention_backend="saccade", skip_tokenizer_init=True, dtype="float32",
        max_total_tokens=4096, max_running_requests=8, page_size=int(page_size),
        chunked_prefill_size=64,  # prompts come in chunks, beside tokens of others
        disable_overlap_schedule=True, sampling_backend="pytorch", grammar_backend="none",
    )  # fmt: skip
    g = torch.Generator().manual_seed(0)
    shared = torch.randint(3, 500, (80,), generator=g).tolist()
    prompts = [shared + torch.randint(3, 500, (n,), generator=g).tolist() for n in (1, 40, 100)]
    prompts.append(torch.randint(3, 500, (17,), generator=g).tolist())
    words = {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}
    for _ in ("cold", "cached"):
        results = engine.generate(input_ids=prompts, sampling_params=words, return_logprob=True)
        for prompt, result in zip(prompts, results, strict=True):
            chosen, about = result["output_ids"], result["meta_info"]
            with torch.no_grad():
                scores = model(torch.tensor([prompt + chosen])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
            told = torch.tensor([x[0] for x in about["output_token_logprobs"]])
            apart = (told - scores.gather(1, torch.tensor(chosen)[:, None])[:, 0]).abs().max().item()
            print("RESULT", len(prompt), about["cached_tokens"], f"{apart:.1e}", flush=True)
    engine.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
