"""The shared log-softmax (:mod:`vime_core.numerics.log_probs`); one program a row.

Each of 4096 lanes adds its columns in ascending order, then a tree adds the lanes. All entries find the peak and
the sum by one function. Nothing of the size of the logits is held in fp32 but what is asked for.
"""

# Triton's language has no types.
# pyright: basic, reportGeneralTypeIssues=false, reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from vime_core.numerics.cuda.launch import UNFUSED, remembered
from vime_core.numerics.cuda.sizes import power_of_2
from vime_core.numerics.cuda.sums import tree_sum

_LANES = 4096
_OPTIONS = {"num_warps": 8, **UNFUSED}


@triton.jit
def temperature_of(temperature_ptr, row):
    """What a row's logits are divided by: 1 in place of 0."""
    temperature = tl.load(temperature_ptr + row)
    return tl.where(temperature == 0.0, 1.0, temperature)


@triton.jit
def scaled(row_ptr, column, size, temperature):
    """z = logits / T by IEEE division; columns after the last are -inf."""
    logits = tl.load(row_ptr + column, mask=column < size, other=float("-inf")).to(tl.float32)
    return tl.div_rn(logits, temperature)


@triton.jit
def peak_and_log_sum(row_ptr, size, temperature, LANES: tl.constexpr):
    """(max z, ln sum exp(z - max z)) of one row."""
    lane = tl.arange(0, LANES)
    peaks = tl.full([LANES], float("-inf"), tl.float32)
    for start in range(0, size, LANES):
        peaks = tl.maximum(peaks, scaled(row_ptr, start + lane, size, temperature))
    peak = tl.max(peaks, 0)
    sums = tl.zeros([LANES], tl.float32)
    for start in range(0, size, LANES):
        sums += tl.exp(scaled(row_ptr, start + lane, size, temperature) - peak)
    return peak, tl.log(tree_sum(sums))


@remembered
@triton.jit
def all_log_probs(logits_ptr, temperature_ptr, y_ptr, size, LANES: tl.constexpr):
    """A row of log p."""
    row, lane = tl.program_id(0).to(tl.int64), tl.arange(0, LANES)
    temperature, row_ptr = temperature_of(temperature_ptr, row), logits_ptr + row * size
    peak, log_sum = peak_and_log_sum(row_ptr, size, temperature, LANES)
    for start in range(0, size, LANES):
        column = start + lane
        y = (scaled(row_ptr, column, size, temperature) - peak) - log_sum
        tl.store(y_ptr + row * size + column, y, mask=column < size)


@remembered
@triton.jit
def chosen_log_prob(logits_ptr, id_ptr, temperature_ptr, y_ptr, size, LANES: tl.constexpr):
    """log p of a row's token."""
    row = tl.program_id(0).to(tl.int64)
    temperature, row_ptr = temperature_of(temperature_ptr, row), logits_ptr + row * size
    peak, log_sum = peak_and_log_sum(row_ptr, size, temperature, LANES)
    column = tl.load(id_ptr + row).to(tl.int64) + tl.arange(0, 1)
    y = (scaled(row_ptr, column, size, temperature) - peak) - log_sum
    tl.store(y_ptr + row + tl.arange(0, 1), y)


@remembered
@triton.jit
def chosen_backward(grad_ptr, logits_ptr, id_ptr, temperature_ptr, y_ptr, size, LANES: tl.constexpr):
    """A row of dlogits = (onehot - p) * (dlogp / T)."""
    row, lane = tl.program_id(0).to(tl.int64), tl.arange(0, LANES)
    temperature, row_ptr = temperature_of(temperature_ptr, row), logits_ptr + row * size
    peak, log_sum = peak_and_log_sum(row_ptr, size, temperature, LANES)
    factor, chosen = tl.div_rn(tl.load(grad_ptr + row), temperature), tl.load(id_ptr + row)
    for start in range(0, size, LANES):
        column = start + lane
        p = tl.exp((scaled(row_ptr, column, size, temperature) - peak) - log_sum)
        y = (tl.where(column == chosen, 1.0, 0.0) - p) * factor
        tl.store(y_ptr + row * size + column, y.to(y_ptr.dtype.element_ty), mask=column < size)


def _lanes(size: int) -> int:
    return min(_LANES, power_of_2(size))


def log_softmax(logits: Tensor, temperatures: Tensor) -> Tensor:
    """log p (..., V) in fp32; temperatures: one for each row."""
    rows = logits.reshape(-1, logits.shape[-1]).contiguous()
    y = torch.empty(rows.shape, dtype=torch.float32, device=rows.device)
    count, size = rows.shape
    if y.numel():
        all_log_probs[(count,)](rows, temperatures.contiguous(), y, size, LANES=_lanes(size), **_OPTIONS)
    return y.reshape(logits.shape)


def token_log_probs(logits: Tensor, ids: Tensor, temperatures: Tensor) -> Tensor:
    """log p of ids (rows) from logits (rows, V): (rows) in fp32."""
    logits = logits.contiguous()
    rows, size = logits.shape
    y = torch.empty(rows, dtype=torch.float32, device=logits.device)
    if rows:
        chosen_log_prob[(rows,)](
            logits, ids.contiguous(), temperatures.contiguous(), y, size, LANES=_lanes(size), **_OPTIONS
        )
    return y


def token_log_probs_backward(grad: Tensor, logits: Tensor, ids: Tensor, temperatures: Tensor) -> Tensor:
    """The gradient of logits (rows, V) from grad (rows)."""
    logits = logits.contiguous()
    rows, size = logits.shape
    y = torch.empty_like(logits)
    if y.numel():
        chosen_backward[(rows,)](
            grad.float().contiguous(), logits, ids.contiguous(), temperatures.contiguous(), y, size,
            LANES=_lanes(size), **_OPTIONS,
        )  # fmt: skip
    return y
