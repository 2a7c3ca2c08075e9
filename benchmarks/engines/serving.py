"""vLLM's engine with each of several attention backends, in turns on one GPU: what it computes, and how fast.

    python -m benchmarks.engines.serving MODEL [--backends FLASH_ATTN,CUSTOM,TRITON_ATTN] [--mode graphs] [--cache fp8]
        [--layers N] [--work check,prefill,mixed,prefix,decode] [--rounds 3] [--seconds 280] [--profile decode-1x1000]
        [--engine JSON] [--lock FILE] [--out rows.jsonl]

CUSTOM is saccade. `FLASH_ATTN@2` is one more engine on FLASH_ATTN: how much two processes of the same backend differ.
For deepseek, whose cache has latents, the backends are FLASH_ATTN_MLA, CUSTOM and TRITON_MLA. Each backend has an
engine in a process of its own, all of them on the same GPU at the same time, and one works while the others wait. The
first backend is what the others are compared with. MODEL is one of `benchmarks.engines.models.SHAPES`, with fewer
layers and a smaller vocabulary than the published one.

Rows: `start` has seconds and memory; `check` has the mean distances of log-probabilities from those of float32, of
tokens of a prompt and of tokens that the engine chose, over a cold and over a cached prompt; all other rows have tokens
per second, `value`, its quartiles, and `ratio`, of the first backend's time to this one's: above 1 is faster;
`ratio_q1` and `ratio_q3` are quartiles of the ratios of single rounds. `kernels-…` has the GPU's milliseconds in a
profile of one piece of work, on which a busy host has no influence.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import multiprocessing as mp
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

import torch

from benchmarks.engines import models
from benchmarks.harness.machine import Run
from saccade.testing.timing import Times, in_turns

TOKENS_IN_CACHE = 280_000
"""For 256 requests of 1,064 tokens in whole pages, so that none has to wait."""
WORK: dict[str, list[tuple[str, int, int, int]]] = {
    # how, requests, tokens of a prompt, tokens that are generated
    "prefill": [("prefill", 16, 4096, 1), ("prefill", 5, 14000, 1)],
    "mixed": [("mixed", 96, 4000, 64)],
    "prefix": [("prefix", 32, 4096, 1)],
    "decode": [("decode", n, 1000, 64) for n in (1, 8, 32, 128, 256)] + [("decode", n, 12000, 64) for n in (1, 8, 16)],
}
"""prefill: prompts that nobody has seen. mixed: prompts of 50 to 4000 tokens in chunks, while others decode. prefix:
prompts of which all but 256 tokens are cached. decode: steps after cached prompts."""
CHECKED = (17, 700, 2049, 3000)
"""Tokens of the prompts whose log-probabilities are compared."""


@dataclass(frozen=True)
class Ask:
    """One piece of work for an engine."""

    how: str
    n: int
    length: int
    tokens: int
    seed: int = 0

    @property
    def name(self) -> str:
        return f"{self.how}-{self.n}x{self.length}"

    @property
    def counted(self) -> int:
        """Tokens that the rate is of."""
        return {"decode": self.n * self.tokens, "prefix": self.n * (self.length + 256)}.get(
            self.how, sum(map(len, self.prompts())) + self.n * (self.tokens if self.how == "mixed" else 0)
        )

    def prompts(self) -> list[list[int]]:
        """Each seed has its own, except for steps of decoding, which go on from the same ones."""
        seed = 0 if self.how == "decode" else 1 + self.seed
        g = torch.Generator().manual_seed(1000 * seed + self.length)
        if self.how == "mixed":
            lengths = torch.randint(50, self.length, (self.n,), generator=torch.Generator().manual_seed(1)).tolist()
        else:
            lengths = [256 if self.how == "prefix" else self.length] * self.n
        drawn = [torch.randint(3, models.VOCABULARY, (n,), generator=g).tolist() for n in lengths]
        if self.how != "prefix":
            return drawn
        shared = torch.randint(3, models.VOCABULARY, (self.length,), generator=torch.Generator().manual_seed(2))
        return [shared.tolist() + x for x in drawn]


class Engine:
    """vLLM on one attention backend, in this process."""

    def __init__(self, folder: str, backend: str, mode: str, cache: str, memory: int, given: dict[str, Any]) -> None:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        start = time.perf_counter()
        vllm: Any = import_module("vllm")
        made = vllm.LLM
        imported = time.perf_counter()
        words: dict[str, Any] = {
            "skip_tokenizer_init": True,
            "attention_backend": backend.split("@")[0],
            "dtype": "bfloat16",
            "enforce_eager": mode == "eager",
            "kv_cache_dtype": cache,
            "kv_cache_memory_bytes": memory,
            "gpu_memory_utilization": 0.2,  # what has to be free at the start, since the cache's size is given
            "max_model_len": 16384,
            "max_num_seqs": 256,
            "max_num_batched_tokens": 8192,
            "seed": 0,
        }
        if backend == "CUSTOM":
            words["attention_config"] = {"mla_prefill_backend": "CUSTOM"}  # which models of latents alone read
        if mode == "full":
            words["compilation_config"] = {"cudagraph_mode": "FULL"}
        self.llm = made(folder, **words | given)
        self.facts = {
            "import_s": round(imported - start, 1),
            "start_s": round(time.perf_counter() - imported, 1),
            "gib_beside_cache": round((torch.cuda.max_memory_reserved() - memory) / 2**30, 2),
            "attention": self._attention(),
        }

    def _attention(self) -> str:
        """The class that runs, from the engine's own layers; not every release has them there."""
        try:
            worker = self.llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
            layers = worker.model_runner.vllm_config.compilation_config.static_forward_context
            return type(next(x for x in layers.values() if hasattr(x, "impl")).impl).__name__
        except (AttributeError, StopIteration) as problem:
            return repr(problem)

    def run(self, prompts: list[list[int]], tokens: int, **words: Any) -> Any:
        vllm: Any = import_module("vllm")
        given = vllm.SamplingParams(temperature=0, ignore_eos=True, detokenize=False, max_tokens=tokens, **words)
        return self.llm.generate([{"prompt_token_ids": x} for x in prompts], given, use_tqdm=False)

    def seconds(self, prompts: list[list[int]], tokens: int) -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        self.run(prompts, tokens)
        torch.cuda.synchronize()
        return time.perf_counter() - start

    def time(self, ask: Ask) -> float:
        """Seconds of the tokens that `ask.counted` counts."""
        prompts = ask.prompts()
        if ask.how == "prefix":
            self.run([prompts[0][: ask.length]], 1)
        if ask.how != "decode":
            return self.seconds(prompts, ask.tokens)
        self.run(prompts, 1)  # from here on their keys are cached
        first = min(self.seconds(prompts, 1) for _ in range(2))
        return self.seconds(prompts, 1 + ask.tokens) - first

    def check(self) -> list[tuple[str, list[int], int, list[float]]]:
        """Tokens, from which on they are judged, and their log-probabilities."""
        g, found = torch.Generator().manual_seed(3), []
        prompts = [torch.randint(3, models.VOCABULARY, (n,), generator=g).tolist() for n in CHECKED]
        for prompt, out in zip(prompts, self.run(prompts, 1, prompt_logprobs=0), strict=True):
            told = [x[token].logprob for token, x in zip(prompt[1:], out.prompt_logprobs[1:], strict=True)]
            found.append(("prompt", prompt, 1, told))
        for kind in ("cold", "cached"):
            for prompt, out in zip(prompts, self.run([[5, *x] for x in prompts], 32, logprobs=0), strict=True):
                chosen = list(out.outputs[0].token_ids)
                told = [x[token].logprob for token, x in zip(chosen, out.outputs[0].logprobs, strict=True)]
                found.append((kind, [5, *prompt, *chosen], len(prompt) + 1, told))
        return found

    def profile(self, ask: Ask) -> tuple[float, str]:
        """Milliseconds of the GPU; what it does, the longest first, and where the host's time goes."""
        import cProfile
        import io
        import pstats

        self.time(ask)
        fresh = [replace(ask, seed=seed).prompts() for seed in (900, 901)]  # prompts that are not cached
        kinds = torch.profiler.ProfilerActivity
        with torch.profiler.profile(activities=[kinds.CUDA]) as seen:
            self.seconds(fresh[0], ask.tokens)
        rows = sorted(seen.key_averages(), key=lambda x: -x.device_time_total)
        total = sum(x.device_time_total for x in rows) / 1e3
        lines = [f"GPU: {total:.2f} ms"]
        lines += [f"  {x.device_time_total / 1e3:8.3f} ms {x.count:5d}  {x.key[:90]}" for x in rows[:14]]
        host, text = cProfile.Profile(), io.StringIO()
        host.runcall(self.seconds, fresh[1], ask.tokens)
        pstats.Stats(host, stream=text).sort_stats("tottime").print_stats(14)
        return total, "\n".join([*lines, *(x[:120] for x in text.getvalue().splitlines() if x.strip())])


def _child(pipe: Any, log: str, cache_root: str, make: Callable[[], Any]) -> None:
    """Answers `(method, arguments)` until None comes; what the process prints goes to its log."""
    with open(log, "w") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    os.environ["VLLM_CACHE_ROOT"] = cache_root
    try:
        made = make()
        pipe.send((True, getattr(made, "facts", None)))
        while (asked := pipe.recv()) is not None:
            try:
                pipe.send((True, getattr(made, asked[0])(*asked[1:])))
            except Exception as problem:  # whatever an engine raises belongs to its row
                pipe.send((False, repr(problem)))
    except BaseException as problem:
        import traceback

        traceback.print_exc()
        pipe.send((False, repr(problem)))
    os._exit(0)  # an engine's threads may keep a process alive


class Child:
    """An object in a process of its own."""

    def __init__(self, name: str, folder: Path, make: Callable[[], Any]) -> None:
        self.name, self.log = name, folder / f"{name}.log"
        self.pipe, theirs = mp.Pipe()
        root = str(Path(os.environ.get("VLLM_CACHE_ROOT", "~/.cache/vllm")).expanduser() / name)
        context = mp.get_context("spawn")
        self.process = context.Process(target=_child, args=(theirs, str(self.log), root, make), daemon=False)
        self.process.start()
        theirs.close()

    def answer(self, until: float) -> Any:
        if not self.pipe.poll(max(0.0, until - time.monotonic())):
            raise TimeoutError(f"{self.name} gave no answer in time; its log ends with\n{self.tail()}")
        try:
            right, value = self.pipe.recv()
        except EOFError:
            right, value = False, "the process ended"
        if not right:
            raise RuntimeError(f"{self.name}: {value}; its log ends with\n{self.tail()}")
        return value

    def ask(self, until: float, *asked: Any) -> Any:
        self.pipe.send(asked)
        return self.answer(until)

    def tail(self, lines: int = 25) -> str:
        told = self.log.read_text(errors="replace") if self.log.exists() else "not begun"
        return "\n".join(x[:200] for x in told.splitlines()[-lines:])

    def end(self) -> None:
        self.process.kill()
        self.process.join()


class Session:
    """One model's engines, and the rows that they give."""

    def __init__(self, given: argparse.Namespace, folder: Path) -> None:
        self.given, self.folder = given, folder
        self.until = time.monotonic() + given.seconds
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.run = Run.now(torch.device(self.device), given.commit)
        self.engines: dict[str, Child] = {}
        self.exact: Child | None = None

    def emit(self, backend: str, work: str, **found: Any) -> None:
        given = self.given
        layers = given.layers or models.SHAPES[given.model][1]["layers"]
        row = {"engine": f"vllm {metadata.version('vllm')}", "model": given.model, "layers": layers}
        row |= {"of": models.WHOLE.get(given.model)}
        row |= {"mode": given.mode, "cache": given.cache, "backend": backend, "work": work} | found
        row |= {"arguments": given.engine} if given.engine else {}
        print(" ".join(f"{k}={v}" for k, v in row.items() if k not in ("engine", "of")), flush=True)
        self.run.append(given.out, row)

    def start(self) -> None:
        given = self.given
        width = 1 if given.cache.startswith("fp8") else 2
        memory = (given.tokens or TOKENS_IN_CACHE) * models.cache_bytes(given.model, given.layers, width)
        for backend in given.backends:
            settings = str(self.folder / "model"), backend, given.mode, given.cache, memory, given.engine
            name = "-".join((given.model, given.mode, given.cache, backend))
            self.engines[backend] = Child(name, self.folder, partial(Engine, *settings))
        for backend, engine in [*self.engines.items()]:
            try:
                self.emit(backend, "start", **engine.answer(self.until), cache_gib=round(memory / 2**30, 2))
            except (RuntimeError, TimeoutError) as problem:
                self.lose(backend, problem)

    def turn(self) -> None:
        """Waits, where a lock is given, until all others have started and none of them works."""
        if "check" in self.given.work:
            device = self.given.exact or self.device
            self.exact = Child("float32", self.folder, partial(models.Exact, self.folder / "model", device))
            try:
                self.exact.answer(self.until)
            except (RuntimeError, TimeoutError) as problem:
                print(f"no float32: {problem}", flush=True)
        while self.given.lock is not None and time.monotonic() < self.until - 60:  # which one's work takes
            try:
                fcntl.flock(self.given.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                time.sleep(0.1)

    def lose(self, backend: str, problem: Exception) -> None:
        self.emit(backend, "failed", reason=str(problem))
        self.engines.pop(backend).end()

    def check(self) -> None:
        """Distances from float32, and those of the first backend as the measure of the others'."""
        exact = self.exact
        assert exact is not None
        try:
            base: dict[str, float] = {}
            for backend, engine in self.engines.items():
                apart: dict[str, list[float]] = {}
                for kind, tokens, start, told in engine.ask(self.until, "check"):
                    right = exact.ask(self.until, "__call__", tokens, start)
                    apart.setdefault(kind, []).extend(abs(a - b) for a, b in zip(told, right, strict=True))
                mean = {kind: statistics.mean(x) for kind, x in apart.items()}
                base = base or mean
                found = {kind: round(x, 5) for kind, x in mean.items()}
                found |= {f"{kind}_ratio": round(x / base[kind], 3) for kind, x in mean.items()}
                self.emit(backend, "check", **found, worst=round(max(map(max, apart.values())), 4))
        except (RuntimeError, TimeoutError) as problem:
            print(f"no check: {problem}", flush=True)
        finally:
            exact.end()

    def time(self, ask: Ask) -> None:
        """In turns; a first round, whose kernels compile, does not count."""
        samples: dict[str, list[float]] = {backend: [] for backend in self.engines}

        def sample(backend: str) -> float:
            seed = 1 + len(samples[backend])
            samples[backend].append(self.engines[backend].ask(self.until, "time", replace(ask, seed=seed)))
            return samples[backend][-1]

        for backend in [*self.engines]:
            try:
                sample(backend)
            except (RuntimeError, TimeoutError) as problem:
                self.lose(backend, problem)
        reasons: dict[str, Exception] = {}
        times = in_turns([*self.engines], self.given.rounds, sample, reasons.__setitem__)
        first = next(iter(times), "")
        base = times.get(first, Times(0, 0, 0))
        for backend, found in times.items():
            rounds = Times.of([1e-3 * x / y for x, y in zip(samples[first][1:], samples[backend][1:], strict=False)])
            spread = {"ratio_q1": round(rounds.ms_q1, 4), "ratio_q3": round(rounds.ms_q3, 4)}
            rate = [round(1e3 * ask.counted / ms, 1) for ms in (found.ms, found.ms_q3, found.ms_q1)]
            more = {"ms_per_step": round(found.ms / ask.tokens, 4)} if ask.how == "decode" else {}
            ratio = round(base.ms / found.ms, 4)
            self.emit(backend, ask.name, value=rate[0], q1=rate[1], q3=rate[2], ratio=ratio, **spread, **more)
        for backend, problem in reasons.items():
            self.lose(backend, problem)

    def profile(self, ask: Ask) -> None:
        base = 0.0
        for backend, engine in self.engines.items():
            try:
                ms, told = engine.ask(self.until, "profile", ask)
                base = base or ms
                print(f"{backend} {ask.name}\n{told}", flush=True)
                self.emit(backend, f"kernels-{ask.name}", ms=round(ms, 3), ratio=round(base / ms, 4))
            except (RuntimeError, TimeoutError) as problem:
                print(f"no profile: {problem}", flush=True)


def _asked(words: list[str]) -> list[Ask]:
    """`decode`, or one of its kinds as rows name it: `decode-1x1000`."""
    every = {kind: [Ask(*x) for x in asks] for kind, asks in WORK.items()}
    return [ask for word in words for ask in every.get(word.split("-")[0], []) if word in (ask.how, ask.name)]


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    listed = partial(str.split, sep=",")
    words.add_argument("model", choices=models.SHAPES)
    words.add_argument("--backends", type=listed, default="FLASH_ATTN,CUSTOM,TRITON_ATTN")
    words.add_argument("--mode", choices=("eager", "graphs", "full"), default="graphs")
    words.add_argument("--cache", default="auto")
    words.add_argument("--layers", type=int)
    words.add_argument("--exact", help="where float32 runs, such as cuda:1, if it is too large for the engines' GPU")
    words.add_argument("--tokens", type=int, help=f"that the cache holds, {TOKENS_IN_CACHE} if not given")
    words.add_argument("--work", type=listed, default="check,prefill,mixed,prefix,decode")
    words.add_argument("--rounds", type=int, default=3)
    words.add_argument("--seconds", type=float, default=280)
    words.add_argument("--profile", type=listed, default="")
    words.add_argument("--engine", type=json.loads, default={}, help="more arguments of vllm.LLM")
    words.add_argument("--lock", type=partial(open, mode="w"), help="a file: those that name it start, then take turns")
    words.add_argument("--out", type=Path)
    words.add_argument("--logs", type=Path, help="where the logs of the engines are left")
    words.add_argument("--commit")
    given = words.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if given.lock is not None:
            fcntl.flock(given.lock, fcntl.LOCK_SH)
        session = Session(given, Path(folder))
        models.save(given.model, given.layers, Path(folder) / "model", session.device)
        if session.device == "cuda":
            torch.cuda.empty_cache()
        try:
            session.start()
            session.turn()
            if "check" in given.work:
                session.check()
            for ask in _asked(given.work):
                if session.engines and time.monotonic() < session.until - 15:  # the longest takes about as many seconds
                    session.time(ask)
            for ask in _asked(given.profile):
                session.profile(ask)
        finally:
            for engine in [*session.engines.values(), *filter(None, [session.exact])]:
                engine.end()
            if given.logs is not None:
                shutil.copytree(folder, given.logs, dirs_exist_ok=True, ignore=shutil.ignore_patterns("model"))


if __name__ == "__main__":
    sys.exit(main())
