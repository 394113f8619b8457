"""Transformer Engine's modules: refused by name where they cannot run; where they can, checked against transformers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from vime_core.errors import ConfigError, PolicyError
from vime_megatron.aligned.holding import require_layout
from vime_megatron.options import MegatronOptions
from vime_megatron.specs import LOCAL, PackedSequences, dense_block_spec
from vime_megatron.structures import spec
from vime_megatron.structures.dense import LLAMA
from vime_megatron.structures.spec import of_spec
from vime_megatron.testing import PPO, SHAPE, Observed, hf_log_probs, random_sequences, run_config, unequal

TE = MegatronOptions.model_validate({"spec": "te"})
BLUEPRINT = LLAMA.blueprint({**SHAPE, "rms_norm_eps": 1e-6})


def test_what_transformer_engine_needs_is_named_before_anything_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    assert of_spec(BLUEPRINT, "auto") is of_spec(BLUEPRINT, "local") is BLUEPRINT
    monkeypatch.setattr(spec, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match="'te' needs transformer_engine, which is not installed"):
        of_spec(BLUEPRINT, "te")
    monkeypatch.setattr(spec, "find_spec", lambda _: object())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="'te' needs a CUDA device"):
        of_spec(BLUEPRINT, "te")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ConfigError, match="has no modules for this model's structure"):
        of_spec(replace(BLUEPRINT, te_block_spec=None), "te")
    assert of_spec(BLUEPRINT, "te").block_spec is BLUEPRINT.te_block_spec


def test_a_contract_refuses_them_by_name() -> None:
    alignment: Any = SimpleNamespace(contract=SimpleNamespace(id="dense/v1"))
    with pytest.raises(PolicyError, match=r"spec = 'te' contradicts alignment\.contract = 'dense/v1': Transformer"):
        require_layout(alignment, "te", 1)


def test_layers_differ_in_nothing_but_their_modules() -> None:
    marked = replace(LOCAL, column="column", row="row", norm="norm", core_attention="attention")
    (layer,) = dense_block_spec(1, qk_norm=True, modules=marked).layer_specs
    attention = layer.submodules.self_attention.submodules
    assert (attention.linear_qkv, attention.core_attention, attention.q_layernorm) == ("column", "attention", "norm")
    assert attention.linear_proj.args[:2] == ("row", False)
    mlp = layer.submodules.mlp.keywords["submodules"]
    assert (mlp.linear_fc1.args[0], mlp.linear_fc2.args[0]) == ("column", "row")
    assert (layer.submodules.input_layernorm, layer.submodules.pre_mlp_layernorm) == ("norm", "norm")


def test_a_pack_is_described_as_transformer_engine_reads_it() -> None:
    from vime_megatron.te import with_cumulative_lengths

    pack = with_cumulative_lengths(PackedSequences(qkv_format="thd", lengths=(3, 1, 4)), torch.device("cpu"))
    assert pack.cu_seqlens_q.tolist() == pack.cu_seqlens_kv.tolist() == [0, 3, 4, 8]
    assert pack.cu_seqlens_q.dtype == torch.int32
    assert (pack.max_seqlen_q, pack.max_seqlen_kv, pack.lengths) == (4, 4, (3, 1, 4))


def test_a_trainer_of_its_modules_computes_the_model_and_repeats(
    save_hf: Callable[..., tuple[Any, Path]], open_at: Callable[..., Any]
) -> None:
    model, place = save_hf("llama", tie_word_embeddings=True, num_attention_heads=4, hidden_size=256, head_dim=64)
    sequences, config = random_sequences(((5, 12), (1, 20), (16, 3))), run_config(dtype="bf16")
    if find_spec("transformer_engine") is None or not torch.cuda.is_available():
        with pytest.raises(ConfigError, match=r"trainer\.megatron\.spec = 'te' needs"):
            open_at(place, config, options=TE)
        return
    outcomes = []
    for _ in range(2):
        trainer, observed = open_at(place, config, options=TE), Observed()
        assert trainer.processes()[0].settings["spec"] == "te"
        for values, sequence in zip(trainer.log_probs([sequences]), sequences, strict=True):
            np.testing.assert_allclose(values, hf_log_probs(model, sequence).detach(), atol=0.2)
        trainer.train_step([sequences], PPO, observed)
        outcomes.append(observed.seen)
    assert unequal(*outcomes) == []
