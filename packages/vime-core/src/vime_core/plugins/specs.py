"""Every hook that a vime plugin can implement. The docstring of a spec is its documentation.

Registration hooks yield frozen records from `vime_core.plugins.types`; they run at discovery, so they must import
nothing heavy. Lifecycle hooks receive live objects during a run; an exception in one ends the run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from vime_core.plugins.markers import hookspec
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
    Reward,
    RolloutEngine,
    TrainerBackend,
)

if TYPE_CHECKING:
    from pathlib import Path

    from vime_core.alignment import Alignment
    from vime_core.backends import Rollout, Trainer
    from vime_core.config.schema import RunConfig
    from vime_core.determinism.policy import DeterminismPolicy
    from vime_core.findings import Finding
    from vime_core.types import Sample


class RegistrationSpecs:
    """What exists: each hook yields the plugin's entries of one kind."""

    @hookspec
    def vime_trainers(self) -> Iterable[TrainerBackend]:
        """Trainer backends, selected by ``trainer.backend``.

        .. versionadded:: 0.1

        Example:
            >>> @hookimpl
            ... def vime_trainers():
            ...     yield TrainerBackend("echo", "Trains nothing.", "echo_trainer:open_trainer")
        """
        raise NotImplementedError

    @hookspec
    def vime_rollouts(self) -> Iterable[RolloutEngine]:
        """Rollout engines, selected by ``rollout.backend``.

        .. versionadded:: 0.1

        Example:
            >>> @hookimpl
            ... def vime_rollouts():
            ...     yield RolloutEngine("echo", "Repeats the prompt.", "echo_rollout:open_rollout")
        """
        raise NotImplementedError

    @hookspec
    def vime_model_structures(self) -> Iterable[ModelStructure]:
        """Model structures by HF ``model_type``, each for one trainer backend.

        .. versionadded:: 0.1

        Example:
            >>> @hookimpl
            ... def vime_model_structures():
            ...     yield ModelStructure("gemma9", "Gemma 9.", "gemma9.megatron:STRUCTURE", backend="megatron")
        """
        raise NotImplementedError

    @hookspec
    def vime_model_sources(self) -> Iterable[ModelSource]:
        """Ways to come by a HF model directory, selected by ``model.source``.

        .. versionadded:: 0.1

        Example:
            >>> @hookimpl
            ... def vime_model_sources():
            ...     yield ModelSource("store", "The company's model store.", "store:fetch", "store:StoreOptions")
        """
        raise NotImplementedError

    @hookspec
    def vime_determinism_policies(self) -> Iterable[DeterminismPolicyEntry]:
        """Determinism policies, selected by ``run.policy``.

        .. versionadded:: 0.1

        Example:
            >>> @hookimpl
            ... def vime_determinism_policies():
            ...     yield DeterminismPolicyEntry("site", "Our cluster's rules.", "site_policy:POLICY")
        """
        raise NotImplementedError

    @hookspec
    def vime_contracts(self) -> Iterable[ContractEntry]:
        """Alignment contracts: the frozen lists of operations that both sides of a run call.

        .. versionadded:: 0.1

        Example:
            >>> @hookimpl
            ... def vime_contracts():
            ...     yield ContractEntry("gemma9/v1", "Gemma 9.", "gemma9.contract:GEMMA9_V1")

        A contract with operations beyond those of ``dense/v1`` names what makes them: ``operations="gemma9.ops:load"``.
        """
        raise NotImplementedError

    @hookspec
    def vime_aligned_sides(self) -> Iterable[AlignedSide]:
        """How a backend keeps a contract for some structures: one entry for the trainer, one for the engine.

        .. versionadded:: 0.1

        Example:
            >>> @hookimpl
            ... def vime_aligned_sides():
            ...     yield AlignedSide(
            ...         "gemma9/v1 vllm", "Gemma 9 in vLLM.", "gemma9.vllm:Gemma9",
            ...         backend="vllm", contract="gemma9/v1", structures=("gemma9",),
            ...     )
        """
        raise NotImplementedError

    @hookspec
    def vime_kernels(self) -> Iterable[KernelEntry]:
        """Faster kernels for a provider of a contract's operations; a linear's must have the provider's bits.

        .. versionadded:: 0.1

        Example:
            >>> @hookimpl
            ... def vime_kernels():
            ...     yield KernelEntry(
            ...         "swift", "A linear for Hopper.", "swift_kernels:linear", provider="cuda", operation="linear"
            ...     )
        """
        raise NotImplementedError

    @hookspec
    def vime_contract_models(self) -> Iterable[ContractModel]:
        """Small random models that ``vime plugins check`` runs the verdicts of a contract on.

        .. versionadded:: 0.1

        Example:
            >>> @hookimpl
            ... def vime_contract_models():
            ...     yield ContractModel("gemma9", "A tiny one.", "gemma9.models:write", contract="gemma9/v1")
        """
        raise NotImplementedError

    @hookspec
    def vime_alignment_checks(self) -> Iterable[AlignmentCheck]:
        """Checks that ``vime verify NAME`` runs.

        .. versionadded:: 0.1

        Example:
            >>> @hookimpl
            ... def vime_alignment_checks():
            ...     yield AlignmentCheck("router", "Do both sides route alike?", "router_check:run")
        """
        raise NotImplementedError

    @hookspec
    def vime_rewards(self) -> Iterable[Reward]:
        """Reward functions, selected by ``reward.name``.

        .. versionadded:: 0.1

        Example:
            >>> @hookimpl
            ... def vime_rewards():
            ...     yield Reward("length", "Shorter is better.", "length_reward:make")
        """
        raise NotImplementedError

    @hookspec
    def vime_datasets(self) -> Iterable[DatasetSource]:
        """Dataset sources, selected by ``data.source``.

        .. versionadded:: 0.1

        Example:
            >>> @hookimpl
            ... def vime_datasets():
            ...     yield DatasetSource("sql", "Prompts from a table.", "sql_data:open", "sql_data:SqlOptions")
        """
        raise NotImplementedError

    @hookspec
    def vime_advantage_estimators(self) -> Iterable[AdvantageEstimator]:
        """Advantage estimators, selected by ``algorithm.advantage``.

        .. versionadded:: 0.1

        Example:
            >>> @hookimpl
            ... def vime_advantage_estimators():
            ...     yield AdvantageEstimator("rank", "Rank within the group.", "rank_advantage:estimate")
        """
        raise NotImplementedError

    @hookspec
    def vime_losses(self) -> Iterable[Loss]:
        """Policy losses, selected by ``algorithm.loss``.

        .. versionadded:: 0.1

        Example:
            >>> @hookimpl
            ... def vime_losses():
            ...     yield Loss("reinforce", "Plain policy gradient.", "reinforce:token_loss")
        """
        raise NotImplementedError

    @hookspec
    def vime_metric_sinks(self) -> Iterable[MetricSink]:
        """Places that metrics go to, listed in ``run.sinks``.

        .. versionadded:: 0.1

        Example:
            >>> @hookimpl
            ... def vime_metric_sinks():
            ...     yield MetricSink("mail", "A mail a step.", "mail_sink:open_sink")
        """
        raise NotImplementedError

    @hookspec
    def vime_launchers(self) -> Iterable[LauncherEntry]:
        """Launchers, selected by ``run.launcher``.

        .. versionadded:: 0.1

        Example:
            >>> @hookimpl
            ... def vime_launchers():
            ...     yield LauncherEntry("slurm", "One job step a role.", "slurm_launch:open_launcher")
        """
        raise NotImplementedError

    @hookspec
    def vime_commands(self) -> Iterable[Command]:
        """Commands that the ``vime`` command line offers in addition to its own.

        .. versionadded:: 0.1

        Example:
            >>> @hookimpl
            ... def vime_commands():
            ...     yield Command("hello", "Say hello.", "hello_command:hello")
        """
        raise NotImplementedError


class LifecycleSpecs:
    """What happens: hooks that a run calls with its live objects, in the order below."""

    @hookspec
    def vime_check_run(
        self, config: RunConfig, policy: DeterminismPolicy, model_directory: Path, alignment: Alignment | None
    ) -> Iterable[Finding]:
        """Whether a run can start, as far as the plugin knows: yield findings, of which errors forbid it.

        Called by ``vime run``, ``--dry-run``, ``vime verify`` and ``vime doctor``, after the model, the contract and
        the algorithm were found good; start no process and import nothing that takes seconds. A VimeError may be
        raised instead of a finding.

        .. versionadded:: 0.1

        Example:
            >>> @hookimpl
            ... def vime_check_run(config):
            ...     if config.sampling.max_tokens > 9000:
            ...         cause, remedy = "the grader takes 9000 tokens", "Lower sampling.max_tokens."
            ...         yield Finding("SITE-001", "error", "responses are too long", cause, remedy)
        """
        raise NotImplementedError

    @hookspec
    def vime_before_run(self, config: RunConfig) -> None:
        """The configuration is resolved and checked; no backend has started.

        .. versionadded:: 0.1

        Example:
            >>> @hookimpl
            ... def vime_before_run(config):
            ...     print("starting", config.run.name)
        """

    @hookspec
    def vime_before_log_probs(self, step: int, trainer: Trainer, samples: Sequence[Sample]) -> None:
        """Samples are scored and recorded; the trainer computes log-probs next.

        .. versionadded:: 0.1

        Example:
            >>> @hookimpl
            ... def vime_before_log_probs(step, samples):
            ...     print(step, len(samples))
        """

    @hookspec
    def vime_before_train_step(self, step: int, trainer: Trainer) -> None:
        """The batch is packed; the optimizer step comes next.

        .. versionadded:: 0.1

        Example:
            >>> @hookimpl
            ... def vime_before_train_step(step, trainer):
            ...     print(step, sum(t.numel() for _, t in trainer.weights()))
        """

    @hookspec
    def vime_after_weight_update(self, step: int, trainer: Trainer, rollout: Rollout) -> None:
        """The engine holds the step's new weights and both sides' digests agreed.

        .. versionadded:: 0.1

        Example:
            >>> @hookimpl
            ... def vime_after_weight_update(step, rollout):
            ...     print(step, len(rollout.weight_digests()))
        """

    @hookspec
    def vime_after_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """The step is recorded.

        .. versionadded:: 0.1

        Example:
            >>> @hookimpl
            ... def vime_after_step(step, metrics):
            ...     print(step, metrics["reward/mean"])
        """

    @hookspec
    def vime_write_point(self, point: str, path: Path) -> None:
        """Something of the record or of a checkpoint has just changed on disk: a place where a run may be killed.

        ``point`` says what happened to ``path``: created, opened, written (half a file at a time), renamed, cut, saved
        (by the trainer), synced.

        .. versionadded:: 0.1

        Example:
            >>> @hookimpl
            ... def vime_write_point(point, path):
            ...     print(point, path)
        """
