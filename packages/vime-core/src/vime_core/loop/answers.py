"""What an engine returned is what it was asked for, before anything is scored or trained on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from vime_core.errors import BackendError
from vime_core.types import Completion, SampleKey, SampleRequest


def require_answers(requests: Sequence[SampleRequest], completions: Sequence[Completion], weight_version: int) -> None:
    """One completion a request, in their order, by the weights of now, with a log-prob a token.

    Raises:
        BackendError: names the first completion that is missing, comes twice, was not asked for or is no answer.
    """
    fault = next(_faults(requests, completions, weight_version), None)
    if fault is not None:
        raise BackendError(
            f"the rollout engine returned {len(completions)} completions of {len(requests)} requests, and {fault}",
            remedy="Nothing of this step was kept; an engine answers each request once, in the order of the requests"
            " (vime_core.backends.Rollout).",
            code="VIME-BACKEND-005",
        )


def _faults(requests: Sequence[SampleRequest], completions: Sequence[Completion], weight_version: int) -> Iterator[str]:
    wanted, found = [request.key for request in requests], [completion.key for completion in completions]
    asked, counts = set(wanted), Counter(found)
    yield from (f"none of them is {_name(key)}" for key in wanted if key not in counts)
    yield from (f"nobody asked for {_name(key)}" for key in found if key not in asked)
    yield from (f"{_name(key)} comes {count} times" for key, count in counts.items() if count > 1)
    pairs = zip(wanted, found, strict=False)
    yield from (f"{_name(got)} stands where {_name(key)} was asked for" for key, got in pairs if key != got)
    for one in completions:
        if len(one.log_probs) != len(one.tokens):
            yield f"{_name(one.key)} has {len(one.log_probs)} log-probs for {len(one.tokens)} tokens"
        if one.weight_version != weight_version:
            yield f"{_name(one.key)} is of weight version {one.weight_version}, not {weight_version}"


def _name(key: SampleKey) -> str:
    return f"prompt {key[0]}, sample {key[1]}"
