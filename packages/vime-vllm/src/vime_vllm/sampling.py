"""Requests as vLLM takes them, and what it answers as completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from vime_core.errors import BackendError, ContractViolation, DataError, NotFinite
from vime_core.types import WHOLE_VOCABULARY, Completion, FinishReason, Float32Array, KeptTokens, SampleRequest
from vime_vllm import compat
from vime_vllm.prefix_witness import Served

_FINISH_REASONS: Final[dict[str, FinishReason]] = {"stop": "stop", "length": "length", "abort": "abort"}


def check_requests(requests: Sequence[SampleRequest], context_length: int) -> None:
    """Raise DataError for a prompt that is empty or leaves no room for a response."""
    for request in requests:
        length = len(request.prompt_tokens)
        if not 0 < length < context_length:
            raise DataError(
                f"the prompt of sample {request.key} has {length} tokens, but rollout.context_length ="
                f" {context_length} must hold it and a response",
                remedy="Raise rollout.context_length, or leave such prompts out.",
                code="VIME-DATA-060",
            )


NOTHING_CUT: Final = -1
"""Stands among the ids of a position where the whole vocabulary was left (see `vime_vllm.aligned.sampler`)."""
_ALL_REPORTED: Final = -1


def is_cut(request: SampleRequest) -> bool:
    """Whether top-k or top-p may leave out tokens; at temperature 0 the most likely one is taken whatever they are."""
    return request.temperature > 0 and (request.top_k > 0 or request.top_p < 1)


def sampling_params(request: SampleRequest, *, kept: bool = False) -> Any:
    """vLLM's SamplingParams: the request's own seed, and the log-prob of each sampled token.

    Args:
        request: what is sampled.
        kept: ask for the ids of the tokens that were left to choose from, too.
    """
    return compat.sampling_params(
        seed=request.seed,
        max_tokens=request.max_tokens,
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
        stop_token_ids=list(request.stop_token_ids),
        logprobs=_ALL_REPORTED if kept else 0,
    )


def completion(request: SampleRequest, output: Any, version: int, *, kept: bool = False) -> Completion:
    """The completion of a finished request; with ``kept`` as `sampling_params` asked for it.

    Raises:
        BackendError: a reason or log-prob that vime cannot use.
        ContractViolation: the engine stamped it with another weight version.
    """
    answer = output.outputs[0]
    if stamped := compat.stamped_versions(answer) - {str(version)}:
        raise ContractViolation(
            f"sample {request.key} was generated with weight version {stamped.pop()}, not {version}",
            remedy="The weights changed while the engine was generating; the run stops before using the sample.",
            code="VIME-ALIGN-061",
        )
    tokens = tuple(int(token) for token in answer.token_ids)
    return Completion(
        prompt_index=request.prompt_index,
        sample_index=request.sample_index,
        tokens=tokens,
        log_probs=_log_probs(request, tokens, answer.logprobs),
        finish_reason=_finish_reason(request, answer.finish_reason),
        weight_version=version,
        kept=_kept(answer.logprobs) if kept else WHOLE_VOCABULARY,
    )


def served(output: Any) -> Served:
    """What the prefix witness needs to know of a finished request."""
    return Served(output.prompt_token_ids, output.outputs[0].token_ids, output.num_cached_tokens or 0)


def unusable(what: str) -> BackendError:
    """The error for an answer that makes no sense."""
    return BackendError(
        f"the vLLM engine gave an unusable answer: {what}",
        remedy="Report this with the engine's log and the run record.",
        code="VIME-BACKEND-063",
    )


def _log_probs(request: SampleRequest, tokens: tuple[int, ...], reported: Any) -> Float32Array:
    if len(reported or ()) != len(tokens):
        raise unusable(f"sample {request.key} has {len(tokens)} tokens and {len(reported or ())} log-probs")
    values = [place[token].logprob for place, token in zip(reported or (), tokens, strict=True)]
    log_probs = np.array(values, dtype=np.float32)
    if not np.isfinite(log_probs).all():
        raise NotFinite(
            f"the vLLM engine sampled with a log-prob that is not finite, in sample {request.key} (prompt, sample)",
            remedy="Look at the weights of the last update; a learning rate that is too high is a usual cause.",
            code="VIME-BACKEND-068",
        )
    return log_probs


def _kept(reported: Any) -> KeptTokens:
    positions = [sorted(place) for place in reported]
    cut = [ids if NOTHING_CUT not in ids else [] for ids in positions]
    if not any(cut):
        return WHOLE_VOCABULARY
    return KeptTokens(tuple(token for ids in cut for token in ids), tuple(len(ids) for ids in cut))


def _finish_reason(request: SampleRequest, reason: str | None) -> FinishReason:
    if reason not in _FINISH_REASONS:
        raise unusable(f"sample {request.key} finished for the reason {reason!r}")
    return _FINISH_REASONS[reason]
