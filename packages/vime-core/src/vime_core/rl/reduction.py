"""Per-token weights, so that the loss of a step is the plain sum of weight times token loss.

The denominators come from the whole batch, never from a microbatch: a token's weight is the same bits whatever the
packing, the number of microbatches or of ranks. That promise is the weights' only. The sum itself is floating-point
addition in the order that the packing gives, so another packing may change its last bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

from vime_core.errors import DataError
from vime_core.types import Float32Array

Reduction = Literal["token", "sample", "constant"]


def token_weights(reduction: Reduction, loss_masks: Sequence[Sequence[bool]], longest: int = 0) -> list[Float32Array]:
    """Weights of the response tokens of a whole batch, in the order of its samples.

    Args:
        reduction: ``token``: 1 / (tokens in the batch), every token counts alike (DAPO, arXiv 2503.14476, section 3.3);
            ``sample``: 1 / (samples * tokens of the sample), every sample counts alike (GRPO, arXiv 2402.03300,
            equation 3); ``constant``: 1 / (samples * longest), whatever was sampled (Dr. GRPO, arXiv 2503.20783,
            section 3.2).
        loss_masks: for each sample [R] which response tokens count; "tokens" above are those that do.
        longest: tokens of the longest response that sampling allows, for ``constant``.

    Returns:
        fp32 [R] for each sample, 0 where the mask is False; the quotient is computed in fp64 and rounded once. A
        sample without a counting token still counts as a sample.

    Raises:
        DataError: no token of the batch counts.
    """
    counts = [sum(map(bool, mask)) for mask in loss_masks]
    if not any(counts):
        raise DataError(
            f"none of the {len(counts)} samples of the batch has a response token to train on",
            remedy="Check the loss masks and why every response is empty.",
            code="VIME-DATA-030",
        )
    total, samples = sum(counts), len(counts)
    by_reduction = {"token": [total] * samples, "sample": [samples * count for count in counts]}
    denominators = by_reduction.get(reduction, [samples * longest] * samples)
    return [_weights(mask, denominator) for mask, denominator in zip(loss_masks, denominators, strict=True)]


def _weights(mask: Sequence[bool], denominator: int) -> Float32Array:
    weight = np.float32(1.0 / denominator) if denominator else np.float32(0.0)
    return np.where(np.asarray(mask, dtype=np.bool_), weight, np.float32(0.0)).astype(np.float32)
