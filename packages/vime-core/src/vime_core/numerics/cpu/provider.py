"""Loads the C++ kernels as a provider, with the best instruction set of the machine or a forced one."""

from __future__ import annotations

import os
from functools import cache
from types import MappingProxyType
from typing import Any, Final

import torch

from vime_core.errors import PolicyError
from vime_core.numerics import embedding
from vime_core.numerics.attention import AttentionSpec
from vime_core.numerics.cpu import build
from vime_core.numerics.cpu.build import InstructionSet
from vime_core.numerics.draw import reference_numbers
from vime_core.numerics.kernels import Kernels
from vime_core.numerics.linear import chunk_count
from vime_core.numerics.operations import Operations, provider_digest, shared_sources, source_digest

FORCE: Final = "VIME_NUMERICS_ISA"
PARAMETERS: Final = {
    "provider": "cpu",
    "dot": "16 lanes of fp32 across K by fused multiply-add (bf16: element 2j+1, then 2j), tree 8 4 2 1",
    "attention": "ascending, fp32 weights by fused multiply-add",
    "subnormals": "zero",
    "contraction": "off",
}


def _kernels(ops: Any) -> Kernels:
    """The functions of a loaded library behind the types of :class:`Kernels`."""

    def options(spec: AttentionSpec) -> tuple[float, int, float]:
        return spec.scale, spec.window or 0, spec.soft_cap or 0.0

    return Kernels(
        chunk_count=chunk_count,
        embedding_backward=embedding.reference_backward,
        linear=ops.linear.default,
        linear_partials=ops.linear_partials.default,
        column_sum=ops.column_sum.default,
        add_rms_norm=ops.add_rms_norm.default,
        add_rms_norm_backward=ops.add_rms_norm_backward.default,
        rope=ops.rope.default,
        swiglu=ops.swiglu.default,
        swiglu_backward=ops.swiglu_backward.default,
        attention_packed=lambda q, k, v, cu, spec: ops.attention_packed.default(q, k, v, cu, *options(spec)),
        attention_backward=lambda dy, q, k, v, o, lse, cu, spec: ops.attention_backward.default(
            dy, q, k, v, o, lse, cu, *options(spec)
        ),
        attention_paged=lambda q, cache, batch, spec, o: ops.attention_paged.default(
            q, cache.keys, cache.values, batch.query_start, batch.seq_lens, batch.block_table, *options(spec), o
        ),
        write_kv=lambda k, v, cache, slots: ops.write_kv.default(k, v, cache.keys, cache.values, slots),
        log_softmax=ops.log_softmax.default,
        token_log_probs=ops.token_log_probs.default,
        token_log_probs_backward=ops.token_log_probs_backward.default,
        keep_mask=ops.keep_mask.default,
        draw_numbers=reference_numbers,
        draw=ops.draw.default,
    )


def _choices(forced: str | None) -> list[InstructionSet]:
    available = build.supported()
    chosen = [isa for isa in available if forced in (None, isa.name)]
    if not chosen:
        wanted = f"instruction set {forced!r}" if forced else "AVX2 with FMA"
        raise PolicyError(
            f"numerics provider 'cpu' needs {wanted}; this machine has: {[isa.name for isa in available] or 'none'}",
            remedy=f"Unset {FORCE} if it is set, or choose the provider 'reference'.",
            code="VIME-ENV-044",
        )
    return chosen


def load(isa: str | None = None) -> Operations:
    """The C++ operations; ``isa`` (or VIME_NUMERICS_ISA) forces an instruction set, which changes no bit.

    A machine whose bf16 dot instruction differs from its definition in one probe runs the emulation instead.

    Raises:
        PolicyError: the machine, the compiler or the cache directory does not allow it.
    """
    for choice in _choices(isa or os.environ.get(FORCE) or None):
        namespace, library = build.load_library(choice)
        if getattr(torch.ops, namespace).bf16_step_agrees():
            return _operations(choice, namespace, str(library))
    raise PolicyError(
        f"the bf16 dot instruction of this machine does not compute its definition ({isa} was forced)",
        remedy=f"Unset {FORCE}: another instruction set gives the defined bits.",
        code="VIME-ENV-045",
    )


@cache
def _operations(isa: InstructionSet, namespace: str, library: str) -> Operations:
    parameters = {**PARAMETERS, "sources": source_digest([*shared_sources(), build.SOURCE])}
    return Operations(
        provider="cpu",
        digest=provider_digest(parameters),
        parameters=MappingProxyType(parameters),
        details=MappingProxyType({"instruction set": isa.name, "library": library}),
        kernels=_kernels(getattr(torch.ops, namespace)),
    )
