"""Dataset source ``mixture``: several JSONL or Parquet files, each with its share of an epoch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pydantic import Field, model_validator

from vime_core.config.paths import UserPath
from vime_core.config.schema import PositiveFloat, PositiveInt
from vime_core.data.columns import ColumnOptions
from vime_core.data.files import JsonlOptions, ParquetOptions, open_jsonl, open_parquet
from vime_core.data.types import Dataset, Example
from vime_core.plugins.types import Options


class MixtureSource(ColumnOptions):
    """One file of a mixture; columns as for ``jsonl`` and ``parquet``."""

    path: UserPath = Field(description="A .jsonl or .parquet file.")
    weight: PositiveFloat = Field(1.0, description="Share of the epoch, relative to the other files'.")


class MixtureOptions(Options):
    """Which files, in which shares."""

    sources: tuple[MixtureSource, ...] = Field(description="Tables with path and weight.", min_length=1)
    size: PositiveInt | None = Field(None, description="Examples of an epoch; None: as many as all files hold.")

    @model_validator(mode="after")
    def _known_forms(self) -> MixtureOptions:
        for source in self.sources:
            if source.path.suffix not in (".jsonl", ".parquet"):
                raise ValueError(f"path = {str(source.path)!r} is neither .jsonl nor .parquet")
        return self


@dataclass(frozen=True)
class Mixture:
    """Examples of several datasets; ``places`` says for each index which dataset and which of its examples."""

    datasets: tuple[Dataset, ...]
    places: tuple[tuple[int, int], ...]

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, index: int, /) -> Example:
        dataset, place = self.places[index]
        return self.datasets[dataset][place]


def open_mixture(options: MixtureOptions) -> Dataset:
    """Open every file.

    Raises:
        DataError: a file is missing, empty or unusable.
    """
    datasets = tuple(_open(source) for source in options.sources)
    lengths = [len(dataset) for dataset in datasets]
    counts = shares([source.weight for source in options.sources], options.size or sum(lengths))
    return Mixture(datasets, tuple((d, i % lengths[d]) for d, count in enumerate(counts) for i in range(count)))


def shares(weights: Sequence[float], size: int) -> list[int]:
    """``size`` split by weight: floors, and what is left to the largest remainders, ties by index (Hamilton)."""
    quotas = [size * weight / sum(weights) for weight in weights]
    counts = [int(quota) for quota in quotas]
    by_remainder = sorted(range(len(weights)), key=lambda i: (counts[i] - quotas[i], i))
    for index in by_remainder[: size - sum(counts)]:
        counts[index] += 1
    return counts


def _open(source: MixtureSource) -> Dataset:
    columns = source.model_dump(exclude={"weight"})
    if source.path.suffix == ".jsonl":
        return open_jsonl(JsonlOptions.model_validate(columns))
    return open_parquet(ParquetOptions.model_validate(columns))
