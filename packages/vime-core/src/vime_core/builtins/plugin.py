"""Entry point ``core`` of the group ``vime``."""

from __future__ import annotations

from collections.abc import Iterable

from vime_core.plugins.markers import hookimpl
from vime_core.plugins.types import (
    AdvantageEstimator,
    ContractEntry,
    DatasetSource,
    DeterminismPolicyEntry,
    LauncherEntry,
    Loss,
    MetricSink,
    Reward,
)


@hookimpl
def vime_advantage_estimators() -> Iterable[AdvantageEstimator]:
    yield AdvantageEstimator(
        "grpo",
        "Reward against the group's mean and spread.",
        "vime_core.rl.advantages:grpo",
        "vime_core.rl.advantages:GrpoOptions",
    )
    yield AdvantageEstimator(
        "rloo",
        "Reward against the mean of the others in the group.",
        "vime_core.rl.advantages:rloo",
        "vime_core.rl.advantages:RlooOptions",
    )

    yield AdvantageEstimator(
        "dr-grpo",
        "Reward against the group's mean.",
        "vime_core.rl.advantages:dr_grpo",
        "vime_core.rl.advantages:DrGrpoOptions",
    )
    yield AdvantageEstimator(
        "reinforce++",
        "Reward against mean and spread of the batch.",
        "vime_core.rl.advantages:reinforce_plus_plus",
        "vime_core.rl.advantages:ReinforceOptions",
    )
    yield AdvantageEstimator(
        "reinforce++-baseline",
        "Reward against the group's mean and the batch's spread.",
        "vime_core.rl.advantages:reinforce_plus_plus_baseline",
        "vime_core.rl.advantages:ReinforceOptions",
    )


@hookimpl
def vime_losses() -> Iterable[Loss]:
    yield Loss(
        "ppo-clip",
        "PPO with separate low and high clip, optional KL.",
        "vime_core.rl.losses:ppo_clip",
        "vime_core.rl.losses:PpoClipOptions",
    )
    yield Loss(
        "gspo",
        "PPO with the ratio of the whole response.",
        "vime_core.rl.losses:gspo",
        "vime_core.rl.losses:GspoOptions",
    )
    yield Loss(
        "cispo",
        "Policy gradient with a clipped weight.",
        "vime_core.rl.losses:cispo",
        "vime_core.rl.losses:CispoOptions",
    )


@hookimpl
def vime_datasets() -> Iterable[DatasetSource]:
    yield DatasetSource(
        "jsonl",
        "Question and answer, or messages and label, a line each.",
        "vime_core.data.files:open_jsonl",
        "vime_core.data.files:JsonlOptions",
    )
    yield DatasetSource(
        "parquet",
        "The same columns in a Parquet file.",
        "vime_core.data.files:open_parquet",
        "vime_core.data.files:ParquetOptions",
    )
    yield DatasetSource(
        "reasoning-gym",
        "Any task of reasoning-gym by name and seed.",
        "vime_core.data.reasoning:open_reasoning_gym",
        "vime_core.data.reasoning:ReasoningGymOptions",
    )
    yield DatasetSource(
        "mixture",
        "Several files with weights.",
        "vime_core.data.mixture:open_mixture",
        "vime_core.data.mixture:MixtureOptions",
    )


@hookimpl
def vime_rewards() -> Iterable[Reward]:
    yield Reward(
        "math-verify",
        "Mathematical equality with the label.",
        "vime_core.rewards.symbolic:make_math_verify",
        "vime_core.rewards.symbolic:MathVerifyOptions",
    )
    yield Reward(
        "exact",
        "The right number or string.",
        "vime_core.rewards.exact:make_exact",
        "vime_core.rewards.exact:ExactOptions",
    )
    yield Reward(
        "reasoning-gym",
        "The task's own scorer.",
        "vime_core.rewards.reasoning:make_reasoning_gym",
        "vime_core.rewards.reasoning:ReasoningGymRewardOptions",
    )
    yield Reward(
        "length",
        "How close a response is to a length in characters.",
        "vime_core.rewards.length:make_length",
        "vime_core.rewards.length:LengthOptions",
    )


@hookimpl
def vime_determinism_policies() -> Iterable[DeterminismPolicyEntry]:
    yield DeterminismPolicyEntry("off", "Promises nothing; records everything.", "vime_core.determinism.policy:OFF")
    yield DeterminismPolicyEntry(
        "reproducible", "The same run twice gives the same bits.", "vime_core.determinism.policy:REPRODUCIBLE"
    )


@hookimpl
def vime_contracts() -> Iterable[ContractEntry]:
    yield ContractEntry("dense/v1", "Dense decoders: Qwen2, Qwen3, Llama.", "vime_core.numerics.contract:DENSE_V1")


@hookimpl
def vime_metric_sinks() -> Iterable[MetricSink]:
    yield MetricSink("console", "One line a step.", "vime_core.sinks.console:open_sink")
    yield MetricSink("jsonl", "metrics.jsonl in the record.", "vime_core.sinks.jsonl:open_sink")
    yield MetricSink("tensorboard", "TensorBoard event files in the record.", "vime_core.sinks.tensorboard:open_sink")
    yield MetricSink("wandb", "Weights & Biases, offline in the record.", "vime_core.sinks.wandb:open_sink")
    yield MetricSink("trackio", "trackio, on this machine.", "vime_core.sinks.trackio:open_sink")


@hookimpl
def vime_launchers() -> Iterable[LauncherEntry]:
    yield LauncherEntry(
        "inline", "Everything on this machine; the trainer in the driver's process.", "vime_core.launch:InlineLauncher"
    )
    yield LauncherEntry(
        "ray",
        "A Ray actor for each trainer rank and each engine, on one machine or several.",
        "vime_core.ray.launcher:RayLauncher",
        "vime_core.ray.options:RayOptions",
    )
