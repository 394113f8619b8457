"""Models and trainers of the tests; a trainer is closed when its test ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from vime_core.backends import TrainerContext
from vime_core.config.schema import RunConfig
from vime_core.determinism.policy import REPRODUCIBLE, DeterminismPolicy
from vime_megatron.options import MegatronOptions
from vime_megatron.testing import hf_model, run_config
from vime_megatron.trainer import open_trainer

settings.register_profile("vime", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("vime")


@pytest.fixture
def save_hf(tmp_path: Path) -> Callable[..., tuple[Any, Path]]:
    """Make and save a random transformers model; gives the model and its directory."""

    def make(model_type: str, seed: int = 0, **changes: Any) -> tuple[Any, Path]:
        model = hf_model(model_type, seed, **changes)
        place = tmp_path / f"{model_type}-{len(list(tmp_path.iterdir()))}"
        model.save_pretrained(place)
        return model, place

    return make


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a random tied Llama."""
    place = tmp_path_factory.mktemp("models") / "llama"
    hf_model("llama", tie_word_embeddings=True).save_pretrained(place)
    return place


@pytest.fixture
def open_at() -> Iterator[Callable[..., Any]]:
    """Open a trainer on a model directory, closing the one opened before."""
    trainers: list[Any] = []

    def make(
        directory: Path,
        config: RunConfig | None = None,
        policy: DeterminismPolicy = REPRODUCIBLE,
        options: MegatronOptions | None = None,
    ) -> Any:
        while trainers:
            trainers.pop().close()
        context = TrainerContext(config or run_config(), options or MegatronOptions(), policy, directory)
        trainers.append(open_trainer(context))
        return trainers[-1]

    yield make
    for trainer in trainers:
        trainer.close()
