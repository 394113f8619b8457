"""A run's parts, put together in the one order that works, and taken apart whatever happens."""

from __future__ import annotations

import platform
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field

from vime_core import __version__
from vime_core.backends import ReferenceTrainer, Rollout, Trainer
from vime_core.config.schema import RunConfig
from vime_core.config.validate import resolved_table
from vime_core.data.template import Tokenizer
from vime_core.determinism.policy import DeterminismPolicy
from vime_core.loop.algorithm import Algorithm, require_entropy
from vime_core.loop.aligned import require_draws
from vime_core.loop.data_digest import RunData, described, require_same_data
from vime_core.loop.preparation import Preparation
from vime_core.loop.prompts import PromptStream
from vime_core.loop.reference import reference_trainer
from vime_core.loop.resume import Resumption, plugin_entries, require_same_software, require_same_start, restore
from vime_core.loop.same_processes import require_same_processes
from vime_core.loop.scoring import Scorer, open_scorer
from vime_core.loop.sides import Sides, open_sides, parts_of
from vime_core.loop.sinks import GuardedSink
from vime_core.loop.streams import EvaluationStream
from vime_core.plugins.manager import PluginManager
from vime_core.record.digest import merkle_root
from vime_core.record.schema import Manifest, ProcessEntry, ResumeEntry
from vime_core.record.settings import with_changeable
from vime_core.record.writer import RecordWriter
from vime_core.sinks import Sink
from vime_core.types import Completion


@dataclass
class Session:
    """Everything that a step needs. ``weight_version``, ``next_prompt`` (in the order of prompts) and ``rewind_to``
    change, nothing else.

    ``rewind_to`` is the step from which on the sinks must forget what they were told, before they hear of it again.
    ``first_step`` is where this process begins; ``reference`` the trainer, where a reference model is needed; ``data``
    what checkpoints say of the data.
    """

    config: RunConfig
    plugins: PluginManager
    tokenizer: Tokenizer
    prompts: PromptStream
    evaluation: tuple[EvaluationStream, ...]
    scorer: Scorer
    algorithm: Algorithm
    rollout: Rollout
    trainer: Trainer
    writer: RecordWriter
    sinks: tuple[Sink, ...]
    rewind_to: int | None = None
    weight_version: int = 0
    first_step: int = 0
    next_prompt: int = 0
    reference: ReferenceTrainer | None = None
    data: Mapping[str, int | str] = field(default_factory=dict[str, int | str])

    def rewind_sinks(self) -> None:
        """Not before the first step is there to be told anew: what is kept of earlier ones is kept until then."""
        first, self.rewind_to = self.rewind_to, None
        if first is not None:
            for sink in self.sinks:
                sink.rewind(first)

    def decode(self, completions: Sequence[Completion]) -> list[str]:
        """The text of each response, without special tokens."""
        return [self.tokenizer.decode(c.tokens, skip_special_tokens=True) for c in completions]


@contextmanager
def open_session(preparation: Preparation, resumption: Resumption | None = None) -> Generator[Session]:
    """Start both sides and check that they hold the same weights; close everything in reverse order.

    With a ``resumption`` both sides then hold what its checkpoint says, and its record goes on.
    """
    config, policy, plugins = preparation.config, preparation.policy, preparation.plugins
    parts = parts_of(preparation)
    data = RunData(parts.prompts, preparation.evaluation)
    if resumption and resumption.state:
        require_same_data(str(resumption.checkpoint), resumption.state.loop.get("data"), data)
    with ExitStack() as stack:
        scorer = stack.enter_context(open_scorer(config, plugins))
        writer = stack.enter_context(_writer(config, policy, plugins, resumption))
        sides = stack.enter_context(open_sides(parts))
        _record_start(writer, sides, resumption, replaces=not policy.repeats)
        require_entropy(parts.algorithm, sides.trainer)
        require_draws(config, sides.trainer)
        reference = reference_trainer(parts.algorithm, sides.trainer)
        version = restore(resumption, sides.trainer, sides.rollout) if resumption else 0
        first = resumption.next_step if resumption else 0
        # Closed before both sides are, which takes a while: who is killed meanwhile has a true record.
        with writer.closing_for_errors(), ExitStack() as opened:
            # What sinks write into the record is there before it is sealed.
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
                sinks=_sinks(preparation, opened),
                rewind_to=first if resumption else None,
                weight_version=version,
                first_step=first,
                next_prompt=resumption.next_prompt if resumption else 0,
                reference=reference,
                data=described(data, config.run.steps) if config.run.checkpoint_every else {},
            )
        writer.finish("complete")


def _writer(
    config: RunConfig, policy: DeterminismPolicy, plugins: PluginManager, resumption: Resumption | None
) -> RecordWriter:
    if resumption is None:
        return RecordWriter.create(config.run.output, _manifest(config, policy, plugins))
    require_same_software(resumption.record.manifest, policy, plugins)
    began = resumption.record.manifest.config
    return RecordWriter.resume(
        config.run.output,
        found=resumption.record,
        replace_from=None if policy.repeats else resumption.next_step,
        config=with_changeable(began, resolved_table(config)),
    )


def _manifest(config: RunConfig, policy: DeterminismPolicy, plugins: PluginManager) -> Manifest:
    return Manifest(
        vime_version=__version__,
        config=resolved_table(config),
        policy=policy.id,
        plugins=plugin_entries(plugins),
        module_directories=plugins.module_directories,
        platform=_platform(),
    )


def _platform() -> Mapping[str, str]:
    return {
        "system": platform.system(),
        "release": platform.release(),
        "machine": platform.machine(),
        "python": platform.python_version(),
    }


def _record_start(writer: RecordWriter, sides: Sides, resumption: Resumption | None, *, replaces: bool) -> None:
    alignment = sides.parts.alignment
    contract = "" if alignment is None else alignment.contract.to_json()
    processes = tuple(ProcessEntry(**asdict(report)) for report in sides.reports)
    manifest = writer.manifest
    if resumption is not None:
        require_same_start(manifest, sides.initial_weights, contract)
        if not replaces:
            require_same_processes(manifest.processes, processes)
        writer.update_manifest(resumed=(*manifest.resumed, _resumed(resumption, sides, processes, replaces=replaces)))
    if not manifest.initial_weights:
        writer.update_manifest(
            processes=processes,
            initial_weights=sides.initial_weights,
            model_root=merkle_root(sides.initial_weights),
            contract=contract,
        )


def _resumed(
    resumption: Resumption, sides: Sides, processes: tuple[ProcessEntry, ...], *, replaces: bool
) -> ResumeEntry:
    return ResumeEntry(
        step=resumption.next_step,
        recorded=len(resumption.record.steps),
        replaces=replaces,
        vime_version=__version__,
        plugins=plugin_entries(sides.parts.plugins),
        platform=_platform(),
        processes=processes,
    )


def _sinks(preparation: Preparation, stack: ExitStack) -> tuple[Sink, ...]:
    opened: list[Sink] = []
    for entry in preparation.sinks:
        sink = GuardedSink(preparation.plugins, entry, preparation.config.run.output)
        stack.callback(sink.close)
        opened.append(sink)
    return tuple(opened)
