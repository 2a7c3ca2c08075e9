"""Functions of the score that write to tensors: those that they make themselves, and no others."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from saccade import attention, mask_mod

Q = torch.randn(1, 2, 4, 8, generator=torch.Generator().manual_seed(0))
TABLE, NUMBER = torch.rand(4, 4), torch.tensor(2.0)


def made_here(s, b, h, i, j):
    x, y, z = TABLE.clone(), torch.zeros(4), torch.tensor([1.0, 2.0, 3.0, 4.0])
    x.add_(1)
    y[0] = 1
    z *= 2
    return s + x[i, j] + y[i] + z[j]


WRITES = {
    "add_": lambda: TABLE.add_(1),
    "fill_": lambda: TABLE.__setitem__(0, 1),
    "mul_": lambda: TABLE.mul_(2),
    "zero_": lambda: torch.zero_(TABLE[:2]),
    "sub_": lambda: TABLE.data.__isub__(1),
    "copy_": lambda: TABLE.copy_(TABLE * 2),
    "exp": lambda: torch.exp(TABLE, out=TABLE),
    "relu_": lambda: F.relu(TABLE, inplace=True),
    "_foreach_neg_": lambda: torch._foreach_neg_([TABLE]),
    "neg_": lambda: torch.neg_(NUMBER),
}


@pytest.mark.parametrize("kind", ["score_mod", "mask"])
@pytest.mark.parametrize("name", WRITES)
def test_captured_tensors_stay_as_they_are(name, kind):
    def write(*at):
        WRITES[name]()
        return at[0] + TABLE[at[-2], at[-1]] * NUMBER

    def seen(*at):
        return write(*at) > 0

    before = TABLE.clone(), NUMBER.clone()
    with pytest.raises(ValueError, match=rf"{name} writes to a captured tensor, torch.float32 \("):
        attention(Q, Q, Q, **({"score_mod": write} if kind == "score_mod" else {"mask": mask_mod(seen)}))
    assert torch.equal(TABLE, before[0])
    assert torch.equal(NUMBER, before[1])


@pytest.mark.parametrize("name", ["add_", "fill_", "sub_", "exp"])
def test_inside_of_torch_compile(name):
    def write(s, b, h, i, j):
        WRITES[name]()
        return s + TABLE[i, j]

    before = TABLE.clone()
    call = torch.compile(lambda: attention(Q, Q, Q, score_mod=write), backend="eager", fullgraph=True)
    with pytest.raises(Exception, match=r"writes to a captured tensor, torch.float32 \(4, 4\)"):
        call()
    assert torch.equal(TABLE, before)


@pytest.mark.parametrize("index", range(4), ids=("b", "h", "q_idx", "kv_idx"))
def test_indices_are_not_written_to(index):
    with pytest.raises(ValueError, match="add_ writes in place; write a new value"):
        attention(Q, Q, Q, score_mod=lambda s, *at: s + at[index].add_(1))
    with pytest.raises(ValueError, match="writes in place; write a new value"):
        attention(Q, Q, Q, mask=mask_mod(lambda *at: at[index].__setitem__(..., 1)))


def test_tensors_that_a_function_makes_may_be_written_to():
    expected = attention(Q, Q, Q, score_mod=made_here, backend="reference")
    for compiled in (False, True):
        call = lambda: attention(Q, Q, Q, score_mod=made_here)  # noqa: E731
        out = torch.compile(call, backend="eager", fullgraph=True)() if compiled else call()
        assert torch.allclose(out, expected, atol=1e-5)
