"""Recomputation keeps less and changes no bit; that it really runs the forward again is counted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vime_megatron.options import MegatronOptions
from vime_megatron.specs import PackedCausalAttention
from vime_megatron.testing import PPO, Observed, random_sequences, run_config, snapshot, unequal

SEQUENCES = random_sequences(((5, 12), (1, 20), (16, 3)))
BATCHES = [SEQUENCES[:2], SEQUENCES[2:]]


def trained(trainer: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any, int]:
    """Gradients and weights after a step, and how often core attention ran."""
    runs = []
    forward = PackedCausalAttention.forward

    def count(self: Any, *arguments: Any, **named: Any) -> Any:
        runs.append(1)
        return forward(self, *arguments, **named)

    with monkeypatch.context() as patch:
        patch.setattr(PackedCausalAttention, "forward", count)
        observed = Observed()
        trainer.train_step(BATCHES, PPO, observed)
    return observed.seen, snapshot(trainer.weights()), len(runs)


@pytest.mark.parametrize("granularity", ["full", "selective"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_recomputing_changes_no_bit(
    granularity: Any, dtype: str, llama: Path, open_at: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = run_config(dtype=dtype)
    plain = trained(open_at(llama, config), monkeypatch)
    trainer = open_at(llama, config, options=MegatronOptions(recompute=granularity))
    assert trainer.processes()[0].settings["recompute"] == granularity
    again = trained(trainer, monkeypatch)
    assert unequal(plain[0], again[0]) == []
    assert unequal(plain[1], again[1]) == []
    assert again[2] == 2 * plain[2] > 0
