"""Both sides of a run: what is ready before either starts, and the two started, checked and closed."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from vime_core.alignment import Alignment, choose_alignment, require_same_contract
from vime_core.backends import Rollout, Trainer
from vime_core.config.schema import RunConfig
from vime_core.data.template import Tokenizer, load_tokenizer
from vime_core.determinism.policy import DeterminismPolicy
from vime_core.determinism.preflight import preflight, require
from vime_core.launch import Launcher
from vime_core.loop.algorithm import Algorithm, load_algorithm
from vime_core.loop.model import model_directory, model_type
from vime_core.loop.prompts import PromptStream
from vime_core.loop.streams import training_stream
from vime_core.loop.weights import require_equal_weights
from vime_core.plugins.manager import PluginManager
from vime_core.plugins.types import DeterminismPolicyEntry, LauncherEntry
from vime_core.record.digest import digest_tensors
from vime_core.types import ProcessReport


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
    policy: DeterminismPolicy = plugins.find(DeterminismPolicyEntry, config.run.policy, field_name="run.policy").load()
    require(preflight(config, policy))
    return policy


def ready_parts(config: RunConfig, policy: DeterminismPolicy, plugins: PluginManager) -> Parts:
    """Set this process's environment, then find or load everything that needs no backend."""
    entry = plugins.find(LauncherEntry, config.run.launcher, field_name="run.launcher")
    launcher: Launcher = entry.load()(config, policy, plugins)
    launcher.prepare()
    plugins.hook.vime_before_run(config=config)
    model = model_directory(config, plugins)
    tokenizer = load_tokenizer(model)
    return Parts(
        config=config,
        plugins=plugins,
        launcher=launcher,
        model=model,
        alignment=choose_alignment(config, plugins, model_type(model)),
        tokenizer=tokenizer,
        prompts=training_stream(config, plugins, tokenizer),
        algorithm=load_algorithm(config, plugins),
    )


@contextmanager
def open_sides(parts: Parts) -> Generator[Sides]:
    """Start engine and trainer, check that contract and weights are the same on both, and close them at the end.

    Raises:
        ContractViolation: contract, provider or a weight differs between the sides.
    """
    with ExitStack() as stack:
        rollout = parts.launcher.rollout(parts.model, parts.alignment)
        stack.callback(rollout.close)
        trainer = parts.launcher.trainer(parts.model, parts.alignment)
        stack.callback(trainer.close)
        reports = (*trainer.processes(), *rollout.processes())
        require_same_contract(parts.alignment, reports)
        initial = digest_tensors(trainer.weights())
        require_equal_weights(initial, rollout.weight_digests(), 0)
        yield Sides(parts, rollout, trainer, reports, initial)
