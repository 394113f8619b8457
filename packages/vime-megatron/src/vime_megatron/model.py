"""The policy: a Megatron GPTModel whose output are log-probs of response tokens. The one place that builds a model."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.mappings import reduce_from_tensor_model_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn.functional import silu

from vime_core.errors import ConfigError
from vime_core.rl.entropy import token_entropies
from vime_megatron.cpu_bridge import cuda_bridge, device
from vime_megatron.embedding import lookup
from vime_megatron.log_prob import token_log_probs
from vime_megatron.mapping import check_complete, to_megatron
from vime_megatron.model_directory import ModelDirectory
from vime_megatron.packing import PackedMicrobatch, upload
from vime_megatron.parallel import unchanged_environment
from vime_megatron.rope import rope_table
from vime_megatron.sharding import gather_columns, shard, whole_shape
from vime_megatron.specs import PackedSequences
from vime_megatron.structures.types import Blueprint

DTYPES: Mapping[str, torch.dtype] = {"bf16": torch.bfloat16, "fp32": torch.float32}
KEEPS_DTYPE = "vime_keeps_dtype"
"""Attribute of a parameter that a structure sets to true where it has its own dtype, whatever the training dtype."""


class PolicyModel(GPTModel):
    """GPTModel on packed sequences that computes logits of response tokens only.

    Args:
        config: Megatron's own.
        blueprint: the structure.
        context: positions of the rotary table; no sequence may be longer.
    """

    def __init__(self, config: TransformerConfig, blueprint: Blueprint, context: int) -> None:
        super().__init__(
            config,
            blueprint.block_spec(),
            vocab_size=blueprint.vocabulary,
            max_sequence_length=blueprint.context,
            position_embedding_type="none",
            share_embeddings_and_output_weights=blueprint.tied,
        )
        self.register_buffer("rope_table", self.make_rope_table(blueprint, context), persistent=False)

    def make_rope_table(self, blueprint: Blueprint, context: int) -> Tensor:
        """Cosines and sines, fp32 [2, context, head_dim / 2]."""
        return rope_table(blueprint.rope, blueprint.head_dim, context)

    def hidden_states(self, batch: PackedMicrobatch) -> Tensor:
        """Final hidden states of every input token, [T, hidden] in the training dtype."""
        embedded = self._embedded(batch.tokens)[:, None]
        hidden: Tensor = self.decoder(
            hidden_states=embedded, attention_mask=None, packed_seq_params=self._sequences(batch)
        )
        return hidden.squeeze(1)  # unlike an index, a view whose gradient is one, without a fill and a copy

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, hidden] to [N, V], both in the training dtype."""
        weight = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None
        output: Tensor = self.output_layer(hidden[:, None], weight=weight)[0]
        return gather_columns(output.squeeze(1))

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride] (another input, another output)
        self, batch: PackedMicrobatch, temperature: float, *, entropy: bool = False
    ) -> Tensor:
        """Log-probs of the response tokens, fp32 [N], in order; with ``entropy`` fp32 [2, N], entropies second."""
        hidden = self.hidden_states(batch).index_select(0, batch.rows)
        logits = batch.left_to_choose(self.logits(hidden))
        log_probs = token_log_probs(logits, batch.targets, temperature)
        return torch.stack((log_probs, token_entropies(logits, temperature))) if entropy else log_probs

    @property
    def _tensor_parallel(self) -> int:
        return parallel_state.get_tensor_model_parallel_world_size()

    def _embedded(self, tokens: Tensor) -> Tensor:
        """[T] to [T, hidden]; a rank without a token's row adds zeros."""
        table: Any = self.embedding.word_embeddings
        if self._tensor_parallel == 1:
            return lookup(table.weight, tokens)
        elsewhere = (tokens < table.vocab_start_index) | (tokens >= table.vocab_end_index)
        rows = lookup(table.weight, (tokens - table.vocab_start_index).masked_fill(elsewhere, 0))
        return reduce_from_tensor_model_parallel_region(rows.masked_fill(elsewhere[:, None], 0.0))

    def _sequences(self, batch: PackedMicrobatch) -> PackedSequences:
        angles: Tensor = self.get_buffer("rope_table")[:, batch.positions, None]
        starts = upload(np.cumsum((0, *batch.lengths), dtype=np.int32), batch.positions.device)
        return PackedSequences(qkv_format="thd", lengths=batch.lengths, cos=angles[0], sin=angles[1], starts=starts)


def build_model(
    directory: ModelDirectory,
    blueprint: Blueprint,
    *,
    dtype: str,
    context: int,
    tensor_parallel: int = 1,
    deterministic: bool = False,
    load: bool = True,
    make: Callable[[TransformerConfig, Blueprint, int], PolicyModel] = PolicyModel,
) -> PolicyModel:
    """Build the model and load the directory's weights, rounded to ``dtype``, on this process's device.

    Args:
        dtype: a key of `DTYPES`.
        context: most tokens of one sequence.
        deterministic: Megatron's ``deterministic_mode``.
        load: take the directory's weights; else they are whatever memory held.
        make: `PolicyModel`, or what stands in its place.

    Raises:
        ConfigError: the weights do not fit the configuration, or ``context`` exceeds the model's.
    """
    if context > blueprint.context:
        raise ConfigError(
            f"rollout.context_length = {context} exceeds the model's max_position_embeddings = {blueprint.context}",
            remedy=f"Set rollout.context_length to at most {blueprint.context}.",
            code="VIME-CONFIG-054",
        )
    config = _transformer_config(blueprint, DTYPES[dtype], tensor_parallel, deterministic)
    with unchanged_environment(), cuda_bridge():
        model = make(config, blueprint, context)
    if load:
        _load(model, directory, blueprint)
    for parameter in model.parameters():  # the rotary table, a buffer, stays fp32
        if not getattr(parameter, KEEPS_DTYPE, False):
            parameter.data = parameter.data.to(DTYPES[dtype])
    return model.to(device=device())


def _transformer_config(
    blueprint: Blueprint, dtype: torch.dtype, tensor_parallel: int, deterministic: bool
) -> TransformerConfig:
    return TransformerConfig(
        **blueprint.transformer,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=silu,
        add_bias_linear=False,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        calculate_per_token_loss=True,  # gradients are summed over ranks, not averaged: weights hold the denominator
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        use_cpu_initialization=True,
        perform_initialization=False,
        tensor_model_parallel_size=tensor_parallel,
        deterministic_mode=deterministic,
    )


def _load(model: PolicyModel, directory: ModelDirectory, blueprint: Blueprint) -> None:
    weights = _without_derived(directory.load(), directory, tied=blueprint.tied)
    check_complete(weights, blueprint.rules, str(directory.path))
    parameters: dict[str, Tensor] = dict(model.named_parameters())
    loaded = dict(to_megatron(weights, blueprint.rules))
    _check_shapes(parameters, loaded, str(directory.path))
    with torch.no_grad():
        for name, tensor in loaded.items():
            parameters[name].copy_(shard(parameters[name], tensor))


def _without_derived(weights: dict[str, Tensor], directory: ModelDirectory, *, tied: bool) -> dict[str, Tensor]:
    """Drop what a file may hold besides the model: rotary frequencies, and the tied output layer's second name."""
    kept = {name: tensor for name, tensor in weights.items() if not name.endswith("rotary_emb.inv_freq")}
    head = kept.pop("lm_head.weight", None) if tied else None
    if head is not None and not torch.equal(head, kept["model.embed_tokens.weight"]):
        raise ConfigError(
            f"{str(directory.path)!r} has tie_word_embeddings = true, but lm_head.weight differs from the embedding",
            remedy="Set tie_word_embeddings to false in its config.json, or remove lm_head.weight.",
            code="VIME-CONFIG-055",
        )
    return kept


def _check_shapes(parameters: Mapping[str, Tensor], loaded: Mapping[str, Tensor], where: str) -> None:
    wanted: dict[str, Any] = {name: whole_shape(parameter) for name, parameter in parameters.items()}
    given: dict[str, Any] = {name: tuple(tensor.shape) for name, tensor in loaded.items()}
    for name in sorted(wanted.keys() | given.keys()):
        if wanted.get(name) != given.get(name):
            raise ConfigError(
                f"the weights in {where!r} do not fit its config.json: {name} is {given.get(name, 'absent')},"
                f" the structure needs {wanted.get(name, 'none')}",
                remedy="Use the weights and the config.json of one model.",
                code="VIME-CONFIG-051",
            )
