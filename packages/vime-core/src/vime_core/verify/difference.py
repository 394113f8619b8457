"""The first difference between two records: its place, its size, and one sentence about it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final, Literal, Protocol

from vime_core.types import SampleKey
from vime_core.verify.causes import Cause, likely_cause
from vime_core.verify.verdict import json_number

Stage = Literal[
    "config",
    "initial weights",
    "steps",
    "evaluation",
    "prompts",
    "tokens",
    "rollout log-probs",
    "rewards",
    "reference log-probs",
    "advantages",
    "updates",
    "train log-probs",
    "loss",
    "gradients",
    "gradient norm",
    "learning rate",
    "weights",
    "optimizer state",
    "metrics",
]
_SHOWN: Final = 3
_COUNTED: Final = 1_000_000


@dataclass(frozen=True)
class Place:
    """Where in a run; what does not apply is None. ``token`` counts response tokens from 0."""

    stage: Stage
    step: int | None = None
    update: int | None = None
    sample: SampleKey | None = None
    token: int | None = None
    tensor: str | None = None

    def __str__(self) -> str:
        parts = [
            None if self.step is None else f"step {self.step}",
            None if self.update is None else f"update {self.update}",
            self.stage,
            None if self.sample is None else f"prompt {self.sample[0]}, sample {self.sample[1]}",
            None if self.token is None else f"token {self.token}",
            None if self.tensor is None else f"tensor {self.tensor!r}",
        ]
        return ", ".join(part for part in parts if part is not None)


@dataclass(frozen=True)
class Size:
    """How much differs at a stage: ``unequal`` of ``compared`` things of a ``unit``; ulps where floats were stored."""

    unequal: int
    compared: int
    unit: str
    first_ulps: int | None = None
    largest_ulps: int | None = None
    largest_difference: float | None = None

    def __str__(self) -> str:
        if self.compared == 1:
            return ""
        verb = "have no counterpart" if self.unit == "steps" else "differ"
        text = f"{self.unequal} of {self.compared} {self.unit} {verb}"
        if self.largest_ulps is None:
            return text
        size = "" if self.largest_ulps > _COUNTED else f", at most {distance(self.largest_ulps)}"
        return f"{text}{size}, by at most {self.largest_difference:.3g}"


@dataclass(frozen=True)
class Found:
    """The first unequal result: place, the two values in words, size, and what kind of fault it points to."""

    place: Place
    what: str
    size: Size
    cause: Cause

    @property
    def ended_early(self) -> bool:
        """Whether nothing differs but that one record has steps without a counterpart."""
        return self.cause == "ended early"


class TapPlace(Protocol):
    """The first unequal tap, as `vime_core.verify.layers.TapDifference` says it."""

    @property
    def layer(self) -> int | None: ...

    @property
    def operation(self) -> str: ...

    @property
    def inputs_equal(self) -> bool | None: ...

    @property
    def ulps(self) -> int | None: ...


@dataclass(frozen=True)
class TapsFound:
    """What taps of both records say: of which side and sample, how many were compared, and the first that differs."""

    side: str
    sample: SampleKey
    compared: int
    first: TapPlace | None
    faults: tuple[str, ...]

    def __str__(self) -> str:
        where = f"of the {self.side}, prompt {self.sample[0]}, sample {self.sample[1]}"
        if self.first is not None:
            return f"first unequal tap {where}: {self.first}"
        if self.faults:
            return f"the taps {where} cannot be compared: {self.faults[0]}"
        return f"all {self.compared} taps {where} are equal, so the runs part after the forward"

    def as_json(self) -> dict[str, Any]:
        """The place as JSON values."""
        names = ("layer", "operation", "inputs_equal", "ulps")
        place = {name: getattr(self.first, name) for name in names} if self.first is not None else None
        return {**asdict(replace(self, first=None)), "first": place}


@dataclass(frozen=True)
class Difference:
    """What `vime_core.verify.diff.diff_records` found.

    Args:
        found: the first unequal result; None when only the configurations differ.
        inputs_equal: whether all that it was computed from is equal; None when the record cannot tell.
        config: configuration keys with two values; inputs of the runs.
        context: versions, environment, hardware and plugins with two values; no inputs, but perhaps the cause.
        unfinished: which of the records is not complete, as a clause; empty when both are.
        taps: what the taps of the place say, where both records hold them.
    """

    found: Found | None
    inputs_equal: bool | None
    config: tuple[str, ...]
    context: tuple[str, ...]
    unfinished: str = ""
    taps: TapsFound | None = None

    @property
    def place(self) -> Place:
        """The first unequal place."""
        return self.found.place if self.found else Place("config")

    @property
    def sentence(self) -> str:
        """All of it for a human."""
        unfinished = f"; {self.unfinished}" if self.unfinished else ""
        return f"{self._config_part()}{self._found_part()}{self._context_part()}{unfinished}."

    def as_json(self) -> dict[str, Any]:
        """All of it as JSON values."""
        found = self.found
        size = {} if found is None else {key: json_number(value) for key, value in asdict(found.size).items()}
        return {
            **asdict(self.place),
            "what": found.what if found else "",
            **size,
            "inputs_equal": self.inputs_equal,
            "cause": likely_cause(found.cause) if found else likely_cause("config"),
            "config": list(self.config),
            "context": list(self.context),
            "unfinished": self.unfinished,
            "taps": self.taps and self.taps.as_json(),
            "sentence": self.sentence,
        }

    def _config_part(self) -> str:
        if not self.config:
            return ""
        differ = f"The configurations differ ({some(self.config)})"
        if self.found is not None and self.found.ended_early:
            return f"{differ}; "
        rest = "every recorded result is equal nevertheless" if self.found is None else "the first unequal result: "
        return f"{differ}, so these are not two runs of the same thing; {rest}"

    def _found_part(self) -> str:
        if self.found is None:
            return ""
        size = f" ({self.found.size})" if str(self.found.size) else ""
        taps = f"; {self.taps}" if self.taps else ""
        text = f"{self.found.place}: {self.found.what}{size}"
        if not self.found.ended_early:
            cause = likely_cause("config" if self.config else self.found.cause)
            text += f"; {self._inputs()}{taps}; likely cause: {cause}"
        return text if self.config else text[0].upper() + text[1:]

    def _inputs(self) -> str:
        if self.inputs_equal is None:
            return "everything recorded before it is equal, but the initial weights were not recorded on both sides"
        return "everything before it is equal" if self.inputs_equal else "the configuration was not equal"

    def _context_part(self) -> str:
        return f"; these differ too, though they are no inputs: {some(self.context)}" if self.context else ""


def distance(ulps: int | None) -> str:
    """A distance in words; None stands for one that involves NaN."""
    if ulps is None:
        return "one of them is not a number"
    if ulps > _COUNTED:
        return f"more than {_COUNTED} ulps apart"
    return "1 ulp apart" if ulps == 1 else f"{ulps} ulps apart"


def some(items: Sequence[str]) -> str:
    """The first few of them in words, and how many more there are."""
    more = f" and {len(items) - _SHOWN} more" if len(items) > _SHOWN else ""
    return ", ".join(items[:_SHOWN]) + more
