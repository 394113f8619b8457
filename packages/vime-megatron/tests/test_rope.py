from __future__ import annotations

from typing import Any

import pytest
import torch

from vime_core.errors import ConfigError
from vime_core.numerics import RopeScaling
from vime_megatron.rope import Rope, read_rope, rope_table, rotate

LLAMA3 = {
    "rope_theta": 500000.0,
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


PLAIN = RopeScaling(original_positions=96)
LINEAR = RopeScaling("linear", factor=4, original_positions=96)
YARN = {"rope_theta": 1e4, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 24}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}}, Rope(1e6, PLAIN)),
        ({"rope_theta": 1e5}, Rope(1e5, PLAIN)),
        (
            {"rope_theta": 1e5, "rope_scaling": {"type": "linear", "factor": 4}},
            Rope(1e5, LINEAR),
        ),
        ({"rope_theta": 500000.0, "rope_scaling": LLAMA3}, Rope(500000.0, RopeScaling("llama3", 8.0, 1.0, 4.0, 64))),
        ({"rope_parameters": LLAMA3}, Rope(500000.0, RopeScaling("llama3", 8.0, 1.0, 4.0, 64))),
        ({"rope_scaling": None}, Rope(10000.0, PLAIN)),
        ({}, Rope(10000.0, PLAIN)),
    ],
)
def test_both_generations_of_keys_are_read(config: dict[str, Any], expected: Rope) -> None:
    assert read_rope({**config, "max_position_embeddings": 96}) == expected


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"rope_scaling": {"rope_type": "longrope", "factor": 4.0}}, "longrope"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "short_factor": [1.0]}}, "short_factor"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4}}, "dynamic"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
    ],
)
def test_other_kinds_are_refused_by_name(config: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        read_rope({**config, "max_position_embeddings": 96})


@pytest.mark.parametrize(
    "parameters",
    [
        {"rope_theta": 10000.0, "rope_type": "default"},
        {"rope_theta": 10000.0, "rope_type": "linear", "factor": 4.0},
        LLAMA3,
        YARN,
    ],
)
def test_the_table_agrees_with_transformers(parameters: dict[str, Any]) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    sizes = {"hidden_size": 64, "num_attention_heads": 2, "max_position_embeddings": 96}
    config = LlamaConfig(**sizes, rope_parameters=dict(parameters))
    theirs = LlamaRotaryEmbedding(config)(torch.zeros(1), torch.arange(96)[None])
    ours = rope_table(read_rope({"rope_parameters": parameters, **sizes}), 32, 96)
    for own, other in zip(ours, theirs, strict=True):
        assert torch.allclose(own, other[0, :, :16], atol=3e-5, rtol=0)
        assert not torch.allclose(own, 1.001 * other[0, :, :16], atol=3e-5, rtol=0)


def test_the_table_holds_cosine_and_sine() -> None:
    table = rope_table(Rope(100.0), 4, 10)
    angles = torch.arange(10.0, dtype=torch.float64)[:, None] * torch.tensor([1.0, 0.1], dtype=torch.float64)
    assert table.dtype == torch.float32
    assert torch.equal(table, torch.stack([angles.cos(), angles.sin()]).float())


def test_rotation_and_its_gradient_are_complex_multiplication() -> None:
    torch.manual_seed(0)
    x = torch.randn(5, 3, 8, dtype=torch.float32, requires_grad=True)
    table = rope_table(Rope(10.0), 8, 5)[:, :, None]
    y = rotate(x, table[0], table[1])
    turned = torch.complex(*x.detach().double().chunk(2, -1)) * torch.complex(table[0].double(), table[1].double())
    assert torch.allclose(y.double(), torch.cat([turned.real, turned.imag], -1), atol=1e-6)
    upstream = torch.randn_like(y)
    y.backward(upstream)
    back = torch.complex(*upstream.double().chunk(2, -1)) * torch.complex(table[0].double(), -table[1].double())
    assert x.grad is not None
    assert torch.allclose(x.grad.double(), torch.cat([back.real, back.imag], -1), atol=1e-6)


def test_bf16_is_rotated_in_fp32_and_rounded_once() -> None:
    torch.manual_seed(0)
    x = torch.randn(7, 2, 16).bfloat16()
    table = rope_table(Rope(1e4), 16, 7)[:, :, None]
    assert torch.equal(rotate(x, table[0], table[1]), rotate(x.float(), table[0], table[1]).bfloat16())
