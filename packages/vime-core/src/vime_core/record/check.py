"""Does a record agree with itself? Every digest that can be recomputed from what is stored, recomputed.

This finds damage and edits. It is no signature: who edits files consistently and seals the record again is found by who
knows the seal's digest, and by comparing the record with another one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from vime_core.errors import RecordError
from vime_core.record.digest import merkle_root
from vime_core.record.layout import EVALUATION, METRICS, SAMPLES, STEPS, samples_path
from vime_core.record.metrics import by_set, metric_findings
from vime_core.record.samples import (
    Columns,
    reference_digest,
    require_order,
    sample_keys,
    sampled_digests,
    stage_digests,
    update_log_prob_digest,
)
from vime_core.record.schema import Digests, StepEntry
from vime_core.record.seal import seal_findings
from vime_core.record.settings import settings_findings

if TYPE_CHECKING:
    from vime_core.record.reader import RunRecord


@dataclass(frozen=True)
class RecordCheck:
    """What was recomputed, and what did not agree (each finding names its place)."""

    findings: tuple[str, ...]
    steps: int
    samples: int

    @property
    def holds(self) -> bool | None:
        """None: nothing could be recomputed."""
        if self.findings:
            return False
        return True if self.steps and self.samples else None


def check_record(record: RunRecord) -> RecordCheck:
    """Recompute the digests and metrics of every step from its samples, the roots from their leaves, and the seal.

    Beside that: is every step there that the configuration promised, and are all weight versions those of their steps?
    """
    findings = [*_start_findings(record), *_sequence_findings(record)]
    samples = 0
    for entry in record.steps:
        try:
            columns = record.columns(entry.step)
        except RecordError as error:
            findings.append(f"step {entry.step}: {error.message}")
            continue
        samples += len(columns["reward"].values)
        found = [*entry_findings(entry, columns), *_version_findings(entry, columns), *_count_findings(record, columns)]
        found += _stored_evaluation(record, entry)
        findings += [f"step {entry.step}: {finding}" for finding in found or _metrics(record, entry)]
    findings += [*_end_findings(record), *_told_metrics(record), *seal_findings(record)]
    return RecordCheck(tuple(findings), len(record.steps), samples)


def entry_findings(entry: StepEntry, columns: Columns) -> list[str]:
    """Where a step's line disagrees with its samples or with its own leaves."""
    return [*_sample_findings(entry, columns), *_root_findings(entry), *_float_findings(entry)]


def evaluation_findings(entry: StepEntry, columns: Columns | None) -> list[str]:
    """Where a step's line disagrees with the responses of its evaluation; None when there are none."""
    if columns is None:
        return ["the line has digests of an evaluation, but no response is stored"] if entry.evaluation else []
    try:
        require_order(sample_keys(columns))
    except RecordError as error:
        return [f"evaluation: {error.message}"]
    found = sampled_digests(columns)
    return [
        f"evaluation: the digest of {_spoken(stage)} is not that of the stored responses"
        for stage in [*found, *(name for name in entry.evaluation if name not in found)]
        if found.get(stage) != entry.evaluation.get(stage)
    ]


def _stored_evaluation(record: RunRecord, entry: StepEntry) -> list[str]:
    if not record.has_evaluation(entry.step):
        due = _due(record, entry.step) and not entry.evaluation
        return ["an evaluation was due, but none is recorded"] if due else evaluation_findings(entry, None)
    try:
        return evaluation_findings(entry, record.evaluation_columns(entry.step))
    except RecordError as error:
        return [error.message]


def _due(record: RunRecord, step: int) -> bool:
    every: object = _configured(record, "evaluation", "every")
    return isinstance(every, int) and every > 0 and step % every == 0


def _version_findings(entry: StepEntry, columns: Columns) -> Iterator[str]:
    for version in sorted(set(columns["weight_version"].values.tolist()) - {entry.weight_version}):
        yield f"it generated with weight version {entry.weight_version}, but holds samples of version {version}"


def _count_findings(record: RunRecord, columns: Columns) -> Iterator[str]:
    prompts, samples = (_configured(record, "sampling", key) for key in ("prompts_per_step", "samples_per_prompt"))
    if not isinstance(prompts, int) or not isinstance(samples, int):
        return
    held = Counter(prompt for prompt, _ in sample_keys(columns))
    if held.total() != prompts * samples or len(held) != prompts:
        yield (
            f"it holds {held.total()} samples of {len(held)} prompts, where the configuration promises {samples} of"
            f" each of {prompts}"
        )
    elif any(count != samples for count in held.values()):
        yield (
            f"it holds {min(held.values())} to {max(held.values())} samples of each of {prompts} prompts, where the"
            f" configuration promises {samples}"
        )


def _configured(record: RunRecord, section: str, key: str) -> object:
    return record.manifest.config.get(section, {}).get(key)


def _sample_findings(entry: StepEntry, columns: Columns) -> Iterator[str]:
    try:
        require_order(sample_keys(columns))
    except RecordError as error:
        yield error.message
    for stage, digest in asdict(stage_digests(columns)).items():
        if getattr(entry, stage) != digest:
            yield f"the digest of {_spoken(stage)} is not that of the stored samples"
    if entry.reference_log_probs != reference_digest(columns):
        yield "the digest of reference log-probs is not that of the stored samples"
    for number, update in enumerate(entry.updates):
        if update.train_log_probs != update_log_prob_digest(columns, number):
            yield f"update {number}: the digest of train log-probs is not that of the stored samples"
    for stray in sorted(set(columns["update"].values.tolist()) - set(range(len(entry.updates)))):
        yield f"samples of update {stray}, which the step does not list"


def _root_findings(entry: StepEntry) -> Iterator[str]:
    for number, update in enumerate(entry.updates):
        yield from _root_finding(f"update {number}: gradients", update.gradients, update.gradients_root)
    yield from _root_finding("weights", entry.weights, entry.weights_root)
    yield from _root_finding("optimizer", entry.optimizer, entry.optimizer_root)


def _root_finding(what: str, leaves: Digests, root: str) -> Iterator[str]:
    try:
        if merkle_root(leaves) != root:
            yield f"{what}: the root is not that of the {len(leaves)} stored digests"
    except RecordError as error:
        yield f"{what}: {error.message}"


def _float_findings(entry: StepEntry) -> Iterator[str]:
    named = dict(entry.metrics)
    for number, update in enumerate(entry.updates):
        for name in ("loss", "grad_norm", "learning_rate"):
            named[f"update {number}: {name}"] = getattr(update, name)
    for name, text in named.items():
        try:
            exact = float.fromhex(text).hex() == text
        except (ValueError, OverflowError):
            exact = False
        if not exact:
            yield f"{name} is {text!r}, not a number as float.hex writes it"


def _start_findings(record: RunRecord) -> Iterator[str]:
    manifest = record.manifest
    if manifest.initial_weights or manifest.model_root:
        yield from _root_finding("manifest: initial weights", manifest.initial_weights, manifest.model_root)
    yield from settings_findings(record)
    for entry in manifest.resumed:
        kept = entry.step if entry.replaces else entry.recorded
        if not 0 <= entry.step <= entry.recorded or kept > len(record.steps):
            yield (
                f"manifest: resumed at step {entry.step} with {entry.recorded} steps recorded,"
                f" and {len(record.steps)} are there"
            )


def _end_findings(record: RunRecord) -> Iterator[str]:
    manifest = record.manifest
    if manifest.status == "running":
        return
    if manifest.steps != len(record.steps):
        yield f"{STEPS}: the manifest counts {manifest.steps} steps, {len(record.steps)} are there"
    elif manifest.steps_digest != record.steps_digest:
        yield f"{STEPS}: its digest is not the one in the manifest"
    if manifest.status == "complete":
        yield from _stray_files(record)


def _sequence_findings(record: RunRecord) -> Iterator[str]:
    if record.steps and record.steps[0].step != 0:
        yield f"the steps begin with step {record.steps[0].step}; step 0 is missing"
    if record.steps and record.steps[0].weight_version != 0:
        yield f"the first step generated with weight version {record.steps[0].weight_version}, not 0"
    for before, entry in pairwise(record.steps):
        if entry.step != before.step + 1:
            yield f"step {before.step} is followed by step {entry.step}"
        if entry.weight_version != before.weight_version + 1:
            yield (
                f"step {entry.step} generated with weight version {entry.weight_version}, the step before it with"
                f" {before.weight_version}"
            )
    wanted = _configured(record, "run", "steps")
    if record.manifest.status == "complete" and isinstance(wanted, int) and len(record.steps) != wanted:
        yield f"{len(record.steps)} steps are there, where {wanted} were configured and the record is complete"


def _metrics(record: RunRecord, entry: StepEntry) -> list[str]:
    """Metrics that are not what the step's samples, updates and evaluation give; what is stored must be sound."""
    responses = record.evaluation_samples(entry.step) if entry.evaluation else []
    evaluation = by_set(responses, record.manifest.config.get("evaluation", {})) if responses else {}
    return list(metric_findings(entry, record.step_samples(entry.step), evaluation))


def _told_metrics(record: RunRecord) -> Iterator[str]:
    """Where ``metrics.jsonl`` tells another number than the step's line."""
    steps = {entry.step: entry for entry in record.steps}
    try:
        for line in record.told_metrics():
            if type(step := line.get("step", -1)) is not int:
                yield f"{METRICS}: a line's step is {step!r}"
                continue
            entry = steps.get(step)
            for name, text in entry.metrics.items() if entry else ():
                told = line.get(name, text)
                if told is not text and not _same_number(told, text):
                    yield f"{METRICS}: {name} of step {step} is {told}, and {STEPS} says {text}"
    except RecordError as error:
        yield error.message


def _same_number(told: object, text: str) -> bool:
    try:
        return isinstance(told, int | float) and float(told).hex() == text
    except OverflowError:
        return False


def _stray_files(record: RunRecord) -> Iterator[str]:
    steps = {samples_path(record.directory, entry.step).name: entry for entry in record.steps}
    for folder in (SAMPLES, EVALUATION):
        for path in sorted((record.directory / folder).glob("*")):
            if path.name not in steps:
                yield f"{folder}/{path.name} belongs to no step"


def _spoken(stage: str) -> str:
    return stage.replace("rollout_log_probs", "rollout log-probs")
