"""Runs of the bigram backend in processes that end where they are told to, and what is left of them.

The processes are forked from a server that has imported everything and run nothing: they start at once, and inherit no
thread of a library.
"""

from __future__ import annotations

import errno
import itertools
import json
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from multiprocessing import forkserver
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any
from unittest.mock import patch

import bigram
import pyarrow.parquet  # noqa: F401 (before the server forks)
import transformers.models.auto.tokenization_auto  # noqa: F401
from command import ROOT

from vime_core.config.load import load_config
from vime_core.errors import Interrupted, VimeError
from vime_core.interruption import interrupt
from vime_core.loop.resume import open_resumption
from vime_core.loop.run import execute
from vime_core.record.points import observed
from vime_core.record.reader import RunRecord
from vime_core.verify.repeat import verify_repeat

SMALL = [
    *bigram.OVERRIDES,
    "run.steps=2",
    "run.checkpoint_every=1",
    "sampling.prompts_per_step=2",
    "sampling.samples_per_prompt=2",
    "sampling.max_tokens=8",
    "trainer.warmup_steps=5",
]
KILLED = -signal.SIGKILL
REFUSED = 77
"""Exit code of a process that ended with an error of vime's, whose text is in ``error.txt`` beside the record."""

CONTEXT = multiprocessing.get_context("forkserver")
Observer = Callable[[str, Path], None]


def forked(work: Callable[..., None], *arguments: Any) -> int:
    """Do the work in a process of its own; its exit code, or minus the signal that ended it."""
    process = started(_guarded, work, arguments)
    process.join(300)
    if process.exitcode is None:
        process.kill()
        raise AssertionError(f"{work.__name__}{arguments} hangs")
    return process.exitcode


def started(work: Callable[..., None], *arguments: Any) -> ForkServerProcess:
    """A process that does the work; the first one starts the server, which finds modules as this process does."""
    CONTEXT.set_forkserver_preload(["stopping"])  # again: others start servers too
    with patch.dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path)):
        forkserver.ensure_running()
    process = CONTEXT.Process(target=work, args=arguments)
    process.start()
    return process


def _guarded(work: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    try:
        work(*arguments)
    except VimeError as error:
        print(error, flush=True)
        os._exit(REFUSED)


def run(record: Path, cache: Path, kill_at: int = 0, *overrides: str) -> None:
    """A run that dies at write point number ``kill_at`` (from 1; 0: at none), and writes its points beside it."""
    settings = [*SMALL, f"run.cache='{cache}'", f"run.output='{record}'", *overrides]
    config, plugins = load_config([ROOT / "configs" / "smoke.toml"], settings)
    points: list[tuple[str, str]] = []
    with observed(_killer(kill_at, points)):
        execute(config, plugins)
    record.with_suffix(".points").write_text(json.dumps(points))


def resume(record: Path, kill_at: int = 0, *overrides: str) -> None:
    """Resume a run that dies at write point number ``kill_at``, and writes its points beside it."""
    config, plugins, resumption = open_resumption(record, overrides)
    points: list[tuple[str, str]] = []
    with observed(_killer(kill_at, points)):
        execute(config, plugins, resumption)
    record.with_suffix(".points").write_text(json.dumps(points))


def _killer(kill_at: int, points: list[tuple[str, str]]) -> Observer:
    def observe(point: str, path: Path) -> None:
        points.append((point, path.name))
        if len(points) == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    return observe


def run_on_a_full_disk(record: Path, cache: Path, first: int, last: int) -> None:
    """A run whose writes find no space from write point number ``first`` to number ``last``."""
    settings = [*SMALL, f"run.cache='{cache}'", f"run.output='{record}'"]
    config, plugins = load_config([ROOT / "configs" / "smoke.toml"], settings)
    numbers = itertools.count(1)

    def observe(point: str, path: Path) -> None:
        if first <= next(numbers) <= last:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with observed(observe):
        execute(config, plugins)


class _Doomed:
    """Told to end by a signal that comes while it is destroyed."""

    def __del__(self) -> None:
        interrupt(signal.SIGTERM)


def run_told_to_end_in_a_destructor(record: Path, cache: Path) -> None:
    """A run that gets SIGTERM where Python drops an exception: as the first step's checkpoint is written."""
    settings = [*SMALL, f"run.cache='{cache}'", f"run.output='{record}'"]
    config, plugins = load_config([ROOT / "configs" / "smoke.toml"], settings)

    def observe(point: str, path: Path) -> None:
        if path.name == "state.json":
            _Doomed()

    try:
        with observed(observe):
            execute(config, plugins)
    except Interrupted as error:
        raise SystemExit(error.exit_code) from error


def run_with_a_wild_clock(record: Path, cache: Path) -> None:
    """A run during which the time of day jumps by years, back and forth."""
    times = itertools.cycle([2e9, 1e9, 4e9, 1.0])
    with patch("time.time", lambda: next(times)), patch("time.time_ns", lambda: int(next(times) * 1e9)):
        run(record, cache, 0, "run.sinks=['console', 'jsonl', 'tensorboard']")


def run_that_resumes_itself(record: Path, cache: Path) -> None:
    """What a second process would do while the first one still writes."""
    settings = [*SMALL, f"run.cache='{cache}'", f"run.output='{record}'"]
    config, plugins = load_config([ROOT / "configs" / "smoke.toml"], settings)
    with observed(lambda _, path: resume(record) if path.name == "steps.jsonl" else None):
        execute(config, plugins)


def resume_forgetting(record: Path, forgotten: str) -> None:
    """Resume with a trainer that loads zeros in place of one tensor."""
    load = bigram.load_file
    bigram.load_file = lambda file: {name: t * 0 if name == forgotten else t for name, t in load(file).items()}
    resume(record)


def resume_with_other_seeds(record: Path, kill_at: int = 0) -> None:
    """Resume with an engine that samples with other seeds, and die at write point number ``kill_at``."""
    answer = bigram.Rollout._answer
    bigram.Rollout._answer = lambda self, request: answer(self, replace(request, seed=request.seed + 1))
    resume(record, kill_at)


def resume_and_compare(record: Path, whole: Path, before: Left | None) -> None:
    """Resume in this process, and compare with the run that was never stopped."""
    resume(record)
    compare(whole, record, before)


def compare(whole: Path, resumed: Path, before: Left | None) -> None:
    """The resumed record is the one that was never stopped, and holds what was complete when it was."""
    first, second = RunRecord.open(whole), RunRecord.open(resumed)
    verdict = verify_repeat(first, second)
    assert verdict.holds, verdict.sentence
    metrics = [json.loads(line)["step"] for line in (resumed / "metrics.jsonl").read_text().splitlines()]
    assert metrics == [entry.step for entry in first.steps]
    assert list(resumed.rglob(".*")) == []
    if before is not None:
        assert second.step_lines[: len(before.lines)] == before.lines
        assert {path.name for path in (resumed / "checkpoints").iterdir()} >= {*before.checkpoints}


@dataclass(frozen=True)
class Left:
    """What a process that was killed left complete."""

    lines: tuple[bytes, ...]
    checkpoints: tuple[str, ...]


def left(record: Path) -> Left | None:
    """None when there is no manifest yet, so no record."""
    if not (record / "manifest.json").exists():
        return None
    checkpoints = (record / "checkpoints").glob("step-*")
    return Left(RunRecord.open(record).step_lines, tuple(sorted(path.name for path in checkpoints)))
