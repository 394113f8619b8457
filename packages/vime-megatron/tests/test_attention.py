from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from vime_megatron.attention import at_once, packed_attention, takes_packs

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


# On a GPU


def test_a_pack_in_one_call_has_the_shapes_and_gradients_of_its_inputs() -> None:
    q, k, v = (torch.empty(12, h, 64, dtype=torch.bfloat16, device="meta", requires_grad=True) for h in (4, 2, 2))
    output = at_once(q, k, v, torch.empty(3, dtype=torch.int32, device="meta"), 7, SCALE)
    assert (output.shape, output.dtype) == (q.shape, q.dtype)
    gradients = torch.autograd.grad(output, (q, k, v), torch.empty_like(output))
    assert [g.shape for g in gradients] == [q.shape, k.shape, v.shape]


@pytest.mark.parametrize(
    ("dtype", "head", "expected"), [(torch.bfloat16, 64, True), (torch.float32, 64, False), (torch.bfloat16, 20, False)]
)
def test_which_packs_one_call_takes(dtype: torch.dtype, head: int, expected: bool) -> None:
    assert takes_packs(torch.empty(3, 2, head, dtype=dtype)) == expected


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: the flash kernel is not run here")
@pytest.mark.parametrize(("head", "heads", "groups"), [(64, 14, 2), (128, 32, 8)])
def test_one_call_on_a_gpu_agrees_with_one_a_sequence(head: int, heads: int, groups: int) -> None:
    lengths = [5, 1, 300, 64, 129]
    generator = torch.Generator().manual_seed(0)
    shapes = [(sum(lengths), h, head) for h in (heads, groups, groups)]
    qkv = [torch.randn(shape, generator=generator).cuda().bfloat16().requires_grad_() for shape in shapes]
    starts = torch.tensor([0, *lengths], device="cuda").cumsum(0).int()
    upstream = torch.randn(shapes[0], generator=generator).cuda().bfloat16()
    found: list[tuple[Tensor, ...]] = []
    other_lengths = torch.tensor([0, *reversed(lengths)], device="cuda").cumsum(0).int()
    for edges in (starts, None, other_lengths):
        output = packed_attention(*qkv, lengths, head**-0.5, edges)
        found.append((output, *torch.autograd.grad(output, qkv, upstream)))
    for one, other in zip(found[0], found[1], strict=True):
        assert float((one - other).abs().max() / other.abs().max()) < 0.02
    assert not torch.allclose(found[2][0], found[1][0], atol=0.1)
