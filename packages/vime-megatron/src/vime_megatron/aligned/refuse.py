"""What the trainer side of a contract refuses by name, before anything is computed."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, Final

from megatron.core.transformer.transformer_config import TransformerConfig

from vime_core.errors import PolicyError

SHAPE: Final = (
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "kv_channels",
    "layernorm_epsilon",
    "add_qkv_bias",
    "qk_layernorm",
)
"""Fields that the aligned modules read, or that shape them."""

INERT: Final = (
    "params_dtype",
    "pipeline_dtype",
    "bf16",
    "autocast_dtype",
    "deterministic_mode",
    "calculate_per_token_loss",
    "use_cpu_initialization",
    "perform_initialization",
    "init_method",
    "output_layer_init_method",
    "embedding_init_method",
    "embedding_init_method_std",
)
"""Fields that belong to initialisation, data types and gradient averaging; the forward does not read them."""

FIXED: Final[dict[str, Any]] = {
    "normalization": "RMSNorm",
    "gated_linear_unit": True,
    "add_bias_linear": False,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "bias_activation_fusion": False,
    "bias_dropout_fusion": False,
    "masked_softmax_fusion": False,
    "gradient_accumulation_fusion": False,
    "apply_rope_fusion": False,
    "persist_layer_norm": False,
}
"""Values of a dense decoder that are not Megatron's defaults; ``activation_func`` is silu besides."""


def refuse_config(config: TransformerConfig, contract: str, free: frozenset[str] = frozenset()) -> None:
    """Hold every other field of a configuration to the one value that the aligned modules compute.

    Megatron's glue reads some two hundred fields; a field that nobody thought of is refused, not ignored.

    Args:
        config: of the model that is about to be built.
        contract: its id.
        free: fields that the side's parts read besides.

    Raises:
        PolicyError: names the first field with another value.
    """
    expected = _expected(config)
    for field in fields(config):
        if field.name in (*SHAPE, *INERT, *free):
            continue
        value, wanted = getattr(config, field.name), getattr(expected, field.name)
        if value is not wanted and value != wanted:
            raise PolicyError(
                f"contract {contract} is kept with TransformerConfig.{field.name} = {_named(wanted)},"
                f" the model's structure sets {_named(value)}",
                remedy="Use a structure without that setting, or clear alignment.contract.",
                code="VIME-ALIGN-033",
            )


def refuse_tensor_parallel(size: int, contract: str) -> None:
    """Raise PolicyError unless every tensor is whole on its rank."""
    if size != 1:
        raise PolicyError(
            f"contract {contract} is kept with trainer.megatron.tensor_parallel = 1; {size} is set",
            remedy="Set trainer.megatron.tensor_parallel = 1, or clear alignment.contract.",
            code="VIME-ALIGN-032",
        )


def _expected(config: TransformerConfig) -> TransformerConfig:
    from torch.nn.functional import silu

    shape = {name: getattr(config, name) for name in (*SHAPE, *INERT)}
    return TransformerConfig(**shape, **FIXED, activation_func=silu)


def _named(value: object) -> str:
    return str(getattr(value, "__name__", repr(value)))
