from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from vime_core.errors import ConfigError
from vime_megatron.mapping import check_complete, grouped_qkv, to_hf, to_megatron
from vime_megatron.structures.dense import LLAMA, QWEN2, QWEN3, DenseStructure

LLAMA3_ROPE = {
    "rope_theta": 10000.0,
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
BOUND = 2e-4
"""On logits of magnitude about 1 to 5, both sides in fp32."""


@given(
    structure=st.sampled_from([LLAMA, QWEN2, QWEN3]),
    groups=st.integers(1, 3),
    repeat=st.integers(1, 3),
    head_dim=st.sampled_from([2, 4]),
    tied=st.booleans(),
)
def test_a_round_trip_changes_no_bit(
    structure: DenseStructure, groups: int, repeat: int, head_dim: int, tied: bool
) -> None:
    rules = structure.rules(2, groups * repeat, groups, head_dim, tied=tied)
    weights = random_weights(rules, groups * repeat, groups, head_dim)
    there = dict(to_megatron(weights, rules))
    back = dict(to_hf(there, rules))
    assert list(back) == [name for rule in rules for name in rule.sources]
    assert all(torch.equal(back[name], weights[name]) for name in weights)
    assert all(tensor.is_contiguous() for tensor in back.values())
    again = dict(to_megatron(back, rules))
    assert all(torch.equal(again[name], there[name]) for name in there)


def random_weights(rules: Any, heads: int, groups: int, head_dim: int) -> dict[str, Tensor]:
    rows = {"q_proj": heads * head_dim, "k_proj": groups * head_dim, "v_proj": groups * head_dim}
    weights = {}
    for name in (name for rule in rules for name in rule.sources):
        part = next((part for part in rows if part in name), "")
        shape = (rows.get(part, 6),) if "norm" in name or name.endswith("bias") else (rows.get(part, 6), 5)
        weights[name] = torch.randn(shape)
    return weights


def test_query_heads_stand_with_their_key_and_value() -> None:
    rule = grouped_qkv("qkv", ("q", "k", "v"), heads=4, groups=2, head_dim=1)
    joined = rule.join([torch.tensor([[0.0], [1.0], [2.0], [3.0]]), torch.tensor([[10.0], [11.0]]), torch.zeros(2, 1)])
    assert joined.flatten().tolist() == [0, 1, 10, 0, 2, 3, 11, 0]


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        ("qwen2", {"tie_word_embeddings": True}),
        ("qwen2", {"tie_word_embeddings": False, "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}}),
        ("qwen3", {"tie_word_embeddings": True, "head_dim": 16}),
        ("qwen3", {"tie_word_embeddings": False, "head_dim": 8, "num_key_value_heads": 6}),
        ("llama", {"tie_word_embeddings": True, "rope_parameters": LLAMA3_ROPE}),
        ("llama", {"tie_word_embeddings": False, "num_key_value_heads": 1}),
    ],
)
def test_logits_agree_with_transformers(
    model_type: str, changes: dict[str, Any], save_hf: Callable[..., tuple[Any, Path]], open_at: Callable[..., Any]
) -> None:
    model, place = save_hf(model_type, **changes)
    ours, theirs = both_logits(open_at(place), model)
    assert theirs.std() > 0.3
    assert float((ours - theirs).abs().max()) < BOUND


def test_a_wrong_mapping_is_noticed(
    save_hf: Callable[..., tuple[Any, Path]], open_at: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, place = save_hf("qwen2")
    true_rules = DenseStructure.rules

    def swapped(self: DenseStructure, *args: Any, **named: Any) -> Any:
        rules = list(true_rules(self, *args, **named))
        at = next(i for i, rule in enumerate(rules) if "linear_fc1" in rule.target)
        rules[at] = replace(rules[at], sources=rules[at].sources[::-1])
        return tuple(rules)

    monkeypatch.setattr(DenseStructure, "rules", swapped)
    ours, theirs = both_logits(open_at(place), model)
    assert float((ours - theirs).abs().max()) > 100 * BOUND


def both_logits(trainer: Any, model: Any) -> tuple[Tensor, Tensor]:
    from vime_megatron.packing import pack_microbatch
    from vime_megatron.testing import random_sequences

    (sequence,) = random_sequences([(20, 30)])
    policy = trainer._model
    with torch.no_grad():
        ours = policy.logits(policy.hidden_states(pack_microbatch([sequence], torch.device("cpu"))))
        theirs = model(torch.tensor([sequence.tokens[:-1]])).logits[0]
    return ours, theirs


def test_absent_and_unknown_weights_are_named() -> None:
    rules = LLAMA.rules(1, 2, 1, 4, tied=True)
    names = [name for rule in rules for name in rule.sources]
    check_complete(names, rules, "here")
    with pytest.raises(ConfigError, match=r"absent model\.norm\.weight; unknown extra"):
        check_complete([*(n for n in names if n != "model.norm.weight"), "extra"], rules, "here")
