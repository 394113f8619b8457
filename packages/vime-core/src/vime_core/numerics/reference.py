"""The provider ``reference``: plain torch on CPU or GPU, written for reading; slow, and the oracle of the others.

Every forward, and every backward but attention's, has the bits of ``cpu``; an H200 and a CPU gave the same bits too.
"""

from __future__ import annotations

from functools import cache
from types import MappingProxyType

import torch

from vime_core.numerics import attention, draw, embedding, linear, log_probs, rms_norm, rope, swiglu, truncation
from vime_core.numerics.kernels import Kernels
from vime_core.numerics.operations import Operations, provider_digest, shared_sources, source_digest

KERNELS = Kernels(
    chunk_count=linear.chunk_count,
    embedding_backward=embedding.reference_backward,
    linear=linear.reference,
    linear_partials=linear.reference_partials,
    column_sum=linear.reference_column_sum,
    add_rms_norm=rms_norm.reference,
    add_rms_norm_backward=rms_norm.reference_backward,
    rope=rope.reference,
    swiglu=swiglu.reference,
    swiglu_backward=swiglu.reference_backward,
    attention_packed=attention.reference_packed,
    attention_backward=attention.reference_backward,
    attention_paged=attention.reference_paged,
    write_kv=attention.reference_write,
    log_softmax=log_probs.reference,
    token_log_probs=log_probs.reference_tokens,
    token_log_probs_backward=log_probs.reference_tokens_backward,
    keep_mask=truncation.reference,
    draw_numbers=draw.reference_numbers,
    draw=draw.reference,
)


@cache
def load() -> Operations:
    """The reference operations; available wherever torch is."""
    parameters = {
        "provider": "reference",
        "sources": source_digest(shared_sources()),
        "torch": torch.__version__,
        "attention": "ascending, fp32 weights",
    }
    return Operations(
        provider="reference",
        digest=provider_digest(parameters),
        parameters=MappingProxyType(parameters),
        details=MappingProxyType({}),
        kernels=KERNELS,
    )
