"""What the contract's sampler of V2 asks of a step, by one kernel from states that V2 keeps where the GPU reads them.

Seeds, temperatures and lengths lie by request, in pinned memory of the host; another copy of it may be the newest in
every step, so nothing of them is kept from one step to the next.
"""

# Triton's language has no types.
# pyright: basic, reportGeneralTypeIssues=false, reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from vime_core.numerics.cuda.draw import number
from vime_core.numerics.cuda.launch import remembered


class Step(NamedTuple):
    """Of the requests of a step, one row each (rows).

    Attributes:
        temperatures: fp32, 0 for greedy.
        u: int64, the random number of the token that comes next (:mod:`vime_core.numerics.draw`).
        num_sampled: int32, 1, or 0 where the prompt isn't at its end.
    """

    temperatures: Tensor
    u: Tensor
    num_sampled: Tensor


@remembered
@triton.jit
def of_request(
    request_ptr, index_ptr, position_ptr, seq_len_ptr, temperature_ptr, seed_ptr, prompt_len_ptr, prefill_len_ptr,
    row_temperature_ptr, u_ptr, sampled_ptr,
):  # fmt: skip
    """One row: the request's temperature, its number at this place of its response, and how many tokens it gets."""
    row = tl.program_id(0) + tl.arange(0, 1)
    request = tl.load(request_ptr + row)
    place = tl.load(position_ptr + tl.load(index_ptr + row)).to(tl.int64) + 1 - tl.load(prompt_len_ptr + request)
    tl.store(row_temperature_ptr + row, tl.load(temperature_ptr + request))
    tl.store(u_ptr + row, number(tl.load(seed_ptr + request), place))
    unfinished = tl.load(seq_len_ptr + row) < tl.load(prefill_len_ptr + request)
    tl.store(sampled_ptr + row, tl.where(unfinished, 0, 1))


def prepare(batch: Any, sampling_states: Any, request_states: Any) -> Step:
    """The `Step` of vLLM's batch, whose requests have one row of logits each, in memory of its own."""
    rows, device = batch.num_reqs, batch.seq_lens.device
    step = Step(
        torch.empty(rows, dtype=torch.float32, device=device),
        torch.empty(rows, dtype=torch.int64, device=device),
        torch.empty(rows, dtype=torch.int32, device=device),
    )
    of_request[(rows,)](
        batch.idx_mapping, batch.logits_indices, batch.positions, batch.seq_lens, sampling_states.temperature.gpu,
        sampling_states.seeds.gpu, request_states.prompt_len.gpu, request_states.prefill_len.gpu, *step, num_warps=1,
    )  # fmt: skip
    return step
