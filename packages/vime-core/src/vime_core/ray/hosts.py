"""What runs inside the actors: one backend object each, made and used in that process alone."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vime_core.backends import (
    AlignedTrainer,
    DrawingRollout,
    DrawingTrainer,
    EntropyTrainer,
    LossFunction,
    Microbatches,
    NamedTensors,
    Ranks,
    ReferenceTrainer,
    RolloutContext,
    TrainerContext,
)
from vime_core.plugins.types import load_attribute
from vime_core.ray.library import ray
from vime_core.ray.tensors import Packed, chunks, pack, unpack, unpacked
from vime_core.record.digest import digest_tensors
from vime_core.types import ProcessReport, TrainStepResult


@dataclass(frozen=True)
class Place:
    """Where an actor is: address and id of its node, its process, its GPUs, and where Ray keeps its output."""

    host: str
    node: str
    pid: int
    gpus: tuple[str, ...]
    logs: Path


@dataclass(frozen=True)
class Abilities:
    """What a trainer can do besides `vime_core.backends.Trainer`, by the protocols there."""

    reference: bool
    aligned: bool
    drawing: bool
    entropy: bool

    @staticmethod
    def of(trainer: Any) -> Abilities:
        """Those of a trainer."""
        kinds = ReferenceTrainer, AlignedTrainer, DrawingTrainer, EntropyTrainer
        return Abilities(*(isinstance(trainer, kind) for kind in kinds))


class Host:
    """An actor that holds one backend object. Exceptions of vime travel as they are."""

    def __init__(self) -> None:
        self._held: Any = None

    def place(self) -> Place:
        """Where this actor is."""
        context = ray().get_runtime_context()
        return Place(
            host=ray().util.get_node_ip_address(),
            node=context.get_node_id(),
            pid=os.getpid(),
            gpus=tuple(map(str, context.get_accelerator_ids().get("GPU", ()))),
            logs=Path(ray()._private.worker._global_node.get_logs_dir_path()),
        )

    def processes(self, settings: Mapping[str, Any]) -> list[ProcessReport]:
        """The object's own reports, with where it is."""
        reports: list[ProcessReport] = self._held.processes()
        return [replace(report, settings={**report.settings, **settings}) for report in reports]

    def call(self, method: str, *args: Any) -> Any:
        """The result of a method of the object."""
        return getattr(self._held, method)(*args)

    def close(self) -> None:
        """Close the object."""
        if self._held is not None:
            self._held.close()


class TrainerHost(Host):
    """One trainer rank. Every rank is called alike; the first one gives the results."""

    def __init__(self) -> None:
        super().__init__()
        self._first = True
        self._chunks: Iterator[list[Packed]] = iter(())
        self._kept: list[tuple[str, Any]] = []
        self._port = socket.socket()

    def free_address(self) -> str:
        """Where ranks can meet: this node, and a port that nobody else is given until `open` has ended."""
        # Bound by two that both reuse addresses, neither of which listens: the ranks' store can have it, no other.
        self._port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._port.bind(("", 0))
        return f"tcp://{ray().util.get_node_ip_address()}:{self._port.getsockname()[1]}"

    def open(self, target: str, name: str, context: TrainerContext, ranks: Ranks) -> Abilities:
        """Build the trainer; says what it can do."""
        self._first = ranks.rank == 0
        with self._port:
            self._held = load_attribute(target, name)(replace(context, ranks=ranks))
        return Abilities.of(self._held)

    def result(self, method: str, *args: Any) -> Any:
        """The result of a method that all ranks have alike; of the first rank only."""
        found = self.call(method, *args)
        return found if self._first else None

    def train_step(
        self, microbatches: Microbatches, loss: LossFunction, keep: bool
    ) -> tuple[TrainStepResult | None, dict[str, str]]:
        """The step's result, of the first rank only, and the digests of its gradients, of every rank."""
        observer = _Gradients(keep=keep and self._first)
        found = self._held.train_step(microbatches, loss, observer)
        self._kept = observer.kept
        return (found if self._first else None), observer.digests

    def digests(self, what: str) -> dict[str, str]:
        """Digests of the tensors of a method such as ``weights``."""
        return digest_tensors(self._tensors(what))

    def begin(self, what: str) -> None:
        """The next `chunk` is the first of these tensors."""
        self._chunks = chunks(self._tensors(what))

    def chunk(self) -> tuple[list[Packed], bool]:
        """The next chunk, and whether it is one; only the first rank gives its contents."""
        found = next(self._chunks, None)
        return (found or [] if self._first else []), found is not None

    def gradients(self, microbatches: Microbatches, loss: LossFunction, recompute: bool) -> list[Packed]:
        """The object's gradients, of the first rank only."""
        found = self._held.gradients(microbatches, loss, recompute=recompute)
        return [pack(name, tensor) for name, tensor in found.items()] if self._first else []

    def by_hf_name(self, tensors: Sequence[Packed]) -> list[Packed]:
        """The same tensors by HF name."""
        return [pack(name, tensor) for name, tensor in self._held.by_hf_name(dict(map(unpack, tensors))).items()]

    def taps(self, sequence: Any) -> list[tuple[Packed, Packed]]:
        """The taps of one sequence."""
        return _packed_taps(self._held.record_taps(sequence)) if self._first else []

    def _tensors(self, what: str) -> NamedTensors:
        return iter(self._kept) if what == "kept" else getattr(self._held, what)()


class EngineHost(Host):
    """One engine, with the processes that it starts."""

    def open(self, target: str, name: str, context: RolloutContext) -> None:
        """Start the engine."""
        self._held = load_attribute(target, name)(context)

    def update_weights(self, parts: Sequence[Any], version: int) -> Mapping[str, str]:
        """Install the weights of some chunks; the digests of what kernels now read."""
        return self._held.update_weights(unpacked(parts, ray().get), version)

    def draws_by_contract(self) -> bool:
        """Whether the engine draws by the contract's draw; False where it does not say."""
        return isinstance(self._held, DrawingRollout) and self._held.draws_by_contract()

    def taps(self, request: Any) -> list[tuple[Packed, Packed]]:
        """The taps of one response."""
        return _packed_taps(self._held.record_taps(request))


class _Gradients:
    """A `vime_core.backends.StateObserver`: digests, and copies where they are asked for."""

    def __init__(self, *, keep: bool) -> None:
        self._keep = keep
        self.digests: dict[str, str] = {}
        self.kept: list[tuple[str, Any]] = []

    def gradients(self, tensors: NamedTensors) -> None:
        pairs = list(tensors)
        self.digests = digest_tensors(pairs)
        if self._keep:
            self.kept = [(name, tensor.detach().cpu().clone()) for name, tensor in pairs]


def _packed_taps(taps: Mapping[str, tuple[Any, Any]]) -> list[tuple[Packed, Packed]]:
    return [(pack(name, positions), pack(name, rows)) for name, (positions, rows) in taps.items()]
