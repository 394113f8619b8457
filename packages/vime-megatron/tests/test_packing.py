from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from vime_core.types import KeptTokens, TrainSequence
from vime_megatron.packing import pack_microbatch

CPU = torch.device("cpu")


def sequence(tokens: tuple[int, ...], start: int) -> TrainSequence:
    values = np.zeros(len(tokens) - start, np.float32)
    return TrainSequence((0, 0), tokens, start, values, values)


def test_rows_point_at_the_token_before_each_response_token() -> None:
    batch = pack_microbatch([sequence((7, 8, 9, 10), 2), sequence((1, 2), 1)], CPU)
    assert batch.tokens.tolist() == [7, 8, 9, 1]
    assert batch.positions.tolist() == [0, 1, 2, 0]
    assert batch.lengths == (3, 1)
    assert batch.rows.tolist() == [1, 2, 3]
    assert batch.targets.tolist() == [9, 10, 2]
    assert [part.tolist() for part in batch.split(torch.tensor([0.5, 1.5, 2.5]))] == [[0.5, 1.5], [2.5]]


def test_what_was_cut_has_no_probability() -> None:
    cut = replace(sequence((7, 1, 2, 0), 1), kept=KeptTokens((0, 1, 0, 1, 3), (2, 0, 3)))
    batch = pack_microbatch([sequence((4, 3), 1), cut], CPU)
    logits = torch.arange(16.0).view(4, 4)
    left = batch.left_to_choose(logits)
    assert torch.equal(left.isfinite(), torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 1, 1, 1], [1, 1, 0, 1]]).bool())
    assert torch.equal(left[left.isfinite()], logits[left.isfinite()])
    assert pack_microbatch([sequence((4, 3), 1)], CPU).left_to_choose(logits) is logits


@pytest.mark.parametrize(("tokens", "start"), [((1, 2), 0), ((1, 2), 2)])
def test_a_sequence_needs_prompt_and_response(tokens: tuple[int, ...], start: int) -> None:
    with pytest.raises(ValueError, match="prompt and a response"):
        pack_microbatch([sequence(tokens, start)], CPU)


def test_an_empty_microbatch_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one sequence"):
        pack_microbatch([], CPU)
