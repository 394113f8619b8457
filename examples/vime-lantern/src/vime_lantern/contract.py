"""``lantern/v1``: the operations of ``dense/v1`` that Lantern uses, and how its layers put them together."""

from __future__ import annotations

from typing import Final

from vime_core.numerics import DENSE_V1, Contract, Definition

_USED: Final = (
    *("embedding", "linear", "add_rms_norm", "rms_norm", "rope", "attention", "swiglu", "soft_cap"),
    *("log_softmax", "keep_mask"),
)

LANTERN_V1: Final = Contract(
    "lantern/v1",
    (
        *(definition for definition in DENSE_V1.operations if definition.operation in _USED),
        Definition(
            "layer",
            "x = rn(x + norm(attention(norm(x)))); x = rn(x + norm(mlp(norm(x)))); even layers over a window",
            "vime_lantern.megatron",
        ),
        Definition("logits", "soft_cap(linear(norm(x), embedding))", "vime_lantern.megatron"),
    ),
)
