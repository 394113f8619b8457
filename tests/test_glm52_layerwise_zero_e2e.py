"""GLM-5.2, layer by layer: hidden states of engine and trainer differ by exactly 0, and every planted fault is named.

Real vLLM and real Megatron-core, one prompt at a time: every position of the prompt (prefill) and of the response
(decode), every element of the hidden states of layers 0 to 5 and of the taps inside the layers.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from glm52 import Gate, opened

from vime_core.alignment.taps import layer_tap
from vime_core.errors import BackendError, ContractViolation
from vime_core.record.digest import digest_tensors
from vime_glm5.routing import verify_routing

pytestmark = [pytest.mark.slow, pytest.mark.engine]

INSIDE = ("query_latent", "q", "k", "attention", "values", "attention_output", "attention_residual", "input_norm")
SPARSE = ("router_slots", "router_weights", "expert_rows", "shared_expert")


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gate]:
    with opened("fp8", tmp_path_factory.mktemp("gate"), "sampling.max_tokens=12") as gate:
        yield gate


@pytest.fixture
def gate(started: Gate) -> Iterator[Gate]:
    yield started
    started.mend()


def test_hidden_states_of_every_layer_differ_by_exactly_zero(gate: Gate) -> None:
    for request in gate.requests(9)[::4]:
        compared, length = gate.taps(request)
        assert compared.faults == ()
        assert compared.first is None, str(compared.first)
        found = {tap.tap: tap for tap in compared.taps}
        for layer in range(gate.shape.layers):
            hidden = found[layer_tap(layer, "hidden_state")]
            assert (hidden.rows, hidden.unequal, hidden.largest_difference) == (length - 1, 0, 0.0)
            assert hidden.compared == (length - 1) * gate.shape.hidden
            inside = INSIDE + (() if layer in gate.shape.dense_layers else SPARSE)
            inside += ("chosen_keys", "index_keys") if layer in gate.shape.indexed_layers else ()
            assert all(found[layer_tap(layer, name)].rows == length - 1 for name in inside)
        prompt = len(request.prompt_tokens)
        assert length - prompt > 1, "no decode was compared"
        print(f"sample {request.key}: {prompt} positions of prefill, {length - 1 - prompt} of decode,", end=" ")
        print(f"{len(found)} taps, {sum(t.compared for t in found.values())} elements, {compared.unequal} unequal")


def test_routing_agreement_of_every_layer(gate: Gate) -> None:
    requests = gate.requests(2)
    held = verify_routing(gate.sides, requests)
    assert held.exit_code == 0, held.sentence
    agreement = held.details["agreement"]
    assert list(agreement) == [
        *(layer_tap(layer, "chosen_keys") for layer in (0, 1, 2)),
        *(layer_tap(layer, "router_slots") for layer in (3, 4, 5)),
    ]
    assert set(agreement.values()) == {1.0}
    print(held.sentence)
    gate.plant("reverse_slots")
    broken = verify_routing(gate.sides, requests)
    assert broken.exit_code == 1
    assert broken.first == "layers.3.router_slots"
    assert broken.details["agreement"]["layers.3.router_slots"] < 0.5
    assert broken.details["agreement"]["layers.2.chosen_keys"] == 1.0


FAULTS = {
    "the indexer's rope on the other dims": ("rotate_the_other_dims", (), "layers.0.index_queries"),
    "ties broken the other way": ("break_ties_the_other_way", (), "layers.0.chosen_keys"),
    "the unrounded residual": ("norm_the_unrounded_residual", (), "layers.0.post_attention_norm"),
    "2.5 applied twice": ("scale_twice", (), "layers.3.mlp_output"),
    "fresh keys not round-tripped": ("keep_fresh_keys_unquantised", (4,), "layers.4.attention"),
    "slot order changed": ("reverse_slots", (), "layers.3.router_slots"),
    "one query's index set off by one": ("shift_an_index", (41,), "layers.0.chosen_keys"),
}


IN_THE_TRAINER = {"keep_fresh_keys_unquantised": "layers.4.k"}
"""Where a fault is seen at another tap than in the engine: the trainer has no cache, so its keys differ already."""


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_in_the_live_engine_is_named_by_layer_and_tap(name: str, gate: Gate) -> None:
    fault, arguments, tap = FAULTS[name]
    gate.plant(fault, *arguments)
    expect_first(gate, name, tap, 41 if fault == "shift_an_index" else None)


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_in_the_live_trainer_is_named_by_layer_and_tap(name: str, gate: Gate) -> None:
    fault, arguments, tap = FAULTS[name]
    gate.plant_in_trainer(fault, *arguments)
    expect_first(
        gate, f"in the trainer: {name}", IN_THE_TRAINER.get(fault, tap), 41 if fault == "shift_an_index" else None
    )


def expect_first(gate: Gate, name: str, tap: str, position: int | None = None) -> None:
    """The taps of one response differ first at ``tap``, everything before it being equal."""
    compared, _ = gate.taps(gate.requests(1)[0])
    assert compared.first is not None, "the fault was not seen"
    assert (compared.first.tap, compared.first.inputs_equal) == (tap, True)
    assert position in (None, compared.first.position)
    print(f"caught: {name}: {compared.first}")


STALE = {
    "one expert's weight stale": ("model.layers.3.mlp.experts.2.down_proj", "e4m3", "layers.3.expert_rows"),
    "a derived absorbed weight stale": ("model.layers.1.self_attn.kv_b_proj", "w_kc", "layers.1.q"),
}


@pytest.mark.parametrize("name", STALE)
def test_a_stale_derived_weight_is_named_before_anything_is_generated(name: str, gate: Gate) -> None:
    module, derived, tap = STALE[name]
    version = gate.rollout._version
    gate.plant("keep_derived", module)
    with pytest.raises(ContractViolation, match="VIME-ALIGN-065") as error:
        gate.train_and_update(gate.requests(2))
    assert f"{module} ({derived})" in str(error.value)
    with pytest.raises(BackendError, match="VIME-BACKEND-065"):
        gate.rollout.generate(gate.requests(1))
    gate.rollout._version = version + 1  # as if the update had passed: the taps, too, name the place
    expect_first(gate, f"{name}: {error.value.message}", tap)


def test_an_expert_that_missed_an_update_is_named_by_digest_and_by_layer_and_tap(gate: Gate) -> None:
    name = "model.layers.3.mlp.experts.2.down_proj.weight"
    gate.plant("drop_update_of", name)
    gate.train_and_update(gate.requests(4))
    engine, trainer = dict(gate.rollout.weight_digests()), digest_tensors(gate.trainer.weights())
    assert [n for n in trainer if engine[n] != trainer[n]] == [name]
    expect_first(gate, f"one expert's weight stale: the digest of {name}", "layers.3.expert_rows")


STALE_IN_THE_TRAINER = {
    "one expert's weight stale": ("keep_an_expert", (3, 2), "layers.3.expert_rows"),
    "a derived absorbed weight stale": ("keep_absorbed", (1,), "layers.1.q"),
}


@pytest.mark.parametrize("name", STALE_IN_THE_TRAINER)
def test_a_stale_weight_in_the_live_trainer_is_named_by_layer_and_tap(name: str, gate: Gate) -> None:
    """Its masters and so all digests are right: what it computes with is seen by the comparison alone."""
    fault, arguments, tap = STALE_IN_THE_TRAINER[name]
    gate.plant_in_trainer(fault, *arguments)
    assert gate.taps(gate.requests(1)[0])[0].first is None, "the fault shows before the weights change"
    gate.train_and_update(gate.requests(2))
    expect_first(gate, f"in the trainer: {name}", tap)
