"""Random Cases, the same one for the same seed, whose name holds the seed."""

from __future__ import annotations

import random

from saccade.testing.cases import Case
from saccade.testing.paged import CACHES


def dense(seed: int, dtype: str | None = None) -> Case:
    """A batch: any mask, heads, head dims and order."""
    dice = random.Random(seed)
    group, h_k = dice.choice([1, 1, 2, 3, 4, 7]), dice.choice([1, 2, 3])
    s_q = dice.choice([1, 2, dice.randint(3, 40), dice.randint(41, 300)])
    s_k = dice.choice([s_q, s_q, 1, dice.randint(1, 40), dice.randint(41, 300)])
    d = dice.choice([1, 8, 16, 32, 40, 64, 64, 72, 96, 128, dice.randint(1, 256)])
    d_v = dice.choice([d, d, d, dice.randint(1, 256)])
    bounds = [dice.choice(["None", str(dice.randint(0, 3)), str(dice.randint(0, 200))]) for _ in range(2)]
    window = f"window({bounds[0]},{bounds[1]})" if bounds != ["None", "0"] else "causal"
    prefix = dice.choice([f"prefix({dice.randint(0, s_k + 3)})", "prefixes"])
    choices = ["none", "causal", "causal", window, window, prefix, f"{prefix}&{window}", f"{prefix}|{window}"]
    if s_q == s_k:
        choices += ["documents", "documents&causal", f"documents&{window}", f"documents|{window}"]
        choices += [f"documents&{prefix}"]
    return Case(
        f"draw{seed}",
        dtype=dtype or dice.choice(["fp16", "bf16", "fp32", "fp64"]),
        b=dice.randint(1, 3),
        h_q=group * h_k,
        h_k=h_k,
        s_q=s_q,
        s_k=s_k,
        d=d,
        d_v=d_v,
        mask=dice.choice(choices),
        score=dice.choice(["none", "none", f"softcap({dice.choice([1, 5, 30])})"]),
        sink=dice.random() < 0.3,
        order=dice.choice(["bhsd", "bhsd", "bshd", "sbhd"]),
        used=dice.choice(["all", "all", "all", "k", "q", "qk"]),
        ids=dice.choice(["packed", "scattered"]),
        dropout_p=dice.choice([0.0, 0.0, 0.0, 0.1, 0.5, 0.9]),
    )


def packed(seed: int, dtype: str) -> Case:
    """Packed sequences."""
    dice = random.Random(seed)
    group, h_k = dice.choice([1, 2, 3, 4]), dice.choice([1, 2])
    s_q = dice.choice([1, dice.randint(2, 70), dice.randint(71, 300)])
    s_k = dice.choice([s_q, s_q, dice.randint(1, 300)])
    d = dice.choice([8, 40, 64, 64, 72, 128, 192, 256])
    left, right = dice.choice([("None", 0), ("None", dice.randint(0, 99)), (dice.randint(0, 99), dice.choice([0, 40]))])
    edges = f"window({left},{right})" if (left, right) != ("None", 0) else "causal"
    return Case(
        f"packed{seed}",
        dtype=dtype,
        b=dice.choice([1, 2, 5, 9, 40]),
        h_q=group * h_k,
        h_k=h_k,
        s_q=s_q,
        s_k=s_k,
        d=d,
        d_v=dice.choice([d, d, 8, 128]),
        mask=dice.choice(["none", edges, edges, f"prefix(9)|{edges}", "prefixes"]),
        score=dice.choice(["none", "none", "softcap(5)", "alibi"]),
        sink=dice.random() < 0.3,
        order="thd",
        used=dice.choice(["all", "all", "k", "q", "qk"]),
        tail=dice.choice([0, 0, 1, 100]),
    )


def paged(seed: int, dtype: str) -> Case:
    """A paged cache: decoding, chunks of prompts, and both."""
    dice = random.Random(seed)
    group, h_k, b = dice.choice([1, 2, 3, 4, 8]), dice.choice([1, 2, 3]), dice.choice([1, 2, 5, 9])
    s_q = dice.choice([1, 1, dice.randint(2, 9), dice.randint(10, 90)])
    d = dice.choice([8, 16, 64, 72, 128])
    d_v = dice.choice([d, d, 8, 128])
    left = dice.choice([None, dice.randint(0, 60)])
    edges = "causal" if left is None else f"window({left},0)"
    return Case(
        f"paged{seed}",
        dtype=dtype,
        b=b,
        h_q=group * h_k,
        h_k=h_k,
        s_q=s_q,
        s_k=dice.choice([dice.randint(1, 40), dice.randint(41, 300)]),
        d=d,
        d_v=d_v,
        mask=dice.choice(["none", edges, edges, edges, f"prefix(9)|{edges}", "prefixes", "dilated_window"]),
        score=dice.choice(["none", "none", "softcap(5)", "alibi"]),
        sink=dice.random() < 0.3,
        order="paged",
        page_size=dice.choice([1, 8, 16, 32, 48, 64]),
        splits=dice.choice([0, 0, 1, 3]),
        tail=dice.choice([0, 0, 1, 7]),
        cache=dice.choice([name for name in CACHES if {"one-head": h_k == 1, "latent": d_v <= d}.get(name, True)]),
    )
