"""The verdicts on real engines: they hold under the contract, and every planted fault is caught and named.

One trainer and one engine serve all faults: after each, the trainer takes back its first weights and the engine gets
them online. Faults are planted in the live engine's worker or in the live trainer.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from command import ROOT, no_traceback, vime

from vime_core.config.load import load_config
from vime_core.determinism.environment import exactly
from vime_core.loop.sides import Sides, checked_policy, open_sides, ready_parts
from vime_core.record.digest import digest_tensors
from vime_core.verify.align_live import AlignOptions, verify_align
from vime_core.verify.batch_live import BatchOptions, verify_batch
from vime_core.verify.checks import run_gradient
from vime_core.verify.gradient_live import GradientOptions, open_trainer, verify_gradient
from vime_core.verify.live import UPDATE_LR, with_learning_rate
from vime_core.verify.verdict import Verdict

pytestmark = [pytest.mark.slow, pytest.mark.engine]

ALIGNED = ROOT / "configs" / "aligned-smoke.toml"
STOCK = ROOT / "configs" / "smoke.toml"
LONG = "Long enough that every prompt begins with a page of the cache. " * 2
SETS = [
    "sampling.prompts_per_step=2",
    "sampling.samples_per_prompt=2",
    "sampling.max_tokens=8",
    f"data.system_prompt='{LONG}'",
]
DOWN = "model.layers.1.mlp.down_proj.weight"
FAULTS = "vime_vllm.aligned.testing"


# Gradients come first: they need a trainer alone, and a process holds one trainer at a time.


@contextmanager
def gradient_of(dtype: str, output: Path) -> Iterator[Any]:
    config, plugins = load_config([ALIGNED], [f"trainer.dtype='{dtype}'", f"run.output='{output}'"])
    with exactly({}):
        yield lambda: run_gradient(config, plugins)


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_gradients_hold(dtype: str, tmp_path: Path) -> None:
    with gradient_of(dtype, tmp_path) as run:
        verdict = run()
    assert verdict.exit_code == 0, verdict.sentence
    assert verdict.details["checked_against_fp64"] == 38


def test_a_backward_that_is_a_thousandth_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It repeats bit for bit, and its forward is right: fp64 alone finds it."""
    linear = import_module("vime_core.numerics.linear")
    right = linear.input_gradient
    monkeypatch.setattr(linear, "input_gradient", lambda *arguments: right(*arguments) * 1.001)
    with gradient_of("fp32", tmp_path) as run:
        verdict = run()
    assert verdict.exit_code == 1
    assert verdict.first.startswith("gradient '")
    assert "farther from fp64 autograd" in verdict.sentence


def test_a_backward_that_does_not_repeat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    linear = import_module("vime_core.numerics.linear")
    right, calls = linear.input_gradient, [0]

    def drifting(*arguments: Any) -> Any:
        calls[0] += 1
        return right(*arguments) * (1 + 2.0**-7 * (calls[0] > 40))

    monkeypatch.setattr(linear, "input_gradient", drifting)
    with gradient_of("bf16", tmp_path) as run:
        verdict = run()
    assert verdict.exit_code == 1
    assert verdict.first.startswith("pass ")


GATE_UP = "decoder.layers.1.mlp.linear_fc1.weight"
GATE = "model.layers.1.mlp.gate_proj.weight"


def negate(gradients: dict[str, Any]) -> None:
    for gradient in gradients.values():
        gradient.neg_()


def zero(gradients: dict[str, Any]) -> None:
    for gradient in gradients.values():
        gradient.zero_()


def scale_one(gradients: dict[str, Any]) -> None:
    gradients[GATE_UP].mul_(1.001)


EMBEDDING = "model.embed_tokens.weight"
CHANGES = {"negated": (negate, EMBEDDING), "zeroed": (zero, EMBEDDING), "one scaled": (scale_one, GATE)}


def test_what_training_really_uses(tmp_path: Path) -> None:
    """Faults in the train step alone, alike every time: before it shows its gradients, after, and in what it shows."""
    import_module("vime_megatron.rank")
    config, plugins = load_config([ALIGNED], ["trainer.dtype='fp32'", f"run.output='{tmp_path}'"])
    with exactly({}):
        policy = checked_policy(config, plugins)
        parts = ready_parts(with_learning_rate(config, 0.0), policy, plugins)
        with open_trainer(parts) as trainer:
            live = cast("Any", trainer)
            for change, first in CHANGES.values():
                with in_train_steps(live, live, "_accumulate", before_it_shows(live, change)):
                    assert gradient_first(parts, trainer) == f"pass 2, gradient '{first}'"
                with in_train_steps(live, live._optimization, "step", before_the_optimizer(live, change)):
                    assert gradient_first(parts, trainer) == f"pass 0, gradient '{first}' in the optimizer"
            with in_train_steps(live, live._optimization, "gradients", leaving_out_one):
                assert gradient_first(parts, trainer) == f"pass 2, gradient '{GATE}'"
            assert verify_gradient(parts, trainer, GradientOptions(sequences=2)).exit_code == 0


def one_late(batch: Any, name: str) -> Any:
    return replace(batch, **{name: getattr(batch, name).roll(1)})


@pytest.mark.parametrize("name", ["advantages", "old_log_probs", "reference_log_probs"])
def test_what_tokens_bring_is_one_token_late(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    accumulate = import_module("vime_megatron.accumulate")
    right = accumulate._token_batch
    monkeypatch.setattr(accumulate, "_token_batch", lambda *given: one_late(right(*given), name))
    with gradient_of("fp32", tmp_path) as run:
        verdict = run()
    assert verdict.exit_code == 1, verdict.sentence
    assert "farther from fp64 autograd" in verdict.sentence


def test_tokens_that_top_k_left_out_get_a_gradient(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rank = import_module("vime_megatron.rank")
    right, trained = rank.pack_microbatch, rank.TrainerRank._accumulate

    def accumulate(*given: Any) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(rank, "pack_microbatch", lambda *packed: replace(right(*packed), kept=None))
            return trained(*given)

    with gradient_of("fp32", tmp_path) as run:
        assert run().exit_code == 0
        monkeypatch.setattr(rank.TrainerRank, "_accumulate", accumulate)
        assert run().exit_code == 1


def gradient_first(parts: Any, trainer: Any) -> str:
    verdict = verify_gradient(parts, trainer, GradientOptions(sequences=2))
    assert verdict.exit_code == 1, verdict.sentence
    return verdict.first


@contextmanager
def in_train_steps(trainer: Any, owner: Any, method: str, make: Any) -> Iterator[None]:
    """Replace a method of the live trainer's parts while it does a train step, and at no other time."""
    train_step = trainer.train_step

    def changed(*arguments: Any) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(owner, method, make(getattr(owner, method)))
            return train_step(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer, "train_step", changed)
        yield


def before_it_shows(trainer: Any, change: Any) -> Any:
    def make(accumulate: Any) -> Any:
        def changed(*arguments: Any) -> Any:
            totals = accumulate(*arguments)
            change(dict(trainer._optimization.gradients()))
            return totals

        return changed

    return make


def before_the_optimizer(trainer: Any, change: Any) -> Any:
    def make(step: Any) -> Any:
        def changed() -> Any:
            change(dict(trainer._optimization.gradients()))
            return step()

        return changed

    return make


def leaving_out_one(gradients: Any) -> Any:
    return lambda: ((name, gradient) for name, gradient in gradients() if name != GATE_UP)


@dataclass
class Live:
    """Both sides, and where the trainer's first state lies."""

    sides: Sides
    state: Path

    @property
    def trainer(self) -> Any:
        return self.sides.trainer

    @property
    def rollout(self) -> Any:
        return self.sides.rollout

    def plant(self, target: str, *arguments: Any) -> None:
        self.rollout.call(target, *arguments)

    def align(self, *, layers: bool = False, longest: int = 1) -> Verdict:
        """Of the run's own lengths, unless more is asked for."""
        return verify_align(self.sides, AlignOptions(updates=1, layers=layers, longest=longest), self.rollout._version)

    def batch(self) -> Verdict:
        return verify_batch(self.sides, BatchOptions(4))

    def renew(self) -> None:
        """The first weights on both sides, as another version."""
        version = (self.rollout._version or 100) + 1
        self.rollout._version = version
        self.plant(f"{FAULTS}:restore")
        self.trainer.load(self.state)
        self.rollout.update_weights(self.trainer.weights(), version)
        assert digest_tensors(self.trainer.weights()) == dict(self.rollout.weight_digests())


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    state = tmp_path_factory.mktemp("state")
    config, plugins = load_config([ALIGNED], SETS)
    with exactly({}):
        policy = checked_policy(config, plugins)
        with open_sides(ready_parts(with_learning_rate(config, UPDATE_LR), policy, plugins)) as sides:
            sides.trainer.save(state)
            yield Live(sides, state)


@pytest.fixture
def live(started: Live) -> Iterator[Live]:
    yield started
    started.renew()


def first(verdict: Verdict) -> str:
    """Where it fails, without the number of the weight version."""
    assert verdict.exit_code == 1, verdict.sentence
    return verdict.first.partition(", ")[2]


def test_the_contract_holds_before_and_after_an_update(live: Live) -> None:
    verdict = live.align(layers=True)
    assert verdict.exit_code == 0, verdict.sentence
    assert (verdict.coverage.samples, verdict.unequal, verdict.largest_difference) == (8, 0, 0.0)
    assert verdict.changed is not None
    assert verdict.changed >= 0.5
    layers = verdict.details["layers"]
    assert {len(one["taps"]) for one in layers} == {45}  # embedding, 3 layers of 14, final norm, logits
    assert all(tap["compared"] and not tap["unequal"] for one in layers for tap in one["taps"])


def test_the_contract_holds_up_to_the_end_of_the_context(live: Live) -> None:
    verdict = live.align(layers=True, longest=0)
    assert verdict.exit_code == 0, verdict.sentence
    assert (verdict.coverage.longest, verdict.details["longest_position"]) == (256, 255)
    assert "up to position 255 of 255" in verdict.sentence


def test_late_positions(live: Live) -> None:
    """Sequences of the run's own lengths, which end before, show nothing."""
    live.plant("live_faults:nudge_late_positions", 230)
    assert live.align().exit_code == 0
    verdict = live.align(longest=0)
    assert first(verdict).startswith("prompt ")
    assert "layer 0, attention, position 230, element 0" in verdict.sentence


def test_company_order_cache_and_chunks_change_nothing(live: Live) -> None:
    verdict = live.batch()
    assert verdict.exit_code == 0, verdict.sentence
    assert all(found["tokens"] for found in verdict.details["circumstances"].values())


def test_one_ulp_in_a_weight(live: Live) -> None:
    live.plant("vime_vllm.testing:flip_bit", DOWN, 5)
    assert first(live.align()) == f"weight {DOWN!r}"


def test_one_ulp_in_a_weight_that_no_digest_shows(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live.rollout, "weight_digests", lambda: digest_tensors(live.trainer.weights()))
    live.plant("vime_vllm.testing:flip_bit", DOWN, 5)
    verdict = live.align()
    assert first(verdict).startswith("prompt ")
    assert "layer 1, mlp_output, position " in verdict.sentence
    assert ", element 0: " in verdict.sentence
    assert "every tap before it is equal" in verdict.sentence


def test_an_operation_swapped(live: Live) -> None:
    live.plant(f"{FAULTS}:swap_operation", "swiglu")
    verdict = live.align()
    assert first(verdict).startswith("prompt ")
    assert "layer 0, swiglu, position 0" in verdict.sentence
    assert "every tap before it is equal" in verdict.sentence


def test_another_epsilon(live: Live) -> None:
    live.plant(f"{FAULTS}:change_eps", "model.layers.1.post_attention_layernorm", 1e-3)
    assert "layer 1, post_attention_norm, position 0" in live.align().sentence


def test_a_temperature_that_differs_by_one_percent(live: Live) -> None:
    live.plant("live_faults:heat", 1.01)
    verdict = live.align()
    assert first(verdict).startswith("prompt ")
    assert "the engine's log-probs belong to temperature 1.0100, the trainer's to 1.0000" in verdict.sentence


@pytest.mark.parametrize("fault", [("draw_the_likeliest",), ("draw_hotter", 1.2), ("draw_from_one_stream",)])
def test_a_draw_of_its_own(live: Live, fault: tuple[Any, ...]) -> None:
    live.plant(f"live_faults:{fault[0]}", *fault[1:])
    verdict = live.align()
    assert verdict.exit_code == 1, verdict.sentence
    assert "every log-prob is equal, but" in verdict.sentence
    assert "where the request's seed draws token" in verdict.sentence


def test_a_log_softmax_of_its_own(live: Live) -> None:
    live.plant("live_faults:score_one_ulp_up")
    assert "both use one temperature, so their log-softmax differs" in live.align().sentence


def test_a_foreign_page(live: Live) -> None:
    live.plant("live_faults:read_the_last_request")
    assert "alone and from an empty prefix cache the engine gives the trainer's bits" in live.align().sentence
    verdict = live.batch()
    assert verdict.exit_code == 1
    assert verdict.first.startswith("in company, prompt 0")
    assert "the smallest company that breaks it is another prompt" in verdict.sentence


def test_a_kernel_that_counts_rows(live: Live) -> None:
    live.plant("live_faults:count_rows", 150)
    verdict = live.batch()
    assert verdict.exit_code == 1
    assert verdict.details["circumstances"]["alone again"]["unequal"] == 0
    assert verdict.details["smallest_company"]


@pytest.mark.parametrize("witness", [True, False], ids=["caught by the engine's witness", "caught by the bits"])
def test_a_stale_prefix_cache(live: Live, monkeypatch: pytest.MonkeyPatch, witness: bool) -> None:
    monkeypatch.setattr(live.rollout, "_reset_prefix_cache", lambda: live.rollout._witness.reset())
    monkeypatch.setattr(live.rollout, "_drops_prefix_cache", False)
    if not witness:
        monkeypatch.setattr(live.rollout, "_witness", SilentWitness())
    verdict = live.align()
    assert verdict.exit_code == 1
    if witness:
        assert verdict.first.startswith("VIME-ALIGN-062")
    else:
        assert first(verdict).startswith("prompt ")
        assert "alone and from an empty prefix cache the engine gives the trainer's bits" in verdict.sentence


class SilentWitness:
    """Sees nothing."""

    def check(self, served: Any) -> None: ...

    def reset(self) -> None: ...


@pytest.mark.parametrize("lies", [False, True], ids=["named by digest", "digests lie"])
def test_a_tensor_that_is_not_updated(live: Live, monkeypatch: pytest.MonkeyPatch, lies: bool) -> None:
    if lies:
        monkeypatch.setattr(live.rollout, "weight_digests", lambda: digest_tensors(live.trainer.weights()))
    live.plant("vime_vllm.testing:keep_out", DOWN)
    verdict = live.align()
    live.plant("vime_vllm.testing:let_in")
    if lies:
        assert "layer 1, mlp_output, position " in verdict.sentence
    else:
        assert first(verdict) == f"weight {DOWN!r}"


def test_an_update_that_is_dropped(live: Live) -> None:
    live.plant("live_faults:keep_all_out")
    verdict = live.align()
    live.plant("vime_vllm.testing:let_in")
    assert first(verdict).startswith("weight 'model.")
    assert verdict.unequal > 30


def test_a_wrong_weight_version(live: Live) -> None:
    live.plant("vime_vllm.testing:mislabel", 77)
    verdict = live.align()
    assert verdict.exit_code == 1
    assert verdict.first.startswith("VIME-ALIGN-061")


def test_nan_in_the_engine(live: Live) -> None:
    live.plant("live_faults:score_nan")
    verdict = live.align()
    assert (verdict.exit_code, verdict.first) == (1, "VIME-BACKEND-068")
    assert "in sample (0, 0) (prompt, sample)" in verdict.sentence


@pytest.mark.parametrize("both", [False, True])
def test_nan_in_the_trainer_or_on_both_sides(live: Live, monkeypatch: pytest.MonkeyPatch, both: bool) -> None:
    score, generate = live.trainer.log_probs, live.rollout.generate
    monkeypatch.setattr(live.trainer, "log_probs", lambda batches: [poisoned(row) for row in score(batches)])
    if both:
        monkeypatch.setattr(
            live.rollout, "generate", lambda r: [replace(c, log_probs=poisoned(c.log_probs)) for c in generate(r)]
        )
    verdict = live.align()
    assert first(verdict) == "prompt 0, sample 0, token 1"
    assert f"so the NaN of the {'engine' if both else 'trainer'} arises after them" in verdict.sentence


def poisoned(row: Any) -> Any:
    row = row.copy()
    row[1] = np.nan
    return row


def test_a_dropped_token(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    score = live.trainer.log_probs
    monkeypatch.setattr(live.trainer, "log_probs", lambda batches: [row[:-1] for row in score(batches)])
    assert first(live.align()) == "dropped token, prompt 0, sample 0"


def collected(order: list[int]) -> Any:
    """Answers in another order, under the keys of the order that was asked for."""

    def relabel(completions: list[Any]) -> list[Any]:
        keys = [{"prompt_index": c.prompt_index, "sample_index": c.sample_index} for c in completions]
        chosen = order if len(completions) == len(order) else range(len(completions))
        return [replace(completions[i], **key) for i, key in zip(chosen, keys, strict=True)]

    return relabel


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda done: done[::-1], "collection order: prompt 1, sample 1"),
        (lambda done: [done[0], *done[:-1]] if len(done) > 1 else done, "duplicated sample: prompt 0, sample 0"),
        (collected([2, 3, 0, 1]), "those of this response under the prompt of prompt 1, sample 0"),
    ],
    ids=["completion order", "duplicated sample", "completion order under other names"],
)
def test_answers_that_are_mixed_up(live: Live, monkeypatch: pytest.MonkeyPatch, change: Any, words: str) -> None:
    generate = live.rollout.generate
    monkeypatch.setattr(live.rollout, "generate", lambda requests: change(generate(requests)))
    verdict = live.align()
    assert verdict.exit_code == 1
    assert words in verdict.sentence


def test_equal_seeds_for_two_prompts(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vime_core.loop.prompts.sample_seed", lambda _run, _step, _prompt, sample: 40 + sample)
    assert first(live.align()) == "equal seeds, prompt 1, sample 0"


def test_nothing_of_all_this_stays(live: Live) -> None:
    assert live.align().exit_code == 0


def test_every_verdict_on_the_command_line(tmp_path: Path) -> None:
    ran = vime(
        *("verify", "all", ALIGNED, "--json", "--samples", "4", "--updates", "1"),
        *("--directory", tmp_path / "records", "--set", f"data.system_prompt='{LONG}'"),
        timeout=900,
    )
    no_traceback(ran)
    assert ran.code == 0, ran.text
    document = ran.json
    assert [v["name"] for v in document["verdicts"]] == ["repeat", "gradient", "batch", "align"]
    assert all(v["holds"] and v["unequal"] == 0 for v in document["verdicts"])


def test_without_a_contract_align_says_by_how_much_it_does_not_hold(tmp_path: Path) -> None:
    ran = vime("verify", "align", STOCK, "--json", "--samples", "4", "--updates", "1", timeout=900)
    no_traceback(ran)
    assert ran.code == 1, ran.text
    verdict = ran.json
    assert 1e-3 < verdict["largest_difference"] < 1
    assert verdict["unequal"] > 100
    assert "no alignment contract is configured" in verdict["sentence"]
    layers = vime("verify", "align", STOCK, "--layers", "--json", timeout=900)
    assert layers.code == 2
    assert layers.json["error"]["code"] == "VIME-CONFIG-070"
