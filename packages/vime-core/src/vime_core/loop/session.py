"""A run's parts, put together in the one order that works, and taken apart whatever happens."""

from __future__ import annotations

import platform
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass

from vime_core import __version__
from vime_core.backends import Rollout, Trainer
from vime_core.config.load import resolved_table
from vime_core.config.schema import RunConfig
from vime_core.data.template import Tokenizer
from vime_core.determinism.policy import DeterminismPolicy
from vime_core.loop.algorithm import Algorithm
from vime_core.loop.preparation import Preparation
from vime_core.loop.prompts import PromptStream
from vime_core.loop.scoring import Scorer, open_scorer
from vime_core.loop.sides import Sides, open_sides, parts_of
from vime_core.loop.sinks import GuardedSink
from vime_core.plugins.manager import PluginManager
from vime_core.record.digest import merkle_root
from vime_core.record.schema import Manifest, PluginEntry, ProcessEntry
from vime_core.record.writer import RecordWriter
from vime_core.sinks import Sink
from vime_core.types import Completion


@dataclass
class Session:
    """Everything that a step needs. Only ``weight_version`` changes."""

    config: RunConfig
    plugins: PluginManager
    tokenizer: Tokenizer
    prompts: PromptStream
    evaluation: PromptStream | None
    scorer: Scorer
    algorithm: Algorithm
    rollout: Rollout
    trainer: Trainer
    writer: RecordWriter
    sinks: tuple[Sink, ...]
    weight_version: int = 0

    def decode(self, completions: Sequence[Completion]) -> list[str]:
        """The text of each response, without special tokens."""
        return [self.tokenizer.decode(c.tokens, skip_special_tokens=True) for c in completions]


@contextmanager
def open_session(preparation: Preparation) -> Generator[Session]:
    """Start both sides and check that they hold the same weights; close everything in reverse order."""
    config, policy, plugins = preparation.config, preparation.policy, preparation.plugins
    parts = parts_of(preparation)
    with ExitStack() as stack:
        scorer = stack.enter_context(open_scorer(config, plugins))
        writer = stack.enter_context(RecordWriter.create(config.run.output, _manifest(config, policy, plugins)))
        sides = stack.enter_context(open_sides(parts))
        _record_start(writer, sides)
        yield Session(
            config=config,
            plugins=plugins,
            tokenizer=parts.tokenizer,
            prompts=parts.prompts,
            evaluation=preparation.evaluation,
            scorer=scorer,
            algorithm=parts.algorithm,
            rollout=sides.rollout,
            trainer=sides.trainer,
            writer=writer,
            sinks=_sinks(preparation, stack),
        )
        writer.finish("complete")


def _manifest(config: RunConfig, policy: DeterminismPolicy, plugins: PluginManager) -> Manifest:
    return Manifest(
        vime_version=__version__,
        config=resolved_table(config),
        policy=policy.id,
        plugins=tuple(
            PluginEntry(name=i.name, distribution=i.distribution, version=i.version) for i in plugins.plugins()
        ),
        platform=_platform(),
    )


def _platform() -> Mapping[str, str]:
    return {
        "system": platform.system(),
        "release": platform.release(),
        "machine": platform.machine(),
        "python": platform.python_version(),
    }


def _record_start(writer: RecordWriter, sides: Sides) -> None:
    alignment = sides.parts.alignment
    writer.update_manifest(
        processes=tuple(ProcessEntry(**asdict(report)) for report in sides.reports),
        initial_weights=sides.initial_weights,
        model_root=merkle_root(sides.initial_weights),
        contract="" if alignment is None else alignment.contract.to_json(),
    )


def _sinks(preparation: Preparation, stack: ExitStack) -> tuple[Sink, ...]:
    opened: list[Sink] = []
    for entry in preparation.sinks:
        sink = GuardedSink(preparation.plugins, entry, preparation.config.run.output)
        stack.callback(sink.close)
        opened.append(sink)
    return tuple(opened)
