"""What a check says: holds, does not hold, or could not be checked, and on what evidence."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Final, cast

NOT_CHECKED: Final = 3


@dataclass(frozen=True)
class Coverage:
    """What was compared.

    ``longest`` is the number of tokens of the longest sequence, prompt and response. ``log_probs`` counts every
    comparison of a log-prob: a token that is compared with two forwards has two.
    """

    steps: int = 0
    samples: int = 0
    tokens: int = 0
    tensors: int = 0
    longest: int = 0
    log_probs: int = 0

    @property
    def nothing(self) -> bool:
        """True when no value at all was compared."""
        return not (self.tokens or self.tensors)


@dataclass(frozen=True)
class Verdict:
    """The outcome of one check. One that holds without evidence cannot be made.

    Args:
        name: of the check.
        holds: None when it could not be checked.
        sentence: the outcome in words.
        coverage: what was compared.
        unequal: what differs, counted in the check's own unit.
        largest_difference: absolute, of compared floats; NaN when one of them is NaN.
        largest_ulps: the same in units in the last place.
        first: the first place that differs or that prevented the check.
        entropy: nats a token of the distributions that were compared (mean of minus log-prob of sampled tokens).
        changed: share of what training changed in the weights: of tensors, or of elements where the sentence says so.
        details: further evidence in the check's own words, plain JSON values.

    Raises:
        ValueError: it says that it holds, but compared nothing or found a difference.
    """

    name: str
    holds: bool | None
    sentence: str
    coverage: Coverage = Coverage()
    unequal: int = 0
    largest_difference: float = 0.0
    largest_ulps: int = 0
    first: str = ""
    entropy: float | None = None
    changed: float | None = None
    details: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def __post_init__(self) -> None:
        clean = self.unequal == 0 and self.largest_ulps == 0 and self.largest_difference == 0.0 and not self.first
        if self.holds and (self.coverage.nothing or not clean):
            raise ValueError(f"verdict {self.name!r} cannot hold on this evidence: {self}")

    def __bool__(self) -> bool:
        raise TypeError("a verdict has three outcomes; look at `holds` or `exit_code`")

    @property
    def exit_code(self) -> int:
        """0 holds, 1 does not hold, 3 could not be checked."""
        return NOT_CHECKED if self.holds is None else int(not self.holds)

    def as_json(self) -> dict[str, Any]:
        """All of it as JSON values; a float that JSON cannot hold is its name (``"nan"``)."""
        return {**{key: json_value(value) for key, value in asdict(self).items()}, "exit_code": self.exit_code}


def json_value(value: Any) -> Any:
    """`json_number` throughout mappings and sequences."""
    if isinstance(value, Mapping):
        return {str(key): json_value(one) for key, one in cast("Mapping[Any, Any]", value).items()}
    if isinstance(value, (list, tuple)):
        return [json_value(one) for one in cast("list[Any]", value)]
    return json_number(value)


def json_number(value: Any) -> Any:
    """The value, or the name of a float that JSON has no number for."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
