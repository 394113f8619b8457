"""The operations of the alignment contract ``dense/v1``: one definition, called by trainer and engine.

    operations = load_provider("cpu")                    # or "reference"
    y = operations.linear(x, weight, bias)               # differentiable; same bits for any batch, place, threads

Every module defines one operation in its docstring: what it computes, in which order, with which roundings. ``rn`` is
round-to-nearest-even to the dtype of the tensors (fp32 or bf16); everything else is fp32 unless said. The definitions
are *row-invariant* (a row's result depends on that row alone) and attention is *phase-invariant* (prefill, any
chunking, a cached prefix and decode give the same bits) by construction.
"""

from vime_core.numerics.attention import AttentionSpec, KvCache, PagedBatch
from vime_core.numerics.contract import DENSE_V1, Contract, Definition
from vime_core.numerics.operations import Operations
from vime_core.numerics.provider import PROVIDERS, load_provider
from vime_core.numerics.rope_table import RopeScaling, rope_scaling, rope_table
from vime_core.numerics.truncation import masked

__all__ = [
    "DENSE_V1",
    "PROVIDERS",
    "AttentionSpec",
    "Contract",
    "Definition",
    "KvCache",
    "Operations",
    "PagedBatch",
    "RopeScaling",
    "load_provider",
    "masked",
    "rope_scaling",
    "rope_table",
]
