"""Loads the Triton kernels as the provider ``cuda``."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType

import torch

from vime_core.errors import PolicyError
from vime_core.numerics import truncation
from vime_core.numerics.chosen_attention import with_attention
from vime_core.numerics.chosen_linear import with_linear
from vime_core.numerics.kernels import Kernels
from vime_core.numerics.offers import NO_OFFERS, Offers
from vime_core.numerics.operations import Operations, provider_digest, shared_sources, source_digest

OLDEST_CAPABILITY = (9, 0)


def kernels(offers: Offers = NO_OFFERS) -> Kernels:
    """The functions of the provider; importing them needs Triton, calling them a GPU or Triton's interpreter."""
    own = own_kernels()
    if offers.attention is not None:
        own = with_attention(own, offers.attention, required="attention" in offers.required)
    if offers.linear is None:
        return own
    return with_linear(own, offers.linear, required="linear" in offers.required)


def own_kernels() -> Kernels:
    """Triton's, without what other packages offer."""
    from vime_core.numerics.cuda import attention, attention_backward, draw, embedding, matmul, norm, pointwise, scoring

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
        draw_numbers=draw.draw_numbers,
        draw=draw.draw_tokens,
        adds_as_torch=True,
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
def load(offers: Offers = NO_OFFERS) -> Operations:
    """The Triton operations, with ``offers`` in their places.

    An offered linear is named in the digest although no bit hangs on it: both sides must have had the same to choose
    from, and found the same, before their choices can be compared call by call.

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
        **{f"offered {offer.name}": offer.version for offer in (offers.linear, offers.attention) if offer},
    }
    absent = {f"without {operation}": why for operation, why in offers.absent}
    return Operations(
        provider="cuda",
        digest=provider_digest(parameters),
        parameters=MappingProxyType(parameters),
        details=MappingProxyType({"device": torch.cuda.get_device_name(), **absent}),
        kernels=kernels(offers),
    )
