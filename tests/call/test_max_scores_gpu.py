"""The largest score of each row on a GPU, by each backend's own kernels: what a row's maximum is in their registers."""

from __future__ import annotations

import pytest
import torch

from saccade import attention, causal, mask_mod, softcap
from saccade.testing.accuracy import check
from saccade.testing.cases import Case

pytestmark = pytest.mark.gpu


DENSE = Case("", h_q=4, h_k=2, s_q=300, s_k=333, d=128)
CASES = {
    "plain": DENSE,
    "causal": DENSE.replace(mask="causal", sink=True, dtype="fp16"),
    "window": DENSE.replace(mask="window(70,9)", d=64, d_v=64),
    "wide": DENSE.replace(mask="causal", d=256, d_v=256, sink=True),
    "unequal": DENSE.replace(mask="window(90,0)", d=192, d_v=128, dropout_p=0.3),
    "softcap": DENSE.replace(mask="causal", score="softcap(5)", sink=True, d=64, d_v=64),
    "linear": DENSE.replace(mask="causal", score="alibi"),
    "table": DENSE.replace(score="relative_bias(90)", d=64, d_v=64, sink=True),
    "documents": DENSE.replace(s_q=400, s_k=400, mask="documents&causal", ids="scattered"),
    "padded": DENSE.replace(b=4, mask="causal", used="qk", order="bshd", sink=True),
    "heads-together": DENSE.replace(h_q=16, s_q=5, mask="causal"),
    "no-keys": DENSE.replace(s_k=0, sink=True),
    "packed": DENSE.replace(b=5, order="thd", mask="causal", sink=True, used="k", tail=90),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_case(case: Case, backend: str) -> None:
    """A forward alone, as its gradients are those of any other call."""
    given = case.inputs("cuda")
    check(
        given.q, given.k, given.v, backend=backend, backward=False, return_max_scores=True, **given.keywords
    ).assert_ok()


@pytest.mark.parametrize("splits", [0, 1, 7])
@pytest.mark.parametrize("lengths", [(), (1, 60, 0, 7)], ids=["batch", "end-to-end"])
def test_pages(lengths: tuple[int, ...], splits: int) -> None:
    """The merge of parts takes the largest, and the first part has the sink."""
    case = Case("", b=4, h_q=32, h_k=8, s_q=1, s_k=2300, d=128, mask="window(900,0)", sink=True, order="paged",
                lengths=lengths, splits=splits, tail=3 if lengths else 0)  # fmt: skip
    given = case.inputs("cuda")
    check(given.q, given.k, given.v, backend="triton", return_max_scores=True, **given.keywords).assert_ok()


@pytest.mark.parametrize("scale", [0.7, -0.7])
@pytest.mark.parametrize("cap", [None, 2.0])
def test_units_and_what_counts(cap: float | None, scale: float, backend: str) -> None:
    """Natural units whatever the kernel's are; a row that sees nothing, and one that sees a NaN."""
    q, k, v = (torch.randn(1, h, s, 64, device="cuda", dtype=torch.float16) for h, s in ((2, 150), (1, 200), (1, 200)))
    mask = mask_mod(lambda b, h, q_idx, kv_idx: (q_idx != 3) & ((kv_idx != 199) | (q_idx == 4)))
    options = {"scale": scale, "mask": mask, "score_mod": cap and softcap(cap), "sink": torch.full((2,), 9.0).cuda()}
    options["backend"] = backend
    check(q, k, v, backward=False, return_max_scores=True, **options).assert_ok()
    k[0, 0, 199] = torch.nan
    top = attention(q, k, v, return_max_scores=True, **options).max_scores
    assert top[:, :, 3].isneginf().all()
    assert top[:, :, 4].isnan().all()
    assert int(top.isfinite().sum()) == 2 * 148


def test_with_and_without_alternate(backend: str) -> None:
    """Launches are kept apart, and what they give repeats, in a graph too."""
    q, k, v = (torch.randn(2, h, 500, 128, device="cuda", dtype=torch.bfloat16) for h in (8, 2, 2))
    options = {"mask": causal(), "backend": backend}
    first = attention(q, k, v, return_max_scores=True, return_lse=True, **options)
    for _ in range(3):
        assert isinstance(attention(q, k, v, **options), torch.Tensor)
        again = attention(q, k, v, return_max_scores=True, return_lse=True, **options)
        assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = attention(q, k, v, return_max_scores=True, return_lse=True, **options)
    for x in captured:
        x.fill_(torch.nan)
    graph.replay()
    assert all(torch.equal(x, y) for x, y in zip(first, captured, strict=True))
