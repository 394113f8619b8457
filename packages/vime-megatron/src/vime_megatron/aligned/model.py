"""The policy model of a contract: what `PolicyModel` is, with every number computed by the operations."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from dataclasses import replace

import numpy as np
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from vime_core.alignment.taps import EMBEDDING, FINAL_NORM, LOGITS, tap
from vime_core.errors import ConfigError
from vime_core.numerics import Operations, rope_table
from vime_megatron.aligned.sequences import AlignedSequences
from vime_megatron.aligned.side import AlignedParts
from vime_megatron.model import PolicyModel
from vime_megatron.packing import PackedMicrobatch, upload
from vime_megatron.structures.types import Blueprint


class AlignedModel(PolicyModel):
    """`PolicyModel` from the parts of a contract's side.

    The rotary table has as many rows as the model has positions: on both sides it is one function of the model.
    """

    def __init__(
        self, config: TransformerConfig, blueprint: Blueprint, operations: Operations, parts: AlignedParts
    ) -> None:
        self._rope = parts.rope
        super().__init__(config, replace(blueprint, block_spec=lambda: parts.block), blueprint.context)
        self.operations, self.says = operations, parts.says
        self.embedding.word_embeddings = parts.embedding(self.embedding.word_embeddings)
        self.output_layer = parts.output_layer(self.output_layer)

    def make_rope_table(self, blueprint: Blueprint, context: int) -> Tensor:
        """fp32 [context, R]."""
        return rope_table(context, blueprint.head_dim, *self._rope)

    def hidden_states(self, batch: PackedMicrobatch) -> Tensor:
        """Final hidden states of every input token, [T, hidden] in the training dtype."""
        embedded: Tensor = self.embedding.word_embeddings(batch.tokens)
        tap(EMBEDDING, batch.positions, embedded)
        hidden: Tensor = self.decoder(
            hidden_states=embedded, attention_mask=None, packed_seq_params=self._aligned_sequences(batch)
        )
        tap(FINAL_NORM, batch.positions, hidden)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, hidden] to [N, V], both in the training dtype."""
        weight = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None
        return self.output_layer(hidden, weight=weight)[0]

    def forward(self, batch: PackedMicrobatch, temperature: float, *, entropy: bool = False) -> Tensor:
        """Log-probs of the response tokens, fp32 [N], in order.

        The operation takes the rows in portions; of all N it keeps the logits in the training dtype.

        Raises:
            ConfigError: the entropy is asked for, which is no operation of a contract.
        """
        if entropy:
            raise ConfigError(
                "the entropy was asked of a model under a contract, which defines none",
                remedy="Set entropy_coefficient = 0, or leave alignment.contract empty.",
                code="VIME-CONFIG-022",
            )
        logits = self.response_logits(batch)
        return self.operations.token_log_probs(batch.left_to_choose(logits), batch.targets, temperature)

    def response_logits(self, batch: PackedMicrobatch) -> Tensor:
        """What response tokens are drawn from, [N, V] in the training dtype."""
        logits = self.logits(self.hidden_states(batch).index_select(0, batch.rows))
        tap(LOGITS, batch.positions[batch.rows], logits)
        return logits

    def _aligned_sequences(self, batch: PackedMicrobatch) -> AlignedSequences:
        starts = np.cumsum((0, *batch.lengths), dtype=np.int32)
        return AlignedSequences(
            qkv_format="thd",
            positions=batch.positions,
            cu_seqlens=upload(starts, batch.positions.device),
            rope_table=self.get_buffer("rope_table"),
        )
