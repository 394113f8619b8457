"""Model runner V1 (CPU and GPU): tokens are drawn and scored by the operations that the trainer calls too.

Stock vLLM scores with its own log-softmax in several places (raw, processed, greedy, prompt). Here there is one, on the
logits and temperatures that the token was drawn with. The draw is `vime_core.numerics.draw`: from logits, the request's
seed and the token's place in the response alone, so that the trainer can draw again what the engine drew.

Top-k and top-p are the contract's ``keep_mask``. A request that they cut asks for all log-probs (``logprobs=-1``) and
gets, beside the sampled token's, the ids of the tokens that were left; an id of -1 where none was cut.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.v1.outputs import LogprobsTensors, SamplerOutput
from vllm.v1.sample.sampler import Sampler

from vime_core.numerics import Operations, masked
from vime_vllm.sampling import NOTHING_CUT

Places = np.ndarray[tuple[int], np.dtype[np.int64]]


class AlignedSampler(Sampler):
    """vLLM's sampler with the contract's scoring, truncation, temperature and draw.

    Args:
        stock: the sampler that the model runner made.
        operations: the contract's operations.
        places: which token of its response each row of the step draws, from 0: int64 (rows or more).
    """

    def __init__(self, stock: Sampler, operations: Operations, places: Callable[[], Places]) -> None:
        mode: Any = stock.logprobs_mode
        super().__init__(mode)
        self.operations, self.places = operations, places

    def forward(
        self,
        logits: Tensor,
        sampling_metadata: Any,
        predict_bonus_token: bool = False,
        logprobs_mode_override: Any = None,
    ) -> SamplerOutput:
        """One token for each row of logits (rows, V), and its log-prob.

        Further columns hold ids of kept tokens; their log-probs repeat the sampled one's, and ranks are zero, since
        nobody reads them.
        """
        del logprobs_mode_override
        wanted = sampling_metadata.max_num_logprobs
        if sampling_metadata.logprob_token_ids or wanted not in (None, 0, logits.shape[-1]):
            raise ValueError("under an alignment contract the engine scores the sampled token and no other")
        logits = self.apply_logits_processors(logits.float(), sampling_metadata, predict_bonus_token)
        keep = self._keep_mask(logits, sampling_metadata)
        kept = logits if keep is None else masked(logits, keep)
        sampled, temperatures = self._draw(kept, sampling_metadata)
        scores = None
        if wanted is not None:
            log_probs = self.operations.token_log_probs(kept, sampled, temperatures)
            scores = log_prob_tensors(sampled, log_probs, keep, report_kept=wanted > 0)
        return SamplerOutput(sampled_token_ids=sampled.to(torch.int32).unsqueeze(-1), logprobs_tensors=scores)

    def compute_logprobs(self, logits: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """log p (rows, V) at temperature 1, for prompt log-probs."""
        return self.operations.log_softmax(logits)

    def _draw(self, kept: Tensor, metadata: Any) -> tuple[Tensor, Tensor | float]:
        """Tokens (rows) of the logits that were left to choose from (rows, V), and the temperatures (rows)."""
        temperatures: Tensor | float = 0.0 if metadata.all_greedy else metadata.temperature
        u = torch.empty(len(kept), dtype=torch.int64, device=kept.device).random_()  # of requests without a seed
        if metadata.generators:
            rows, seeds = zip(*((row, g.initial_seed()) for row, g in metadata.generators.items()), strict=True)
            words = [rows, np.array(seeds, np.uint64).view(np.int64).tolist(), self.places()[list(rows)].tolist()]
            at, seed, place = torch.tensor(words, device=kept.device)
            u[at] = self.operations.draw_numbers(seed, place)
        return self.operations.draw(kept, u, temperatures), temperatures

    def _keep_mask(self, logits: Tensor, metadata: Any) -> Tensor | None:
        """What top-k and top-p leave of logits (rows, V), by the contract's total order; None where no row has them."""
        top_k: Tensor | None = metadata.top_k
        top_p: Tensor | None = metadata.top_p
        if metadata.all_greedy or (top_k is None and top_p is None):
            return None
        return self.operations.keep_mask(
            logits, metadata.temperature, 0 if top_k is None else top_k, 1.0 if top_p is None else top_p
        )


def log_prob_tensors(sampled: Tensor, log_probs: Tensor, keep: Tensor | None, *, report_kept: bool) -> LogprobsTensors:
    """What vLLM hands on of sampled tokens int64 (rows) and their log-probs (rows), ids of kept tokens beside them."""
    ids = sampled.to(torch.int32).unsqueeze(-1)
    reported = torch.cat([ids, kept_ids(keep, sampled)], -1) if report_kept else ids
    return LogprobsTensors(reported, log_probs.unsqueeze(-1).expand(reported.shape), torch.zeros_like(sampled))


def kept_ids(keep: Tensor | None, sampled: Tensor) -> Tensor:
    """int32 (rows, widest): ids of the kept tokens, ascending, then the sampled one; `NOTHING_CUT` where all are kept.

    Args:
        keep: bool (rows, V); None: all of every row.
        sampled: int64 (rows).
    """
    if keep is None:
        return torch.full_like(sampled, NOTHING_CUT, dtype=torch.int32).unsqueeze(-1)
    cut = ~keep.all(-1)
    left = keep & cut.unsqueeze(-1)
    rows, tokens = left.nonzero(as_tuple=True)
    counts = left.sum(-1)
    widest = max(1, int(counts.max()))
    ids = torch.where(cut, sampled, NOTHING_CUT).unsqueeze(-1).repeat(1, widest)
    ids[rows, torch.arange(len(rows), device=rows.device) - (counts.cumsum(0) - counts)[rows]] = tokens
    return ids.to(torch.int32)
