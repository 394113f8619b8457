from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from vime_megatron.attention import packed_attention

SCALE = 0.3


def reference(query: Tensor, key: Tensor, value: Tensor, lengths: list[int]) -> Tensor:
    """Causal attention of each sequence in fp64, written head by head."""
    repeat = query.shape[1] // key.shape[1]
    out, start = [], 0
    for n in lengths:
        rows = slice(start, start + n)
        heads = []
        for h in range(query.shape[1]):
            q, k, v = (t[rows].double()[:, i] for t, i in ((query, h), (key, h // repeat), (value, h // repeat)))
            scores = (q @ k.T * SCALE).masked_fill(torch.ones(n, n).triu(1).bool(), -torch.inf)
            heads.append(scores.softmax(-1) @ v)
        out.append(torch.stack(heads, 1))
        start += n
    return torch.cat(out)


def random_qkv(tokens: int, heads: int, groups: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(tokens, heads, 8), (tokens, groups, 8), (tokens, groups, 8)]
    q, k, v = (torch.randn(shape, generator=generator).requires_grad_() for shape in shapes)
    return q, k, v


@settings(max_examples=20, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    groups=st.sampled_from([1, 2]),
    repeat=st.sampled_from([1, 3]),
)
def test_values_and_gradients_agree_with_fp64(lengths: list[int], groups: int, repeat: int) -> None:
    qkv = random_qkv(sum(lengths), groups * repeat, groups)
    ours = packed_attention(*qkv, lengths, SCALE)
    theirs = reference(*qkv, lengths)
    upstream = torch.randn(ours.shape, generator=torch.Generator().manual_seed(1))
    our_grads = torch.autograd.grad(ours, qkv, upstream)
    their_grads = torch.autograd.grad(theirs, qkv, upstream.double())
    for mine, other in zip((ours, *our_grads), (theirs, *their_grads), strict=True):
        assert torch.allclose(mine.double(), other.double(), atol=3e-6)


def test_a_wrong_length_is_noticed() -> None:
    qkv = random_qkv(9, 4, 2)
    assert not torch.allclose(packed_attention(*qkv, [4, 5], SCALE).double(), reference(*qkv, [5, 4]), atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_neighbour_changes_no_bit(dtype: torch.dtype) -> None:
    first = [t.detach().to(dtype).requires_grad_() for t in random_qkv(12, 4, 2)]
    second = [t.detach().clone().requires_grad_() for t in first]
    with torch.no_grad():
        for tensor in second:
            tensor[:5] += 1
    upstream = torch.ones(12, 4, 8, dtype=dtype)
    outputs = [packed_attention(*qkv, [5, 7], SCALE) for qkv in (first, second)]
    grads = [torch.autograd.grad(o, qkv, upstream) for o, qkv in zip(outputs, (first, second), strict=True)]
    for mine, other in zip((outputs[0], *grads[0]), (outputs[1], *grads[1]), strict=True):
        assert torch.equal(mine[5:], other[5:])
        assert not torch.equal(mine[:5], other[:5])
