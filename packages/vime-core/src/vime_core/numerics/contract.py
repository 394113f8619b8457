"""The frozen list of operations that ``dense/v1`` consists of: what both sides compute, whichever provider runs it.

A contract's *id* and digest name definitions; a provider's digest (:mod:`vime_core.numerics.operations`) names what
runs. A changed definition is a new version of the contract, never an edit of this one.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import Any, Final

from vime_core.errors import ContractViolation


@dataclass(frozen=True)
class Definition:
    """One operation: its name, what it computes, and where its full definition is written."""

    operation: str
    computes: str
    module: str


@dataclass(frozen=True)
class Contract:
    """A versioned list of definitions; serialised into the record and handed to the engine."""

    id: str
    operations: tuple[Definition, ...]

    @property
    def digest(self) -> str:
        """SHA-256 of the canonical JSON."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    def to_json(self) -> str:
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Contract:
        """The contract that :meth:`to_json` wrote.

        Raises:
            ContractViolation: the text is no contract.
        """
        try:
            data: dict[str, Any] = json.loads(text)
            return cls(data["id"], tuple(Definition(**operation) for operation in data["operations"]))
        except (ValueError, KeyError, TypeError) as error:
            raise ContractViolation(
                f"not a serialised contract: {text[:80]!r}", remedy="Hand over what Contract.to_json gave."
            ) from error


def _define(operation: str, computes: str, module: str | None = None) -> Definition:
    return Definition(operation, computes, f"vime_core.numerics.{module or operation}")


DENSE_V1: Final = Contract(
    "dense/v1",
    (
        _define("embedding", "copy of the row; gradient: tokens ascending in fp32, rounded once"),
        _define(
            "linear",
            "rn(D + b), D = sum of C chunk dots ascending, C the provider's rule of the global (N, K) only",
        ),
        _define("add_rms_norm", "r = rn(x + residual); rn((r * 1/sqrt(lane_sum(r*r)/H + eps)) * w)", "rms_norm"),
        _define("rms_norm", "add_rms_norm without a residual; over head_dim: QK-norm"),
        _define("rope", "neox: rn(a cos - b sin), rn(b cos + a sin) of halves; fp32 table of fp64 angles"),
        _define("rope_interleaved", "as rope, of neighbours", "rope"),
        _define(
            "attention",
            "softmax(cap(q k^T scale)) v over the visible keys ascending, fp32, one rounding; causal; window and "
            "soft cap are parameters; packed = paged in bits",
        ),
        _define("swiglu", "rn(silu(g) * u), silu in fp32"),
        _define("soft_cap", "rn(c tanh(x / c))"),
        _define(
            "log_softmax",
            "z = fp32(logits) / T, T = 0 as 1; (z - max z) - ln(lane_sum(exp(z - max z))) over all of V",
            "log_probs",
        ),
        _define(
            "keep_mask",
            "top-k, then top-p, in the order (z descending, id ascending) by integer weights floor(2^32 exp(z - m))",
            "truncation",
        ),
    ),
)
