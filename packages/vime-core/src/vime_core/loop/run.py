"""A whole run: check, open both sides, step, close. `execute` is what ``vime run`` calls."""

from __future__ import annotations

import logging
import time
from contextlib import AbstractContextManager

from vime_core.config.schema import RunConfig
from vime_core.interruption import require_going_on
from vime_core.loop.checkpoint import LoopState, write_checkpoint
from vime_core.loop.preparation import Preparation
from vime_core.loop.readiness import RESUME, RUN, require_ready
from vime_core.loop.resume import Resumption
from vime_core.loop.session import Session, open_session
from vime_core.loop.sides import load_policy
from vime_core.loop.step import run_step
from vime_core.loop.summary import RunSummary, summarize
from vime_core.plugins.manager import PluginManager
from vime_core.record.digest import digest_tensors, merkle_root
from vime_core.record.points import observed
from vime_core.record.reader import RunRecord
from vime_core.record.settings import deciding
from vime_core.scratch import run_scratch

log = logging.getLogger("vime")


def execute(config: RunConfig, plugins: PluginManager, resumption: Resumption | None = None) -> RunSummary:
    """Do a whole run, or the rest of one that was stopped.

    Raises:
        VimeError: of the kind that fits; the record then says ``failed`` and why, and keeps what finished.
    """
    with run_scratch():
        return _execute(Preparation(config, load_policy(config, plugins), plugins), resumption)


def _execute(preparation: Preparation, resumption: Resumption | None) -> RunSummary:
    config = preparation.config
    log.info("preparing model, data and reward")
    for finding in require_ready(preparation, RUN if resumption is None else RESUME):
        if finding.severity == "warning":
            log.warning("%s", finding)
    start = time.monotonic()
    with _write_points(preparation.plugins), open_session(preparation, resumption) as session:
        log.info("training: %d steps into %s", config.run.steps - session.first_step, config.run.output)
        ready = time.monotonic()  # what is left is reckoned from steps alone
        for step in range(session.first_step, config.run.steps):
            _step(session, step, ready)
    return summarize(RunRecord.open(config.run.output), time.monotonic() - start, session.first_step)


def _write_points(plugins: PluginManager) -> AbstractContextManager[None]:
    return observed(lambda point, path: plugins.hook.vime_write_point(point=point, path=path))


def _step(session: Session, step: int, start: float) -> None:
    require_going_on()
    metrics = run_step(session, step)
    metrics["progress/steps"] = float(session.config.run.steps)
    elapsed, done = time.monotonic() - start, step + 1 - session.first_step
    metrics["progress/left_s"] = elapsed / done * (session.config.run.steps - step - 1)
    for sink in session.sinks:
        sink.log(step, metrics)
    session.plugins.hook.vime_after_step(step=step, metrics=metrics)
    every = session.config.algorithm.reference_update_every
    if session.reference is not None and every and (step + 1) % every == 0:
        session.reference.keep_reference()
    _checkpoint(session, step)


def _checkpoint(session: Session, step: int) -> None:
    every = session.config.run.checkpoint_every
    if every and (step + 1) % every == 0:
        state = LoopState(
            run_id=session.writer.manifest.run_id,
            next_step=step + 1,
            weight_version=session.weight_version,
            run_seed=session.config.run.seed,
            weights_root=merkle_root(digest_tensors(session.trainer.weights())),
            optimizer_root=merkle_root(digest_tensors(session.trainer.optimizer_state())),
            steps_digest=session.writer.digest_before(step + 1),
            settings=deciding(session.writer.manifest.config),
            loop={"next_prompt": session.next_prompt, "data": dict(session.data)},
        )
        write_checkpoint(session.trainer, session.config.run.output, state)
