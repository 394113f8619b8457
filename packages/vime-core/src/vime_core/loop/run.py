"""A whole run: check, open both sides, step, close. `execute` is what ``vime run`` calls."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence

from vime_core.config.schema import RunConfig
from vime_core.loop.checkpoint import LoopState, write_checkpoint
from vime_core.loop.preparation import Preparation
from vime_core.loop.readiness import require_ready
from vime_core.loop.session import Session, open_session
from vime_core.loop.sides import load_policy
from vime_core.loop.step import run_step
from vime_core.loop.summary import RunSummary
from vime_core.plugins.manager import PluginManager
from vime_core.record.digest import digest_tensors, merkle_root

log = logging.getLogger("vime")


def execute(config: RunConfig, plugins: PluginManager) -> RunSummary:
    """Do a whole run.

    Raises:
        VimeError: of the kind that fits; the record then says ``failed`` and why, and keeps what finished.
    """
    preparation = Preparation(config, load_policy(config, plugins), plugins)
    for finding in require_ready(preparation):
        if finding.severity == "warning":
            log.warning("%s", finding)
    start = time.monotonic()
    with open_session(preparation) as session:
        history = [_step(session, step, start) for step in range(config.run.steps)]
    return _summary(session, history, time.monotonic() - start)


def _step(session: Session, step: int, start: float) -> dict[str, float]:
    metrics = run_step(session, step)
    metrics["progress/steps"] = float(session.config.run.steps)
    elapsed = time.monotonic() - start
    metrics["progress/left_s"] = elapsed / (step + 1) * (session.config.run.steps - step - 1)
    for sink in session.sinks:
        sink.log(step, metrics)
    session.plugins.hook.vime_after_step(step=step, metrics=metrics)
    _checkpoint(session, step)
    return metrics


def _checkpoint(session: Session, step: int) -> None:
    every = session.config.run.checkpoint_every
    if every and (step + 1) % every == 0:
        state = LoopState(
            next_step=step + 1,
            weight_version=session.weight_version,
            run_seed=session.config.run.seed,
            weights_root=merkle_root(digest_tensors(session.trainer.weights())),
        )
        write_checkpoint(session.trainer, session.config.run.output, step + 1, state)


def _summary(session: Session, history: Sequence[Mapping[str, float]], seconds: float) -> RunSummary:
    config = session.config
    return RunSummary(
        record=config.run.output,
        steps=len(history),
        samples=len(history) * config.sampling.prompts_per_step * config.sampling.samples_per_prompt,
        tokens=int(sum(metrics["rollout/tokens"] for metrics in history)),
        first_reward=history[0]["reward/mean"],
        last_reward=history[-1]["reward/mean"],
        weights_root=session.writer.last_weights_root,
        seconds=seconds,
    )
