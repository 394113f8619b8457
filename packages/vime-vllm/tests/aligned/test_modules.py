"""Weights by Hugging Face names, the structure of a configuration, and the cache's layout, without an engine."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import wraps
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from vime_core.alignment.taps import LOGITS, recording
from vime_core.errors import ContractViolation, PolicyError
from vime_core.numerics import DENSE_V1, RopeScaling, load_provider, rope_table
from vime_core.numerics.offers import LinearCall

OPERATIONS = load_provider("cpu")


def toy() -> Any:
    from torch import nn

    from vime_vllm.aligned.base import AlignedModel
    from vime_vllm.aligned.modules import Embedding, Linear, RmsNorm

    class Toy(AlignedModel):
        def __init__(self) -> None:
            nn.Module.__init__(self)
            self.ignored_weights = ("inv_freq",)
            self._step: list[Tensor] = []
            self.embed = Embedding(OPERATIONS, 7, 4)
            self.block = nn.Module()
            self.block.qkv = Linear(OPERATIONS, 4, (6, 2, 2), bias=True, parts=("q", "k", "v"))
            self.norm = RmsNorm(OPERATIONS, 4, 1e-5)

    return Toy()


def toy_weights() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes = {"embed.weight": (7, 4), "norm.weight": (4,)}
    for part, rows in (("q", 6), ("k", 2), ("v", 2)):
        shapes |= {f"block.{part}.weight": (rows, 4), f"block.{part}.bias": (rows,)}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def test_weights_go_in_and_come_out_under_their_names() -> None:
    model, weights = toy(), toy_weights()
    assert model.load_weights([*weights.items(), ("block.inv_freq", torch.ones(2))]) == {
        *("embed.weight", "block.qkv.weight", "block.qkv.bias", "norm.weight")
    }
    held = dict(model.vime_kernel_tensors())
    assert set(held) == set(weights)
    assert all(torch.equal(held[name], weights[name]) for name in weights)
    held["block.k.weight"][1, 2] = 42.0
    assert model.block.qkv.weight[7, 2] == 42.0, "what comes out is what is read"


def test_a_parameter_that_comes_later_is_not_overlooked() -> None:
    """Where tensors lie is remembered from one update to the next."""
    from vime_vllm.aligned.modules import Linear, weight

    model = toy()
    assert set(dict(model.vime_kernel_tensors())) == set(toy_weights())
    model.block.qkv = Linear(OPERATIONS, 4, (6, 2, 2), bias=False, parts=("q", "k", "v"))
    model.extra = weight(3)
    held = set(dict(model.vime_kernel_tensors()))
    assert held == {name for name in toy_weights() if not name.endswith("bias")} | {"extra"}
    model.norm.weight = weight(4)
    replaced = dict(model.vime_kernel_tensors())["norm.weight"]
    assert replaced.data_ptr() == model.norm.weight.data_ptr()


def test_a_parameter_without_all_of_its_parts_is_not_loaded() -> None:
    weights = toy_weights()
    del weights["block.k.weight"]
    assert "block.qkv.weight" not in toy().load_weights(weights.items())


def test_unknown_names_and_wrong_shapes_are_errors() -> None:
    with pytest.raises(ValueError, match=r"no weight 'block\.z\.weight'"):
        toy().load_weights([("block.z.weight", torch.ones(2, 4))])
    with pytest.raises(ValueError, match="does not fit"):
        toy().load_weights([("block.k.weight", torch.ones(3, 4))])


def wrap_loaders(model: Any) -> list[tuple[int, ...]]:
    """Wrap every loader as vLLM's reload does; returns the list of the parts that they will be called with."""
    parts: list[tuple[int, ...]] = []
    for parameter in model.parameters():

        def wrapped(param: Tensor, tensor: Tensor, *part: int, loader: Any = parameter.weight_loader) -> None:
            parts.append(part)
            loader(param, tensor, *part)

        parameter.weight_loader = wraps(parameter.weight_loader)(wrapped)
    return parts


def test_a_wrapped_loader_is_called_with_each_part() -> None:
    model, weights = toy(), toy_weights()
    parts = wrap_loaders(model)
    model.load_weights(weights.items())
    assert sorted(parts) == [(), (), (0,), (0,), (1,), (1,), (2,), (2,)]
    held = dict(model.vime_kernel_tensors())
    assert all(torch.equal(held[name], weights[name]) for name in weights)
    with pytest.raises(ValueError, match="does not fit"):
        model.load_weights([("block.k.weight", torch.ones(1, 4))])


def test_a_fused_linear_is_the_operation_on_all_parts() -> None:
    model, weights = toy(), toy_weights()
    model.load_weights(weights.items())
    x = torch.randn(5, 4)
    fused = torch.cat([weights[f"block.{p}.weight"] for p in "qkv"])
    bias = torch.cat([weights[f"block.{p}.bias"] for p in "qkv"])
    assert torch.equal(model.block.qkv(x), OPERATIONS.linear(x, fused, bias))


def test_modules_call_the_operation_with_what_they_were_built_of() -> None:
    from vime_vllm.aligned.modules import RmsNorm, Rope, SwiGlu

    generator = torch.Generator().manual_seed(2)
    x, residual = (torch.randn(5, 8, generator=generator) for _ in range(2))
    norm, positions = RmsNorm(OPERATIONS, 8, 0.5), torch.tensor([7, 0, 3, 9, 1])
    norm.weight.copy_(torch.arange(8.0))
    assert torch.equal(norm(x)[0], OPERATIONS.rms_norm(x, norm.weight, 0.5))
    assert norm(x)[1] is x
    expected = OPERATIONS.add_rms_norm(x, residual, norm.weight, 0.5)
    assert all(torch.equal(got, want) for got, want in zip(norm(x, residual), expected, strict=True))
    table = rope_table(10, 8, 100.0, RopeScaling())
    for interleaved in (False, True):
        rope = Rope(OPERATIONS, 10, 8, 100.0, RopeScaling(), interleaved=interleaved)
        assert torch.equal(
            rope(x[:, None], positions), OPERATIONS.rope(x[:, None], positions, table, interleaved=interleaved)
        )
    assert torch.equal(SwiGlu(OPERATIONS)(x), OPERATIONS.swiglu(x))


def test_what_computes_is_chosen_for_linears_of_bf16_without_a_bias() -> None:
    from torch import nn

    from vime_vllm.aligned.modules import Linear, settle_linears

    chosen: list[LinearCall] = []
    kernels = replace(OPERATIONS.kernels, settle=lambda calls, _: chosen.extend(calls))
    operations = replace(OPERATIONS, kernels=kernels)
    half = [Linear(OPERATIONS, 4, 6), Linear(OPERATIONS, 4, 7, bias=True), Linear(OPERATIONS, 4, 6)]
    model = nn.Sequential(*(linear.bfloat16() for linear in half), Linear(OPERATIONS, 4, 9))
    settle_linears(model, operations, [torch.empty(3, 5, dtype=torch.bfloat16), torch.empty(3, 8)])
    assert chosen == [LinearCall("forward", *shape, wide=False) for shape in ((6, 4), (3, 5))]
    settle_linears(nn.Sequential(Linear(OPERATIONS, 4, 9)), operations)
    assert len(chosen) == 2, "without such a linear nothing is asked"


def test_logits_are_as_rounded_and_recorded_at_the_last_positions_of_their_step() -> None:
    model, hidden = toy(), torch.randn(3, 7)
    model.logits = lambda rows: rows.bfloat16()
    with recording() as taps:
        model.begin_step(torch.tensor([4, 5, 6, 7]))
        logits = model.compute_logits(hidden[:2])
        model.begin_step(torch.tensor([8]))
        model.compute_logits(hidden[2:])
    assert logits.dtype == torch.bfloat16
    assert torch.equal(logits, hidden[:2].bfloat16())
    positions, rows = taps.tensors()[LOGITS]
    assert positions.tolist() == [6, 7, 8]
    assert torch.equal(rows, hidden.bfloat16())


def test_keys_and_values_lie_in_the_tensor_that_vllm_gives() -> None:
    from vime_vllm.aligned.attention import paged

    tensor = torch.arange(2 * 3 * 4 * 10, dtype=torch.float32).reshape(2, 3, 4, 10)
    cache = paged(tensor)
    assert cache.keys.shape == cache.values.shape == (2, 3, 4, 5)
    assert cache.keys.data_ptr() == tensor.data_ptr()
    assert cache.keys[1, 2].is_contiguous(), "keys of one page and head lie together"
    assert cache.values[1, 2].data_ptr() == cache.keys[1, 2].data_ptr() + 4 * 5 * 4
    both = torch.cat([cache.keys.flatten(), cache.values.flatten()])
    assert torch.equal(both.sort().values, tensor.flatten()), "each element once"


def hf_config(kind: str, **changes: Any) -> Any:
    from transformers import AutoConfig

    return AutoConfig.for_model(kind, **changes)


@pytest.mark.parametrize(
    ("kind", "changes", "expected"),
    [
        ("qwen2", {}, {"qkv_bias": True, "o_bias": False, "mlp_bias": False, "qk_norm": False}),
        ("qwen3", {}, {"qkv_bias": False, "o_bias": False, "mlp_bias": False, "qk_norm": True}),
        ("qwen3", {"attention_bias": True}, {"qkv_bias": True, "o_bias": True, "qk_norm": True}),
        ("llama", {}, {"qkv_bias": False, "o_bias": False, "mlp_bias": False, "qk_norm": False}),
        ("llama", {"attention_bias": True, "mlp_bias": True}, {"qkv_bias": True, "o_bias": True, "mlp_bias": True}),
        ("llama", {"hidden_size": 96, "num_attention_heads": 3, "num_key_value_heads": 1}, {"head_dim": 32}),
        ("llama", {"head_dim": 80}, {"head_dim": 80}),
        ("qwen2", {"tie_word_embeddings": True, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
         {"tied": True, "theta": 5e5}),
    ],
)  # fmt: skip
def test_a_structure_is_read_from_its_configuration(kind: str, changes: Any, expected: dict[str, Any]) -> None:
    from vime_vllm.aligned.structure import dense_structure

    structure = dense_structure(hf_config(kind, **changes))
    assert {name: getattr(structure, name) for name in expected} == expected


def test_biases_are_those_of_transformers() -> None:
    """The same switches, seen in the parameters that transformers makes."""
    from transformers import AutoModelForCausalLM

    from vime_vllm.aligned.structure import dense_structure

    small = {"hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 32}
    small |= {"num_hidden_layers": 1, "vocab_size": 50}
    for kind in ("qwen2", "qwen3", "llama"):
        for attention_bias in (False, True):
            config = hf_config(kind, **small, attention_bias=attention_bias, mlp_bias=attention_bias)
            names = {name for name, _ in AutoModelForCausalLM.from_config(config).named_parameters()}
            structure, at = dense_structure(config), "model.layers.0."
            assert structure.qkv_bias == (f"{at}self_attn.k_proj.bias" in names), (kind, attention_bias)
            assert structure.o_bias == (f"{at}self_attn.o_proj.bias" in names), (kind, attention_bias)
            assert structure.mlp_bias == (f"{at}mlp.down_proj.bias" in names), (kind, attention_bias)
            assert structure.qk_norm == (f"{at}self_attn.q_norm.weight" in names), (kind, attention_bias)


def test_windows_in_some_layers_are_refused() -> None:
    from vime_vllm.aligned.structure import dense_structure

    config = hf_config("qwen3", num_hidden_layers=2, layer_types=["full_attention", "sliding_attention"])
    with pytest.raises(PolicyError, match="layer_types = 'sliding_attention'"):
        dense_structure(config)


def test_a_contract_is_installed_from_what_the_engine_was_handed() -> None:
    from vime_core.alignment import Alignment
    from vime_vllm.aligned.installed import CONFIG_KEY, installed, message

    def config(**changes: str) -> Any:
        handed = {**message(Alignment(DENSE_V1, "reference", "t:t", "a:B")), **changes}
        return SimpleNamespace(additional_config=json.loads(json.dumps({CONFIG_KEY: handed})))

    here = installed(config())
    assert (here.contract, here.operations.provider, here.side) == (DENSE_V1, "reference", "a:B")
    assert installed(config()) is here, "one object a process"
    with pytest.raises(ContractViolation, match="not a serialised contract"):
        installed(config(contract="{}"))
    with pytest.raises(ContractViolation, match="without a contract"):
        installed(SimpleNamespace(additional_config={}))


def foreign(**attributes: object) -> Any:
    from torch import nn

    module = nn.Module()
    for name, value in attributes.items():
        setattr(module, name, value)
    return module


def test_only_layers_that_keep_their_weights_as_they_come_are_loaded_in_place() -> None:
    from torch import nn
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod

    from vime_vllm.engine_side.in_place import loads_in_place

    known = foreign(quant_method=UnquantizedLinearMethod())
    assert loads_in_place(nn.Sequential(known, nn.SiLU()))
    assert not loads_in_place(nn.Sequential(known, foreign(quant_method=object())))
    assert not loads_in_place(nn.Sequential(known, foreign(process_weights_after_loading=print)))
    assert loads_in_place(toy())
    assert not loads_in_place(foreign(vime_loads_in_place=False))
