"""What an engine returned is what it was asked for, before anything is scored or trained on."""

from __future__ import annotations

from collections.abc import Sequence

from vime_core.errors import BackendError
from vime_core.types import Completion, SampleRequest
from vime_core.verify.matching import Scored, answer_faults


def require_answers(requests: Sequence[SampleRequest], completions: Sequence[Completion], weight_version: int) -> None:
    """One completion a request, in their order, by the weights of now, with a log-prob a token.

    Raises:
        BackendError: names the first completion that is missing, comes twice, was not asked for or is no answer.
    """
    answers = [Scored(c.key, c.tokens, c.log_probs, c.weight_version) for c in completions]
    if faults := answer_faults(requests, answers, weight_version):
        raise BackendError(
            f"the rollout engine returned {len(completions)} completions of {len(requests)} requests; {faults[0]}",
            remedy="Nothing of this step was kept; an engine answers each request once, in the order of the requests"
            " (vime_core.backends.Rollout).",
            code="VIME-BACKEND-005",
        )
