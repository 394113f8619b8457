"""The ranks of a trainer as one `vime_core.backends.Trainer`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from vime_core.backends import LossFunction, Microbatches, NamedTensors, StateObserver, Taps
from vime_core.errors import BackendError
from vime_core.ray.crew import Crew, agreed
from vime_core.ray.hosts import Abilities
from vime_core.ray.library import ray
from vime_core.ray.tensors import Packed, RemoteTensors, pack, unpack
from vime_core.types import (
    Drawn,
    Float32Array,
    ProcessReport,
    SampleKey,
    SampleRequest,
    TrainSequence,
    TrainStepResult,
)

if TYPE_CHECKING:
    from torch import Tensor


class RayTrainer:
    """See `vime_core.backends.Trainer`. Every call goes to every rank, and the first rank's result is the result.

    Args:
        crew: the ranks, by rank, each with an open trainer.

    It has ``gives_entropy`` where theirs do (`vime_core.backends.EntropyTrainer`).
    """

    gives_entropy: Literal[True]

    def __init__(self, crew: Crew) -> None:
        self._crew = crew

    def log_probs(self, microbatches: Microbatches) -> list[Float32Array]:
        """See `vime_core.backends.Trainer`."""
        return self._result("log_probs", microbatches)

    def train_step(self, microbatches: Microbatches, loss: LossFunction, observer: StateObserver) -> TrainStepResult:
        """See `vime_core.backends.Trainer`.

        Raises:
            ContractViolation: the ranks do not agree on the gradients.
        """
        keep = bool(getattr(observer, "needs_tensors", False))
        found = self._crew.call("train_step", microbatches, loss, keep)
        digests = dict(agreed("gradients", self._crew.members, [one[1] for one in found]))
        references = partial(self._references, "kept") if keep else _not_kept
        observer.gradients(RemoteTensors(lambda: digests, references, ray().get))
        return found[0][0]

    def weights(self) -> NamedTensors:
        """See `vime_core.backends.Trainer`; the ranks must agree on the digests."""
        return self._tensors("weights")

    def optimizer_state(self) -> NamedTensors:
        """See `vime_core.backends.Trainer`; the ranks must agree on the digests."""
        return self._tensors("optimizer_state")

    def save(self, directory: Path) -> None:
        """See `vime_core.backends.Trainer`. All nodes must have the directory."""
        self._result("save", directory.absolute())

    def load(self, directory: Path) -> None:
        """See `vime_core.backends.Trainer`. All nodes must have the directory."""
        self._result("load", directory.absolute())

    def processes(self) -> list[ProcessReport]:
        """One report a rank, with its place."""
        arguments = [(place_settings(self._crew, number),) for number in range(len(self._crew.members))]
        return [report for reports in self._crew.calls("processes", arguments) for report in reports]

    def close(self) -> None:
        """End every rank. Idempotent."""
        self._crew.close()

    def _result(self, method: str, *args: Any) -> Any:
        return self._crew.call("result", method, *args)[0]

    def _tensors(self, what: str) -> RemoteTensors:
        return RemoteTensors(partial(self._digests, what), partial(self._references, what), ray().get)

    def _digests(self, what: str) -> dict[str, str]:
        return dict(agreed(what, self._crew.members, self._crew.call("digests", what)))

    def _references(self, what: str) -> Iterator[Any]:
        self._crew.call("begin", what)
        while True:
            started = [(m, m.handle.chunk.options(num_returns=2).remote()) for m in self._crew.members]
            if not self._crew.gather(f"chunk of {what}", [(m, more) for m, (_, more) in started])[0]:
                return
            yield started[0][1][0]


class ReferenceRayTrainer(RayTrainer):
    """See `vime_core.backends.ReferenceTrainer`."""

    def keep_reference(self) -> None:
        """See `vime_core.backends.ReferenceTrainer`."""
        self._result("keep_reference")

    def reference_log_probs(self, microbatches: Microbatches) -> list[Float32Array]:
        """See `vime_core.backends.ReferenceTrainer`."""
        return self._result("reference_log_probs", microbatches)


class AlignedRayTrainer(ReferenceRayTrainer):
    """See `vime_core.backends.AlignedTrainer`."""

    def record_taps(self, sequence: TrainSequence) -> Taps:
        """See `vime_core.backends.AlignedTrainer`."""
        return unpacked_taps(self._crew.call("taps", sequence)[0])

    def gradients(
        self, microbatches: Microbatches, loss: LossFunction, *, recompute: bool = False
    ) -> Mapping[str, Tensor]:
        """See `vime_core.backends.AlignedTrainer`."""
        return dict(map(unpack, self._crew.call("gradients", microbatches, loss, recompute)[0]))

    def by_hf_name(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """See `vime_core.backends.AlignedTrainer`."""
        packed = [pack(name, tensor) for name, tensor in tensors.items()]
        return dict(map(unpack, self._crew.one(0, "by_hf_name", packed)))


class DrawingRayTrainer(AlignedRayTrainer):
    """See `vime_core.backends.DrawingTrainer`."""

    def draw_again(self, microbatches: Microbatches, requests: Mapping[SampleKey, SampleRequest]) -> list[Drawn]:
        """See `vime_core.backends.DrawingTrainer`."""
        return self._result("draw_again", microbatches, requests)


def ray_trainer(crew: Crew, can: Abilities) -> RayTrainer:
    """The ranks as a trainer that can do what each of them can."""
    kinds = {
        (True, False, False): ReferenceRayTrainer,
        (True, True, False): AlignedRayTrainer,
        (True, True, True): DrawingRayTrainer,
    }
    trainer = kinds.get((can.reference, can.aligned, can.drawing), RayTrainer)(crew)
    if can.entropy:
        trainer.gives_entropy = True
    return trainer


def place_settings(crew: Crew, number: int) -> dict[str, Any]:
    """What a report says of an actor's place: node, GPUs, and how many of its kind there are."""
    place = crew.members[number].place
    return {"launcher": "ray", "node": place.host, "gpus": list(place.gpus), "actors": len(crew.members)}


def unpacked_taps(taps: list[tuple[Packed, Packed]]) -> Taps:
    """Taps as they were before they travelled."""
    return {positions.name: (unpack(positions)[1], unpack(rows)[1]) for positions, rows in taps}


def _not_kept() -> Iterator[Any]:
    raise BackendError(
        "a train step's observer reads gradients that stayed with the trainer's ranks",
        remedy="Give the observer needs_tensors = True (vime_core.backends.StateObserver).",
        code="VIME-BACKEND-084",
    )
