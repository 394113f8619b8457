"""What a run record holds. Floats that are compared are hex (`float.hex`), never decimals."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal

from pydantic import BaseModel, ConfigDict

FORMAT: Final = "vime-record/2"
Status = Literal["running", "complete", "failed", "interrupted"]
Digests = Mapping[str, str]
"""Leaf digest (hex) by tensor name, in the tensors' own order."""


class Entry(BaseModel):
    """Base of everything in a record's JSON: frozen, and unknown keys are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class PluginEntry(Entry):
    """A plugin that was present, and where it came from."""

    name: str
    distribution: str
    version: str
    sources: str = ""
    """blake3 of the package of the distribution's entry point; empty in older records and for ``plugins.modules``."""


class ProcessEntry(Entry):
    """A process as it was read back after its start."""

    role: str
    rank: int
    pid: int
    environment: Mapping[str, str]
    settings: Mapping[str, Any]
    versions: Mapping[str, str]
    hardware: Mapping[str, Any]


class ResumeEntry(Entry):
    """A stopped run that went on: from where, and in which processes."""

    step: int
    """The first step that was done after the checkpoint (or after the start, without one)."""
    recorded: int
    """How many steps the record held; those from ``step`` on were done again."""
    replaces: bool = False
    """They were done anew and replaced, as under the policy `off`; else compared with what was recorded."""
    vime_version: str
    plugins: tuple[PluginEntry, ...]
    platform: Mapping[str, str]
    processes: tuple[ProcessEntry, ...]


class Manifest(Entry):
    """``manifest.json``: everything that decides a run's bits, and what happened to it."""

    format: str = FORMAT
    run_id: str = ""
    """Drawn by the writer, so that a record and its copy are not taken for two runs."""
    vime_version: str
    config: Mapping[str, Mapping[str, Any]]
    config_digest: str = ""
    """blake3 of ``config`` (`vime_core.record.settings`), by the writer."""
    policy: str
    contract: str = ""
    plugins: tuple[PluginEntry, ...] = ()
    module_directories: tuple[str, ...] = ()
    """Where modules of ``plugins.modules`` were looked for, so that a resumed run finds them."""
    processes: tuple[ProcessEntry, ...] = ()
    platform: Mapping[str, str]
    model_root: str = ""
    """Merkle root over ``initial_weights``; empty when they were not digested."""
    initial_weights: Digests = {}
    resumed: tuple[ResumeEntry, ...] = ()
    """Each time that the run was stopped and went on."""
    status: Status = "running"
    error: str = ""
    steps: int = 0
    """Steps recorded, and blake3 of ``steps.jsonl``; both are written when the run ends."""
    steps_digest: str = ""


class UpdateEntry(Entry):
    """One optimizer step. ``train_log_probs`` is a digest; the values stand with the samples."""

    loss: str
    grad_norm: str
    learning_rate: str
    train_log_probs: str
    gradients: Digests
    gradients_root: str
    samples: int = 0
    """Samples that it trained on, the next ones in sample order; 0 stands for all when it is a step's only update."""


class StepEntry(Entry):
    """One line of ``steps.jsonl``. Digests are in the order in which a step computes them."""

    step: int
    weight_version: int
    prompts: str
    tokens: str
    rollout_log_probs: str
    rewards: str
    reference_log_probs: str = ""
    """Of the reference model, all samples; empty where there is none."""
    advantages: str
    updates: tuple[UpdateEntry, ...]
    weights: Digests
    weights_root: str
    optimizer: Digests
    optimizer_root: str
    metrics: Mapping[str, str]
    evaluation: Digests = {}
    """Stages of the evaluation before the step: prompts, tokens, rollout_log_probs, rewards; empty: none was due."""
    timings: Mapping[str, float] = {}


class Seal(Entry):
    """``seal.json``: blake3 of each file of a closed record by its path, ascending, and the Merkle root over them."""

    format: str
    files: Digests
    digest: str
