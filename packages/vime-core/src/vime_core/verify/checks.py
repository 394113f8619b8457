"""Verdicts on a configuration: start what a verdict needs, once, and run it. What ``vime verify NAME`` calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from difflib import get_close_matches

from vime_core.config.schema import RunConfig
from vime_core.determinism.policy import DeterminismPolicy
from vime_core.errors import BackendError, ContractViolation, PluginError
from vime_core.loop.sides import Parts, checked_policy, open_sides, ready_parts
from vime_core.plugins.manager import PluginManager
from vime_core.plugins.types import OWN_VERDICTS, AlignmentCheck
from vime_core.verify import align, batch, gradient
from vime_core.verify.align_live import AlignOptions, require_options, verify_align
from vime_core.verify.batch_live import BatchOptions, verify_batch
from vime_core.verify.gradient_live import GradientOptions, open_trainer, verify_gradient
from vime_core.verify.live import UPDATE_LR, with_learning_rate
from vime_core.verify.verdict import Verdict


def run_align(config: RunConfig, plugins: PluginManager, options: AlignOptions, lr: float = UPDATE_LR) -> Verdict:
    """Start both sides and align them; ``lr`` is the learning rate of the updates between comparisons."""
    require_options(config, options)
    parts = ready_parts(with_learning_rate(config, lr), checked_policy(config, plugins), plugins)
    with open_sides(parts) as sides:
        return verify_align(sides, options)


def run_batch(config: RunConfig, plugins: PluginManager, options: BatchOptions) -> Verdict:
    """Start both sides, since an engine's weights are compared with a trainer's, and try the engine."""
    parts = ready_parts(config, checked_policy(config, plugins), plugins)
    with open_sides(parts) as sides:
        return verify_batch(sides, options)


def run_gradient(
    config: RunConfig,
    plugins: PluginManager,
    options: GradientOptions | None = None,
    policy: DeterminismPolicy | None = None,
) -> Verdict:
    """Start the trainer alone and check its backward. ``policy`` is given when it was checked before."""
    policy = policy or checked_policy(config, plugins)
    parts = ready_parts(with_learning_rate(config, 0.0), policy, plugins)
    with open_trainer(parts) as trainer:
        return verify_gradient(parts, trainer, options or GradientOptions())


def run_check(config: RunConfig, plugins: PluginManager, name: str) -> Verdict:
    """A check that a plugin registered.

    Raises:
        PluginError: there is no such check, or it returns no verdict.
    """
    registered = {check.name: check for check in plugins.of_kind(AlignmentCheck)}
    if name not in registered:
        raise _unknown(name, sorted({*registered, *OWN_VERDICTS}))
    verdict: object = _called(registered[name], config, plugins)
    if not isinstance(verdict, Verdict):
        raise PluginError(
            f"the check {name!r} returned {type(verdict).__name__}, not a vime_core.verify.verdict.Verdict",
            remedy="Correct the check: its target is (config, plugins) -> Verdict.",
            code="VIME-PLUGIN-031",
        )
    return verdict


def _called(check: AlignmentCheck, config: RunConfig, plugins: PluginManager) -> object:
    target: Callable[[RunConfig, PluginManager], object] = check.load()
    with plugins.guarding(check):
        return target(config, plugins)


def run_every(
    config: RunConfig, plugins: PluginManager, samples: int, updates: int, starting: Callable[[str], None]
) -> Iterator[Verdict]:
    """Every verdict of this process that applies to the configuration; `starting` is told each name before it runs.

    Batch and align share one start of both sides, gradient has a trainer of its own. A side that fails makes a verdict
    that says so, and the others go on; errors of configuration are raised.
    """
    policy = checked_policy(config, plugins)
    starting(gradient.NAME)
    yield _verdict(gradient.NAME, lambda: run_gradient(config, plugins, policy=policy))
    parts = ready_parts(with_learning_rate(config, UPDATE_LR), policy, plugins)
    yield from _on_live_sides(parts, AlignOptions(samples, updates, bool(config.alignment.contract)), starting)
    for check in plugins.of_kind(AlignmentCheck):
        if check.contracts and config.alignment.contract not in check.contracts:
            continue
        starting(check.name)
        yield _verdict(check.name, lambda name=check.name: run_check(config, plugins, name))


def _on_live_sides(parts: Parts, options: AlignOptions, starting: Callable[[str], None]) -> Iterator[Verdict]:
    starting(batch.NAME)
    with ExitStack() as stack:
        try:
            sides = stack.enter_context(open_sides(parts))
        except (ContractViolation, BackendError) as error:
            yield from (_failed(name, error) for name in (batch.NAME, align.NAME))
            return
        yield _verdict(batch.NAME, lambda: verify_batch(sides, BatchOptions()))
        starting(align.NAME)
        yield _verdict(align.NAME, lambda: verify_align(sides, options))


def _verdict(name: str, run: Callable[[], Verdict]) -> Verdict:
    try:
        return run()
    except (ContractViolation, BackendError) as error:
        return _failed(name, error)


def _failed(name: str, error: ContractViolation | BackendError) -> Verdict:
    if isinstance(error, ContractViolation):
        sentence = f"{name.capitalize()} does not hold: {error.message} ({error.code})."
        return Verdict(name, False, sentence, unequal=1, first=error.code)
    sentence = f"{name.capitalize()} could not be checked: {error.message} ({error.code})."
    return Verdict(name, None, sentence, first=error.code)


def _unknown(name: str, known: list[str]) -> PluginError:
    close = get_close_matches(name, known, n=1)
    hint = f"Did you mean {close[0]!r}? " if close else ""
    return PluginError(
        f"verify {name}: no such verdict. Known: {', '.join(known)}",
        remedy=f"{hint}Use a known name, or install the package that registers {name!r} (vime_alignment_checks).",
        code="VIME-PLUGIN-001",
    )
