"""Both sides of a run: what is ready before either starts, and the two started, checked and closed."""

from __future__ import annotations

import logging
from collections.abc import Generator, Iterable, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from vime_core.alignment import KERNELS, Alignment, require_same_contract
from vime_core.backends import Rollout, Trainer
from vime_core.config.schema import RunConfig
from vime_core.data.template import Tokenizer
from vime_core.determinism.policy import DeterminismPolicy
from vime_core.determinism.preflight import preflight, require
from vime_core.launch import Launcher
from vime_core.loop.algorithm import Algorithm
from vime_core.loop.preparation import Preparation
from vime_core.loop.prompts import PromptStream
from vime_core.loop.readiness import SIDES, require_ready
from vime_core.loop.weights import require_equal_weights
from vime_core.plugins.manager import PluginManager
from vime_core.plugins.types import DeterminismPolicyEntry
from vime_core.record.digest import digest_tensors
from vime_core.scratch import run_scratch
from vime_core.types import ProcessReport

log = logging.getLogger("vime")


@dataclass(frozen=True)
class Parts:
    """What is ready before a backend starts: model, contract, prompts, algorithm."""

    config: RunConfig
    plugins: PluginManager
    launcher: Launcher
    model: Path
    alignment: Alignment | None
    tokenizer: Tokenizer
    prompts: PromptStream
    algorithm: Algorithm


@dataclass(frozen=True)
class Sides:
    """A running trainer and a running engine that hold the same weights, and what they reported at the start.

    ``initial_weights`` are the trainer's digests by HF name, which the engine's equalled.
    """

    parts: Parts
    rollout: Rollout
    trainer: Trainer
    reports: tuple[ProcessReport, ...]
    initial_weights: Mapping[str, str]


def checked_policy(config: RunConfig, plugins: PluginManager) -> DeterminismPolicy:
    """The configured policy, after preflight. Call it before `ready_parts`, which sets the environment.

    Raises:
        PolicyError: something on this machine or in the configuration breaks the policy.
    """
    policy = load_policy(config, plugins)
    require(preflight(config, policy))
    return policy


def load_policy(config: RunConfig, plugins: PluginManager) -> DeterminismPolicy:
    """The configured policy, unchecked."""
    return plugins.find(DeterminismPolicyEntry, config.run.policy, field_name="run.policy").load()


def ready_parts(config: RunConfig, policy: DeterminismPolicy, plugins: PluginManager) -> Parts:
    """Set this process's environment, then find, load and check everything that needs no backend.

    Raises:
        VimeError: the first thing that stands in the way, before any process starts.
    """
    preparation = Preparation(config, policy, plugins)
    preparation.launcher.prepare()
    require_ready(preparation, SIDES)
    return parts_of(preparation)


def parts_of(preparation: Preparation) -> Parts:
    """The parts of a checked preparation; plugins are told that the run begins."""
    preparation.plugins.hook.vime_before_run(config=preparation.config)
    return Parts(
        config=preparation.config,
        plugins=preparation.plugins,
        launcher=preparation.launcher,
        model=preparation.model,
        alignment=preparation.alignment,
        tokenizer=preparation.tokenizer,
        prompts=preparation.prompts,
        algorithm=preparation.algorithm,
    )


@contextmanager
def open_sides(parts: Parts) -> Generator[Sides]:
    """Start engine and trainer, check that contract and weights are the same on both, and close them at the end.

    Raises:
        ContractViolation: contract, provider or a weight differs between the sides.
    """
    with ExitStack() as stack:
        stack.enter_context(run_scratch())
        stack.callback(parts.launcher.close)
        log.info("starting the rollout engine (%s)", parts.config.rollout.backend)
        rollout = parts.launcher.rollout(parts.model, parts.alignment)
        stack.callback(rollout.close)
        log.info("starting the trainer (%s)", parts.config.trainer.backend)
        trainer = parts.launcher.trainer(parts.model, parts.alignment)
        stack.callback(trainer.close)
        reports = (*trainer.processes(), *rollout.processes())
        require_same_contract(parts.alignment, reports)
        _say_kernels(reports)
        log.info("comparing the weights of both sides")
        initial = digest_tensors(trainer.weights())
        require_equal_weights(initial, rollout.weight_digests(), 0)
        yield Sides(parts, rollout, trainer, reports, initial)


def _say_kernels(reports: Iterable[ProcessReport]) -> None:
    """Tell, once a call, what serves it where a provider was offered kernels."""
    for call, kernels in sorted({pair for report in reports for pair in report.settings.get(KERNELS, {}).items()}):
        log.info("%s: %s", call, kernels)
