"""Tasks of the reasoning-gym library by name and seed."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from difflib import get_close_matches
from functools import lru_cache
from typing import Any, cast

from pydantic import Field, JsonValue, PositiveInt, field_validator

from vime_core.config.frozen import thaw
from vime_core.data.optional import require
from vime_core.data.types import Dataset, Example, Message
from vime_core.errors import DataError
from vime_core.plugins.types import Options
from vime_core.rl.seeds import derive_key, keyed_hash

HASH_DEPENDENT = frozenset(
    {"isomorphic_strings", "knight_swap", "polynomial_multiplication", "ransom_note", "word_ladder"}
)
"""Tasks whose examples depend on Python's string hash seed, as measured with reasoning-gym 0.1.25."""

METADATA_KEY = "reasoning_gym"


class ReasoningGymOptions(Options):
    """A task and where in its endless stream to look."""

    task: str = Field(description="Name in reasoning-gym, such as chain_sum.")
    seed: int = 0
    size: PositiveInt = Field(1000, description="Number of examples.")
    task_options: Mapping[str, JsonValue] = Field(
        default_factory=dict[str, JsonValue], description="Fields of the task's own configuration."
    )

    @field_validator("task_options")
    @classmethod
    def _has_no_seed(cls, value: Mapping[str, JsonValue]) -> Mapping[str, JsonValue]:
        for name in ("seed", "size"):
            if name in value:
                raise ValueError(f"set {name} beside task_options, not inside")
        return value


@dataclass(frozen=True)
class ReasoningGymDataset:
    """Examples of one task. The metadata of an example says how to make it again (see `regenerate`)."""

    options: ReasoningGymOptions
    task: Any

    def __len__(self) -> int:
        return self.options.size

    def __getitem__(self, index: int, /) -> Example:
        entry = self.entry(index)
        source: JsonValue = {"index": index, "options": self.options.model_dump(mode="json")}
        return Example((Message("user", entry["question"]),), entry["answer"] or "", {METADATA_KEY: source})

    def entry(self, index: int) -> dict[str, Any]:
        """What the library makes of ``index``: question, answer and the metadata that its scorer reads."""
        if not 0 <= index < len(self):
            raise IndexError(index)
        try:
            with _seeded(self.options, index):
                return self.task[index]
        except Exception as error:  # a hundred generators, each with its own ways to fail
            raise DataError(
                f"reasoning-gym task {self.options.task!r} cannot make example {index}:"
                f" {type(error).__name__}: {error}",
                remedy="Change task_options or the seed.",
                code="VIME-DATA-010",
            ) from error


def open_reasoning_gym(options: ReasoningGymOptions) -> Dataset:
    """The task as a dataset; examples are made on demand.

    Raises:
        DataError: unknown task (with the nearest name), task options that the task refuses, or a task that needs a
            fixed PYTHONHASHSEED in a process without one.
        PluginError: reasoning-gym is not installed.
    """
    _refuse_random_hashes(options.task)
    return ReasoningGymDataset(options, _create_task(options))


def regenerate(example: Example) -> tuple[ReasoningGymDataset, dict[str, Any]]:
    """The task and library entry that an example came from, made again from its metadata.

    Raises:
        DataError: the example is of another dataset, or this process makes another one of the same name.
    """
    dataset, index = _source(example)
    entry = dataset.entry(index)
    if (entry["question"], entry["answer"] or "") != (example.messages[-1].content, example.label):
        raise DataError(
            f"reasoning-gym task {dataset.options.task!r} makes another example {index} in the process that scores it",
            remedy="Set PYTHONHASHSEED=0 in the environment before the run, or choose another task.",
            code="VIME-DATA-015",
        )
    return dataset, entry


def _source(example: Example) -> tuple[ReasoningGymDataset, int]:
    source = example.metadata.get(METADATA_KEY)
    if not isinstance(source, dict):
        raise DataError(
            "the reward 'reasoning-gym' scores only examples of the dataset source 'reasoning-gym'",
            remedy="Set data.source = 'reasoning-gym', or choose another reward.",
            code="VIME-DATA-016",
        )
    return _cached_dataset(json.dumps(source["options"])), cast(int, source["index"])


@lru_cache(maxsize=8)
def _cached_dataset(options: str) -> ReasoningGymDataset:
    parsed = ReasoningGymOptions.model_validate_json(options)
    return ReasoningGymDataset(parsed, _create_task(parsed))


def _create_task(options: ReasoningGymOptions) -> Any:
    known: dict[str, tuple[Any, Any]] = require("reasoning_gym.factory").DATASETS
    if options.task not in known:
        close = get_close_matches(options.task, known, n=1)
        hint = f"Did you mean {close[0]!r}? " if close else ""
        raise DataError(
            f"reasoning-gym has no task {options.task!r}",
            remedy=f"{hint}It has {len(known)}: {', '.join(sorted(known))}.",
            code="VIME-DATA-006",
        )
    try:
        return require("reasoning_gym").create_dataset(
            options.task, seed=options.seed, size=options.size, **thaw(options.task_options)
        )
    except Exception as error:  # TypeError for unknown fields, AssertionError and others for values
        allowed = [f.name for f in fields(known[options.task][1]) if f.name not in ("seed", "size")]
        raise DataError(
            f"reasoning-gym task {options.task!r} refuses its task_options: {type(error).__name__}: {error}",
            remedy=f"Its options: {', '.join(allowed) or 'none'}.",
            code="VIME-DATA-007",
        ) from error


def _refuse_random_hashes(task: str) -> None:
    if task in HASH_DEPENDENT and sys.flags.hash_randomization:
        raise DataError(
            f"examples of reasoning-gym task {task!r} depend on Python's hash seed, which differs in every process",
            remedy="Set PYTHONHASHSEED=0 in the environment before the run, or choose another task.",
            code="VIME-DATA-015",
        )


@contextmanager
def _seeded(options: ReasoningGymOptions, index: int) -> Generator[None]:
    """A few tasks draw from Python's global generator: give it a state of our own, then put the old one back."""
    state = random.getstate()
    random.seed(keyed_hash(derive_key(f"reasoning-gym {options.task}", options.seed), index))
    try:
        yield
    finally:
        random.setstate(state)
