"""The configuration of a run. Frozen; unknown keys are errors.

A section that selects a plugin (``trainer.backend = "megatron"``) has a table with the plugin's name
(``[trainer.megatron]``) that belongs to the plugin and is typed by it; the loader validates it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, SerializeAsAny, model_validator

from vime_core.config.paths import LatePath, UserPath

PositiveInt = Annotated[int, Field(gt=0)]
ActorCount = Annotated[int, Field(gt=0, le=65536)]
NonNegativeInt = Annotated[int, Field(ge=0)]
NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Decay = Annotated[float, Field(gt=0, lt=1)]
Probability = Annotated[float, Field(gt=0, le=1)]


def _tapped_sample(value: str) -> str:
    if not re.fullmatch(r"[0-9]+:[0-9]+:[0-9]+", value):
        raise ValueError(f"{value!r} is not of the form STEP:PROMPT:SAMPLE, such as '0:3:1'")
    return value


class Section(BaseModel):
    """Base of every section."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class PluginSection(Section):
    """A section that selects plugins; ``plugin_options`` is filled by the loader, never by a file."""

    plugin_options: Mapping[str, SerializeAsAny[BaseModel]] = Field(default_factory=dict[str, BaseModel])


class RunSection(PluginSection):
    """What a run is called, how long it is, and what it promises."""

    name: str = Field(default="run", description="For people; it decides no bit.")
    seed: NonNegativeInt = Field(default=0, description="Decides prompt order and the seed of each sample.")
    steps: PositiveInt = Field(
        default=1, description="Rollout steps; each holds algorithm.updates_per_rollout train steps."
    )
    output: UserPath = Field(default=Path("runs/run"), description="Directory of the run record; must not exist.")
    policy: str = Field(default="reproducible", description="Determinism policy plugin: what the run promises.")
    launcher: str = Field(default="inline", description="Launcher plugin: where ranks and engines run.")
    sinks: tuple[str, ...] = Field(default=("console", "jsonl", "tensorboard"), description="Metric sink plugins.")
    checkpoint_every: NonNegativeInt = Field(default=0, description="Steps between checkpoints; 0: none.")
    taps: tuple[Annotated[str, AfterValidator(_tapped_sample)], ...] = Field(
        default=(),
        examples=[("0:3:1",)],
        description="Samples whose taps are recorded, as STEP:PROMPT:SAMPLE; needs a contract.",
    )
    cache: LatePath = Field(default=Path("~/.cache/vime"), description="Where model sources keep what they made.")


class ModelSection(PluginSection):
    """Where the model comes from."""

    source: str = Field(default="directory", description="Model source plugin; its table says which model.")


class DataSection(PluginSection):
    """Where prompts come from."""

    source: str = Field(description="Dataset source plugin.")
    system_prompt: str = Field(default="", description="Put before each conversation; empty: none.")
    overlong: Literal["error", "drop"] = Field(default="error", description="A prompt that does not fit the context.")


class EvaluationSet(PluginSection):
    """One evaluation set by name; what it leaves out is as in [evaluation]."""

    source: str = Field(description="Dataset source plugin; its table stands in this one.")
    prompts: PositiveInt | None = Field(default=None, description="The first so many of the dataset.")
    max_tokens: PositiveInt | None = Field(default=None, description="Longest response.")
    temperature: NonNegativeFloat | None = Field(default=None, description="0: greedy.")


class EvaluationSection(PluginSection):
    """How the policy is evaluated during a run."""

    every: NonNegativeInt = Field(default=0, description="Steps between evaluations; 0: none. Step 0 is included.")
    source: str = Field(
        default="", description="Dataset source plugin; empty: the training source, or none where there are sets."
    )
    prompts: PositiveInt = Field(default=32, description="The first so many of the dataset.")
    max_tokens: PositiveInt = Field(default=128, description="Longest response.")
    temperature: NonNegativeFloat = Field(default=0.0, description="0: greedy.")
    sets: Mapping[Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]+$")], EvaluationSet] = Field(
        default_factory=dict[str, EvaluationSet],
        description="Further sets by name, with metrics evaluation/NAME/...: [evaluation.sets.NAME].",
    )

    @model_validator(mode="after")
    def _sets_are_evaluated(self) -> EvaluationSection:
        if self.sets and not self.every:
            raise ValueError(
                f"evaluation.sets has {', '.join(self.sets)}, but evaluation.every = 0 evaluates nothing; set"
                " evaluation.every, or leave the sets out"
            )
        return self

    @property
    def temperatures(self) -> dict[str, float]:
        """The temperature of each table that has one, by its path; none without evaluations."""
        own = {f"evaluation.sets.{name}": one.temperature for name, one in self.sets.items()}
        given = {name: temperature for name, temperature in own.items() if temperature is not None}
        return {"evaluation": self.temperature, **given} if self.every else {}


class RewardSection(PluginSection):
    """How responses are scored."""

    name: str = Field(description="Reward plugin.")
    timeout_s: PositiveFloat = Field(default=30.0, description="Longest time for one response; then the run ends.")
    timeout_reward: float | None = Field(
        default=None,
        allow_inf_nan=False,
        description="What a response scores that took too long; None: that is an error.",
    )
    workers: PositiveInt = Field(default=1, description="Processes that score.")


class CorrectionSection(Section):
    """Importance correction of what the engine sampled with against what the trainer computes."""

    level: Literal["off", "token", "sequence"] = Field(default="off", description="Ratio of tokens or of responses.")
    mode: Literal["truncate", "clip", "mask"] = Field(
        default="truncate", description="At most high; within low and high; or 0 outside of them."
    )
    low: NonNegativeFloat = Field(default=0.5, description="Lower bound of the ratio.")
    high: PositiveFloat = Field(default=2.0, description="Upper bound of the ratio.")
    reject: bool = Field(default=False, description="Drop a response whose own ratio is outside the bounds.")

    @property
    def active(self) -> bool:
        return self.level != "off" or self.reject

    @model_validator(mode="after")
    def _around_one(self) -> CorrectionSection:
        if self.low > 1.0:
            raise ValueError(f"algorithm.correction.low = {self.low} {_LEAVES_OUT} at most 1")
        if self.high < 1.0:
            raise ValueError(f"algorithm.correction.high = {self.high} {_LEAVES_OUT} at least 1")
        return self

    @model_validator(mode="after")
    def _bounds_are_used(self) -> CorrectionSection:
        """Only where they are not the defaults: a resolved configuration holds those too."""
        fields = CorrectionSection.model_fields
        for name in ("mode", "low", "high") if not self.active else ("mode",) if self.level == "off" else ():
            if (value := getattr(self, name)) != fields[name].default:
                raise ValueError(
                    f"algorithm.correction.{name} = {value!r} corrects nothing, since algorithm.correction.level ="
                    f" 'off'; set the level to 'token' or 'sequence', or leave {name} out"
                )
        return self


_LEAVES_OUT: Final = "leaves out the ratio 1, where engine and trainer agree; set it to"


class AlgorithmSection(PluginSection):
    """How samples become gradients."""

    advantage: str = Field(default="grpo", description="Advantage estimator plugin.")
    loss: str = Field(default="ppo-clip", description="Loss plugin.")
    reduction: Literal["token", "sample", "constant"] = Field(
        default="token",
        description="What counts alike: tokens, samples, or tokens over samples x sampling.max_tokens.",
    )
    overlong: Literal["keep", "mask", "drop"] = Field(
        default="keep",
        description="Responses that ran into sampling.max_tokens: train on them, on none of their tokens (mask), or"
        " leave them out of their groups' advantages too (drop).",
    )
    overlong_buffer: NonNegativeInt = Field(
        default=0,
        description="The last tokens before sampling.max_tokens, over which a response's reward loses up to"
        " overlong_weight; 0: none.",
    )
    overlong_weight: NonNegativeFloat = Field(default=1.0, description="What the longest response loses.")
    reward_kl: NonNegativeFloat = Field(
        default=0.0, description="Weight of a response's KL to the reference model, taken off its reward; 0: none."
    )
    reference_update_every: NonNegativeInt = Field(
        default=0, description="Steps after which the reference model becomes the policy; 0: never."
    )
    correction: CorrectionSection = Field(
        default_factory=CorrectionSection, description="Importance correction of rollout against trainer."
    )
    updates_per_rollout: PositiveInt = Field(
        default=1, description="Optimizer steps that share the samples of a rollout step."
    )
    old_log_probs: Literal["reuse", "recompute", "rollout"] = Field(
        default="reuse",
        description="reuse the training forward (one update a rollout), recompute before training, or the rollout's.",
    )

    @model_validator(mode="after")
    def _weight_has_a_buffer(self) -> AlgorithmSection:
        if (
            not self.overlong_buffer
            and self.overlong_weight != AlgorithmSection.model_fields["overlong_weight"].default
        ):
            raise ValueError(
                f"algorithm.overlong_weight = {self.overlong_weight} weighs nothing, since algorithm.overlong_buffer ="
                " 0; set the buffer, or leave the weight out"
            )
        return self

    @model_validator(mode="after")
    def _reuse_needs_one_update(self) -> AlgorithmSection:
        if self.old_log_probs == "reuse" and self.updates_per_rollout > 1:
            raise ValueError(
                "algorithm.old_log_probs = 'reuse' holds for one update a rollout, but algorithm.updates_per_rollout"
                f" = {self.updates_per_rollout}; use 'recompute' or 'rollout'"
            )
        if self.correction.active and self.old_log_probs != "recompute":
            raise ValueError(
                "algorithm.correction needs the trainer's log-probs before training, but algorithm.old_log_probs ="
                f" {self.old_log_probs!r}; use 'recompute'"
            )
        return self


class SamplingSection(Section):
    """How responses are sampled in training."""

    prompts_per_step: PositiveInt = Field(default=8, description="Prompts of a rollout step.")
    samples_per_prompt: PositiveInt = Field(default=4, description="Responses to each prompt: its group.")
    dynamic_rounds: NonNegativeInt = Field(
        default=0,
        description="Leave out groups of equal rewards and go on with the next prompts, at most so many rounds of"
        " prompts_per_step; 0: off.",
    )
    max_tokens: PositiveInt = Field(default=128, description="Longest response.")
    temperature: NonNegativeFloat = Field(default=1.0, description="Of sampling and of the trainer's log-probs alike.")
    top_p: Probability = Field(default=1.0, description="1: off.")
    top_k: NonNegativeInt = Field(default=0, description="0: off.")
    stop_token_ids: tuple[int, ...] = Field(
        default=(), description="Tokens that end a response, besides the model's own."
    )


class RolloutSection(PluginSection):
    """The engine that generates."""

    backend: str = Field(default="vllm", description="Rollout plugin.")
    engines: ActorCount = Field(
        default=1, description="Engines that generate; prompt number n goes to engine n modulo engines."
    )
    context_length: PositiveInt = Field(default=1024, description="Prompt and response tokens of one sequence.")
    timeout_s: PositiveFloat = Field(default=600.0, description="Longest wait for one call of the engine.")
    threads: PositiveInt | None = Field(
        default=None, description="CPU threads of an engine; None: as the machine says."
    )


class TrainerSection(PluginSection):
    """The trainer and its optimizer."""

    backend: str = Field(default="megatron", description="Trainer plugin.")
    dtype: Literal["bf16", "fp32"] = Field(
        default="bf16", description="Of weights and engine; masters and moments are fp32."
    )
    lr: NonNegativeFloat = Field(default=1e-6, description="Learning rate after warm-up, constant.")
    betas: tuple[Decay, Decay] = Field(default=(0.9, 0.98), description="Of Adam.")
    eps: PositiveFloat = Field(default=1e-8, description="Of Adam.")
    weight_decay: NonNegativeFloat = Field(default=0.1, description="Decoupled.")
    clip_grad: NonNegativeFloat = Field(default=1.0, description="Largest gradient norm; 0: no clipping.")
    warmup_steps: NonNegativeInt = Field(default=0, description="Optimizer steps of linear warm-up.")
    token_budget: PositiveInt = Field(default=9216, description="Most tokens of one packed microbatch.")
    threads: PositiveInt | None = Field(
        default=None, description="CPU threads of a trainer rank; None: as the machine says."
    )


class AlignmentSection(Section):
    """Whether trainer and engine compute the same operations, bit for bit."""

    contract: str = Field(
        default="", description="Alignment contract plugin, such as dense/v1; empty: none is promised."
    )
    provider: str = Field(
        default="cpu", description="Implementation of the contract's operations: cpu, cuda or reference."
    )
    linear: str = Field(
        default="auto",
        description="Kernels of its linear: auto: those offered to the provider, weight by weight, where they have its"
        " bits; own: none of them; or those named, such as deepgemm, which must have its bits.",
    )
    attention: str = Field(
        default="auto",
        description="Kernels of its attention, which have bits of their own: auto: those offered to the provider, for"
        " the head sizes that they cover; own: none of them; or those named, such as fa3.",
    )


class PluginsSection(Section):
    """Which plugins a run may use."""

    allow: tuple[str, ...] | None = Field(default=None, description="Only these installed plugins load; None: all.")
    disable: tuple[str, ...] = Field(default=(), description="These installed plugins do not load.")
    modules: tuple[str, ...] = Field(default=(), description="Extra modules that load as plugins.")


class RunConfig(Section):
    """A whole run."""

    run: RunSection
    model: ModelSection
    data: DataSection
    reward: RewardSection
    evaluation: EvaluationSection = Field(default_factory=EvaluationSection)
    algorithm: AlgorithmSection = Field(default_factory=AlgorithmSection)
    sampling: SamplingSection = Field(default_factory=SamplingSection)
    rollout: RolloutSection = Field(default_factory=RolloutSection)
    trainer: TrainerSection = Field(default_factory=TrainerSection)
    alignment: AlignmentSection = Field(default_factory=AlignmentSection)
    plugins: PluginsSection = Field(default_factory=PluginsSection)

    @model_validator(mode="after")
    def _lengths_fit(self) -> RunConfig:
        context = self.rollout.context_length
        for section, reserved in {"sampling": self.sampling.max_tokens, **self._evaluation_tokens}.items():
            if reserved >= context:
                raise ValueError(
                    f"{section}.max_tokens = {reserved} leaves no room for a prompt in"
                    f" rollout.context_length = {context}"
                )
        if self.trainer.token_budget < context:
            raise ValueError(
                f"trainer.token_budget = {self.trainer.token_budget} is less than one sequence of"
                f" rollout.context_length = {context}"
            )
        return self

    @property
    def _evaluation_tokens(self) -> dict[str, int]:
        """The longest response of each evaluation table, by its path; none without evaluations."""
        own = {f"evaluation.sets.{name}": one.max_tokens or 0 for name, one in self.evaluation.sets.items()}
        return {"evaluation": self.evaluation.max_tokens, **own} if self.evaluation.every else {}

    @model_validator(mode="after")
    def _taps_need_a_contract(self) -> RunConfig:
        if self.run.taps and not self.alignment.contract:
            raise ValueError(f"run.taps = {list(self.run.taps)!r} needs alignment.contract, whose operations have taps")
        return self

    @model_validator(mode="after")
    def _taps_are_of_samples(self) -> RunConfig:
        for one in self.run.taps:
            if why := self._never_sampled(*map(int, one.split(":"))):
                raise ValueError(f"run.taps names {one!r} (STEP:PROMPT:SAMPLE), which never exists: {why}")
        return self

    def _never_sampled(self, step: int, prompt: int, sample: int) -> str:
        """Why a step has no such sample, counted from 0; empty where it may have."""
        if step >= self.run.steps:
            return f"run.steps = {self.run.steps}"
        if sample >= self.sampling.samples_per_prompt:
            return f"sampling.samples_per_prompt = {self.sampling.samples_per_prompt}"
        size = self.sampling.prompts_per_step
        first = step * size
        if prompt < first or (prompt >= first + size and not self.sampling.dynamic_rounds):
            last = "on" if self.sampling.dynamic_rounds else f"to {first + size - 1}"
            return f"prompts count over the whole run, and step {step} has those from {first} {last}"
        return ""

    @model_validator(mode="after")
    def _every_update_has_prompts(self) -> RunConfig:
        if self.algorithm.updates_per_rollout > self.sampling.prompts_per_step:
            raise ValueError(
                f"algorithm.updates_per_rollout = {self.algorithm.updates_per_rollout} is more than"
                f" sampling.prompts_per_step = {self.sampling.prompts_per_step}: each update needs a prompt of its own"
            )
        return self

    @model_validator(mode="after")
    def _buffer_is_of_the_response(self) -> RunConfig:
        if self.algorithm.overlong_buffer > self.sampling.max_tokens:
            raise ValueError(
                f"algorithm.overlong_buffer = {self.algorithm.overlong_buffer} is more than sampling.max_tokens ="
                f" {self.sampling.max_tokens}"
            )
        return self

    @model_validator(mode="after")
    def _old_log_probs_are_of_one_distribution(self) -> RunConfig:
        """The engine's log-probs are of the truncated distribution; the trainer's too where a contract records it."""
        sampling = self.sampling
        cut = sampling.top_p < 1.0 or sampling.top_k > 0
        if cut and self.algorithm.old_log_probs == "rollout" and not self.alignment.contract:
            raise ValueError(
                f"algorithm.old_log_probs = 'rollout' with sampling.top_p = {sampling.top_p} and sampling.top_k ="
                f" {sampling.top_k}: the engine's log-probs are of the truncated distribution and the trainer's are"
                " not, so every ratio would be wrong; use 'recompute', or an alignment.contract, which records what"
                " was left"
            )
        return self

    def options(self, section: str, plugin: str) -> BaseModel:
        """The validated table of a plugin: ``config.options("trainer", "megatron")``."""
        holder: PluginSection = getattr(self, section)
        return holder.plugin_options[plugin]
