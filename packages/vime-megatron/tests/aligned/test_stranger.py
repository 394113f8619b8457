"""A structure of another package: alternating sliding windows, norms before and after, soft-capped logits."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from vime_core.alignment import Alignment
from vime_core.errors import ContractViolation
from vime_core.numerics import AttentionSpec, Operations
from vime_core.types import TrainSequence
from vime_megatron.aligned.testing import WholeSequence, unequal_bits
from vime_megatron.model import DTYPES
from vime_megatron.testing import PPO, Observed, random_sequences, run_config, unequal

PLUGIN = """
from dataclasses import dataclass, replace
from functools import partial

from megatron.core.transformer.spec_utils import ModuleSpec
from vime_core.numerics import AttentionSpec, Contract, Definition
from vime_core.plugins import ModelStructure, hookimpl
from vime_megatron.aligned.dense import block_spec, layer_spec
from vime_megatron.aligned.layer import AlignedLayer
from vime_megatron.aligned.modules import AlignedColumnLinear, AlignedEmbedding, AlignedRmsNorm, adopt
from vime_megatron.aligned.sequences import LayerTaps
from vime_megatron.aligned.side import AlignedParts
from vime_megatron.mapping import same
from vime_megatron.structures.dense import DenseStructure
from vime_megatron.structures.types import Blueprint

CONTRACT = Contract("stranger/v1", (Definition("layer", "norms before and after", "stranger"),))


@dataclass(frozen=True)
class StrangerBlueprint(Blueprint):
    window: int = 0
    cap: float = 0.0


class Stranger(DenseStructure):
    def blueprint(self, config):
        dense = super().blueprint(config)
        return StrangerBlueprint(**vars(dense), window=config["window"], cap=config["cap"])

    def _layer_rules(self, target, source, head_shape):
        names = ("post_attention_norm", "post_mlp_norm")
        after = [same(f"{target}{name}.weight", f"{source}{name}.weight") for name in names]
        return [*super()._layer_rules(target, source, head_shape), *after]


class StrangerLayer(AlignedLayer):
    def __init__(self, config, submodules, *, operations, **given):
        super().__init__(config, submodules, operations=operations, **given)
        norm = partial(AlignedRmsNorm, config, config.hidden_size, config.layernorm_epsilon, operations=operations)
        self.post_attention_norm, self.post_mlp_norm = norm(), norm()

    def forward(self, hidden_states, *, packed_seq_params, **_):
        taps = LayerTaps(self.layer_number - 1, packed_seq_params.positions)
        normed = self.input_layernorm(hidden_states)
        attended, _ = self.self_attention(normed, attention_mask=None, packed_seq_params=packed_seq_params)
        normed, stream = self.pre_mlp_layernorm(self.post_attention_norm(attended), hidden_states)
        output = self.operations.residual_sum(self.post_mlp_norm(self.mlp(normed, taps)), stream)
        taps("hidden_state", output)
        return output, None


class CappedOutput(AlignedColumnLinear):
    def forward(self, input_, weight=None, runtime_gather_output=None):
        logits, _ = super().forward(input_, weight)
        return self.operations.soft_cap(logits, self.cap), None


def capped_output(module, operations, cap):
    adopted = adopt(module, CappedOutput, operations)
    adopted.cap = cap
    return adopted


class Side:
    contract = CONTRACT

    def parts(self, operations, blueprint):
        scale = blueprint.head_dim**-0.5
        kinds = [AttentionSpec(scale, window=blueprint.window), AttentionSpec(scale)]
        layers = [
            replace(layer_spec(operations, kinds[layer % 2], qk_norm=False), module=StrangerLayer)
            for layer in range(blueprint.transformer["num_layers"])
        ]
        return AlignedParts(
            block=block_spec(operations, layers),
            embedding=partial(adopt, kind=AlignedEmbedding, operations=operations),
            output_layer=partial(capped_output, operations=operations, cap=blueprint.cap),
            rope=blueprint.rope,
        )


class CarelessOutput(CappedOutput):
    def forward(self, input_, weight=None, runtime_gather_output=None):
        logits, _ = AlignedColumnLinear.forward(self, input_, weight)
        return (logits / self.cap).tanh() * self.cap, None


class CarelessSide(Side):
    def parts(self, operations, blueprint):
        def careless(module):
            adopted = adopt(module, CarelessOutput, operations)
            adopted.cap = blueprint.cap
            return adopted

        return replace(super().parts(operations, blueprint), output_layer=careless)


STRUCTURE, SIDE, CARELESS = Stranger(), Side(), CarelessSide()


@hookimpl
def vime_model_structures():
    yield ModelStructure("stranger", "Of another package.", "stranger_side:STRUCTURE", backend="megatron")
"""
CONFIG: dict[str, Any] = {
    "model_type": "stranger",
    "hidden_size": 48,
    "intermediate_size": 67,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 96,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    "window": 7,
    "cap": 5.0,
}


class WholeStranger(WholeSequence):
    """The same structure, written out once more."""

    def log_probs(self, sequence: TrainSequence, temperature: float, tap: Any = None) -> Tensor:
        del tap
        tokens, embedding = torch.tensor(sequence.tokens), self.weights["model.embed_tokens.weight"]
        stream = embedding[tokens[:-1]]
        for number in range(self.config["num_hidden_layers"]):
            stream = self._stranger_layer(number, stream)
        hidden = self._norm("model.norm", stream)[sequence.response_start - 1 :]
        logits = self.operations.soft_cap(self.operations.linear(hidden, embedding), self.config["cap"])
        return self.operations.token_log_probs(logits, tokens[sequence.response_start :], temperature)

    def _stranger_layer(self, number: int, stream: Tensor) -> Tensor:
        name, ops = f"model.layers.{number}.", self.operations
        attended = self._windowed(number, self._norm(f"{name}input_layernorm", stream))
        after = self._norm(f"{name}post_attention_norm", attended)
        weight = self.weights[f"{name}post_attention_layernorm.weight"]
        normed, stream = ops.add_rms_norm(after, stream, weight, 1e-6)
        pair = torch.cat([self._linear(f"{name}mlp.{w}_proj", normed) for w in ("gate", "up")], -1)
        output = self._norm(f"{name}post_mlp_norm", self._linear(f"{name}mlp.down_proj", ops.swiglu(pair)))
        return (output.float() + stream.float()).to(stream.dtype)

    def _windowed(self, number: int, x: Tensor) -> Tensor:
        name, positions = f"model.layers.{number}.self_attn.", torch.arange(len(x))
        q, k, v = (self._linear(f"{name}{w}_proj", x).unflatten(-1, (-1, 32)) for w in "qkv")
        q, k = (self.operations.rope(t, positions, self._table(32)) for t in (q, k))
        spec = AttentionSpec(32**-0.5, window=None if number % 2 else self.config["window"])
        o, _ = self.operations.attention_packed(q, k, v, torch.tensor([0, len(x)]), spec)
        return self._linear(f"{name}o_proj", o.flatten(1))


@pytest.fixture
def stranger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    (tmp_path / "stranger_side.py").write_text(PLUGIN)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    import stranger_side  # pyright: ignore[reportMissingImports]

    save_file(random_weights(stranger_side.STRUCTURE.blueprint(CONFIG)), tmp_path / "model.safetensors")
    yield stranger_side
    sys.modules.pop("stranger_side", None)


def random_weights(blueprint: Any) -> dict[str, Tensor]:
    hidden, ffn, vocabulary, heads, groups = 48, 67, 96, 4 * 32, 2 * 32
    shapes = {
        "embed_tokens": (vocabulary, hidden),
        "q_proj": (heads, hidden),
        "k_proj": (groups, hidden),
        "v_proj": (groups, hidden),
        "o_proj": (hidden, heads),
        "gate_proj": (ffn, hidden),
        "up_proj": (ffn, hidden),
        "down_proj": (hidden, ffn),
    }
    generator = torch.Generator().manual_seed(3)
    weights: dict[str, Tensor] = {}
    for name in (source for rule in blueprint.rules for source in rule.sources):
        shape = shapes.get(name.split(".")[-2], (hidden,))
        weights[name] = 0.15 * torch.randn(shape, generator=generator) + float("norm" in name)
    return weights


def alignment(module: Any, side: str) -> Alignment:
    return Alignment(module.CONTRACT, "cpu", f"stranger_side:{side}", "")


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_strangers_structure_is_aligned_by_its_own_side(
    dtype: str, stranger: Any, tmp_path: Path, operations: Operations, open_aligned: Callable[..., Any]
) -> None:
    config = run_config(0.9, modules=("stranger_side",), dtype=dtype)
    trainer = open_aligned(tmp_path, config, alignment(stranger, "SIDE"))
    sequences = random_sequences([(5, 12), (1, 60), (20, 30)])
    reference = WholeStranger.open(operations, tmp_path, DTYPES[dtype])
    expected = torch.cat([reference.log_probs(s, 0.9) for s in sequences])
    for packing in ([sequences], [[s] for s in sequences]):
        found = torch.cat([torch.from_numpy(part) for part in trainer.log_probs(packing)])
        assert unequal_bits(found, expected) == 0
    assert expected.std() > 0.3
    settings = trainer.processes()[0].settings
    assert settings["contract"] == "stranger/v1"
    assert settings["modules"]["StrangerLayer"] == 3
    trainer.save(tmp_path / "checkpoint")
    repeated = [trainer.gradients([sequences], PPO, recompute=r) for r in (False, True)]
    assert unequal(*repeated) == []
    assert all(gradient.any() for gradient in repeated[0].values())
    assert trainer.train_step([sequences], PPO, Observed()).grad_norm > 0


def test_a_careless_stranger_is_named(stranger: Any, tmp_path: Path, open_aligned: Callable[..., Any]) -> None:
    config = run_config(modules=("stranger_side",))
    with pytest.raises(ContractViolation, match=r"aten::tanh in CarelessOutput"):
        open_aligned(tmp_path, config, alignment(stranger, "CARELESS"))
