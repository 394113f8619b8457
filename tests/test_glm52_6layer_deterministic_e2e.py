"""GLM-5.2 with 6 layers: the log-probs of rollout and training forward are the same bits, before and after an update.

Real vLLM and real Megatron-core: 3 dense and 3 sparse layers, key indices shared, contexts longer than index_topk, a
real optimizer step and online update, then a second step. FP8 KV cache; bf16 by the second case.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from glm52 import Gate, opened, scale_of_this_machine, unequal_bits

from vime_core.backends import NamedTensors
from vime_core.record.digest import digest_tensors
from vime_core.types import WHOLE_VOCABULARY, Completion, SampleRequest
from vime_core.verify.live import bfloat16_weights, changed_share, score, sequences_of
from vime_core.verify.spread import spread

pytestmark = [pytest.mark.slow, pytest.mark.engine]

FROZEN = ".indexer."
EXPERTS = ".experts.linear_fc"
BIAS = "e_score_correction_bias"


@pytest.fixture(scope="module", params=["fp8", "bf16"])
def gate(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gate]:
    sets = ("sampling.max_tokens=12", "sampling.samples_per_prompt=2")
    with opened(request.param, tmp_path_factory.mktemp("gate"), *sets) as made:
        yield made


@dataclass
class Kept:
    """A `StateObserver` that keeps the norm of every gradient, of experts the least one's, or the middle one's."""

    norms: dict[str, float]

    def gradients(self, tensors: NamedTensors) -> None:
        self.norms = {name: norm(name, tensor) for name, tensor in tensors}


def norm(name: str, gradient: Any) -> float:
    """Of experts the least one's; where few tokens leave some out, the middle one's."""
    if EXPERTS not in name:
        return float(gradient.norm())
    norms = gradient.flatten(1).norm(dim=1)
    return float(norms.min() if scale_of_this_machine().spreads else norms.median())


@dataclass(frozen=True)
class Compared:
    """One comparison of rollout and training forward."""

    difference: float
    unequal: int
    tokens: int


def compare(gate: Gate, requests: Sequence[SampleRequest], completions: Sequence[Completion], version: int) -> Compared:
    """``train_rollout_logprob_abs_diff`` as the field prints it, and the bits."""
    scored = score(gate.sides, sequences_of(requests, completions), version)
    trainer = {one.key: one.log_probs for one in scored}
    pairs = [(c.log_probs, trainer[c.key]) for c in completions]
    assert len(pairs) == len(requests) == len({c.key for c in completions})
    assert all(np.isfinite(side).all() for pair in pairs for side in pair)
    assert all(c.weight_version == version for c in completions)
    values = spread([c.log_probs for c in completions])
    assert not values.near_constant
    assert values.entropy > 1
    assert dropped_share(gate, requests, completions) >= 0.5
    engine, ours = (np.concatenate(side).astype(np.float64) for side in zip(*pairs, strict=True))
    compared = Compared(float(np.abs(engine - ours).mean()), unequal_bits(*zip(*pairs, strict=True)), len(engine))
    print(
        f"weight version {version}: {len(requests)} samples, {compared.tokens} tokens, {compared.unequal} unequal,"
        f" train_rollout_logprob_abs_diff {compared.difference:g}, entropy {values.entropy:.3f} nats a token"
    )
    return compared


def dropped_share(gate: Gate, requests: Sequence[SampleRequest], completions: Sequence[Completion]) -> float:
    """Of the compared queries, those that attend to fewer keys than they could see."""
    first = {request.key: len(request.prompt_tokens) for request in requests}
    visible = np.concatenate([first[c.key] + np.arange(len(c.tokens)) for c in completions])
    return float((visible > gate.shape.index_top_k).mean())


def train(gate: Gate, requests: Sequence[SampleRequest], completions: Sequence[Completion]) -> tuple[Any, Kept]:
    """One optimizer step; the training forward's log-probs, too, are the rollout's."""
    sequences = [
        _with_advantages(s, 1.0 if n % 2 else -1.0, 1.0 / len(requests))
        for n, s in enumerate(sequences_of(requests, completions))
    ]
    algorithm, kept = gate.sides.parts.algorithm, Kept({})
    microbatches = algorithm.microbatches(sequences)
    result = gate.trainer.train_step(microbatches, algorithm.loss, kept)
    by_key = {s.key: v for s, v in zip((s for m in microbatches for s in m), result.log_probs, strict=True)}
    assert unequal_bits([c.log_probs for c in completions], [by_key[c.key] for c in completions]) == 0
    return result, kept


def _with_advantages(sequence: Any, sign: float, weight: float) -> Any:
    size = sequence.response_length
    return replace(
        sequence,
        advantages=np.full(size, sign, dtype=np.float32),
        weights=np.full(size, weight / size, dtype=np.float32),
    )


def test_log_probs_of_rollout_and_training_are_equal_before_and_after_an_update(gate: Gate) -> None:
    shape = gate.shape
    assert (shape.layers, len(shape.dense_layers)) == (6, 3)
    assert len(shape.indexed_layers) < shape.layers, "no layer shares its indices"
    first = compare(gate, *answers(gate, 0), 0)
    requests, completions = answers(gate, 0)
    before = bfloat16_weights(gate.trainer)
    frozen = digest_tensors((n, t) for n, t in gate.trainer.weights() if FROZEN in n or BIAS in n)
    result, kept = train(gate, requests, completions)
    assert np.isfinite([result.loss, result.grad_norm]).all()
    check_gradients(gate, kept)
    assert digest_tensors((n, t) for n, t in gate.trainer.weights() if n in frozen) == frozen
    digests = gate.rollout.update_weights(gate.trainer.weights(), 1)
    assert dict(digests) == digest_tensors(gate.trainer.weights())
    changed = changed_share(before, bfloat16_weights(gate.trainer))
    assert changed > 0.5
    print(f"update: {len(digests)} tensors with equal digests, {changed:.1%} of the elements changed")
    second = compare(gate, *answers(gate, 1), 1)
    for compared in (first, second):
        assert compared.difference < 1e-6
        assert compared.unequal == 0
        assert compared.tokens >= 80
    third = train_update_and_compare(gate, 1, 2)
    assert third.difference < 1e-6
    assert third.unequal == 0


def train_update_and_compare(gate: Gate, step: int, version: int) -> Compared:
    """A further step: the engine has the new weights, which are others than before."""
    before = bfloat16_weights(gate.trainer)
    train(gate, *answers(gate, step))
    digests = gate.rollout.update_weights(gate.trainer.weights(), version)
    assert dict(digests) == digest_tensors(gate.trainer.weights())
    assert changed_share(before, bfloat16_weights(gate.trainer)) > 0.5
    return compare(gate, *answers(gate, version), version)


def answers(gate: Gate, step: int) -> tuple[list[SampleRequest], list[Completion]]:
    requests = gate.requests(24)[8 * step : 8 * step + 8]
    return requests, gate.rollout.generate(requests)


def check_gradients(gate: Gate, kept: Kept) -> None:
    """Everything but the indexer and the routers' biases trains; routers and experts too, no routing is replayed."""
    trained = {rule.target for rule in gate.trainer._blueprint.rules if FROZEN not in rule.target}
    trained = {name for name in trained if "expert_bias" not in name}
    assert set(kept.norms) == trained
    idle = [name for name, norm in kept.norms.items() if not norm > 0]
    assert idle == []
    routers = [n for n in kept.norms if n.endswith("router.weight")]
    experts = [n for n in kept.norms if EXPERTS in n]
    assert len(routers) == 3
    assert len(experts) == 3 * 2
    print(f"gradients: {len(kept.norms)} parameters, none zero; the indexer has none; no routing was replayed")


def test_top_k_and_top_p_are_scored_among_what_they_left(gate: Gate) -> None:
    version = gate.rollout._version
    for changes in ({"top_k": 9}, {"top_p": 0.7}, {"top_k": 40, "top_p": 0.9}):
        requests = [replace(request, **changes) for request in gate.requests(4)]
        completions = gate.rollout.generate(requests)
        assert all(len(c.kept.counts) == len(c.tokens) for c in completions), "a token was drawn from everything"
        counts = np.concatenate([c.kept.counts for c in completions])
        assert (counts.min() if scale_of_this_machine().spreads else counts.mean()) > 1
        assert counts.max() <= changes.get("top_k", gate.shape.vocabulary - 1)
        print(f"{changes}: {counts.mean():.1f} tokens left on average;", end=" ")
        assert compare(gate, requests, completions, version).unequal == 0
        whole = [replace(c, kept=WHOLE_VOCABULARY) for c in completions]
        assert compare(gate, requests, whole, version).unequal > 0, "it makes no difference what was left"


def test_a_wrong_row_in_the_live_engine_is_counted(gate: Gate) -> None:
    """The comparison above can fail: one row of one weight of the live engine has the other sign."""
    name = "model.layers.4.self_attn.o_proj.weight"
    gate.rollout.call("glm52_faults:negate_a_row", name)
    requests, completions = answers(gate, 0)
    version = gate.rollout._version
    assert compare(gate, requests, completions, version).unequal > 0
    gate.mend()
    assert compare(gate, *answers(gate, 0), gate.rollout._version).unequal == 0
