"""What a model structure is to the trainer: the extension point for structures of other packages.

A plugin registers ``ModelStructure(model_type, summary, "module:STRUCTURE", backend="megatron")``, where
``STRUCTURE`` is a `Structure`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from vime_megatron.mapping import Rule
from vime_megatron.rope import Rope


@dataclass(frozen=True)
class Blueprint:
    """Everything that a Megatron GPTModel and its weights are built from.

    Args:
        transformer: keyword arguments of ``TransformerConfig`` that the structure decides.
        block_spec: makes the ``TransformerBlockSubmodules``; called once megatron-core is imported.
        vocabulary: rows of the embedding.
        context: most positions of one sequence.
        head_dim: elements of one head.
        tied: one matrix for embedding and output layer.
        rope: the rotary embedding.
        rules: the weight mapping, in the order of the model's layers.
        output_bias: a bias on the attention's output projection.
        mlp_bias: biases on both linears of the MLP.
        te_block_spec: the same of Transformer Engine's modules, with parameters of the same names; None: there is none.
    """

    transformer: Mapping[str, Any]
    block_spec: Callable[[], Any]
    vocabulary: int
    context: int
    head_dim: int
    tied: bool
    rope: Rope
    rules: tuple[Rule, ...]
    output_bias: bool = field(default=False, kw_only=True)
    mlp_bias: bool = field(default=False, kw_only=True)
    te_block_spec: Callable[[], Any] | None = field(default=None, kw_only=True)


class Structure(Protocol):
    """One model structure."""

    def blueprint(self, config: Mapping[str, Any]) -> Blueprint:
        """Translate a ``config.json``.

        Raises:
            ConfigError: a key is absent, or asks for something that the structure does not build.
        """
        ...
