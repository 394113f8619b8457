"""The configuration of a run. Frozen; unknown keys are errors.

A section that selects a plugin (``trainer.backend = "megatron"``) has a table with the plugin's name
(``[trainer.megatron]``) that belongs to the plugin and is typed by it; the loader validates it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, SerializeAsAny, model_validator

PositiveInt = Annotated[int, Field(gt=0)]
NonNegativeInt = Annotated[int, Field(ge=0)]
NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Probability = Annotated[float, Field(gt=0, le=1)]


class Section(BaseModel):
    """Base of every section."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class PluginSection(Section):
    """A section that selects plugins; ``plugin_options`` is filled by the loader, never by a file."""

    plugin_options: Mapping[str, SerializeAsAny[BaseModel]] = Field(default_factory=dict[str, BaseModel])


class RunSection(Section):
    name: str = "run"
    seed: NonNegativeInt = 0
    steps: PositiveInt = Field(1, description="Rollout steps; each holds algorithm.updates_per_rollout train steps.")
    output: Path = Field(Path("runs/run"), description="Directory of the run record; must not exist.")
    policy: str = "reproducible"
    launcher: str = "inline"
    sinks: tuple[str, ...] = ("console", "jsonl")
    checkpoint_every: NonNegativeInt = Field(0, description="Steps between checkpoints; 0: none.")
    cache: Path = Field(Path("~/.cache/vime"), description="Where model sources keep what they made.")


class ModelSection(PluginSection):
    source: str = Field("directory", description="Model source plugin; its table says which model.")


class DataSection(PluginSection):
    source: str = Field(description="Dataset source plugin.")
    system_prompt: str = ""
    overlong: Literal["error", "drop"] = Field("error", description="A prompt that does not fit the context.")


class EvaluationSection(PluginSection):
    every: NonNegativeInt = Field(0, description="Steps between evaluations; 0: none. Step 0 is included.")
    source: str = Field("", description="Dataset source plugin; empty: the training source.")
    prompts: PositiveInt = 32
    max_tokens: PositiveInt = 128
    temperature: NonNegativeFloat = 0.0


class RewardSection(PluginSection):
    name: str
    timeout_s: PositiveFloat = 30.0
    workers: PositiveInt = 1


class AlgorithmSection(PluginSection):
    advantage: str = "grpo"
    loss: str = "ppo-clip"
    reduction: Literal["token", "sample"] = "token"
    updates_per_rollout: PositiveInt = 1
    old_log_probs: Literal["reuse", "recompute", "rollout"] = Field(
        "reuse",
        description="reuse the training forward (one update a rollout), recompute before training, or the rollout's.",
    )

    @model_validator(mode="after")
    def _reuse_needs_one_update(self) -> AlgorithmSection:
        if self.old_log_probs == "reuse" and self.updates_per_rollout > 1:
            raise ValueError(
                "algorithm.old_log_probs = 'reuse' holds for one update a rollout, but algorithm.updates_per_rollout"
                f" = {self.updates_per_rollout}; use 'recompute' or 'rollout'"
            )
        return self


class SamplingSection(Section):
    prompts_per_step: PositiveInt = 8
    samples_per_prompt: PositiveInt = 4
    max_tokens: PositiveInt = 128
    temperature: NonNegativeFloat = 1.0
    top_p: Probability = 1.0
    top_k: NonNegativeInt = 0
    stop_token_ids: tuple[int, ...] = ()


class RolloutSection(PluginSection):
    backend: str = "vllm"
    context_length: PositiveInt = Field(1024, description="Prompt and response tokens of one sequence.")
    timeout_s: PositiveFloat = Field(600.0, description="Longest wait for one call of the engine.")
    threads: PositiveInt | None = Field(None, description="CPU threads of an engine; None: as the machine says.")


class TrainerSection(PluginSection):
    backend: str = "megatron"
    dtype: Literal["bf16", "fp32"] = "bf16"
    lr: NonNegativeFloat = 1e-6
    betas: tuple[Probability, Probability] = (0.9, 0.98)
    eps: PositiveFloat = 1e-8
    weight_decay: NonNegativeFloat = 0.1
    clip_grad: NonNegativeFloat = Field(1.0, description="Largest gradient norm; 0: no clipping.")
    warmup_steps: NonNegativeInt = 0
    token_budget: PositiveInt = Field(9216, description="Most tokens of one packed microbatch.")
    threads: PositiveInt | None = Field(None, description="CPU threads of a trainer rank; None: as the machine says.")


class PluginsSection(Section):
    allow: tuple[str, ...] | None = Field(None, description="Only these installed plugins load; None: all.")
    disable: tuple[str, ...] = ()
    modules: tuple[str, ...] = Field((), description="Extra modules that load as plugins.")


class RunConfig(Section):
    """A whole run."""

    run: RunSection
    model: ModelSection
    data: DataSection
    reward: RewardSection
    evaluation: EvaluationSection = EvaluationSection()
    algorithm: AlgorithmSection = AlgorithmSection()
    sampling: SamplingSection = SamplingSection()
    rollout: RolloutSection = RolloutSection()
    trainer: TrainerSection = TrainerSection()
    plugins: PluginsSection = PluginsSection()

    @model_validator(mode="after")
    def _lengths_fit(self) -> RunConfig:
        if self.sampling.max_tokens >= self.rollout.context_length:
            raise ValueError(
                f"sampling.max_tokens = {self.sampling.max_tokens} leaves no room for a prompt in"
                f" rollout.context_length = {self.rollout.context_length}"
            )
        if self.trainer.token_budget < self.rollout.context_length:
            raise ValueError(
                f"trainer.token_budget = {self.trainer.token_budget} is less than one sequence of"
                f" rollout.context_length = {self.rollout.context_length}"
            )
        return self

    def options(self, section: str, plugin: str) -> BaseModel:
        """The validated table of a plugin: ``config.options("trainer", "megatron")``."""
        holder: PluginSection = getattr(self, section)
        return holder.plugin_options[plugin]
