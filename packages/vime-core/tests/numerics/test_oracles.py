"""Against independent sources: fp64, and the modules of transformers, within stated bounds."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numerics_support import DTYPES, PRECISION, assert_same, attention_fp64, cpu, normal
from torch import Tensor
from torch.nn import functional

from vime_core.errors import PolicyError
from vime_core.numerics import AttentionSpec, RopeScaling, load_provider, rope_scaling, rope_table
from vime_core.numerics.rope_table import rope_frequencies

dtypes = st.sampled_from(DTYPES)
seeds = st.integers(0, 2**20)


def assert_near(got: Tensor, exact: Tensor, magnitude: Tensor, terms: int) -> None:
    """One final rounding, and ``terms`` fp32 roundings of numbers up to ``magnitude``."""
    bound = exact.abs() * PRECISION[got.dtype] * 1.01 + magnitude * terms * 2.0**-24
    excess = ((got.double() - exact).abs() / bound.clamp_min(1e-30)).max().item()
    assert excess <= 1, f"{excess:.2f} times the bound"


@given(st.integers(1, 12), st.integers(1, 30), st.integers(1, 300), dtypes, seeds)
def test_linear(m: int, n: int, k: int, dtype: torch.dtype, seed: int) -> None:
    x, weight, bias = (
        normal(seed, m, k, dtype=dtype),
        normal(seed + 1, n, k, dtype=dtype),
        normal(seed + 2, n, dtype=dtype),
    )
    exact = x.double() @ weight.double().T + bias.double()
    magnitude = x.double().abs() @ weight.double().abs().T + bias.double().abs()
    assert_near(cpu().linear(x, weight, bias), exact, magnitude, k // 16 + 6)


def test_linear_of_integers_is_exact() -> None:
    x = torch.randint(-8, 9, (9, 2048), generator=torch.Generator().manual_seed(0)).float()
    weight = torch.randint(-8, 9, (13, 2048), generator=torch.Generator().manual_seed(1)).float()
    assert_same(cpu().linear(x, weight), (x.double() @ weight.double().T).float())


@given(st.integers(1, 9), st.integers(1, 200), dtypes, seeds)
def test_rms_norm(m: int, h: int, dtype: torch.dtype, seed: int) -> None:
    x, residual, weight = (normal(seed + i, *shape, dtype=dtype) for i, shape in enumerate([(m, h), (m, h), (h,)]))
    y, r = cpu().add_rms_norm(x, residual, weight, 1e-5)
    assert_same(r, (x.float() + residual.float()).to(dtype))
    exact = r.double() / (r.double().square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    assert_near(y, exact, exact.abs(), h // 16 + 12)


def test_rms_norm_is_that_of_transformers() -> None:
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    module = LlamaRMSNorm(576, eps=1e-5)
    module.weight.data = normal(1, 576)
    x = normal(0, 20, 576)
    torch.testing.assert_close(
        cpu().rms_norm(x, module.weight.detach(), 1e-5), module(x).detach(), rtol=1e-6, atol=1e-6
    )


@pytest.mark.parametrize("interleaved", [False, True])
def test_rope_is_a_rotation_of_complex_numbers(interleaved: bool) -> None:
    x, positions = normal(0, 50, 3, 64), torch.arange(50) * 37
    turned = cpu().rope(x, positions, rope_table(2000, 64, 10000.0), interleaved)
    angles = positions.double()[:, None] * torch.tensor(
        [10000.0 ** -(2 * i / 64) for i in range(32)], dtype=torch.float64
    )
    pairs = x.double().unflatten(-1, (32, 2)) if interleaved else torch.stack(x.double().chunk(2, -1), -1)
    exact = torch.view_as_real(
        torch.view_as_complex(pairs.contiguous()) * torch.polar(torch.ones_like(angles), angles)[:, None]
    )
    exact = exact.flatten(-2) if interleaved else torch.cat(exact.unbind(-1), -1)
    assert_near(turned, exact, x.double().abs().amax(), 4)


def _config(rope: dict[str, Any]) -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(
        hidden_size=128, num_attention_heads=2, head_dim=64, max_position_embeddings=4096, rope_parameters=rope
    )


def test_rope_is_that_of_transformers() -> None:
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

    q, k, positions = normal(0, 9, 4, 64), normal(1, 9, 2, 64), torch.arange(9)
    module = LlamaRotaryEmbedding(_config({"rope_type": "default", "rope_theta": 1e6}))
    cos, sin = module(q, positions[None])
    theirs = apply_rotary_pos_emb(q.transpose(0, 1)[None], k.transpose(0, 1)[None], cos, sin)
    table = rope_table(4096, 64, 1e6)
    for x, expected in zip((q, k), theirs, strict=True):
        torch.testing.assert_close(cpu().rope(x, positions, table), expected[0].transpose(0, 1), rtol=1e-5, atol=2e-6)


ROPES: list[dict[str, Any]] = [
    {"rope_type": "default", "rope_theta": 5e5},
    {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
    {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 1024,
    },
    {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 1024},
    {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 2.0,
        "attention_factor": 1.2,
        "beta_fast": 16.0,
        "truncate": False,
    },
    {"rope_type": "yarn", "rope_theta": 1e4, "factor": 40.0, "mscale": 0.7, "mscale_all_dim": 1.1},
]


@pytest.mark.parametrize("rope", ROPES, ids=lambda r: r["rope_type"])
def test_frequencies_and_magnitude_are_those_of_transformers(rope: dict[str, Any]) -> None:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    module = LlamaRotaryEmbedding(_config(dict(rope)))
    theta, scaling = rope_scaling(rope, 4096)
    np.testing.assert_allclose(rope_frequencies(64, theta, scaling), module.inv_freq.numpy(), rtol=2e-6)
    assert rope_table(8, 64, theta, scaling)[0, 0].item() == pytest.approx(module.attention_scaling, rel=1e-6)
    assert rope["rope_type"] == "default" or rope["rope_type"] in ROPE_INIT_FUNCTIONS


def test_a_part_of_the_head_may_rest() -> None:
    table = rope_table(16, 64, 1e4, RopeScaling(partial=0.5))
    x = normal(0, 5, 2, 64)
    assert table.shape == (16, 32)
    assert_same(x[..., 32:], cpu().rope(x, torch.arange(5), table)[..., 32:])


def test_a_rope_without_a_definition_is_refused_by_name() -> None:
    with pytest.raises(PolicyError, match="'longrope'"):
        rope_scaling({"rope_type": "longrope", "rope_theta": 1e4}, 4096)
    with pytest.raises(PolicyError, match="'short_factor'"):
        rope_scaling({"rope_type": "yarn", "rope_theta": 1e4, "short_factor": [1.0]}, 4096)


def test_positions_outside_the_table_are_refused() -> None:
    with pytest.raises(RuntimeError, match="outside the table"):
        cpu().rope(normal(0, 1, 1, 64), torch.tensor([16]), rope_table(16, 64, 1e4))


@given(st.integers(1, 5), st.integers(1, 50), dtypes, st.floats(0.1, 30), seeds)
def test_swiglu(m: int, f: int, dtype: torch.dtype, scale: float, seed: int) -> None:
    gate_up = normal(seed, m, 2 * f, dtype=dtype, scale=scale)
    gate, up = gate_up.double().chunk(2, -1)
    exact = functional.silu(gate) * up
    assert_near(cpu().swiglu(gate_up), exact, exact.abs() + 1e-30, 8)


@given(
    st.integers(1, 60),
    st.sampled_from([(4, 2), (3, 3), (7, 1)]),
    st.sampled_from([32, 64, 80]),
    st.sampled_from([(None, None), (7, None), (None, 5.0)]),
    dtypes,
    seeds,
)
def test_attention(
    n: int, heads: tuple[int, int], dim: int, spec: tuple[int | None, float | None], dtype: torch.dtype, seed: int
) -> None:
    q, k, v = (normal(seed + i, n, heads[min(i, 1)], dim, dtype=dtype) for i in range(3))
    attention = AttentionSpec(dim**-0.5, *spec)
    o, lse = cpu().attention_packed(q, k, v, torch.tensor([0, n]), attention)
    exact, exact_lse = attention_fp64(q, k, v, attention)
    assert_near(o, exact, v.double().abs().max() + 0 * exact, n + dim // 4 + 20)
    assert_near(lse, exact_lse, exact_lse.abs() + 4, dim // 4 + 10)


def test_attention_is_that_of_transformers() -> None:
    from transformers.models.llama.modeling_llama import eager_attention_forward

    q, k, v = (normal(i, 40, n, 64) for i, n in enumerate((6, 2, 2)))
    module = torch.nn.Module()
    module.num_key_value_groups = 3  # pyright: ignore[reportArgumentType]
    mask = torch.full((40, 40), -math.inf).triu(1)[None, None]
    theirs, _ = eager_attention_forward(module, *(t.transpose(0, 1)[None] for t in (q, k, v)), mask, scaling=0.125)
    ours, _ = cpu().attention_packed(q, k, v, torch.tensor([0, 40]), AttentionSpec(0.125))
    torch.testing.assert_close(ours, theirs[0], rtol=1e-5, atol=2e-6)


@given(st.integers(1, 5), st.integers(1, 2000), dtypes, st.sampled_from([0.3, 1.0, 1.3]), seeds)
def test_log_softmax(m: int, v: int, dtype: torch.dtype, temperature: float, seed: int) -> None:
    logits = normal(seed, m, v, dtype=dtype, scale=5)
    exact = (logits.double() / float(np.float32(temperature))).log_softmax(-1)
    magnitude = (logits.double().abs() / temperature).amax(-1, keepdim=True) + exact.abs()
    assert_near(cpu().log_softmax(logits, temperature), exact, magnitude, 6)


@given(st.floats(0.01, 40), dtypes, seeds)
def test_soft_cap(cap: float, dtype: torch.dtype, seed: int) -> None:
    x = normal(seed, 50, dtype=dtype, scale=cap)
    exact = float(np.float32(cap)) * torch.tanh(x.double() / float(np.float32(cap)))
    assert_near(cpu().soft_cap(x, cap), exact, exact.abs(), 6)


def test_embedding_copies_bits() -> None:
    weight, ids = normal(0, 30, 16, dtype=torch.bfloat16), torch.tensor([[3, 29], [0, 3]])
    assert_same(load_provider("reference").embedding(ids, weight), functional.embedding(ids, weight))
