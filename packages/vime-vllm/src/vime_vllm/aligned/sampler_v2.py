"""Model runner V2 (GPU): the model class supplies the sampler, which draws and scores as V1's does.

V2 keeps seeds, temperatures and lengths of requests where the GPU reads them, and so does the sampler: nothing of a
draw asks the host, so vLLM may schedule ahead. Where top-k or top-p cut, the number of tokens that they left is asked
for once a step, since their ids are reported. A step of a small model is as long as the host needs to begin it, so
nothing is prepared that a kernel can take as it is.
"""

from __future__ import annotations

from typing import Any, Final, cast

import torch
from torch import Tensor
from vllm.sampling_params import SamplingParams
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.worker.gpu.model_states.default import DefaultModelState
from vllm.v1.worker.gpu.sample import prompt_logprob
from vllm.v1.worker.gpu.sample.output import SamplerOutput
from vllm.v1.worker.gpu.sample.sampler import Sampler

from vime_core.numerics import Operations, masked
from vime_vllm.aligned.sampler import log_prob_tensors

_UNTOUCHED: Final[dict[str, Any]] = {
    "min_p": 0.0,
    "min_tokens": 0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "logit_bias": None,
    "allowed_token_ids": None,
    "bad_words": None,
    "logprob_token_ids": None,
    "structured_outputs": None,
}
_NO_LOG_PROBS: Final = -1
_SCORED: Final = (None, 0, -1)


class AlignedSamplerV2(Sampler):
    """vLLM's sampler of V2 with the contract's scoring, truncation, temperature and draw.

    Args:
        stock: the sampler that the model runner made; its states are kept.
        operations: the contract's operations.
    """

    def __init__(self, stock: Sampler, operations: Operations) -> None:
        from vime_vllm.aligned.step_kernel import prepare

        self.__dict__.update(stock.__dict__)
        states: Any = self.req_states
        self.operations, self._prepare = operations, prepare
        self._ranks = torch.zeros(states.max_num_reqs, dtype=torch.int64, device=states.device)
        self._rejected = self._ranks.int()  # with one row a request nothing is ever drawn in vain
        self._staged = True
        self._unlike: set[int] = set()  # requests that top-k or top-p may cut, or whose log-probs are none or many

    def add_request(self, *args: Any, **kwargs: Any) -> None:
        """See vLLM's `Sampler`; the request's number comes first, its parameters last.

        Raises:
            ValueError: they change logits or ask for scores as no contract defines.
        """
        given = [*args, *kwargs.values()]
        require_defined(given[-1])
        super().add_request(*args, **kwargs)
        self._staged = True
        request, states = given[0], cast("Any", self.sampling_states)
        cut = states.top_k.np[request] != states.vocab_size or states.top_p.np[request] != 1.0
        (self._unlike.add if cut or states.num_logprobs[request] != 0 else self._unlike.discard)(request)

    def apply_staged_writes(self) -> None:
        """See vLLM's `Sampler`, which copies all states in every step; only a new request's settings are ever new."""
        if self._staged:
            super().apply_staged_writes()
            self._staged = False

    def __call__(self, logits: Tensor, input_batch: Any) -> SamplerOutput:
        """One token for each row of logits (rows, V), and its log-prob; columns as in `AlignedSampler.forward`.

        vLLM copies what is returned while the next step runs, so each step has its own; but zeros are everybody's.

        Raises:
            ValueError: a request has more than one row: its further ones would be drafted, which no contract defines.
        """
        batch, states = input_batch, cast("Any", self.sampling_states)
        if len(logits) != batch.num_reqs:
            raise ValueError(f"under an alignment contract {batch.num_reqs} requests cannot have {len(logits)} rows")
        step = self._prepare(batch, states, self.req_states)
        alike = not self._any_unlike()
        keep = None if alike else self._keep_mask(logits, batch, step.temperatures)
        kept = logits if keep is None else masked(logits, keep)
        sampled = self.operations.draw(kept, step.u, step.temperatures)
        tokens = sampled.view(-1, 1)
        wanted = 0 if alike else int(states.max_num_logprobs(batch.idx_mapping_np))
        scores = None
        if wanted != _NO_LOG_PROBS:
            log_probs = self.operations.token_log_probs(kept, sampled, step.temperatures)
            if wanted > 0:
                scores = log_prob_tensors(sampled, log_probs, keep, report_kept=True)
            else:
                scores = LogprobsTensors(tokens, log_probs.view(-1, 1), self._ranks[: batch.num_reqs])
        return SamplerOutput(tokens, scores, None, step.num_sampled, self._rejected[: batch.num_reqs])

    def _any_unlike(self) -> bool:
        """Whether a step must look at its requests' settings one by one; requests that are gone are forgotten."""
        if self._unlike:
            self._unlike &= cast("Any", self.req_states).index_to_req_id.keys()
        return bool(self._unlike)

    def _keep_mask(self, logits: Tensor, batch: Any, temperatures: Tensor) -> Tensor | None:
        states: Any = self.sampling_states
        top_k, top_p = states.get_top_k_top_p(batch.expanded_idx_mapping, batch.idx_mapping_np)
        if top_k is None and top_p is None:
            return None
        return self.operations.keep_mask(
            logits, temperatures, 0 if top_k is None else top_k, 1.0 if top_p is None else top_p
        )


def require_defined(params: SamplingParams) -> None:
    """Raise ValueError for parameters that no contract defines; vLLM warms up with every one that there is."""
    changed = [name for name, value in _UNTOUCHED.items() if (getattr(params, name) or value) != value]
    changed += ["logprobs"] if params.logprobs not in _SCORED else []
    if changed and params != SamplingParams.for_sampler_warmup():
        raise ValueError(f"under an alignment contract no request may set {changed[0]} = {getattr(params, changed[0])}")


class AlignedModelState(DefaultModelState):
    """What V2 asks for a sampler after the model is loaded."""

    def custom_sampler(self, sampler: Any) -> tuple[Any, Any]:
        """The contract's sampler, and no rejection sampler; prompts are scored by the contract from here on too."""
        from vime_vllm.aligned.installed import installed

        operations = installed(self.vllm_config).operations
        score_prompts(operations)
        return AlignedSamplerV2(sampler, operations), None


def scores(operations: Operations, logits: Tensor, ids: Tensor) -> Tensor:
    """log p (rows, n) of ids (rows, n) under logits (rows, V); vLLM warms up with more than the sampled token."""
    if ids.shape[1] == 1:
        return operations.token_log_probs(logits, ids[:, 0]).unsqueeze(-1)
    return operations.log_softmax(logits).gather(-1, ids.long())


def score_prompts(operations: Operations) -> None:
    """Put the contract's scoring where V2 scores prompts, which no hook of vLLM's reaches."""
    module = cast("Any", prompt_logprob)
    assert callable(module.compute_topk_scores)

    def compute_topk_scores(logits: Tensor, wanted: int, ids: Tensor, *, logits_mode: bool) -> LogprobsTensors:
        if logits_mode:
            raise ValueError("under an alignment contract the engine scores prompts by log-probs")
        chosen = torch.cat([ids.unsqueeze(-1), logits.topk(wanted).indices], -1)
        return LogprobsTensors(chosen, scores(operations, logits, chosen), torch.zeros_like(ids))

    module.compute_topk_scores = compute_topk_scores
