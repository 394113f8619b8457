"""Gradient of the embedding (:mod:`vime_core.numerics.embedding`): one program a token id that occurs, no atomics.

Tokens are sorted by id, those of one id staying in their order; the program of an id's first token adds them all.
Nothing here waits for the device.
"""

# Triton's language has no types.
# pyright: basic, reportGeneralTypeIssues=false, reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from vime_core.numerics.cuda.launch import remembered
from vime_core.numerics.cuda.sizes import parts, power_of_2

_COLUMNS = 512


@remembered
@triton.jit
def sum_by_id(dy_ptr, token_ptr, id_ptr, end_ptr, y_ptr, width, BLOCK: tl.constexpr):
    """The rows of dy of one id, ascending, for BLOCK columns; programs of an id's later tokens have nothing to do."""
    place = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask, row = column < width, tl.load(id_ptr + place)
    if row != tl.load(id_ptr + place - 1, mask=place > 0, other=-1):
        total = tl.zeros([BLOCK], tl.float32)
        for next_place in range(place, tl.load(end_ptr + place)):
            token = tl.load(token_ptr + next_place)
            total += tl.load(dy_ptr + token * width + column, mask=mask, other=0.0).to(tl.float32)
        tl.store(y_ptr + row * width + column, total.to(y_ptr.dtype.element_ty), mask=mask)


def backward(grad: Tensor, ids: Tensor, rows: int) -> Tensor:
    """(rows, H) of ``grad``'s dtype from grad (T, H) and ids (T)."""
    y = torch.zeros(rows, grad.shape[-1], dtype=grad.dtype, device=grad.device)
    if grad.numel():
        sorted_ids, tokens = torch.sort(ids.long(), stable=True)
        ends = torch.searchsorted(sorted_ids, sorted_ids, right=True, out_int32=True)
        block = min(_COLUMNS, power_of_2(grad.shape[-1]))
        sum_by_id[(ids.shape[0], parts(grad.shape[-1], block))](
            grad.contiguous(), tokens, sorted_ids, ends, y, grad.shape[-1], BLOCK=block, num_warps=4
        )
    return y
