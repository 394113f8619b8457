"""Trainers that keep a contract; each is closed when its test ends or the next one opens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from vime_core.alignment import Alignment
from vime_core.backends import TrainerContext
from vime_core.config.schema import RunConfig
from vime_core.determinism.policy import REPRODUCIBLE
from vime_core.numerics import Operations, load_provider
from vime_megatron.aligned.testing import DENSE_ALIGNMENT
from vime_megatron.options import MegatronOptions
from vime_megatron.testing import run_config
from vime_megatron.trainer import open_trainer


@pytest.fixture(scope="session")
def operations() -> Operations:
    return load_provider("cpu")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """The trainer sets its own threads; the reference beside it gets as many."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def open_aligned() -> Iterator[Callable[..., Any]]:
    trainers: list[Any] = []

    def make(
        directory: Path,
        config: RunConfig | None = None,
        alignment: Alignment | None = DENSE_ALIGNMENT,
        **options: Any,
    ) -> Any:
        while trainers:
            trainers.pop().close()
        given = MegatronOptions.model_validate(options)
        trainers.append(open_trainer(TrainerContext(config or run_config(), given, REPRODUCIBLE, directory, alignment)))
        return trainers[-1]

    yield make
    for trainer in trainers:
        trainer.close()


@pytest.fixture(scope="session")
def reference_provider() -> Alignment:
    return replace(DENSE_ALIGNMENT, provider="reference")
