"""Open the configured datasets as prompt streams over a model's tokenizer."""

from __future__ import annotations

from vime_core.config.schema import RunConfig
from vime_core.data import Dataset
from vime_core.data.template import PromptRenderer, Tokenizer, usable_examples
from vime_core.loop.prompts import PromptStream
from vime_core.plugins.manager import PluginManager
from vime_core.plugins.types import DatasetSource


def training_stream(config: RunConfig, plugins: PluginManager, tokenizer: Tokenizer) -> PromptStream:
    """The training prompts."""
    name = config.data.source
    dataset = _dataset(plugins, "data", name, config.options("data", name))
    stream = _stream(config, dataset, tokenizer, "sampling", config.sampling.max_tokens)
    stream.check(config.run.steps)
    return stream


def evaluation_stream(config: RunConfig, plugins: PluginManager, tokenizer: Tokenizer) -> PromptStream | None:
    """The evaluation prompts, or None when no evaluation is configured."""
    section = config.evaluation
    if section.every == 0:
        return None
    holder, name = ("evaluation", section.source) if section.source else ("data", config.data.source)
    dataset = _dataset(plugins, holder, name, config.options(holder, name))
    stream = _stream(config, dataset, tokenizer, "evaluation", section.max_tokens)
    stream.first(section.prompts)
    return stream


def _dataset(plugins: PluginManager, section: str, name: str, options: object) -> Dataset:
    return plugins.find(DatasetSource, name, field_name=f"{section}.source").load()(options)


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
