"""Can this run start? One list of checks for ``vime run``, ``--dry-run``, ``vime verify`` and ``vime doctor``.

No backend process is started. Model and dataset are opened, prompts rendered, the algorithm tried on zeros and the
reward, in a worker of its own, on the first prompt; backends check what they know through the hook ``vime_check_run``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Final

from vime_core.determinism.preflight import preflight, require
from vime_core.errors import ConfigError, RecordError, VimeError
from vime_core.findings import Finding, errors
from vime_core.loop.preparation import Preparation
from vime_core.loop.scoring import try_reward
from vime_core.record.files import refuse_unwritable

Check = Callable[[Preparation], Iterable[Finding]]
"""Raises VimeError or yields findings."""


def environment(run: Preparation) -> Iterator[Finding]:
    """The policy's preflight; then this process's variables are set, before anything heavy is imported."""
    found = preflight(run.config, run.policy)
    yield from found
    if not errors(found):
        run.launcher.prepare()


def output(run: Preparation) -> Iterator[Finding]:
    """The record can be made."""
    place = run.config.run.output
    try:
        refuse_unwritable(place)
    except RecordError as error:
        named = f"run.output = {str(place)!r}"
        said = error.message if error.message.startswith(named) else f"{named}: {error.message}"
        raise RecordError(said, remedy=error.remedy, code=error.code) from error
    yield from ()


def names(run: Preparation) -> Iterator[Finding]:
    """Every plugin that is selected by name exists and can be imported."""
    _ = run.launcher, run.sinks, run.reward
    yield from ()


def backends(run: Preparation) -> Iterator[Finding]:
    """Trainer and rollout engine can be imported, and the launcher can hold them."""
    _ = run.backends
    run.launcher.require_room()
    yield from ()


def model(run: Preparation) -> Iterator[Finding]:
    """The model is there, of a known structure, and large enough for the run's context and stop tokens."""
    facts, config = run.facts, run.config
    if facts.context is not None and config.rollout.context_length > facts.context:
        raise ConfigError(
            f"rollout.context_length = {config.rollout.context_length} is more than the model's"
            f" max_position_embeddings = {facts.context}",
            remedy=f"Set rollout.context_length to at most {facts.context}, or take another model.",
            code="VIME-CONFIG-013",
        )
    for token in config.sampling.stop_token_ids:
        if token < 0 or (facts.vocabulary is not None and token >= facts.vocabulary):
            raise ConfigError(
                f"sampling.stop_token_ids holds {token}, and the model has tokens 0 to"
                f" {'...' if facts.vocabulary is None else facts.vocabulary - 1}",
                remedy="Give ids of this model's tokenizer.",
                code="VIME-CONFIG-014",
            )
    yield from ()


def contract(run: Preparation) -> Iterator[Finding]:
    """Both sides keep the contract for this model's structure."""
    _ = run.alignment
    yield from ()


def algorithm(run: Preparation) -> Iterator[Finding]:
    """Advantage and loss take this configuration."""
    _ = run.algorithm
    if run.config.sampling.temperature == 0.0 and run.config.sampling.samples_per_prompt > 1:
        yield Finding(
            "VIME-CONFIG-015",
            "warning",
            "sampling.temperature = 0: the samples of a prompt are all the same",
            "an advantage compares a prompt's samples with one another, so all of them are 0 and nothing is learned",
            "Set sampling.temperature = 1.0.",
        )


def prompts(run: Preparation) -> Iterator[Finding]:
    """The prompts of the run and of its evaluation can be rendered and fit."""
    usable, wanted = len(run.prompts.usable), run.config.sampling.prompts_per_step
    if usable < wanted:
        noun = "prompt" if usable == 1 else "prompts"
        yield Finding(
            "VIME-DATA-024",
            "warning",
            f"the dataset has {usable} usable {noun} and sampling.prompts_per_step = {wanted}",
            "so a step holds the same prompt more than once",
            "Use a larger dataset, or lower sampling.prompts_per_step.",
        )


def evaluation(run: Preparation) -> Iterator[Finding]:
    """The evaluation's prompts can be rendered and fit."""
    _ = run.evaluation
    yield from ()


def plugins(run: Preparation) -> Iterator[Finding]:
    """What the backends and other plugins know of their own part."""
    found = run.plugins.call_hook(
        "vime_check_run",
        {
            "config": run.config,
            "policy": run.policy,
            "model_directory": run.model,
            "alignment": run.alignment,
        },
    )
    for findings in found:
        yield from findings


def reward(run: Preparation) -> Iterator[Finding]:
    """The reward can be built, takes a `RewardInput` and gives a number."""
    try_reward(run.config, run.plugins, run.prompts.first(1)[0])
    yield from ()


SIDES: Final[tuple[Check, ...]] = (model, contract, algorithm, plugins, backends, prompts)
"""What both sides of a run need, in an environment that was checked and set."""

RUN: Final[tuple[Check, ...]] = (output, environment, names, *SIDES, evaluation, reward)
"""What a whole run needs besides: its record, sinks, reward and evaluation."""

RESUME: Final[tuple[Check, ...]] = RUN[1:]
"""What a run needs whose record is there already."""


def require_ready(run: Preparation, checks: Iterable[Check] = RUN) -> list[Finding]:
    """Raise the first obstacle; the findings that forbid nothing.

    Raises:
        VimeError: as the check raised it; PolicyError for a finding.
    """
    kept: list[Finding] = []
    for check in checks:
        found = list(check(run))
        require(found)
        kept += found
    return kept


def examine_ready(run: Preparation, checks: Iterable[Check] = RUN) -> Iterator[Finding]:
    """Every obstacle, each once, and the findings that forbid nothing."""
    seen: set[tuple[str, str]] = set()
    for check in checks:
        for finding in _findings(run, check):
            if (finding.code, finding.message) not in seen:
                seen.add((finding.code, finding.message))
                yield finding


def as_finding(error: VimeError) -> Finding:
    """An error that stands in a run's way, as doctor lists it."""
    return Finding(error.code, "error", error.message, "found while the run was being prepared", error.remedy)


def _findings(run: Preparation, check: Check) -> Iterator[Finding]:
    try:
        yield from check(run)
    except VimeError as error:
        yield as_finding(error)
