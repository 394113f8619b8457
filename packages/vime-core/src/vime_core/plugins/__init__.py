"""Plugin system: hook specifications, registrations and the manager that finds them."""

from __future__ import annotations

from vime_core.plugins.markers import hookimpl
from vime_core.plugins.types import (
    AdvantageEstimator,
    AlignedSide,
    AlignmentCheck,
    Command,
    ContractEntry,
    ContractModel,
    DatasetSource,
    DeterminismPolicyEntry,
    KernelEntry,
    LauncherEntry,
    Loss,
    MetricSink,
    ModelSource,
    ModelStructure,
    Registration,
    Reward,
    RolloutEngine,
    TrainerBackend,
)

__all__ = [
    "AdvantageEstimator",
    "AlignedSide",
    "AlignmentCheck",
    "Command",
    "ContractEntry",
    "ContractModel",
    "DatasetSource",
    "DeterminismPolicyEntry",
    "KernelEntry",
    "LauncherEntry",
    "Loss",
    "MetricSink",
    "ModelSource",
    "ModelStructure",
    "Registration",
    "Reward",
    "RolloutEngine",
    "TrainerBackend",
    "hookimpl",
]
