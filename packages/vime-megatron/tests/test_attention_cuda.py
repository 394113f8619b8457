"""A pack in one call of torch's flash kernel: its form anywhere, its values on a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from vime_megatron.attention import at_once, packed_attention, takes_packs

SCALE = 0.3


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
