"""Model runner V2 (GPU): the model class supplies the sampler, which scores by the contract."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.worker.gpu.model_states.default import DefaultModelState
from vllm.v1.worker.gpu.sample import prompt_logprob
from vllm.v1.worker.gpu.sample.sampler import Sampler

from vime_core.numerics import Operations


class AlignedSamplerV2(Sampler):
    """vLLM's sampler of V2 with the contract's scoring and temperature. It knows no top-k and top-p.

    Args:
        stock: the sampler that the model runner made; its states are kept.
        operations: the contract's operations.
    """

    def __init__(self, stock: Sampler, operations: Operations) -> None:
        self.__dict__.update(stock.__dict__)
        self.operations = operations
        self._scored: Tensor | None = None
        states: Any = self.sampling_states

        def apply_temperature(logits: Tensor, expanded_idx_mapping: Tensor, requests: Any) -> None:
            if set(states.temperature.np[requests].tolist()) <= {0.0, 1.0}:
                return
            # Triton's division approximates; tensor by tensor torch divides as IEEE 754 says.
            temperatures = states.temperature.gpu[expanded_idx_mapping]
            logits.div_(torch.where(temperatures == 0, 1.0, temperatures).unsqueeze(-1))

        states.apply_temperature = apply_temperature

    def sample(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Draw as vLLM does, and remember z = logits / T."""
        sampled, z = super().sample(*args, **kwargs)
        self._scored = z
        return sampled, z

    def __call__(self, logits: Tensor, input_batch: Any) -> Any:
        """vLLM's output with the contract's log-probs."""
        output = super().__call__(logits, input_batch)
        found = output.logprobs_tensors
        if found is not None:
            assert self._scored is not None
            log_probs = scores(self.operations, self._scored, found.logprob_token_ids)
            output.logprobs_tensors = found._replace(logprobs=log_probs)
        return output


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
