"""The vLLM rollout that keeps an alignment contract, with what verdicts ask of it (`vime_core.backends`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

from vime_core.backends import RolloutContext, Taps
from vime_core.errors import BackendError, DataError, PolicyError
from vime_core.types import Completion, Float32Array, SampleRequest
from vime_vllm import compat
from vime_vllm.aligned import verdicts
from vime_vllm.aligned.effective import require_aligned
from vime_vllm.client import EngineClient
from vime_vllm.options import VllmOptions
from vime_vllm.rollout import VllmRollout
from vime_vllm.sampling import check_requests, is_cut, served

_LOWEST_TEMPERATURE: Final = 0.01
"""vLLM raises a smaller temperature to this one and goes on."""


class AlignedVllmRollout(VllmRollout):
    """A `VllmRollout` whose log-probs are bits that the trainer gets too, whatever the company of a request.

    Args:
        engine: the running engine, with weight version 0.
        context: what it was started from; it has an alignment.
        options: the context's options.
        flags: the policy's switches.

    Raises:
        PolicyError: the engine does not keep the contract.
    """

    def __init__(
        self, engine: EngineClient, context: RolloutContext, options: VllmOptions, flags: Mapping[str, bool]
    ) -> None:
        assert context.alignment is not None
        verdicts.take_census(engine)
        super().__init__(engine, context, options, flags)
        require_aligned(self._reports, context.alignment)
        self._limit = 0
        self._cached: list[int] = []

    def generate(self, requests: Sequence[SampleRequest]) -> list[Completion]:
        """See `VllmRollout.generate`.

        Raises:
            PolicyError: a sampling parameter that the contract does not cover here.
        """
        for request in requests:
            self._check(request)
        return super().generate(requests)

    def record_taps(self, request: SampleRequest) -> Taps:
        """The taps of one response, generated alone from an empty prefix cache: prefill and every decode.

        The last token of the response is missing: nothing was computed from it. ``logits`` has the rows that a token
        was drawn from, and where the prompt is prefilled in chunks, the last of each.

        Raises:
            BackendError: the engine computed a position where taps do not reach.
        """
        drops, self._drops_prefix_cache = self._drops_prefix_cache, True
        verdicts.start_taps(self.engine)
        try:
            (completion,) = self.generate([request])
        except BaseException:
            with suppress(BackendError):  # an engine that died: why is what its caller is told
                verdicts.collect_taps(self.engine)
            raise
        finally:
            self._drops_prefix_cache = drops
        taps = verdicts.collect_taps(self.engine)
        return verdicts.complete(taps, len(request.prompt_tokens) + len(completion.tokens) - 1)

    def prompt_log_probs(self, tokens: Sequence[int]) -> Float32Array:
        """fp32 [len - 1]: the log-prob of each token but the first, at temperature 1, computed as one prefill.

        Raises:
            BackendError: an update to the engine failed, so that its weights are unknown.
            ContractViolation: it holds another weight version than the last update's.
            DataError: fewer than two tokens, or as many as the context holds.
        """
        version = self._require_version("prompt_log_probs")
        scored = SampleRequest(0, 0, tuple(tokens), seed=0, max_tokens=1, temperature=0.0)
        check_requests([scored], self._context_length)
        if len(tokens) < 2:
            raise DataError("a sequence of one token has no log-probs", remedy="Give at least two tokens.")
        params = compat.sampling_params(max_tokens=1, temperature=0.0, logprobs=0, prompt_logprobs=0)
        output = self.engine.call("prompt_log_probs", lambda: self._answer(tokens, params))
        self._require_held(version)
        self._witness.check([served(output)])
        return verdicts.prompt_scores(output, tokens)

    def draws_by_contract(self) -> bool:
        """Always: both model runners have the contract's sampler, or the engine was refused."""
        return True

    def keep_prefix_cache(self, keep: bool) -> None:
        """Whether `generate` may use what earlier calls left in the prefix cache, until said otherwise."""
        self._drops_prefix_cache = not keep

    def cached_tokens(self) -> list[int]:
        """How many prompt tokens each request of the last `generate` took from the prefix cache."""
        return list(self._cached)

    def prefill_in_chunks(self, tokens: int) -> None:
        """Compute at most ``tokens`` in an engine step, so prompts in chunks, until said otherwise; 0: as started.

        On a CPU greedy requests alone may then be generated: vLLM crashes there when a seeded prompt comes in chunks.

        Raises:
            PolicyError: the scheduler did not take it.
        """
        limit = self.engine.call("limit_step_tokens", lambda: compat.limit_step_tokens(self.engine.llm, tokens))
        if tokens and limit != tokens:
            raise PolicyError(
                f"the scheduler was limited to {tokens} tokens a step, but {limit} is effective",
                remedy="Use a limit that this vLLM takes.",
                code="VIME-ALIGN-025",
            )
        self._limit = tokens

    def _check(self, request: SampleRequest) -> None:
        if 0 < request.temperature < _LOWEST_TEMPERATURE:
            raise PolicyError(
                f"under an alignment contract: vLLM takes temperature {_LOWEST_TEMPERATURE} in the place of"
                f" {request.temperature}",
                remedy=f"Use 0 or at least {_LOWEST_TEMPERATURE}.",
                code="VIME-ALIGN-028",
            )
        if self._limit and request.temperature > 0 and compat.is_cpu():
            raise PolicyError(
                "on a CPU vLLM crashes when a seeded prompt comes in chunks",
                remedy="Use temperature 0, or prefill whole prompts.",
                code="VIME-ALIGN-027",
            )

    def _wants_kept(self, request: SampleRequest) -> bool:
        return is_cut(request)

    def _run(self, requests: Sequence[SampleRequest]) -> list[Any]:
        outputs = super()._run(requests)
        self._cached = [output.num_cached_tokens or 0 for output in outputs]
        return outputs

    def _answer(self, tokens: Sequence[int], params: Any) -> Any:
        compat.enqueue(self.engine.llm, tokens, params)
        return compat.wait_for_all(self.engine.llm)[0]
