"""A run is killed wherever it writes and resumed each time: nothing complete is lost, nothing half-written is read."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from stopping import (
    KILLED,
    REFUSED,
    forked,
    left,
    resume,
    resume_and_compare,
    resume_forgetting,
    resume_with_other_seeds,
    run,
    run_that_resumes_itself,
    run_told_to_end_in_a_destructor,
    run_with_a_wild_clock,
    started,
)

from vime_core.errors import VimeError
from vime_core.loop.checkpoint import _write_state, read_checkpoint
from vime_core.loop.resume import open_resumption
from vime_core.record.reader import RunRecord
from vime_core.verify.repeat import verify_repeat
from vime_core.verify.resume import verify_resume

pytestmark = pytest.mark.slow
Points = list[tuple[str, str]]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("points")


@pytest.fixture(scope="module")
def whole(place: Path) -> tuple[Path, Points]:
    """A run that nobody stops, and every write point of it."""
    assert forked(run, place / "whole", place / "cache") == 0
    points = json.loads((place / "whole.points").read_text())
    return place / "whole", [(point, path) for point, path in points]


def test_every_kind_of_write_is_a_point(whole: tuple[Path, Points]) -> None:
    points = set(whole[1])
    assert {
        ("created", "whole"),
        ("written", ".manifest.json.unfinished"),
        ("renamed", "manifest.json"),
        ("written", ".step-000000.parquet.unfinished"),
        ("renamed", "step-000001.parquet"),
        ("written", "steps.jsonl"),
        ("created", ".step-000001.partial"),
        ("saved", "trainer"),
        ("written", "state.json"),
        ("synced", ".step-000002.partial"),
        ("renamed", "step-000002"),
    } <= points


def test_a_run_killed_at_any_write_point_resumes(place: Path, whole: tuple[Path, Points]) -> None:
    resumed = 0
    for number, point in enumerate(whole[1], 1):
        record = place / f"killed-{number}"
        assert forked(run, record, place / "cache", number) == KILLED
        before = left(record)
        code = forked(resume_and_compare, record, whole[0], before)
        if before is None:
            assert code == REFUSED, point  # there is no manifest, so there was no record yet
            continue
        if code == REFUSED:  # only because everything was done before the kill
            assert (RunRecord.open(record).manifest.status, len(before.lines)) == ("complete", 2), point
            continue
        assert code == 0, point
        resumed += 1
        shutil.rmtree(record)
    assert resumed > 30


def test_a_resume_killed_at_any_write_point_resumes_again(place: Path, whole: tuple[Path, Points]) -> None:
    stopped = place / "stopped"
    middle = whole[1].index(("renamed", "step-000001")) + 4
    assert forked(run, stopped, place / "cache", middle) == KILLED
    number = -2
    while True:
        number += 3
        record = place / f"twice-{number}"
        shutil.copytree(stopped, record)
        if (code := forked(resume, record, number)) != KILLED:
            break
        before = left(record)
        code = forked(resume_and_compare, record, whole[0], before)
        assert code == 0 or (code == REFUSED and RunRecord.open(record).manifest.status == "complete")
        shutil.rmtree(record)
    assert code == 0
    assert number > 20


def damage_state(checkpoint: Path) -> None:
    file = checkpoint / "state.json"
    file.write_text(file.read_text().replace('"weight_version": 1', '"weight_version": 2'))


def truncate_state(checkpoint: Path) -> None:
    os.truncate(checkpoint / "state.json", 100)


def flip_tensor_bit(checkpoint: Path) -> None:
    file = checkpoint / "trainer" / "state.safetensors"
    data = bytearray(file.read_bytes())
    data[-3] ^= 1
    file.write_bytes(data)


def truncate_tensors(checkpoint: Path) -> None:
    os.truncate(checkpoint / "trainer" / "state.safetensors", 5000)


def remove_tensors(checkpoint: Path) -> None:
    (checkpoint / "trainer" / "state.safetensors").unlink()


def add_a_file(checkpoint: Path) -> None:
    (checkpoint / "trainer" / "more").touch()


def another_format(checkpoint: Path) -> None:
    file = checkpoint / "state.json"
    file.write_text(file.read_text().replace("vime-checkpoint/2", "vime-checkpoint/9"))


def rename(checkpoint: Path) -> None:
    checkpoint.rename(checkpoint.with_name("step-000009"))


def forge_weights(checkpoint: Path) -> None:
    """Other weights with every digest of the checkpoint made to fit."""
    state = read_checkpoint(checkpoint).model_copy(update={"weights_root": "0" * 64})
    _write_state(checkpoint, state)


@pytest.fixture
def stopped(place: Path, whole: tuple[Path, Points], tmp_path: Path) -> Path:
    """A record with one step and its checkpoint."""
    kept = place / "one-step"
    if not kept.exists():
        point = whole[1].index(("renamed", "step-000001")) + 1
        assert forked(run, kept, place / "cache", point) == KILLED
    return Path(shutil.copytree(kept, tmp_path / "record"))


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (damage_state, r"step-000001' is damaged: state.json was changed"),
        (truncate_state, r"step-000001' is damaged: state.json cannot be read"),
        (flip_tensor_bit, r"step-000001' is damaged: trainer/state.safetensors was changed"),
        (truncate_tensors, r"step-000001' is damaged: trainer/state.safetensors was changed"),
        (remove_tensors, r"step-000001' is damaged: trainer/state.safetensors is missing"),
        (add_a_file, r"step-000001' is damaged: trainer/more is not of it"),
        (another_format, r"step-000001' has format 'vime-checkpoint/9'"),
        (forge_weights, r"step-000001' does not belong to this record: its weights_root is not that of step 0"),
        (rename, r"step-000009' does not belong to this record: it is of step 1"),
    ],
)
def test_a_spoilt_checkpoint_is_refused_by_name(stopped: Path, spoil: Callable[[Path], None], says: str) -> None:
    spoil(stopped / "checkpoints" / "step-000001")
    with pytest.raises(VimeError, match=says):
        open_resumption(stopped, [])


def test_a_checkpoint_of_another_run_is_refused(stopped: Path, whole: tuple[Path, Points]) -> None:
    shutil.rmtree(stopped / "checkpoints" / "step-000001")
    shutil.copytree(whole[0] / "checkpoints" / "step-000001", stopped / "checkpoints" / "step-000001")
    with pytest.raises(VimeError, match="does not belong to this record: it is of run"):
        open_resumption(stopped, [])


def test_a_checkpoint_of_steps_that_are_not_recorded_is_refused(stopped: Path) -> None:
    os.truncate(stopped / "steps.jsonl", 100)
    with pytest.raises(VimeError, match="it follows other steps than the 0 that are recorded"):
        open_resumption(stopped, [])


def test_a_damaged_record_is_not_continued(stopped: Path) -> None:
    lines = (stopped / "steps.jsonl").read_bytes()
    (stopped / "steps.jsonl").write_bytes(lines.replace(b'"train/loss":"', b'"train/loss":"1'))
    with pytest.raises(VimeError, match="contradicts itself: step 0: train/loss"):
        open_resumption(stopped, [])


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("trainer.lr=1", "--set trainer.lr would change the run"),
        ("run.seed=1", "--set run.seed would change"),
        ("run.setps=8", "(?s)unknown key run.setps.*Did you mean run.steps"),
        ("run.num_rollout=8", "run.num_rollout is called run.steps here"),
    ],
)
def test_what_decides_a_step_cannot_change(stopped: Path, override: str, says: str) -> None:
    with pytest.raises(VimeError, match=says):
        open_resumption(stopped, [override])


def test_a_complete_run_has_nothing_to_resume_but_may_be_made_longer(
    place: Path, whole: tuple[Path, Points], tmp_path: Path
) -> None:
    record = Path(shutil.copytree(whole[0], tmp_path / "longer"))
    with pytest.raises(VimeError, match="is complete: all 2 steps"):
        open_resumption(record, [])
    assert forked(resume, record, 0, "run.steps=3") == 0
    assert forked(run, tmp_path / "three", place / "cache", 0, "run.steps=3") == 0
    verdict = verify_resume(RunRecord.open(tmp_path / "three"), RunRecord.open(record))
    assert verdict.holds, verdict.sentence
    assert "went on from the checkpoint after step 2" in verdict.sentence


def test_recorded_steps_cannot_be_left_out(whole: tuple[Path, Points], tmp_path: Path) -> None:
    record = Path(shutil.copytree(whole[0], tmp_path / "shorter"))
    (record / "seal.json").unlink()
    manifest = json.loads((record / "manifest.json").read_text())
    (record / "manifest.json").write_text(json.dumps({**manifest, "status": "running"}))
    open_resumption(record, [])
    with pytest.raises(VimeError, match=r"run\.steps = 1, and the record .* holds 2 steps already"):
        open_resumption(record, ["run.steps=1"])


def test_a_record_that_is_being_written_is_not_resumed(place: Path, tmp_path: Path) -> None:
    assert forked(run_that_resumes_itself, tmp_path / "live", place / "cache") == REFUSED
    assert "is being written by a process that still runs" in RunRecord.open(tmp_path / "live").manifest.error


@pytest.mark.parametrize("forgotten", ["exp_avg", "count", "bigram.weight"])
def test_what_a_trainer_forgets_is_found(stopped: Path, forgotten: str) -> None:
    assert forked(resume_forgetting, stopped, forgotten) == REFUSED
    what = "weights" if forgotten == "bigram.weight" else "optimizer state"
    assert f"the trainer's {what} is not what was saved" in RunRecord.open(stopped).manifest.error


def test_a_step_that_comes_out_otherwise_is_found(place: Path, whole: tuple[Path, Points], tmp_path: Path) -> None:
    record = tmp_path / "record"
    kill = whole[1].index(("created", ".step-000002.partial"))  # two steps recorded, one in a checkpoint
    assert forked(run, record, place / "cache", kill) == KILLED
    assert len(RunRecord.open(record).steps) == 2
    assert forked(resume_with_other_seeds, record) == REFUSED
    error = RunRecord.open(record).manifest.error
    assert "step 1 was recorded before the run was stopped, and doing it again gave other tokens" in error


def test_without_a_promise_the_steps_after_the_checkpoint_are_done_anew(
    place: Path, whole: tuple[Path, Points], tmp_path: Path
) -> None:
    record = tmp_path / "record"
    kill = whole[1].index(("created", ".step-000002.partial"))
    assert forked(run, record, place / "cache", kill, "run.policy=off") == KILLED
    assert forked(resume_with_other_seeds, record) == 0
    found = RunRecord.open(record)
    assert (found.manifest.resumed[0].step, found.manifest.resumed[0].recorded) == (1, 2)
    assert found.check().holds


@pytest.mark.parametrize("every", [1, 0])
def test_steps_are_cut_only_when_a_new_one_is_there(
    place: Path, whole: tuple[Path, Points], tmp_path: Path, every: int
) -> None:
    """Killed before and right after the new step's line is there; every point between: test_replacing.py."""
    stopped = tmp_path / "stopped"
    assert forked(run, tmp_path / "off", place / "cache", 0, "run.policy=off", f"run.checkpoint_every={every}") == 0
    points = json.loads((tmp_path / "off.points").read_text())
    kill = len(points) - points[::-1].index(["written", "steps.jsonl"])
    assert forked(run, stopped, place / "cache", kill, "run.policy=off", f"run.checkpoint_every={every}") == KILLED
    before = left(stopped)
    assert before is not None
    assert len(before.lines) == 2
    shutil.copytree(stopped, tmp_path / "again")
    assert forked(resume_with_other_seeds, tmp_path / "again") == 0
    again = json.loads((tmp_path / "again.points").read_text())
    line = again.index(["renamed", "steps.jsonl"]) + 1
    for number, new in ((line - 5, 0), (line, 1)):
        record = Path(shutil.copytree(stopped, tmp_path / f"anew-{number}"))
        assert forked(resume_with_other_seeds, record, number) == KILLED
        found = RunRecord.open(record)
        assert found.check().findings == ()
        assert found.step_lines[:every] == before.lines[:every]
        assert len(found.step_lines) == (every + 1 if new else 2)
        assert len({*found.step_lines} - {*before.lines}) == new
        assert forked(resume_with_other_seeds, record) == 0
        after = RunRecord.open(record)
        assert (after.manifest.status, after.check().findings, len(after.steps)) == ("complete", (), 2)
        assert list(record.rglob(".*")) == []


DURATIONS = {"time/step", "time/record", "progress/left_s"}


def test_a_clock_that_jumps_changes_nothing(place: Path, whole: tuple[Path, Points], tmp_path: Path) -> None:
    record = tmp_path / "record"
    assert forked(run_with_a_wild_clock, record, place / "cache") == 0
    found = RunRecord.open(record)
    verdict = verify_repeat(RunRecord.open(whole[0]), found)
    assert verdict.holds, verdict.sentence
    assert all(0 <= seconds < 1000 for entry in found.steps for seconds in entry.timings.values())
    told = [json.loads(line) for line in (record / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in told if line.keys() >= DURATIONS] == [0, 1]
    assert all(0 <= value < 1000 for line in told for name, value in line.items() if name in DURATIONS)


def test_a_run_told_to_end_in_a_destructor_ends_before_its_next_step(
    place: Path, whole: tuple[Path, Points], tmp_path: Path
) -> None:
    record = tmp_path / "record"
    assert forked(run_told_to_end_in_a_destructor, record, place / "cache") == 143
    found = RunRecord.open(record).manifest
    assert (found.status, found.steps) == ("interrupted", 1)
    assert forked(resume_and_compare, record, whole[0], left(record)) == 0


def edit_setting(record: Path, section: str, name: str, value: object) -> None:
    manifest = json.loads((record / "manifest.json").read_text())
    manifest["config"][section][name] = value
    (record / "manifest.json").write_text(json.dumps(manifest))


def test_a_setting_that_was_edited_is_refused_by_name(stopped: Path) -> None:
    assert RunRecord.open(stopped).check().findings == ()
    edit_setting(stopped, "trainer", "lr", 1.0)
    says = r"its configuration is not that of checkpoints/step-000001: trainer.lr is 1.0, and was "
    with pytest.raises(VimeError, match=says):
        open_resumption(stopped, [])
    assert re.search(says, RunRecord.open(stopped).check().findings[0])


def test_data_that_was_edited_is_refused(place: Path, tmp_path: Path) -> None:
    questions, record = tmp_path / "questions.jsonl", tmp_path / "record"
    lines = [json.dumps({"question": f"{n} + 1 = ?", "answer": f"#### {n + 1}"}) + "\n" for n in range(8)]
    questions.write_text("".join(lines))
    assert forked(run, record, place / "cache", 0, "data.source=jsonl", f"data.jsonl.path='{questions}'") == 0
    before = left(record)
    assert before is not None
    questions.write_text("".join(lines).replace("#### ", "#### 1"))  # no prompt is another
    assert forked(resume, record, 0, "run.steps=3") == REFUSED
    assert (left(record), RunRecord.open(record).manifest.status) == (before, "complete")
    questions.write_text("".join(lines))
    assert forked(resume, record, 0, "run.steps=3") == 0


def test_a_setting_that_was_edited_is_refused_without_a_checkpoint_too(stopped: Path) -> None:
    shutil.rmtree(stopped / "checkpoints" / "step-000001")
    edit_setting(stopped, "trainer", "lr", 1.0)
    with pytest.raises(VimeError, match="its configuration was changed: the digest is"):
        open_resumption(stopped, [])


REFERENCE = ("algorithm.ppo-clip.kl_coefficient=0.1", "algorithm.reference_update_every=1")
BOTH_KL = ("algorithm.reward_kl=0.05", "algorithm.loss=cispo", "algorithm.cispo.kl_coefficient=0.1")
CORRECTED = (
    *("algorithm.old_log_probs=recompute", "algorithm.correction.level=token"),
    *("algorithm.overlong=drop", "algorithm.overlong_buffer=2", "sampling.samples_per_prompt=8"),
)
DYNAMIC = ("sampling.dynamic_rounds=9", "sampling.max_tokens=2", "reward.length.target=4", "run.steps=3")


@pytest.mark.parametrize(
    "algorithm",
    [
        (*BOTH_KL, REFERENCE[1], "algorithm.advantage=reinforce++"),
        DYNAMIC,
        (*CORRECTED, "algorithm.loss=gspo", "algorithm.reduction=constant", "sampling.max_tokens=60"),
    ],
)
def test_what_an_algorithm_carries_on_is_in_the_checkpoint(
    place: Path, tmp_path: Path, algorithm: tuple[str, ...]
) -> None:
    whole, record = tmp_path / "whole", tmp_path / "record"
    assert forked(run, whole, place / "cache", 0, *algorithm) == 0
    points = json.loads((tmp_path / "whole.points").read_text())
    kill = points.index(["renamed", "step-000001"]) + 1
    assert forked(run, record, place / "cache", kill, *algorithm) == KILLED
    assert forked(resume_and_compare, record, whole, left(record)) == 0


def test_a_reference_model_is_recorded_and_moves_only_when_it_should(place: Path, tmp_path: Path) -> None:
    frozen, moving = tmp_path / "frozen", tmp_path / "moving"
    assert forked(run, frozen, place / "cache", 0, REFERENCE[0]) == 0
    assert forked(run, moving, place / "cache", 0, *REFERENCE) == 0
    for record, moved in ((frozen, False), (moving, True)):
        found = RunRecord.open(record)
        assert found.check().holds
        second = found.step_samples(1)
        rollout = [sample.rollout_log_probs for sample in second.samples]
        same = [a.tobytes() == b.tobytes() for a, b in zip(second.reference_log_probs, rollout, strict=True)]
        assert all(same) is moved  # the reference of a step that follows its update is the policy that sampled


def test_dynamic_sampling_takes_prompts_in_order_and_only_groups_with_a_signal(place: Path, tmp_path: Path) -> None:
    record = tmp_path / "record"
    assert forked(run, record, place / "cache", 0, *DYNAMIC) == 0
    found = RunRecord.open(record)
    indices: list[int] = []
    for entry in found.steps:
        groups: dict[int, set[float]] = {}
        for sample in found.samples(entry.step):
            groups.setdefault(sample.prompt_index, set()).add(sample.reward)
            assert sample.weight_version == entry.step
        assert [len(rewards) for rewards in groups.values()] == [2, 2]
        indices += groups
    assert indices == sorted(set(indices))
    left_out = sum(float.fromhex(entry.metrics["data/no_signal"]) for entry in found.steps)
    assert left_out == indices[-1] + 1 - len(indices)
    assert left_out > 0


def test_prompts_without_any_signal_end_the_run(place: Path, tmp_path: Path) -> None:
    settings = ("sampling.dynamic_rounds=2", "sampling.temperature=0.0")
    assert forked(run, tmp_path / "record", place / "cache", 0, *settings) == REFUSED
    error = RunRecord.open(tmp_path / "record").manifest.error
    assert "step 0: 2 rounds of 2 prompts gave 0 groups whose rewards differ" in error


def kill_at_random(record: Path, cache: Path, generator: random.Random) -> None:
    """Start a run in a process of its own and kill it at a random moment after it has begun."""
    process = started(run, record, cache)
    while process.is_alive() and not (record / "manifest.json").exists():
        time.sleep(0.005)
    time.sleep(generator.uniform(0, 0.2))
    process.kill()
    process.join()


def random_moments(place: Path, whole: Path, count: int, seed: int) -> None:
    generator = random.Random(seed)
    killed = 0
    for number in range(count):
        record = place / f"random-{seed}-{number}"
        kill_at_random(record, place / "cache", generator)
        before = left(record)
        if before is None or RunRecord.open(record).manifest.status == "complete":
            continue
        killed += 1
        assert forked(resume_and_compare, record, whole, before) == 0
    assert killed


def test_a_run_killed_at_random_moments_resumes(place: Path, whole: tuple[Path, Points]) -> None:
    random_moments(place, whole[0], 4, seed=1)


@pytest.mark.long
def test_a_run_killed_at_fifty_random_moments_resumes(place: Path, whole: tuple[Path, Points]) -> None:
    random_moments(place, whole[0], 50, seed=2)
