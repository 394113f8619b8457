"""Where a stopped run goes on, read from its record, and what must be as it was before it may."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from blake3 import blake3

from vime_core import __version__
from vime_core.backends import Rollout, Trainer
from vime_core.config.layers import overlay, parse_override
from vime_core.config.load import resolve
from vime_core.config.schema import RunConfig
from vime_core.config.selectors import refuse_unselected
from vime_core.determinism.policy import DeterminismPolicy
from vime_core.errors import ConfigError, ContractViolation, RecordError, VimeError
from vime_core.loop.checkpoint import TRAINER, LoopState, last_checkpoint, read_checkpoint
from vime_core.loop.weights import require_equal_weights
from vime_core.plugins.manager import PluginManager
from vime_core.record.digest import digest_tensors, merkle_root
from vime_core.record.lock import DirectoryLock
from vime_core.record.reader import RunRecord
from vime_core.record.schema import Manifest, PluginEntry
from vime_core.record.settings import CHANGEABLE, changed_settings

log = logging.getLogger("vime")

_NO_KEY: Final = ("VIME-CONFIG-004", "VIME-CONFIG-005")
"""Codes of a key that is unknown, or has another name here."""


@dataclass(frozen=True)
class Resumption:
    """Where a run goes on.

    Args:
        record: what was recorded before it was stopped.
        checkpoint: its last checkpoint; None: it goes on from the start.
        state: the loop state of the checkpoint.
    """

    record: RunRecord
    checkpoint: Path | None
    state: LoopState | None

    @property
    def next_step(self) -> int:
        return self.state.next_step if self.state else 0

    @property
    def next_prompt(self) -> int:
        return int(self.state.loop["next_prompt"]) if self.state else 0


def open_resumption(
    directory: Path, overrides: Sequence[str], last: Mapping[str, Any] | None = None
) -> tuple[RunConfig, PluginManager, Resumption]:
    """Configuration, plugins and place of a run that was stopped.

    Raises:
        ConfigError: an override changes what decides a step, or leaves recorded steps out.
        RecordError: the directory is no record, is still written, is complete, or is damaged; or its last checkpoint is
            damaged or of another run.
    """
    record = RunRecord.open(directory)
    DirectoryLock(directory).release()
    config, plugins = _configuration(record.manifest, directory, overrides, last or {})
    if record.manifest.status == "complete" and len(record.steps) >= config.run.steps:
        raise RecordError(
            f"the run {str(directory)!r} is complete: all {config.run.steps} steps are recorded",
            remedy="Nothing is left to do; to go on further, add --set run.steps=N.",
            code="VIME-RECORD-051",
        )
    if len(record.steps) > config.run.steps:
        raise ConfigError(
            f"run.steps = {config.run.steps}, and the record {str(directory)!r} holds {len(record.steps)} steps"
            " already",
            remedy=f"Set run.steps to at least {len(record.steps)}: what is recorded is not thrown away.",
            code="VIME-CONFIG-016",
        )
    if findings := record.check().findings:
        raise RecordError(
            f"the record {str(directory)!r} contradicts itself: {findings[0]}",
            remedy="A damaged record is not continued; run again.",
            code="VIME-RECORD-006",
        )
    return config, plugins, _place(record, config)


def require_same_software(manifest: Manifest, policy: DeterminismPolicy, plugins: PluginManager) -> None:
    """A run that promises the same bits goes on with the versions and the sources that it began with.

    Raises:
        ConfigError: vime or a plugin has another version or other sources, or is another.
    """
    if not policy.repeats:
        return
    recorded = {"vime": manifest.vime_version, **{p.name: f"{p.distribution} {p.version}" for p in manifest.plugins}}
    present = {"vime": __version__, **{p.name: f"{p.distribution} {p.version}" for p in plugin_entries(plugins)}}
    for name in {**recorded, **present}:
        if recorded.get(name) != present.get(name):
            raise ConfigError(
                f"the run was recorded with {name} {recorded.get(name, 'absent')}, and this is"
                f" {present.get(name, 'absent')}",
                remedy="Resume with the software that the run began with.",
                code="VIME-CONFIG-017",
            )
    _require_same_sources(manifest, plugin_entries(plugins))


def _require_same_sources(manifest: Manifest, present: Sequence[PluginEntry]) -> None:
    times = [manifest.plugins, *(entry.plugins for entry in manifest.resumed)]
    recorded = {plugin.name: plugin.sources for plugins in reversed(times) for plugin in plugins if plugin.sources}
    for plugin in present:
        origin = f"{plugin.distribution} {plugin.version} (plugin {plugin.name!r})"
        began = recorded.get(plugin.name, "")
        if began and began != plugin.sources:
            raise ConfigError(
                f"the run was recorded with sources {began[:16]} of {origin}, and this is"
                f" {plugin.sources[:16] or 'without files'}: a file of its package was edited, added or removed",
                remedy="Put the package's files back as they were when the run began, or start a new run.",
                code="VIME-CONFIG-017",
            )
        if plugin.sources and not began:
            log.warning("the record does not hold the sources of %s: whether they are the same is unknown", origin)


def plugin_entries(plugins: PluginManager) -> tuple[PluginEntry, ...]:
    """The plugins of this process as a record names them."""
    return tuple(
        PluginEntry(name=info.name, distribution=info.distribution, version=info.version, sources=info.sources)
        for info in plugins.plugins()
    )


def require_same_start(manifest: Manifest, initial_weights: Mapping[str, str], contract: str) -> None:
    """The model must be the one that the run began with, and so must the contract.

    Raises:
        RecordError: a weight of the model or the contract is another.
    """
    recorded = manifest.initial_weights
    if not recorded:
        return
    changed = [name for name in {**recorded, **initial_weights} if recorded.get(name) != initial_weights.get(name)]
    what = f"weight {changed[0]!r} of the model" if changed else "the alignment contract"
    if changed or manifest.contract != contract:
        raise RecordError(
            f"{what} is not what the run began with",
            remedy="Resume with the same model and contract, or start a new run.",
            code="VIME-RECORD-055",
        )


def restore(resumption: Resumption, trainer: Trainer, rollout: Rollout) -> int:
    """Load the checkpoint into both sides, and return the weight version.

    Raises:
        RecordError: the trainer refuses its part.
        ContractViolation: weights or optimizer state are not what was saved.
    """
    state = resumption.state
    if resumption.checkpoint is None or state is None:
        return 0
    trainer.load(resumption.checkpoint / TRAINER)
    weights = digest_tensors(trainer.weights())
    _require_root("weights", resumption.checkpoint, merkle_root(weights), state.weights_root)
    optimizer = merkle_root(digest_tensors(trainer.optimizer_state()))
    _require_root("optimizer state", resumption.checkpoint, optimizer, state.optimizer_root)
    held = rollout.update_weights(trainer.weights(), state.weight_version)
    require_equal_weights(weights, held, state.weight_version)
    return state.weight_version


def _configuration(
    manifest: Manifest, directory: Path, overrides: Sequence[str], last: Mapping[str, Any]
) -> tuple[RunConfig, PluginManager]:
    raw = overlay(manifest.config, {})
    for override in overrides:
        key = override.partition("=")[0].strip()
        if key not in CHANGEABLE:
            _refuse_unknown(overlay(manifest.config, parse_override(override)), _directories(manifest))
            raise ConfigError(
                f"--set {key} would change the run that is resumed",
                remedy=f"Only {', '.join(CHANGEABLE)} may change; for anything else start a new run.",
                code="VIME-CONFIG-016",
            )
        raw = overlay(raw, parse_override(override))
    config, plugins = resolve(overlay(overlay(raw, last), {"run": {"output": str(directory)}}), _directories(manifest))
    refuse_unselected(overrides, config, plugins)
    return config, plugins


def _refuse_unknown(raw: dict[str, Any], directories: tuple[Path, ...]) -> None:
    """Raise ConfigError when a key does not exist; whatever else is wrong with its value does not matter."""
    try:
        resolve(raw, directories)
    except VimeError as error:
        if error.code in _NO_KEY:
            raise


def _directories(manifest: Manifest) -> tuple[Path, ...]:
    return tuple(Path(directory) for directory in manifest.module_directories)


def _place(record: RunRecord, config: RunConfig) -> Resumption:
    checkpoint = last_checkpoint(record.directory)
    if checkpoint is None:
        return Resumption(record, None, None)
    state = read_checkpoint(checkpoint)
    foreign = next(_foreign(state, record, config, checkpoint), "")
    if foreign:
        raise RecordError(
            f"checkpoint {str(checkpoint)!r} does not belong to this record: {foreign}",
            remedy="Move this checkpoint out of the record: the run then goes on from the one before it.",
            code="VIME-RECORD-054",
        )
    return Resumption(record, checkpoint, state)


def _foreign(state: LoopState, record: RunRecord, config: RunConfig, checkpoint: Path) -> Iterator[str]:
    """What a checkpoint says that contradicts the record, in words."""
    lines = record.step_lines[: state.next_step]
    if checkpoint.name != f"step-{state.next_step:06d}":
        yield f"it is of step {state.next_step}"
    if state.run_id != record.manifest.run_id:
        yield f"it is of run {state.run_id!r}, the record of run {record.manifest.run_id!r}"
    if changed := next(changed_settings(state.settings, record.manifest.config), ""):
        yield f"it is of other settings: {changed}"
    if state.run_seed != config.run.seed:
        yield f"it is of run.seed = {state.run_seed}"
    if len(lines) != state.next_step or blake3(b"".join(lines)).hexdigest() != state.steps_digest:
        yield f"it follows other steps than the {len(record.steps)} that are recorded"
        return
    last = record.steps[state.next_step - 1]
    for what in ("weights_root", "optimizer_root"):
        if getattr(state, what) != getattr(last, what):
            yield f"its {what} is not that of step {last.step}"


def _require_root(what: str, checkpoint: Path, found: str, wanted: str) -> None:
    if found != wanted:
        raise ContractViolation(
            f"after loading checkpoint {str(checkpoint)!r}, the trainer's {what} is not what was saved",
            remedy="This is an error of the trainer plugin; report it with the run record.",
            code="VIME-ALIGN-007",
        )
