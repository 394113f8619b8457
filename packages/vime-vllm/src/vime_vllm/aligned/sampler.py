"""Model runner V1 (CPU and GPU): tokens are drawn by vLLM from z = logits / T, and scored by the contract.

Stock vLLM scores with its own log-softmax in several places (raw, processed, greedy, prompt). Here there is one, the
operation that the trainer calls, on the logits and temperatures that the token was drawn with.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.v1.outputs import LogprobsTensors, SamplerOutput
from vllm.v1.sample.sampler import Sampler

from vime_core.numerics import Operations, masked


class AlignedSampler(Sampler):
    """vLLM's sampler with the contract's scoring, truncation and temperature.

    Args:
        stock: the sampler that the model runner made; its random draw is kept, which reads one row at a time.
        operations: the contract's operations.
    """

    def __init__(self, stock: Sampler, operations: Operations) -> None:
        mode: Any = stock.logprobs_mode
        super().__init__(mode)
        self.operations = operations
        self.topk_topp_sampler = stock.topk_topp_sampler
        self.topk_topp_sampler.logprobs_mode = "raw_logprobs"  # it draws, and scores nothing

    def forward(
        self,
        logits: Tensor,
        sampling_metadata: Any,
        predict_bonus_token: bool = False,
        logprobs_mode_override: Any = None,
    ) -> SamplerOutput:
        """One token for each row of logits (rows, V), and its log-prob; ranks are zero, since nobody reads them."""
        del logprobs_mode_override
        wanted = sampling_metadata.max_num_logprobs
        if sampling_metadata.logprob_token_ids or wanted not in (None, 0):
            raise ValueError("under an alignment contract the engine scores the sampled token and no other")
        logits = self.apply_logits_processors(logits.float(), sampling_metadata, predict_bonus_token)
        sampled, kept, temperatures = self._draw(logits, sampling_metadata)
        scores = None
        if wanted is not None:
            log_probs = self.operations.token_log_probs(kept, sampled, temperatures)
            ids = sampled.to(torch.int32).unsqueeze(-1)
            scores = LogprobsTensors(ids, log_probs.unsqueeze(-1), torch.zeros_like(sampled))
        return SamplerOutput(sampled_token_ids=sampled.to(torch.int32).unsqueeze(-1), logprobs_tensors=scores)

    def compute_logprobs(self, logits: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """log p (rows, V) at temperature 1, for prompt log-probs."""
        return self.operations.log_softmax(logits)

    def _draw(self, logits: Tensor, metadata: Any) -> tuple[Tensor, Tensor, Tensor | float]:
        """Tokens (rows), the logits that were left to choose from (rows, V), and the temperatures (rows)."""
        if metadata.all_greedy:
            return self.greedy_sample(logits).long(), logits, 1.0
        temperatures: Tensor = metadata.temperature
        kept = self._truncated(logits, metadata, temperatures)
        z = kept / torch.where(temperatures == 0, 1.0, temperatures).unsqueeze(-1)
        sampled = self.topk_topp_sampler(z, metadata.generators, None, None)[0].long()
        if not metadata.all_random:
            sampled = torch.where(temperatures == 0, self.greedy_sample(logits).long(), sampled)
        return sampled, kept, temperatures

    def _truncated(self, logits: Tensor, metadata: Any, temperatures: Tensor) -> Tensor:
        """Logits with -inf outside of top-k and top-p, chosen by the contract's total order."""
        top_k: Tensor | None = metadata.top_k
        top_p: Tensor | None = metadata.top_p
        if top_k is None and top_p is None:
            return logits
        keep = self.operations.keep_mask(
            logits, temperatures, 0 if top_k is None else top_k, 1.0 if top_p is None else top_p
        )
        return masked(logits, keep)
