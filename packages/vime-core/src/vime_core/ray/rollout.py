"""Several engines as one `vime_core.backends.Rollout`: a prompt's index says which one answers, never its load."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain, islice
from typing import Any

from vime_core.backends import NamedTensors, Taps
from vime_core.errors import ContractViolation
from vime_core.ray.crew import Crew, agreed
from vime_core.ray.library import ray
from vime_core.ray.tensors import RemoteTensors, chunks
from vime_core.ray.trainer import place_settings, unpacked_taps
from vime_core.types import Completion, Float32Array, ProcessReport, SampleRequest


class RayRollout:
    """See `vime_core.backends.Rollout`.

    Args:
        crew: the engines, by number, each started.
    """

    def __init__(self, crew: Crew) -> None:
        self._crew = crew
        self._asked: list[int] = []

    def generate(self, requests: Sequence[SampleRequest]) -> list[Completion]:
        """See `vime_core.backends.Rollout`. Which engine answers is a function of the prompt index alone."""
        self._asked = [self._engine(request) for request in requests]
        return self._in_order(self._crew.calls("call", [("generate", part) for part in self._parts(requests)]))

    def update_weights(self, weights: NamedTensors, version: int) -> Mapping[str, str]:
        """See `vime_core.backends.Rollout`.

        Raises:
            ContractViolation: the engines do not agree on what their kernels read.
        """
        parts = list(weights.references() if isinstance(weights, RemoteTensors) else map(ray().put, chunks(weights)))
        return self._agreed(self._crew.call("update_weights", parts, version))

    def weight_digests(self) -> Mapping[str, str]:
        """Of every engine, which must agree."""
        return self._agreed(self._crew.call("call", "weight_digests"))

    def processes(self) -> list[ProcessReport]:
        """The reports of each engine's processes, with its number and its place."""
        numbers = range(len(self._crew.members))
        arguments = [({"engine": number, **place_settings(self._crew, number)},) for number in numbers]
        return [report for reports in self._crew.calls("processes", arguments) for report in reports]

    def close(self) -> None:
        """End every engine. Idempotent."""
        self._crew.close()

    def _engine(self, request: SampleRequest) -> int:
        return request.prompt_index % len(self._crew.members)

    def _parts(self, requests: Sequence[SampleRequest]) -> list[list[SampleRequest]]:
        numbers = range(len(self._crew.members))
        return [[r for r in requests if self._engine(r) == number] for number in numbers]

    def _in_order(self, parts: Sequence[Sequence[Any]]) -> list[Any]:
        """What the engines answered, in the order of the requests of the last `generate`.

        An engine that answers more or less than it was asked is for the caller to find: nothing is left out or made up.
        """
        answers = [iter(part) for part in parts]
        asked = [answer for engine in self._asked for answer in islice(answers[engine], 1)]
        return [*asked, *chain.from_iterable(answers)]

    def _agreed(self, found: Sequence[Mapping[str, str]]) -> Mapping[str, str]:
        return agreed("weights", self._crew.members, found)


class AlignedRayRollout(RayRollout):
    """See `vime_core.backends.AlignedRollout`."""

    def draws_by_contract(self) -> bool:
        """See `vime_core.backends.DrawingRollout`: whether every engine does.

        Raises:
            ContractViolation: some do, and others do not, so that part of the tokens would be compared with nothing.
        """
        found: list[bool] = self._crew.call("draws_by_contract")
        if len(set(found)) > 1:
            raise ContractViolation(
                f"{self._crew.members[found.index(False)]} does not draw by the contract's draw, and"
                f" {self._crew.members[found.index(True)]} does",
                remedy="All engines of a run must be alike: the same packages and variables on every node.",
                code="VIME-ALIGN-009",
            )
        return all(found)

    def record_taps(self, request: SampleRequest) -> Taps:
        """Of the engine that answers this prompt."""
        return unpacked_taps(self._crew.one(self._engine(request), "taps", request))

    def prompt_log_probs(self, tokens: Sequence[int]) -> Float32Array:
        """Of the first engine."""
        return self._crew.one(0, "call", "prompt_log_probs", tuple(tokens))

    def keep_prefix_cache(self, keep: bool) -> None:
        """In every engine."""
        self._crew.call("call", "keep_prefix_cache", keep)

    def cached_tokens(self) -> list[int]:
        """See `vime_core.backends.AlignedRollout`."""
        return self._in_order(self._crew.call("call", "cached_tokens"))

    def prefill_in_chunks(self, tokens: int) -> None:
        """In every engine."""
        self._crew.call("call", "prefill_in_chunks", tokens)
