"""The calls of a server, over paged caches: Cases that `grids` names."""

from __future__ import annotations

from saccade.testing.cases import Case


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
