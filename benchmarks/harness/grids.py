"""Cells, and the named lists of them that `saccade bench --cases` takes."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import zip_longest

from benchmarks.harness import quantizing
from saccade.testing.callbacks import USUAL
from saccade.testing.cases import MODELS, NAMED, Case


def _both(b: int, h: int, s: int, d: int, d_v: int = 0, dtype: str = "bf16") -> Iterator[Case]:
    """Full and causal."""
    for mask in ("none", "causal"):
        yield Case("", dtype=dtype, b=b, h_q=h, h_k=h, s_q=s, s_k=s, d=d, d_v=d_v, mask=mask)


def dims() -> Iterator[Case]:
    """One problem at each head dim, for comparison with its neighbours in the same run."""
    yield from _both(4, 16, 4096, 128)
    yield from _both(4, 16, 4096, 128, dtype="fp16")
    for d, d_v in ((192, 128), (96, 96), (80, 80)):
        yield from _both(4, 16, 4096, d, d_v)


def paged(b: int, s_k: int, h_q: int = 32, page_size: int = 64, s_q: int = 1, score: str = "none") -> Case:
    """Requests with caches of s_k keys each, or, below 0, of mixed lengths up to -s_k; their last s_q rows attend."""
    case = Case("", b=b, h_q=h_q, h_k=8, s_q=s_q, s_k=abs(s_k), d=128, order="paged", page_size=page_size, score=score)
    return case.replace(mask="causal" if s_q > 1 else "none", used="all" if s_k > 0 else "k")


def latent(b: int, s_k: int, h_q: int, page_size: int = 64, s_q: int = 1) -> Case:
    """Heads of queries on one of keys, of which values are the first 512 columns: read once, as multi-head latent
    attention has them."""
    case = paged(b, s_k, h_q, page_size, s_q)
    return case.replace(h_k=1, d=576, d_v=512, cache="latent")


_CACHES = (1, 65536), (8, 8192), (64, 4096), (128, 8192), (256, -16384)
DECODE = [
    *(paged(b, s_k, h_q) for h_q in (32, 64) for b, s_k in _CACHES),
    *(paged(b, s_k, page_size=size) for size in (1, 16) for b, s_k in _CACHES),
    paged(64, 4096, score="alibi"),
    paged(1, 2048),
    *(paged(b, s_k, page_size=size).replace(cache="heads") for size in (64, 16) for b, s_k in _CACHES[1:4]),
]
PROMPTS = [
    *(paged(4, 8192 + 2048, page_size=size, s_q=2048) for size in (64, 16)),
    *(paged(b, s, page_size=size, s_q=new) for b, s, new in ((1, 32768, 2048), (8, 4096, 4096)) for size in (64, 128)),
    paged(16, 8192, s_q=256),
    *(paged(4, 8192 + 2048, page_size=size, s_q=2048).replace(cache="heads") for size in (64, 16)),
]
EIGHT_BITS = [
    *(paged(b, s_k).replace(dtype="fp8_e4m3") for s_k in (1024, 8192, 65536) for b in (1, 8, 64) if b * s_k <= 1 << 20),
    *(paged(64, 8192, page_size=size).replace(dtype="fp8_e4m3") for size in (1, 16)),
    paged(64, 8192, h_q=64).replace(dtype="fp8_e4m3"),
]
SHARED = [paged(b, n + 512).replace(used=f"shared{n}") for n in (8192, 32768) for b in (4, 16, 64)]
DRAFTS = [
    *(paged(b, s_k, s_q=s_q) for b, s_k in ((8, 8192), (64, 4096)) for s_q in (1, 2, 4, 8, 16, 32, 64)),
    *(paged(b, s_k, s_q=15).replace(mask="tree") for b, s_k in ((8, 8192), (64, 4096))),
]
LATENT = [
    *(latent(b, s_k, h_q) for h_q in (16, 128) for b in (1, 8, 64, 128) for s_k in (1024, 8192, 65536)),
    *(latent(b, 8192, h_q, s_q=2) for h_q in (16, 128) for b in (8, 64, 128)),
    *(latent(b, 8192, h_q, page_size=1) for h_q in (16, 128) for b in (8, 64, 128)),
]


MODES = ("forward", "backward", "forward+backward")
WITH_HOST = "+host"
"""After a mode: through autograd, as a model calls, and with the host's time."""

# A trailing star matches every provider whose name starts so.
FUSED = ("saccade-*", "fa3", "fa4", "sdpa-cudnn", "sdpa-flash")


@dataclass(frozen=True)
class Cell:
    """One comparison: all providers do the same work, in turns."""

    case: Case
    mode: str
    """One of `MODES`, also `WITH_HOST`; `decode`: a forward as a CUDA graph; `host`: the host's time for one forward;
    `first forward`, `first backward`: the first call in a new process; `block mask`: making one; `quantize block
    rotate` and the like: 8-bit operands, as a CUDA graph, with the options of `quantizing`."""
    deterministic: bool = False
    """Gradients bitwise equal from run to run."""

    @property
    def call(self) -> str:
        """The call that is timed: one of `MODES`, `block mask` or `quantize`."""
        if self.mode.startswith("quantize "):
            return "quantize"
        mode = self.mode.removesuffix(WITH_HOST)
        return "forward" if mode in ("decode", "host") else mode.removeprefix("first ")

    @property
    def with_host(self) -> bool:
        """Whether the call goes through autograd, and its time is that from an idle device to its results."""
        return self.mode.endswith(WITH_HOST)

    @property
    def in_new_process(self) -> bool:
        return self.mode.startswith("first ")

    @property
    def has_rates(self) -> bool:
        """Whether the device's time is measured, so that TFLOP/s, GB/s and ceilings apply."""
        return self.in_graph or self.mode.removesuffix(WITH_HOST) in MODES

    @property
    def in_graph(self) -> bool:
        """Whether the call is replayed as a CUDA graph, so that the host's time does not count."""
        return self.mode == "decode" or self.call == "quantize"

    @property
    def layout(self) -> str:
        words = {"thd": "ranges" if self.case.ranges else "packed", "paged": "paged"}
        return words.get(self.case.order, "dense" if self.case.used == "all" else "padded")

    def on_host(self) -> Cell:
        return replace(self, mode="host")

    def first(self) -> Cell:
        return replace(self, mode=f"first {self.call}")

    def __str__(self) -> str:
        return f"{self.case.name} {self.mode}" + (" deterministic" if self.deterministic else "")


@dataclass(frozen=True)
class BenchGrid:
    """Cells, and the providers that are worth timing on them."""

    cells: tuple[Cell, ...]
    providers: tuple[str, ...]
    what: str
    """One line for `saccade bench --list`."""


def named(case: Case) -> Case:
    """The Case under its canonical name, so that one problem has one name in every grid and every results file.

    >>> named(Case("", b=1, h_q=64, h_k=8, s_q=2048, s_k=2048, d=128, mask="causal")).name
    'bf16 b1 h64:8 s2048 d128 causal'
    """
    heads = f"h{case.h_q}" if case.h_q == case.h_k else f"h{case.h_q}:{case.h_k}"
    lengths = f"s{case.s_q}" if case.s_q == case.s_k else f"s{case.s_q}:{case.s_k}"
    lengths += f" t{sum(case.lengths)}" if case.lengths else ""
    dims = f"d{case.d}" if case.d == case.d_v else f"d{case.d}/{case.d_v}"
    words = [case.dtype, f"b{case.b}", heads, lengths, dims]
    words += [word for word in (case.mask, case.score) if word != "none"]
    words += ["sink"] if case.sink else []
    words += [case.order] if case.order != "bhsd" else []
    words += [f"page{case.page_size}"] if case.order == "paged" else []
    words += [f"cache-{case.cache}"] if case.cache != "apart" else []
    words += [f"used-{case.used}"] if case.used != "all" else []
    return case.replace(name=" ".join(words))


def _tokens(d: int, s: int, mask: str) -> Case:
    """16k tokens and h d = 2048, as FlashAttention's papers and Triton's tutorial measure."""
    h = 2048 // d
    return named(Case("", b=16384 // s, h_q=h, h_k=h, s_q=s, s_k=s, d=d, mask=mask))


def _cells(cases: Iterable[Case], *modes: str) -> tuple[Cell, ...]:
    # The modes of one case follow one another: they share its inputs.
    return tuple(Cell(case, mode) for case in cases for mode in modes)


def _decoder(
    model: str, h: str, d: int, lengths: str, mask: str = "causal", d_v: int = 0, sink: bool = False
) -> Models:
    """A layer of a language model. h: heads of queries and of keys; lengths: batches of sequences, such as `2x4096`."""
    h_q, h_k = map(int, h.split(":"))
    for words in lengths.split():
        b, s = map(int, words.split("x"))
        case = Case("", b=b, h_q=h_q, h_k=h_k, s_q=s, s_k=s, d=d, d_v=d_v, mask=mask, sink=sink, order="bshd")
        yield model, case


def _layer(model: str, b: int, h: int, s: int, d: int, keys: int = 0) -> Models:
    """A layer of a vision model: b images of s patches, which attend to so many keys of a text; 0: to themselves."""
    yield model, Case("", b=b, h_q=h, h_k=h, s_q=s, s_k=keys or s, d=d, order="bshd")


_WITH_AND_WITHOUT_HOST = [mode + host for host in ("", WITH_HOST) for mode in MODES[:2]]
Models = Iterator[tuple[str, Case]]
"""The name of a model, and one of its calls: of order bshd, whose operands are views of one projection."""


def _prompts() -> Models:
    """Prompts, and batches of training; of each model the most usual one first."""
    yield from _decoder("llama-1b", "32:8", 64, "4x2048 1x8192 1x512")
    yield from _decoder("llama-3b", "24:8", 128, "4x4096 1x2048")
    yield from _decoder("llama-8b", "32:8", 128, "2x4096 1x8192 1x2048 1x512 1x16384")
    yield from _decoder("llama-70b-tp8", "8:1", 128, "4x4096 1x8192 1x2048")
    yield from _decoder("qwen3-30b", "32:4", 128, "4x2048 2x4096")
    yield from _decoder("gemma3-4b", "8:4", 256, "4x2048 1x8192")
    yield from _decoder("gemma3-4b", "8:4", 256, "4x2048 1x8192", "window(1023,0)")
    yield from _decoder("gpt-oss", "64:8", 64, "1x4096 1x8192", sink=True)
    yield from _decoder("gpt-oss", "64:8", 64, "1x4096 1x8192", "window(127,0)", sink=True)
    yield from _decoder("deepseek-v3-tp8", "16:16", 192, "1x4096 4x1024 2x4096", d_v=128)
    yield from _decoder("phi3-mini", "32:32", 96, "4x2048 1x4096")
    yield from _decoder("gpt2", "12:12", 64, "16x1024")
    yield from _decoder("gpt2-xl", "25:25", 64, "8x1024")
    yield from _layer("vit-l", 64, 16, 577, 64)  # images of 336 pixels, 14 a patch
    yield from _layer("siglip-so400m", 32, 16, 729, 72)  # of 384
    yield from _layer("vit-h", 32, 16, 1024, 80)  # of 448
    yield from _layer("vit-g", 64, 16, 257, 88)  # of 224
    yield from _layer("sdxl", 8, 10, 4096, 64)
    yield from _layer("sdxl", 8, 10, 4096, 64, 77)  # a text
    yield from _layer("sd1", 16, 8, 4096, 40, 77)


def _tokens_over_caches() -> Models:
    for b, s in ((64, 4096), (8, 8192), (1, 2048)):
        yield "llama-8b", paged(b, s)
    for b, s in ((64, 4096), (8, 8192)):
        yield "llama-70b-tp8", paged(b, s, h_q=8).replace(h_k=1)
    yield "qwen3-30b", paged(64, 4096).replace(h_k=4)
    for b, s in ((128, 4096), (8, 8192)):
        yield "deepseek-v3-tp8", latent(b, s, 16)


def _of_models() -> Iterator[Cell]:
    """The first prompt and the first cache of each model, then the second ones, and so on."""
    calls: dict[tuple[str, str], list[Case]] = {}
    for model, case in (*_prompts(), *_tokens_over_caches()):
        calls.setdefault((model, case.order), []).append(case.replace(name=f"{model} {named(case).name}"))
    for one_of_each in zip_longest(*calls.values()):
        for case in filter(None, one_of_each):
            yield from _cells([case], *(["decode"] if case.order == "paged" else _WITH_AND_WITHOUT_HOST))


_GRID = [
    _tokens(d, s, mask) for d in (64, 128, 256) for mask in ("none", "causal") for s in (1024, 2048, 4096, 8192, 16384)
]
_FLEX = [_tokens(d, s, mask) for d in (64, 128) for mask in ("none", "causal") for s in (2048, 8192)]


_SCORES = [
    _tokens(d, 8192, mask).replace(score=score)
    for d in (64, 128)
    for score, mask in (
        ("none", "none"),
        ("none", "causal"),
        ("none", "window(1023,0)"),
        ("alibi", "none"),
        ("alibi", "causal"),
        ("softcap(50)", "none"),
        ("softcap(50)", "causal"),
        ("relative_bias(128)", "causal"),
        ("t5_bias", "none"),
    )
]


_CALLBACKS = [_tokens(d, 8192, "none").replace(score=f"callback({name})") for d in (64, 128) for name in USUAL]


_MASKS = [
    Case("", h_q=16, h_k=16, s_q=s, s_k=s, d=128, mask=mask)
    for mask in ("documents&causal", "neighborhood_plane", "random_blocks")
    for s in (8192, 32768)
]


def _gqa(s: int, mask: str) -> Case:
    return named(Case("", b=1, h_q=64, h_k=8, s_q=s, s_k=s, d=128, mask=mask))


_GQA = [_gqa(s, mask) for mask in ("none", "causal") for s in (2048, 4096, 8192, 16384, 32768)]
_FP8 = [
    named(Case("", "fp8_e4m3", b=16384 // s, h_q=64, h_k=8, s_q=s, s_k=s, d=d, mask=mask))
    for d in (64, 128, 256)
    for mask in ("none", "causal")
    for s in (2048, 4096, 8192, 16384)
]
_WINDOW = [
    named(Case("", b=2, h_q=2048 // d, h_k=2048 // d, s_q=8192, s_k=8192, d=d, mask="window(1023,0)", sink=sink))
    for d, sink in ((128, False), (64, True))
]


def _cpu(dtype: str, mask: str = "none", s: int = 4096, score: str = "none") -> Case:
    return named(Case("", dtype=dtype, b=1, h_q=8, h_k=8, s_q=s, s_k=s, d=64, mask=mask, score=score))


_CPU = [
    *(cell for dtype in ("bf16", "fp32") for cell in _cells([_cpu(dtype)], "forward", "forward+backward")),
    *_cells([_cpu(dtype, "causal") for dtype in ("bf16", "fp32")], "forward"),
    *_cells([_cpu(dtype, "window(256,0)", 8192) for dtype in ("bf16", "fp32")], "forward"),
]


def _packed(lengths: Iterable[int], h_q: int, h_k: int, d: int, mask: str, dtype: str = "bf16") -> Case:
    """Sequences end to end, queries and keys alike."""
    lengths = tuple(lengths)
    case = Case("", dtype=dtype, b=len(lengths), h_q=h_q, h_k=h_k, s_q=max(lengths), s_k=max(lengths), d=d, mask=mask)
    return named(case.replace(order="thd", lengths=lengths))


def _varlen() -> Iterator[Case]:
    """Typical packs: batches of any lengths, documents, and one sequence that is longer than all others together."""
    dice = random.Random(0)
    tiles, any_length = [64 * dice.randint(1, 32) for _ in range(8)], [dice.randint(1, 4096) for _ in range(32)]
    documents = [round(min(max(dice.lognormvariate(math.log(500), 0.8), 16), 8192)) for _ in range(256)]
    for mask in ("none", "causal"):
        yield _packed(tiles, 16, 16, 64, mask)
        yield _packed(any_length, 16, 16, 128, mask)
    yield _packed(documents, 32, 8, 128, "causal")
    yield _packed([30000, *[300] * 100], 16, 16, 128, "causal")


def _uniform(d: int, s: int) -> Case:
    """Eight causal sequences, the shortest a quarter as long as the longest."""
    dice = random.Random(0)
    return _packed([s, *(dice.randint(s // 4, s) for _ in range(7))], 2048 // d, 2048 // d, d, "causal")


_INTERVALS = [
    *(_tokens(d, s, "causal") for d in (64, 128) for s in (2048, 8192)),
    *(_uniform(d, s) for d in (64, 128) for s in (2048, 8192)),
]


def _documents(dtype: str, mask: str) -> Case:
    dice = random.Random(0)
    return _packed([dice.randint(100, 2000) for _ in range(64)], 4, 4, 64, mask, dtype)


_SMALL = Case("", b=1, h_q=8, h_k=8, s_q=128, s_k=128, d=64)
_FIRST = [_tokens(128, 2048, "causal").replace(score=score) for score in ("none", "alibi", "relative_bias(128)")]

GRIDS = {
    "models": BenchGrid(
        tuple(_of_models()),
        ("auto", "fa3", "fa4", "sdpa", "sdpa-cudnn", "flex"),
        "language, vision and diffusion models: training, prompts, new tokens; kernels alone, and with the host",
    ),
    "h200": BenchGrid(_cells(_GRID, "forward", "backward"), FUSED, "16k tokens, h d = 2048, s = 1k to 16k, both modes"),
    "grid-forward": BenchGrid(_cells(_GRID, "forward"), FUSED, "the forward half of h200"),
    "grid-backward": BenchGrid(_cells(_GRID, "backward"), FUSED, "the backward half of h200"),
    "flex-bar": BenchGrid(
        _cells(_FLEX, "forward", "backward"),
        ("saccade-*", "flex", "fa3", "sdpa-cudnn"),
        "against compiled FlexAttention: d 64 and 128, s 2048 and 8192, both modes",
    ),
    "scores": BenchGrid(
        _cells(map(named, _SCORES), "forward", "backward"),
        ("saccade-gluon", "saccade-triton", "flex"),
        "score functions against compiled FlexAttention: d 64 and 128, s 8192, both modes, learned tables with theirs",
    ),
    "callbacks": BenchGrid(
        _cells(map(named, _CALLBACKS), "forward", "backward"),
        ("saccade-gluon", "saccade-cudnn"),
        "cuDNN's score callbacks on gluon against cuDNN itself: d 64 and 128, s 8192, both modes",
    ),
    "callbacks-host": BenchGrid(
        _cells([named(_SMALL.replace(score=f"callback({name})")) for name in USUAL], "host"),
        ("saccade-gluon", "saccade-cudnn"),
        "the host's time for score callbacks: one small call of each, with its graphs in the cache",
    ),
    # The oracle's float64 matrices of one head fill an H200 in the backward at 32k, which is therefore timed at 16k.
    "masks": BenchGrid(
        tuple(
            Cell(named(case.replace(b=1, s_q=s, s_k=s)), mode)
            for case in _MASKS
            for mode, s in (("forward", case.s_q), ("backward", min(case.s_q, 16384)))
        ),
        ("saccade-gluon", "saccade-triton", "flex"),
        "documents, neighbourhoods and random blocks against compiled FlexAttention: d 128, s 8192 and 32768",
    ),
    "gqa": BenchGrid(
        tuple(
            cell for case in _GQA for cell in _cells([case], "forward", *(["backward"] if case.s_q <= 16384 else []))
        ),
        FUSED,
        "64 query heads on 8 key heads, d 128, one row of s = 2k to 32k",
    ),
    "fp8": BenchGrid(
        _cells(_FP8, "forward"),
        ("saccade-gluon", "saccade-gluon-bf16", "cudnn-fp8"),
        "8-bit q, k and v against 16-bit ones of their values and cuDNN's, with its error: 16k tokens, 64 heads on 8",
    ),
    "window": BenchGrid(
        _cells(_WINDOW, "forward", "backward"),
        (*FUSED, "flex"),
        "causal window of 1024 at s = 8192: d 128, and d 64 with a sink",
    ),
    "intervals": BenchGrid(
        _cells(_INTERVALS, "forward", "backward"),
        ("saccade-gluon", "interval-*", "left-padded"),
        "causal masks as intervals that the device reads: d 64 and 128, s 2048 and 8192; and left padding for packed",
    ),
    "max-scores": BenchGrid(
        _cells([_tokens(128, 8192, mask) for mask in ("none", "causal")], "forward"),
        ("saccade-gluon", "saccade-triton", "max-scores-*"),
        "the cost of the largest score of each row as one more output: d 128, s 8192",
    ),
    "dims": BenchGrid(
        _cells(map(named, dims()), "forward", "backward"),
        FUSED,
        "fp16 and bf16 at d 128, and d 192/128, 96 and 80: 4 x 16 heads, s = 4096",
    ),
    "varlen": BenchGrid(
        _cells(_varlen(), "forward", "backward"),
        ("auto", "saccade-gluon", "saccade-triton", "fa3", "fa4", "torch-varlen", "sdpa-padded"),
        "packed sequences: 8 up to 2048, 32 up to 4096, 256 documents, one of 30k among 100 of 300; both modes",
    ),
    "varlen-cpu": BenchGrid(
        _cells([_documents("fp32", "none"), _documents("fp32", "causal")], "forward+backward"),
        ("saccade-cpu", "sdpa-padded"),
        "64 packed documents of 100 to 2000 tokens against SDPA on the padded batch",
    ),
    "decode": BenchGrid(
        _cells(map(named, DECODE), "decode"),
        ("auto", "fa3"),
        "one new token over a paged cache, as a CUDA graph: 32 or 64 heads on 8, pages of 64, 16 and 1, views",
    ),
    "decode-8bit": BenchGrid(
        _cells(map(named, EIGHT_BITS), "decode"),
        ("auto", "saccade-triton-bf16"),
        "one new token over 8-bit pages, beside 16-bit ones of the same values, as a CUDA graph: 1k to 64k keys",
    ),
    "shared-prefix": BenchGrid(
        _cells(map(named, SHARED), "decode"),
        ("auto", "shared-prefix", "fa3"),
        "one new token over 8k or 32k keys that 4 to 64 sequences share and 512 of their own: plain, and shared_pages",
    ),
    "drafts": BenchGrid(
        _cells(map(named, DRAFTS), "decode"),
        ("auto", "fa3"),
        "1 to 64 drafted tokens over a paged cache, as a CUDA graph: causal, and a tree of 15 by mask_mod",
    ),
    "mla": BenchGrid(
        _cells(map(named, LATENT), "decode"),
        ("auto", "saccade-triton", "fa3"),
        "latent attention, 16 and 128 heads on one of d 576/512: 1 to 128 caches of 1k to 64k, as a CUDA graph",
    ),
    "prompts": BenchGrid(
        _cells(map(named, PROMPTS), "forward"),
        ("saccade-gluon", "saccade-triton", "fa3"),
        "chunks of 256 to 4096 tokens over a paged cache, causal: 32 heads on 8, pages of 64, 128 and 16",
    ),
    "quantize": BenchGrid(
        tuple(Cell(named(case), mode) for case, mode in quantizing.calls()),
        ("quantize", "copy-of-bytes"),
        "8-bit q, k and v beside a copy of the bytes that must move: d 64, 128 and 256, 1 and 8 heads on one, s = 16k",
    ),
    "block-masks": BenchGrid(
        tuple(
            Cell(
                named(Case("", b=1, h_q=1, h_k=1, s_q=s, s_k=s, d=8, mask="documents&causal", ids="1300")), "block mask"
            )
            for s in (8192, 32768, 131072)
        ),
        ("block-mask", "flex-block-mask"),
        "making a block mask: causal documents of about 1300 tokens, s = 8k, 32k and 128k; time and memory",
    ),
    "host": BenchGrid(
        _cells([named(_SMALL)], "host"),
        ("saccade-*", "sdpa", "sdpa-flash", "sdpa-cudnn", "fa3"),
        "the host's time for one small call",
    ),
    "faces-host": BenchGrid(
        _cells([named(_SMALL), named(_SMALL.replace(mask="causal"))], "host"),
        ("auto", "flash-attn-face", "transformers"),
        "what the host's time for one small call is by other libraries' names",
    ),
    "first-call": BenchGrid(
        _cells(map(named, _FIRST), "first forward", "first backward"),
        ("saccade-*", "flex"),
        "the first call in a new process with empty caches: one plain call and two scores, causal, d 128",
    ),
    "scores-cpu": BenchGrid(
        tuple(
            cell
            for dtype in ("fp32", "bf16")
            for cell in _cells([_cpu(dtype, "causal", score="softcap(50)")], "forward", "forward+backward")
        ),
        ("saccade-cpu", "flex"),
        "softcap and causal, 1x8x4096x64, against compiled FlexAttention, which has no backward there",
    ),
    "cpu": BenchGrid(
        tuple(_CPU),
        ("saccade-cpu", "sdpa", "sdpa-padded"),
        "1x8x4096x64 in bf16 and fp32, and a window of 256 at 8192 against SDPA with a mask tensor",
    ),
}
"""In the order of `saccade bench --list`."""


def cells(names: Iterable[str]) -> Iterator[Cell]:
    """The Cells of grids and of named cases (forward and backward), each once.

    Raises:
        ValueError: a name that is neither.
    """
    chosen: dict[Cell, None] = {}
    for name in names:
        if name in GRIDS:
            chosen |= dict.fromkeys(GRIDS[name].cells)
        elif name in NAMED:
            chosen |= dict.fromkeys(_cells([named(NAMED[name])], "forward", "backward"))
        else:
            raise ValueError(
                f"{name!r} is not a grid or a case; grids: {', '.join(GRIDS)}; a case is, for example, {MODELS[0].name}"
            )
    return iter(chosen)


def providers(names: Iterable[str]) -> tuple[str, ...]:
    """The patterns of the providers that are worth timing on these grids."""
    wanted = dict.fromkeys(word for name in names for word in (GRIDS[name].providers if name in GRIDS else FUSED))
    return tuple(wanted)
