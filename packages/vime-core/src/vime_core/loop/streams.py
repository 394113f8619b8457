"""Open the configured datasets as prompt streams over a model's tokenizer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vime_core.config.schema import RunConfig
from vime_core.data import Dataset
from vime_core.data.template import PromptRenderer, Tokenizer, usable_examples
from vime_core.errors import DataError
from vime_core.loop.prompts import Prompt, PromptStream
from vime_core.plugins.manager import PluginManager
from vime_core.plugins.types import DatasetSource


def training_stream(config: RunConfig, plugins: PluginManager, tokenizer: Tokenizer) -> PromptStream:
    """The training prompts."""
    name = config.data.source
    dataset = _dataset(plugins, "data", name, config.options("data", name))
    stream = _stream(config, dataset, tokenizer, "sampling", config.sampling.max_tokens)
    stream.check(config.run.steps)
    return stream


@dataclass(frozen=True)
class EvaluationStream:
    """The prompts of one evaluation set; ``name`` is empty for that of [evaluation] itself."""

    name: str
    prompts: tuple[Prompt, ...]
    max_tokens: int
    temperature: float


def evaluation_streams(config: RunConfig, plugins: PluginManager, tokenizer: Tokenizer) -> tuple[EvaluationStream, ...]:
    """The evaluation sets in the order of the configuration; none when no evaluation is configured."""
    section = config.evaluation
    if section.every == 0:
        return ()
    unnamed = [_unnamed(config, plugins, tokenizer)] if section.source or not section.sets else []
    return (*unnamed, *(_named(config, plugins, tokenizer, name) for name in section.sets))


def _unnamed(config: RunConfig, plugins: PluginManager, tokenizer: Tokenizer) -> EvaluationStream:
    section = config.evaluation
    holder, source = ("evaluation", section.source) if section.source else ("data", config.data.source)
    entry = plugins.find(DatasetSource, source, field_name=f"{holder}.source")
    with plugins.guarding(entry):
        dataset = _opened(entry, config.options(holder, source), f"{holder}.{source}")
        stream = _stream(config, dataset, tokenizer, "evaluation", section.max_tokens)
        return EvaluationStream("", tuple(stream.first(section.prompts)), section.max_tokens, section.temperature)


def _named(config: RunConfig, plugins: PluginManager, tokenizer: Tokenizer, name: str) -> EvaluationStream:
    section, one, where = config.evaluation, config.evaluation.sets[name], f"evaluation.sets.{name}"
    entry = plugins.find(DatasetSource, one.source, field_name=f"{where}.source")
    max_tokens = one.max_tokens or section.max_tokens
    temperature = section.temperature if one.temperature is None else one.temperature
    with plugins.guarding(entry):
        dataset = _opened(entry, one.plugin_options[one.source], f"{where}.{one.source}")
        stream = _stream(config, dataset, tokenizer, where if one.max_tokens else "evaluation", max_tokens)
        return EvaluationStream(name, tuple(stream.first(one.prompts or section.prompts)), max_tokens, temperature)


def _dataset(plugins: PluginManager, section: str, name: str, options: object) -> Dataset:
    return _opened(plugins.find(DatasetSource, name, field_name=f"{section}.source"), options, f"{section}.{name}")


def _opened(entry: DatasetSource, options: object, table: str) -> Dataset:
    """What a source makes of its table; where the file cannot be used, the error begins with the table's key."""
    try:
        return entry.load()(options)
    except DataError as error:
        key = next((key for key, path in _files(options) if str(path) in error.message), None)
        if key is None:
            raise
        raise DataError(f"{table}.{key}: {error.message}", remedy=error.remedy, code=error.code) from error


def _files(options: Any) -> Iterator[tuple[str, Path]]:
    """The files that a table names, by their keys within it."""
    if isinstance(path := getattr(options, "path", None), Path):
        yield "path", path
    for number, source in enumerate(getattr(options, "sources", ())):
        yield f"sources.{number}.path", source.path


def _stream(config: RunConfig, dataset: Dataset, tokenizer: Tokenizer, section: str, max_tokens: int) -> PromptStream:
    renderer = PromptRenderer(
        tokenizer,
        max_tokens=config.rollout.context_length - max_tokens,
        system_prompt=config.data.system_prompt,
        reserved_by=f"{section}.max_tokens",
    )
    if config.data.overlong == "error":
        return PromptStream(dataset, renderer, range(len(dataset)), config.run.seed, config.sampling.prompts_per_step)
    examples = usable_examples(dataset, renderer)
    return PromptStream(
        dataset, renderer, examples.kept, config.run.seed, config.sampling.prompts_per_step, len(examples.dropped)
    )
