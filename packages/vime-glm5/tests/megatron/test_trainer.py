"""GLM-5 in Megatron-core: transformers as oracle without quantisation; packing, recomputation, weights, freezing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from glm5_support import assert_same
from pydantic import ValidationError
from torch import Tensor

from vime_core.alignment import Alignment
from vime_core.backends import TrainerContext
from vime_core.determinism.policy import REPRODUCIBLE
from vime_core.errors import PolicyError
from vime_core.types import TrainSequence
from vime_core.verify.reference_model import errors_against_fp64, policy_gradient
from vime_glm5.megatron import side
from vime_glm5.numerics import GLM5_V1
from vime_glm5.reference import open_reference
from vime_glm5.source import RandomGlm5Options, make_random_glm5
from vime_megatron.aligned.holding import require_layout
from vime_megatron.aligned.side import ExpertLayout
from vime_megatron.aligned.testing import DENSE_ALIGNMENT
from vime_megatron.options import MegatronOptions
from vime_megatron.testing import PPO, Observed, hf_log_probs, random_sequences, run_config, snapshot, unequal
from vime_megatron.trainer import open_trainer

ALIGNMENT = Alignment(
    GLM5_V1,
    "cpu",
    "vime_glm5.megatron.side:FP8",
    "vime_glm5.vllm.model:AlignedGlm5",
    operations="vime_glm5.numerics.provider:load_operations",
    reference="vime_glm5.reference:open_reference",
)
SMALL = {"layers": 4, "dense_layers": 2, "index_offset": 2, "index_top_k": 16}


@pytest.fixture(scope="session")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_random_glm5(RandomGlm5Options.model_validate(SMALL), tmp_path_factory.mktemp("cache"))


@pytest.fixture
def open_at() -> Iterator[Callable[..., Any]]:
    trainers: list[Any] = []

    def make(directory: Path, dtype: str = "bf16", alignment: Alignment | None = ALIGNMENT) -> Any:
        while trainers:
            trainers.pop().close()
        config = run_config(dtype=dtype)
        trainers.append(open_trainer(TrainerContext(config, MegatronOptions(), REPRODUCIBLE, directory, alignment)))
        return trainers[-1]

    yield make
    for trainer in trainers:
        trainer.close()


SEQUENCES = random_sequences([(30, 10), (1, 25), (12, 30)], vocabulary=500)


def test_a_pack_gives_the_bits_of_each_sequence_alone(directory: Path, open_at: Callable[..., Any]) -> None:
    trainer = open_at(directory)
    together, alone = trainer.log_probs([SEQUENCES]), trainer.log_probs([[s] for s in SEQUENCES])
    for left, right in zip(together, alone, strict=True):
        assert_same(torch.from_numpy(left), torch.from_numpy(right))
    assert torch.cat([torch.from_numpy(x) for x in alone]).std() > 0.5


def test_recomputed_layers_give_the_same_gradients(directory: Path, open_at: Callable[..., Any]) -> None:
    """Shared indices live as long as the pack, so a layer that reuses them finds them in the backward."""
    trainer = open_at(directory)
    gradients = [trainer.gradients([SEQUENCES], PPO, recompute=recompute) for recompute in (False, True, False)]
    assert unequal(gradients[0], gradients[1]) == []
    assert unequal(gradients[0], gradients[2]) == []


def test_the_indexer_is_frozen_and_the_rest_trains(directory: Path, open_at: Callable[..., Any]) -> None:
    trainer = open_at(directory)
    before = snapshot(trainer.weights())
    gradients = trainer.gradients([SEQUENCES], PPO)
    frozen = {name for name in before if ".indexer." in name or name.endswith("e_score_correction_bias")}
    assert len(frozen) == 2 * 5 + 2
    assert set(gradients) == set(before) - frozen
    trainer.train_step([SEQUENCES], PPO, Observed())
    after = snapshot(trainer.weights())
    assert [name for name in frozen if not torch.equal(before[name], after[name])] == []
    assert not torch.equal(before["model.layers.2.mlp.gate.weight"], after["model.layers.2.mlp.gate.weight"])
    states = {name.rpartition(".")[0] for name, _ in trainer.optimizer_state()}
    assert not any("indexer" in name or "expert_bias" in name for name in states)


def test_the_record_says_what_is_frozen_and_not_done(directory: Path, open_at: Callable[..., Any]) -> None:
    (report,) = open_at(directory).processes()
    said = {name: report.settings[name] for name in ("indexer", "router_bias", "routing_replay", "experts")}
    assert said == {
        "indexer": "frozen",
        "router_bias": "frozen",
        "routing_replay": "none",
        "experts": "on one rank",
    }


def test_an_indexer_that_trains_is_refused_with_the_reason() -> None:
    assert MegatronOptions.model_validate({"freeze_indexer": True}).freeze_indexer
    with pytest.raises(ValidationError, match="a choice of keys has no gradient"):
        MegatronOptions.model_validate({"freeze_indexer": False})


@pytest.mark.parametrize("name", ["alltoall", "flex", "deep_ep", "pigeon"])
def test_a_dispatcher_that_cannot_keep_the_contract_is_refused_by_name(name: str) -> None:
    with pytest.raises(PolicyError, match="VIME-ALIGN-074") as error:
        require_layout(ALIGNMENT, "auto", 1, ExpertLayout(1, name))
    assert repr(name) in error.value.message


def test_experts_over_ranks_are_data_parallel_ranks_of_a_contract_that_has_experts() -> None:
    assert MegatronOptions.model_validate({"data_parallel": 4, "expert_parallel": 2}).expert_parallel == 2
    with pytest.raises(ValidationError, match="data_parallel = 3 is no multiple"):
        MegatronOptions.model_validate({"data_parallel": 3, "expert_parallel": 2})
    for alignment in (None, DENSE_ALIGNMENT):
        with pytest.raises(PolicyError, match="VIME-ALIGN-078") as error:
            require_layout(alignment, "auto", 1, ExpertLayout(2))
        assert "trainer.megatron.expert_parallel = 2" in error.value.message


def test_weights_are_those_of_the_directory(directory: Path, open_at: Callable[..., Any]) -> None:
    from safetensors.torch import load_file

    trainer, held = open_at(directory), load_file(directory / "model.safetensors")
    assert unequal(snapshot(trainer.weights()), held) == []
    bias = dict(trainer.weights())["model.layers.2.mlp.gate.e_score_correction_bias"]
    assert bias.dtype == torch.float32


def test_a_checkpoint_of_unlike_layers_comes_back(directory: Path, open_at: Callable[..., Any], tmp_path: Path) -> None:
    trainer = open_at(directory)
    trainer.train_step([SEQUENCES], PPO, Observed())
    trainer.save(tmp_path / "state")
    saved = [snapshot(trainer.weights()), snapshot(trainer.optimizer_state())]
    trainer.train_step([SEQUENCES], PPO, Observed())
    assert unequal(saved[0], snapshot(trainer.weights())) != []
    trainer.load(tmp_path / "state")
    assert unequal(saved[0], snapshot(trainer.weights())) == []
    assert unequal(saved[1], snapshot(trainer.optimizer_state())) == []


def test_another_dtype_is_refused(directory: Path, open_at: Callable[..., Any]) -> None:
    with pytest.raises(PolicyError, match="VIME-ALIGN-072"):
        open_at(directory, dtype="fp32")


def transformers_model(directory: Path) -> Any:
    """In fp32, with the two corrections: a stable order in its top-k, and the config's eps in the latents' norms."""
    from transformers import GlmMoeDsaForCausalLM

    model = GlmMoeDsaForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()
    for layer in model.model.layers:
        layer.self_attn.q_a_layernorm.variance_epsilon = layer.self_attn.kv_a_layernorm.variance_epsilon = 1e-5
    return model


def stable_top_k(self: Tensor, k: int, dim: int = -1, **_: Any) -> Any:
    values, indices = torch.sort(self, dim=dim, descending=True, stable=True)
    return torch.return_types.topk((values[..., :k], indices[..., :k]))


def test_without_quantisation_it_is_transformers_model(
    directory: Path, open_at: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forward and gradients in fp32, past index_topk, with shared indices, dense and sparse layers."""
    monkeypatch.setattr(side, "require_bf16", lambda *_, **__: None)
    trainer = open_at(directory, "fp32", replace(ALIGNMENT, operations="glm5_support:unquantised"))
    monkeypatch.setattr(torch.Tensor, "topk", stable_top_k)
    model = transformers_model(directory)
    exact = [hf_log_probs(model, s) for s in SEQUENCES]
    found = trainer.log_probs([SEQUENCES])
    for ours, theirs in zip(found, exact, strict=True):
        assert float((torch.from_numpy(ours) - theirs.detach()).abs().max()) < 2e-4
    loss = -sum((x * torch.from_numpy(s.advantages * s.weights)).sum() for x, s in zip(exact, SEQUENCES, strict=True))
    loss.backward()
    theirs = hf_gradients(model)
    gradients = trainer.gradients([SEQUENCES], policy_gradient)
    assert set(theirs) == set(gradients)
    for name, gradient in gradients.items():
        error = float((gradient - theirs[name]).norm() / theirs[name].norm().clamp_min(1e-12))
        assert error < 1e-3, (name, error)


def hf_gradients(model: Any) -> dict[str, Tensor]:
    """By the names of a directory: transformers holds all experts of a layer in two tensors."""
    found: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        if ".indexer." in name:
            continue
        at, _, last = name.rpartition(".experts.")
        if last == "gate_up_proj":
            for expert, pair in enumerate(parameter.grad):
                gate, up = pair.chunk(2)
                found |= {f"{at}.experts.{expert}.gate_proj.weight": gate, f"{at}.experts.{expert}.up_proj.weight": up}
        elif last == "down_proj":
            found |= {f"{at}.experts.{e}.down_proj.weight": g for e, g in enumerate(parameter.grad)}
        else:
            found[name] = parameter.grad
    return found


def test_gradients_of_the_quantised_model_against_fp64(directory: Path, open_at: Callable[..., Any]) -> None:
    trainer = open_at(directory)
    ours = trainer.gradients([SEQUENCES], policy_gradient)
    weights = snapshot(trainer.weights())

    def open_model(place: Path, held: Any, dtype: torch.dtype) -> Any:
        return open_reference(GLM5_V1, place, held, dtype)

    errors, norm = errors_against_fp64(directory, weights, "bf16", SEQUENCES, 1.0, ours, open_model)
    assert norm > 0
    assert len(errors) == len(ours) == 101
    assert [one.name for one in errors if not one.within] == []
    assert max(one.error for one in errors) < 0.05
    spoiled = {name: g * 1.2 if "q_b_proj" in name else g for name, g in ours.items()}
    errors, _ = errors_against_fp64(directory, weights, "bf16", SEQUENCES, 1.0, spoiled, open_model)
    assert [one.name for one in errors if not one.within] == [n for n in ours if "q_b_proj" in n]


def test_sequences_are_longer_than_the_chosen_keys() -> None:
    assert isinstance(SEQUENCES[0], TrainSequence)
    assert all(len(s.tokens) > SMALL["index_top_k"] for s in SEQUENCES)
