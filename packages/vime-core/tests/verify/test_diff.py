"""Negative controls: one thing is changed in one of two records, and the diff must name it and nothing earlier."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from synthetic import CONFIG, Step, change_sample, change_step, flip_bit, make_run, with_evaluation, write_run

from vime_core.errors import RecordError
from vime_core.numerics.contract import DENSE_V1
from vime_core.record.reader import RunRecord
from vime_core.record.schema import PluginEntry, ProcessEntry
from vime_core.record.taps import Side, TapRows, read_taps, taps_name, taps_to_parquet
from vime_core.verify.diff import NothingCompared, config_differences, context_differences, diff_records, unfinished
from vime_core.verify.difference import Difference, Place
from vime_core.verify.replay import compare_replays, plan_replay
from vime_core.verify.stages import unequal_tensors

BASE = make_run(3, updates=2)
SAMPLE = BASE[1].samples[2]


def compared(tmp_path: Path, steps: list[Step], other: list[Step] | None = None, **changes: Any) -> Difference | None:
    a = write_run(tmp_path / "a", BASE if other is None else other)
    return diff_records(a, write_run(tmp_path / "b", steps, **changes))


def found(tmp_path: Path, steps: list[Step], **changes: Any) -> dict[str, Any]:
    difference = compared(tmp_path, steps, **changes)
    assert difference is not None
    assert difference.sentence.count(". ") == 0
    assert difference.sentence.endswith(".")
    return json.loads(json.dumps(difference.as_json(), allow_nan=False))


def change_update(steps: list[Step], step: int, update: int, **changes: Any) -> list[Step]:
    updates = list(steps[step].updates)
    updates[update] = replace(updates[update], **changes)
    return change_step(steps, step, updates=tuple(updates))


def with_flip(arrays: dict[str, Any], name: str) -> dict[str, Any]:
    return {**arrays, name: flip_bit(arrays[name], 0)}


def other_token(place: int) -> tuple[int, ...]:
    tokens = list(SAMPLE.response_tokens)
    tokens[place] += 1
    return tuple(tokens)


def train_log_probs(place: int) -> tuple[Any, ...]:
    rows = list(BASE[1].train_log_probs)
    rows[place] = flip_bit(rows[place], 1)
    return tuple(rows)


KEY = list(SAMPLE.key)
UPDATE = BASE[1].updates[1]
CASES: dict[str, tuple[list[Step], dict[str, Any]]] = {
    "seed": (
        change_sample(BASE, 1, 2, seed=5),
        {"stage": "prompts", "sample": KEY, "what": f"seed is {SAMPLE.seed} and 5"},
    ),
    "prompt": (
        change_sample(BASE, 1, 2, prompt_tokens=(1, 9, 3)),
        {
            "stage": "prompts",
            "sample": KEY,
            "what": "prompt_tokens is (1, 3, 3) and (1, 9, 3)",
            "unequal": 1,
            "compared": 4,
        },
    ),
    "dataset": (change_sample(BASE, 1, 2, dataset_index=0), {"stage": "prompts", "what": "dataset_index is 11 and 0"}),
    "token": (
        change_sample(BASE, 1, 2, response_tokens=other_token(3)),
        {"stage": "tokens", "sample": KEY, "token": 3, "unequal": 1, "compared": 4, "unit": "responses"},
    ),
    "version": (
        change_sample(BASE, 1, 2, weight_version=0),
        {"stage": "tokens", "sample": KEY, "what": "weight_version is 1 and 0"},
    ),
    "finish": (change_sample(BASE, 1, 2, finish_reason="abort"), {"stage": "tokens", "sample": KEY}),
    "text": (
        change_sample(BASE, 1, 2, response_text="!"),
        {"stage": "tokens", "what": "response_text is 'é 1 0' and '!'"},
    ),
    "rollout": (
        change_sample(BASE, 1, 2, rollout_log_probs=flip_bit(SAMPLE.rollout_log_probs, 3)),
        {"stage": "rollout log-probs", "sample": KEY, "token": 3, "first_ulps": 1, "unequal": 1, "compared": 16},
    ),
    "reward": (
        change_sample(BASE, 1, 2, reward=0.5),
        {"stage": "rewards", "sample": KEY, "largest_difference": 0.5, "unequal": 1, "compared": 4},
    ),
    "advantage": (
        change_step(BASE, 1, advantages=flip_bit(BASE[1].advantages, 2)),
        {"stage": "advantages", "sample": KEY, "first_ulps": 1},
    ),
    "train": (
        change_step(BASE, 1, train_log_probs=train_log_probs(2)),
        {"stage": "train log-probs", "update": 1, "sample": KEY, "token": 1, "first_ulps": 1, "compared": 9},
    ),
    "loss": (
        change_update(BASE, 1, 1, loss=0.25),
        {
            "stage": "loss",
            "update": 1,
            "what": "0.125 and 0.25, more than 1000000 ulps apart",
        },
    ),
    "gradients": (
        change_update(BASE, 1, 1, gradients=with_flip(UPDATE.gradients, "layers.0.mlp.weight")),
        {"stage": "gradients", "update": 1, "tensor": "layers.0.mlp.weight", "unequal": 1, "compared": 3},
    ),
    "norm": (change_update(BASE, 1, 1, grad_norm=1.25), {"stage": "gradient norm", "update": 1}),
    "rate": (change_update(BASE, 1, 1, learning_rate=0.5), {"stage": "learning rate", "update": 1}),
    "weights": (
        change_step(BASE, 1, weights=with_flip(BASE[1].weights, "norm.weight")),
        {"stage": "weights", "tensor": "norm.weight", "unequal": 1, "compared": 3},
    ),
    "optimizer": (
        change_step(BASE, 1, optimizer=with_flip(BASE[1].optimizer, "norm.weight.exp_avg")),
        {"stage": "optimizer state", "tensor": "norm.weight.exp_avg"},
    ),
    "evaluation": (
        change_step(BASE, 1, metrics={"evaluation/reward": 0.5}),
        {"stage": "evaluation", "what": "evaluation/reward is None and 0x1.0000000000000p-1"},
    ),
    "a metric of the trainer's": (
        change_step(BASE, 1, metrics={"train/ratio": 0.5}),
        {"stage": "metrics", "what": "train/ratio is None and 0x1.0000000000000p-1", "unequal": 1},
    ),
    "lost tensor": (
        change_step(BASE, 1, weights={k: v for k, v in BASE[1].weights.items() if k != "norm.weight"}),
        {"stage": "weights", "tensor": "norm.weight", "what": "only the first record has it"},
    ),
    "order of tensors": (
        change_step(BASE, 1, weights=dict(reversed(BASE[1].weights.items()))),
        {"stage": "weights", "tensor": None, "what": "the tensors stand in another order"},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_first_difference_is_named(tmp_path: Path, name: str) -> None:
    steps, expected = CASES[name]
    table = found(tmp_path, steps)
    wanted = {"step": 1, "inputs_equal": True, "config": [], "context": [], **expected}
    assert {key: table[key] for key in wanted} == wanted
    assert f"tep 1, {'update 1, ' if 'update' in expected else ''}{expected['stage']}" in table["sentence"]
    assert "everything before it is equal" in table["sentence"]
    assert table["cause"] in table["sentence"]


@pytest.mark.parametrize("name", CASES)
def test_a_difference_in_an_earlier_step_comes_first(tmp_path: Path, name: str) -> None:
    steps, _ = CASES[name]
    table = found(tmp_path, change_step(steps, 0, optimizer=with_flip(BASE[0].optimizer, "norm.weight.exp_avg")))
    assert (table["step"], table["stage"]) == (0, "optimizer state")


def test_equal_records_have_no_difference(tmp_path: Path) -> None:
    assert compared(tmp_path, BASE) is None


def test_equality_of_one_run_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from vime_cli.commands.diff import diff

    places = [
        write_run(tmp_path / name, BASE, run_id=run).directory for name, run in (("a", "7"), ("b", "7"), ("c", "8"))
    ]
    assert diff(places[0], places[1]) == 0
    assert "but both records are of one run (7), and a run equals itself" in capsys.readouterr().out
    assert diff(places[0], places[2]) == 0
    assert capsys.readouterr().out == "The two records are complete and equal in every digest.\n"


def test_a_token_after_equal_log_probs_points_to_the_draw(tmp_path: Path) -> None:
    table = found(tmp_path, CASES["token"][0])
    ids = f"the ids are {SAMPLE.response_tokens[3]} and {SAMPLE.response_tokens[3] + 1}"
    assert table["what"] == f"{ids}, the log-probs of the 3 tokens before it are equal"
    assert "the draw of this token" in table["cause"]


def test_a_token_after_unequal_log_probs_points_to_the_engine(tmp_path: Path) -> None:
    log_probs = flip_bit(SAMPLE.rollout_log_probs, 1)
    table = found(tmp_path, change_sample(BASE, 1, 2, response_tokens=other_token(3), rollout_log_probs=log_probs))
    assert (table["stage"], table["token"]) == ("tokens", 3)
    assert "the log-probs before it differ already, from token 1 on (1 ulp apart)" in table["what"]
    assert "the rollout engine's forward" in table["cause"]


def test_a_first_token_and_an_early_end(tmp_path: Path) -> None:
    table = found(tmp_path, change_sample(BASE, 1, 2, response_tokens=other_token(0)))
    assert "it is the response's first token" in table["what"]
    shorter = {
        "response_tokens": SAMPLE.response_tokens[:2],
        "rollout_log_probs": SAMPLE.rollout_log_probs[:2],
        "loss_mask": (True, True),
    }
    cut = list(BASE[1].train_log_probs)
    cut[2] = cut[2][:2]
    ended = change_step(change_sample(BASE, 1, 2, **shorter), 1, train_log_probs=tuple(cut))
    table = found(tmp_path / "cut", ended)
    assert (table["stage"], table["token"]) == ("tokens", 2)
    assert f"the ids are {SAMPLE.response_tokens[2]} and the end" in table["what"]


def test_stale_weights_are_named_when_tokens_differ(tmp_path: Path) -> None:
    table = found(tmp_path, change_sample(BASE, 1, 2, response_tokens=other_token(0), weight_version=0))
    assert "weight versions are 1 and 0" in table["what"]
    assert "other weights" in table["cause"]


@pytest.mark.parametrize("kept", [(0, 1, 2), (0, 1, 3), (1, 2, 3)])
def test_a_dropped_sample_is_named(tmp_path: Path, kept: tuple[int, ...]) -> None:
    step = BASE[1]
    fewer = change_step(
        BASE,
        1,
        samples=tuple(step.samples[i] for i in kept),
        advantages=step.advantages[list(kept)],
        train_log_probs=tuple(step.train_log_probs[i] for i in kept),
        updates=(replace(step.updates[0], samples=2), replace(step.updates[1], samples=1)),
    )
    (lost,) = {0, 1, 2, 3} - set(kept)
    table = found(tmp_path, fewer)
    assert (table["step"], table["stage"]) == (1, "prompts")
    assert table["sample"] == list(step.samples[lost].key)
    assert table["what"] == "only the first record has it"


def test_an_added_sample_is_named(tmp_path: Path) -> None:
    step = BASE[1]
    copy = replace(step.samples[3], sample_index=2)
    more = change_step(
        BASE,
        1,
        samples=(*step.samples, copy),
        advantages=np.append(step.advantages, np.float32(0)),
        train_log_probs=(*step.train_log_probs, step.train_log_probs[3]),
        updates=(step.updates[0], replace(step.updates[1], samples=3)),
    )
    table = found(tmp_path, more)
    assert (table["stage"], table["sample"], table["what"]) == ("prompts", [3, 2], "only the second record has it")


def test_minibatches_that_are_split_otherwise(tmp_path: Path) -> None:
    step = BASE[1]
    split = change_step(BASE, 1, updates=(replace(step.updates[0], samples=1), replace(step.updates[1], samples=3)))
    table = found(tmp_path, split)
    assert (table["stage"], table["update"]) == ("train log-probs", 0)
    assert table["what"] == "this update trained on other samples"
    one = change_step(BASE, 1, updates=(replace(step.updates[0], samples=4),))
    assert found(tmp_path / "one", one)["stage"] == "train log-probs"


def test_a_missing_step(tmp_path: Path) -> None:
    table = found(tmp_path, BASE[:1])
    assert (table["stage"], table["step"], table["unequal"], table["compared"]) == ("steps", 1, 2, 3)
    states = "with status 'complete' and 'complete'"
    ended = f"tep 1, steps: the records hold 3 and 1 steps, {states}, equal as far as both go (2 of 3 steps have no"
    assert table["sentence"] == f"S{ended} counterpart)."
    config = {**CONFIG, "run": {**CONFIG["run"], "seed": 8}}
    sentence = found(tmp_path / "other config", BASE[:1], config=config)["sentence"]
    assert sentence == f"The configurations differ (run.seed: 7 against 8); s{ended} counterpart)."
    table = found(tmp_path / "later", BASE[1:])
    assert (table["stage"], table["step"]) == ("steps", 0)


def test_nan_is_named_with_its_token(tmp_path: Path) -> None:
    log_probs = SAMPLE.rollout_log_probs.copy()
    log_probs[1] = np.nan
    table = found(tmp_path, change_sample(BASE, 1, 2, rollout_log_probs=log_probs))
    assert (table["stage"], table["token"], table["first_ulps"]) == ("rollout log-probs", 1, None)
    assert table["largest_difference"] == "nan"
    assert "one of them is not a number" in table["sentence"]


def test_other_initial_weights(tmp_path: Path) -> None:
    from synthetic import digests, tensors

    from vime_core.record.digest import merkle_root

    other = digests(with_flip(tensors(0), "norm.weight"))
    table = found(tmp_path, CASES["token"][0], initial_weights=other, model_root=merkle_root(other))
    assert (table["stage"], table["step"], table["tensor"]) == ("initial weights", None, "norm.weight")
    assert table["sentence"].startswith("Initial weights, tensor 'norm.weight'")


def test_unknown_initial_weights_are_said(tmp_path: Path) -> None:
    table = found(tmp_path, CASES["token"][0], initial_weights={}, model_root="")
    assert table["inputs_equal"] is None
    assert "the initial weights were not recorded on both sides" in table["sentence"]


OTHER_CONFIG = {**CONFIG, "trainer": {**CONFIG["trainer"], "lr": 2e-3}}


def test_other_configurations_come_first_in_the_sentence(tmp_path: Path) -> None:
    table = found(tmp_path, CASES["weights"][0], config=OTHER_CONFIG)
    assert table["config"] == ["trainer.lr: 0.001 against 0.002"]
    assert table["inputs_equal"] is False
    assert (table["step"], table["stage"]) == (1, "weights")
    assert table["sentence"].startswith(
        "The configurations differ (trainer.lr: 0.001 against 0.002), so these are not two"
    )
    assert "the first unequal result: step 1, weights" in table["sentence"]
    assert "; the configuration was not equal; likely cause: the configuration itself" in table["sentence"]
    table = found(tmp_path / "equal", BASE, config=OTHER_CONFIG)
    assert table["stage"] == "config"
    assert "every recorded result is equal nevertheless" in table["sentence"]


def test_names_and_paths_of_a_run_are_no_inputs(tmp_path: Path) -> None:
    moved = {**CONFIG, "run": {**CONFIG["run"], "name": "other", "output": "elsewhere"}}
    assert compared(tmp_path, BASE, config=moved) is None
    seeded = {**CONFIG, "run": {**CONFIG["run"], "seed": 8}}
    assert found(tmp_path / "seed", BASE, config=seeded)["config"] == ["run.seed: 7 against 8"]


@pytest.mark.parametrize("field", ["policy", "contract"])
def test_policy_and_contract_are_inputs(tmp_path: Path, field: str) -> None:
    assert found(tmp_path, BASE, **{field: "another/v1"})["stage"] == "config"


def test_a_contract_is_named_by_id_and_digest(tmp_path: Path) -> None:
    other = DENSE_V1.to_json().replace("copy of the row", "another copy of the row")
    a = write_run(tmp_path / "a", BASE, contract=DENSE_V1.to_json())
    name = f"dense/v1 ({DENSE_V1.digest[:12]})"
    assert config_differences(a, write_run(tmp_path / "b", BASE)) == (f"contract: '{name}' against 'none'",)
    changed = f"dense/v1 ({hashlib.sha256(other.encode()).hexdigest()[:12]})"
    assert config_differences(a, write_run(tmp_path / "c", BASE, contract=other)) == (
        f"contract: '{name}' against '{changed}'",
    )


def test_environment_and_versions_are_context(tmp_path: Path) -> None:
    process = ProcessEntry(
        role="trainer", rank=0, pid=1, environment={"OMP": "1"}, settings={}, versions={"torch": "2"}, hardware={}
    )
    steps = CASES["gradients"][0]
    a = write_run(tmp_path / "a", BASE, processes=(process,))
    other = process.model_copy(update={"environment": {"OMP": "2"}, "pid": 99})
    difference = diff_records(a, write_run(tmp_path / "b", steps, processes=(other,), vime_version="0.2.0"))
    assert difference is not None
    assert difference.context == ("trainer 0: environment.OMP: '1' against '2'", "vime: '0.1.0' against '0.2.0'")
    assert "these differ too, though they are no inputs: trainer 0: environment.OMP" in difference.sentence
    assert difference.inputs_equal is True
    assert diff_records(a, write_run(tmp_path / "c", BASE, processes=(other,))) is None


def test_edited_sources_of_a_plugin_are_context(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from vime_cli.commands.diff import diff

    plugins = [(PluginEntry(name="mine", distribution="vime-mine", version="0.1", sources=s * 64),) for s in ("a", "b")]
    a, same = (write_run(tmp_path / name, BASE, plugins=plugins[0]) for name in ("a", "same"))
    edited = write_run(tmp_path / "edited", BASE, plugins=plugins[1])
    other = write_run(tmp_path / "other", CASES["reward"][0], plugins=plugins[1])
    named = f"plugin mine, sources: '{'a' * 16}' against '{'b' * 16}'"
    difference = diff_records(a, other)
    assert difference is not None
    assert (difference.context, difference.inputs_equal) == ((named,), True)
    assert diff(a.directory, edited.directory) == 0
    assert f"These differ, though they are no inputs: {named}." in capsys.readouterr().out
    assert diff(a.directory, edited.directory, as_json=True) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["equal"], document["context"]) == (True, [named])
    assert diff(a.directory, same.directory) == 0
    assert "differ" not in capsys.readouterr().out


def test_records_without_steps_compare_nothing(tmp_path: Path) -> None:
    with pytest.raises(NothingCompared, match="nothing could be compared") as caught:
        compared(tmp_path, [], [])
    assert caught.value.exit_code == 3


def test_a_digest_that_its_samples_do_not_explain(tmp_path: Path) -> None:
    a = write_run(tmp_path / "a", BASE)
    b = write_run(tmp_path / "b", BASE)
    path = b.directory / "steps.jsonl"
    path.write_text(path.read_text().replace(b.steps[1].rewards, "0" * 64))
    difference = diff_records(a, type(b).open(b.directory))
    assert difference is not None
    assert "the digests differ, the stored samples don't" in difference.sentence
    assert "damaged or edited" in difference.sentence


def evaluated(**changes: Any) -> list[Step]:
    responses = list(with_evaluation(BASE, 1)[1].evaluation)
    responses[1] = replace(responses[1], **changes)
    return with_evaluation(BASE, 1, *responses)


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"response_text": "other"}, "tokens: response_text is"),
        ({"reward": 0.5}, "rewards: 1.0 and 0.5"),
        ({"seed": 5}, "prompts: seed is"),
    ],
)
def test_another_evaluation(tmp_path: Path, changes: dict[str, Any], what: str) -> None:
    table = found(tmp_path, evaluated(**changes), other=with_evaluation(BASE, 1))
    assert (table["step"], table["stage"], table["sample"]) == (1, "evaluation", [1, 0])
    assert table["what"].startswith(what)
    assert "Step 1, evaluation, prompt 1, sample 0" in table["sentence"]


def test_an_evaluation_on_one_side_only(tmp_path: Path) -> None:
    table = found(tmp_path, with_evaluation(BASE, 1))
    assert (table["stage"], table["what"]) == ("evaluation", "only the second record has it")


def process(**environment: str) -> ProcessEntry:
    return ProcessEntry(role="rollout", rank=0, pid=1, environment=environment, settings={}, versions={}, hardware={})


def test_what_an_engine_draws_anew_in_every_run_is_no_difference(tmp_path: Path) -> None:
    a, b = (
        write_run(tmp_path / name, BASE, processes=(process(VLLM_DIST_IDENT=name, OMP_NUM_THREADS="1"),))
        for name in "ab"
    )
    assert context_differences(a, b) == ()


@pytest.mark.parametrize("status", ["running", "failed"])
@pytest.mark.parametrize("steps", [3, 2])
def test_a_record_that_is_not_complete_is_named(tmp_path: Path, status: str, steps: int) -> None:
    a, b = write_run(tmp_path / "a", BASE[:steps]), write_run(tmp_path / "b", BASE[:2], status=status)
    words = f"the second record is {status} with 2 of unknown steps"
    assert unfinished(a, b) == words
    difference = diff_records(a, b)
    assert (difference is None) == (steps == 2)
    if difference is not None:
        assert difference.sentence.endswith(f"; {words}.")
        assert difference.as_json()["unfinished"] == words


def tapped(value: float) -> dict[str, TapRows]:
    """Taps of three positions; attention of layer 0 has ``value`` at the last."""
    rows = np.arange(6, dtype=np.float32).reshape(3, 2)
    other = rows.copy()
    other[2, 1] = value
    places = np.arange(3, dtype=np.int64)
    return {
        "embedding": TapRows(places, rows, "float32"),
        "layers.0.attention": TapRows(places, other, "float32"),
        "logits": TapRows(places, other, "float32"),
    }


def flipped_at(place: int) -> list[Step]:
    return change_sample(BASE, 1, 2, rollout_log_probs=flip_bit(SAMPLE.rollout_log_probs, place))


def test_recorded_taps_name_layer_and_operation(tmp_path: Path) -> None:
    a, b = write_run(tmp_path / "a", BASE), write_run(tmp_path / "b", flipped_at(0))
    for record, value in ((a, 5.0), (b, float(np.nextafter(np.float32(5), np.float32(9))))):
        store(record, "engine", tapped(value))
    difference = diff_records(a, b)
    assert difference is not None
    assert (
        "first unequal tap of the engine, prompt 3, sample 0: layer 0, attention, position 2, element 1: 5 in the"
        in (difference.sentence)
    )
    assert "in the second run, 1 ulp apart; every tap before it is equal; likely cause:" in difference.sentence
    taps = difference.as_json()["taps"]
    assert taps["first"] == {"layer": 0, "operation": "attention", "inputs_equal": True, "ulps": 1}


def store(record: RunRecord, side: Side, taps: dict[str, TapRows]) -> None:
    folder = record.taps_folder(1)
    folder.mkdir(parents=True)
    (folder / taps_name(SAMPLE.key, side)).write_bytes(taps_to_parquet(cut(taps)))


def cut(taps: dict[str, TapRows]) -> dict[str, TapRows]:
    """With a row for every position that is compared: the prompt has three tokens, and so has the response."""
    places = np.arange(len(SAMPLE.tokens) - 1, dtype=np.int64)
    grown = (np.resize(one.rows, (len(places), 2)) for one in taps.values())
    return {name: TapRows(places, rows, "float32") for name, rows in zip(taps, grown, strict=True)}


def test_equal_taps_say_that_the_forward_is_equal(tmp_path: Path) -> None:
    a, b = write_run(tmp_path / "a", BASE), write_run(tmp_path / "b", change_update(BASE, 1, 1, loss=0.25))
    for record in (a, b):
        store(record, "trainer", tapped(5.0))
    difference = diff_records(a, b)
    assert difference is not None
    assert "all 3 taps of the trainer, prompt 3, sample 0 are equal, so the runs part after the forward" in (
        difference.sentence
    )


def test_damaged_taps_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "taps.parquet"
    path.write_bytes(taps_to_parquet(tapped(5.0)))
    assert [*read_taps(path)] == ["embedding", "layers.0.attention", "logits"]
    assert read_taps(path)["logits"].rows.tobytes() == tapped(5.0)["logits"].rows.tobytes()
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(RecordError, match="cannot read the taps"):
        read_taps(path)


@pytest.mark.parametrize("where", ["step", "initial weights", "config"])
def test_what_is_replayed(tmp_path: Path, where: str) -> None:
    steps = flipped_at(0) if where == "step" else BASE
    changes: dict[str, Any] = {"initial_weights": {}, "model_root": ""} if where == "config" else {}
    a = write_run(tmp_path / "a", BASE)
    changes |= {"config": {**CONFIG, "trainer": {"lr": 2.0}}} if where != "step" else {}
    difference = diff_records(a, write_run(tmp_path / "b", steps, **changes))
    assert difference is not None
    plan = plan_replay(a, difference)
    assert (plan is None) == (where != "step")
    if plan is not None:
        assert (plan.step, plan.sample) == (1, SAMPLE.key)
        wanted = {"steps": 2, "taps": [], "sinks": [], "checkpoint_every": 0}
        assert plan.overrides(CONFIG) == wanted
        assert plan.overrides({"alignment": {"contract": "dense/v1"}}) == {**wanted, "taps": ["1:3:0"]}


def test_what_replays_say(tmp_path: Path) -> None:
    a, b = write_run(tmp_path / "a", BASE), write_run(tmp_path / "b", flipped_at(0))
    difference = diff_records(a, b)
    assert difference is not None
    plan = plan_replay(a, difference)
    assert plan is not None
    shorter = [write_run(tmp_path / name, steps[:2]) for name, steps in (("c", BASE), ("d", flipped_at(0)))]
    again = compare_replays(plan, (a, b), (shorter[0], shorter[1]))
    assert again.repeats == (True, True)
    assert again.sentence.startswith("Replayed, each with the bits that its record holds: Step 1, rollout log-probs")
    equal = compare_replays(plan, (a, b), (shorter[0], write_run(tmp_path / "e", BASE[:2])))
    assert (equal.difference, equal.repeats) == (None, (True, False))
    assert "both runs give equal bits up to step 1, the second run not with the bits that its record holds" in (
        equal.sentence
    )


@pytest.mark.parametrize(("a", "b", "which"), [({}, {"x": "0"}, "second"), ({"x": "0"}, {}, "first")])
def test_a_tensor_of_one_record_is_named(a: dict[str, str], b: dict[str, str], which: str) -> None:
    both = {"w": "1"}
    found = unequal_tensors(Place("weights", 0), "optimizer", {**both, **a}, {**both, **b}, "root", "other root")
    assert found is not None
    assert (found.place.tensor, found.what) == ("x", f"only the {which} record has it")
