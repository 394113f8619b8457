"""Loads the Triton kernels as the provider ``cuda``."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType

import torch

from vime_core.errors import PolicyError
from vime_core.numerics import draw, truncation
from vime_core.numerics.kernels import Kernels
from vime_core.numerics.operations import Operations, provider_digest, shared_sources, source_digest

OLDEST_CAPABILITY = (9, 0)


def kernels() -> Kernels:
    """The functions of the provider; importing them needs Triton, calling them a GPU or Triton's interpreter."""
    from vime_core.numerics.cuda import attention, attention_backward, embedding, matmul, norm, pointwise, scoring

    return Kernels(
        chunk_count=matmul.chunk_count,
        embedding_backward=embedding.backward,
        linear=matmul.linear,
        linear_partials=matmul.linear_partials,
        column_sum=norm.column_sum,
        add_rms_norm=norm.add_rms_norm,
        add_rms_norm_backward=norm.add_rms_norm_backward,
        rope=pointwise.rope,
        swiglu=pointwise.swiglu,
        swiglu_backward=pointwise.swiglu_backward,
        attention_packed=attention.packed,
        attention_backward=attention_backward.backward,
        attention_paged=attention.paged,
        write_kv=pointwise.write_kv,
        log_softmax=scoring.log_softmax,
        token_log_probs=scoring.token_log_probs,
        token_log_probs_backward=scoring.token_log_probs_backward,
        keep_mask=truncation.reference,
        draw=draw.reference,
    )


def require_device() -> None:
    """Refuse a machine whose GPU was never probed, or that has none."""
    found = torch.cuda.get_device_capability() if torch.cuda.is_available() else None
    if found is None or found < OLDEST_CAPABILITY or find_spec("triton") is None:
        has = "no NVIDIA GPU" if found is None else f"capability {found[0]}.{found[1]}"
        raise PolicyError(
            "alignment.provider = 'cuda' needs Triton and an NVIDIA GPU of capability 9.0 or later;"
            f" this machine has {has}",
            remedy='Set alignment.provider = "cpu" or "reference".',
            code="VIME-ENV-047",
        )


@cache
def load() -> Operations:
    """The Triton operations.

    Raises:
        PolicyError: this machine has no NVIDIA GPU of capability 9.0 or later, or Triton is not installed.
    """
    require_device()
    import triton

    device = torch.cuda.get_device_capability()
    parameters = {
        "provider": "cuda",
        "sources": source_digest([*shared_sources(), *Path(__file__).parent.glob("*.py")]),
        "triton": triton.__version__,
        "torch": torch.__version__,
        "capability": f"{device[0]}.{device[1]}",
        "dot": "one chain over K",
        "attention": "key blocks of 64 ascending, bf16 weights, fp32 sums",
    }
    return Operations(
        provider="cuda",
        digest=provider_digest(parameters),
        parameters=MappingProxyType(parameters),
        details=MappingProxyType({"device": torch.cuda.get_device_name()}),
        kernels=kernels(),
    )
