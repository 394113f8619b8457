"""Score responses in worker processes: in order, within a time limit each, or with an error that names the response."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from vime_core.errors import DataError
from vime_core.rewards.process import START_S, WorkerProcess, describe_exit, wait_for_any
from vime_core.rewards.types import RewardInput, RewardSpec
from vime_core.rewards.wire import encode_input


class RewardFailed(DataError):
    """The reward of one response raises, takes too long, kills its process or is no finite fp32 number."""


@dataclass(frozen=True)
class Scores:
    """Rewards in the order of the inputs, and the indices of those that are the pool's ``timeout_reward``."""

    values: tuple[float, ...]
    timed_out: tuple[int, ...] = ()


class RewardPool:
    """Workers for one reward. They start on the first call, live until `close`, and are replaced when killed.

    Args:
        spec: the reward; its target and its options' class must be importable by name.
        timeout_s: longest time for one response, from when a worker gets it.
        workers: number of processes.
        timeout_reward: what a response scores whose reward took too long; None: that is an error. A run that sets it
            repeats only while no time limit strikes: record `Scores.timed_out`.

    Workers inherit the environment; PYTHONHASHSEED is 0 where it is not set, so that rewards that walk over sets of
    strings (sympy's do) are the same in every worker.
    """

    def __init__(
        self, spec: RewardSpec, *, timeout_s: float, workers: int = 1, timeout_reward: float | None = None
    ) -> None:
        self._spec = spec
        self._timeout_s = timeout_s
        self._size = workers
        self._timeout_reward = timeout_reward
        self._workers: list[WorkerProcess] = []

    def score(self, inputs: Sequence[RewardInput]) -> Scores:
        """Rewards of the inputs, by index, whatever finished first.

        Raises:
            DataError: the reward cannot be built.
            RewardFailed: for the first input, by index, of which that holds. The pool stays usable.
        """
        batch = _Batch(inputs, [_encoded(item, index) for index, item in enumerate(inputs)])
        try:
            while not batch.settled(self._workers):
                self._step(batch)
        except BaseException:
            self.close()
            raise
        if batch.failures:
            self._drop([worker for worker in self._workers if worker.job is not None])
            raise batch.failures[min(batch.failures)]
        return Scores(tuple(batch.values[i] for i in range(len(inputs))), tuple(sorted(batch.timed_out)))

    def close(self) -> None:
        """End every worker at once. A pool that is used again starts new ones."""
        self._drop(list(self._workers))

    def __enter__(self) -> RewardPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _step(self, batch: _Batch) -> None:
        """Hand out work, wait for a reply or a time limit, and note what happened."""
        self._start_missing(batch)
        for worker in self._workers:
            if worker.idle and batch.waiting:
                worker.send(batch.lines[batch.next], batch.next, self._timeout_s)
                batch.next += 1
        ready = wait_for_any(self._workers)
        for worker in ready:
            self._receive(worker, batch)
        late = [worker for worker in self._workers if worker not in ready and worker.remaining_s == 0.0]
        answered = wait_for_any(late)  # the late one may be this process, which was kept from looking
        for worker in late:
            (self._receive if worker in answered else self._expire)(worker, batch)

    def _start_missing(self, batch: _Batch) -> None:
        busy = sum(worker.job is not None for worker in self._workers)
        while len(self._workers) < min(self._size, busy + batch.waiting):
            self._workers.append(WorkerProcess(self._spec))

    def _drop(self, workers: Sequence[WorkerProcess]) -> None:
        for worker in workers:
            worker.kill()
            self._workers.remove(worker)

    def _receive(self, worker: WorkerProcess, batch: _Batch) -> None:
        reply = worker.receive()
        if reply is None:
            self._workers.remove(worker)
            reply = {"error": f"its process ended ({describe_exit(worker.kill())})"}
        if worker.starting:
            self._note_start(worker, reply)
        elif worker.job is not None:
            self._note_result(worker.job, reply, batch)
        worker.job = None

    def _note_start(self, worker: WorkerProcess, reply: dict[str, Any]) -> None:
        if "error" in reply:
            raise _cannot_build(self._spec, reply["error"])
        worker.starting = False

    def _note_result(self, index: int, reply: dict[str, Any], batch: _Batch) -> None:
        if "error" in reply:
            batch.failures[index] = RewardFailed(
                f"reward {self._spec.target!r} failed for {batch.describe(index)}: {reply['error']}",
                remedy="Correct the reward function, its options, or the dataset.",
                code="VIME-DATA-020",
            )
        else:
            batch.values[index] = reply["value"]

    def _expire(self, worker: WorkerProcess, batch: _Batch) -> None:
        self._drop([worker])
        if worker.job is None:
            raise _cannot_build(self._spec, f"it was not ready after {START_S:g} s")
        if self._timeout_reward is not None:
            batch.values[worker.job] = self._timeout_reward
            batch.timed_out.append(worker.job)
            return
        batch.failures[worker.job] = RewardFailed(
            f"reward {self._spec.target!r} took longer than reward.timeout_s = {self._timeout_s:g} for"
            f" {batch.describe(worker.job)}; its process was killed",
            remedy="Raise reward.timeout_s, or correct the reward function.",
            code="VIME-DATA-021",
        )


def score_all(
    reward: RewardSpec, inputs: Sequence[RewardInput], timeout_s: float, workers: int = 1
) -> tuple[float, ...]:
    """Score once, with workers of its own; a loop keeps a `RewardPool` instead. Raises as `RewardPool.score`."""
    with RewardPool(reward, timeout_s=timeout_s, workers=workers) as pool:
        return pool.score(inputs).values


@dataclass
class _Batch:
    """The state of one call of `RewardPool.score`. Inputs are handed out by ascending index."""

    inputs: Sequence[RewardInput]
    lines: list[bytes]
    next: int = 0
    values: dict[int, float] = field(default_factory=dict[int, float])
    failures: dict[int, RewardFailed] = field(default_factory=dict[int, RewardFailed])
    timed_out: list[int] = field(default_factory=list[int])

    @property
    def waiting(self) -> int:
        """Inputs that are still to be handed out: none after a failure, since all before it are out already."""
        return 0 if self.failures else len(self.lines) - self.next

    def settled(self, workers: Sequence[WorkerProcess]) -> bool:
        """All done, or the first failure by index is known: nothing before it is running."""
        end = min(self.failures, default=len(self.lines))
        return not self.waiting and not any(w.job is not None and w.job < end for w in workers)

    def describe(self, index: int) -> str:
        return f"{_name(self.inputs[index], index)} (response {self.inputs[index].response_text[:60]!r})"


def _name(item: RewardInput, index: int) -> str:
    return f"input {index}" if item.key is None else f"prompt {item.key[0]}, sample {item.key[1]}"


def _encoded(item: RewardInput, index: int) -> bytes:
    try:
        return encode_input(item)
    except (TypeError, ValueError) as error:
        raise DataError(
            f"the example of {_name(item, index)} cannot be sent to the reward: {error}",
            remedy="Put JSON values only into an example's metadata.",
            code="VIME-DATA-019",
        ) from error


def _cannot_build(spec: RewardSpec, reason: str) -> DataError:
    return DataError(
        f"reward {spec.target!r} cannot be built: {reason}",
        remedy="Correct reward.name or its options, or install what it needs.",
        code="VIME-DATA-023",
    )
