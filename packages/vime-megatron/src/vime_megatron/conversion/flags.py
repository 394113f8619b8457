"""Megatron's model flags against the checkpoint they are given with: they are compared, never trusted over it."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from vime_core.errors import ConfigError
from vime_megatron.conversion.layout import PIPELINE, TENSOR
from vime_megatron.model_directory import ModelDirectory
from vime_megatron.structures.types import Blueprint

NUMBERS: Final[Mapping[str, tuple[str, ...]]] = {
    "--num-layers": ("num_hidden_layers",),
    "--hidden-size": ("hidden_size",),
    "--ffn-hidden-size": ("intermediate_size",),
    "--num-attention-heads": ("num_attention_heads",),
    "--num-query-groups": ("num_key_value_heads",),
    "--kv-channels": ("head_dim",),
    "--vocab-size": ("vocab_size",),
    "--max-position-embeddings": ("max_position_embeddings",),
    "--norm-epsilon": ("rms_norm_eps",),
    "--rotary-base": ("rope_theta", "rope_parameters.rope_theta"),
}
"""Flags with a value, and where a ``config.json`` says the same."""
IMPLIED: Final[Mapping[str, Callable[[Blueprint], float]]] = {
    "--num-query-groups": lambda built: built.transformer["num_query_groups"],
    "--kv-channels": lambda built: built.head_dim,
    "--rotary-base": lambda built: built.rope.theta,
}
"""What is built where a ``config.json`` may say nothing."""
ONLY: Final[Mapping[str, str]] = {
    "--normalization": "RMSNorm",
    "--position-embedding-type": "rope",
    "--rotary-percent": "1.0",
    "--num-experts": "0",
    "--expert-model-parallel-size": "1",
    "--context-parallel-size": "1",
}
"""Flags of which one value is built."""
SWITCHES: Final[Mapping[str, Callable[[Blueprint], bool]]] = {
    "--swiglu": lambda _: True,
    "--use-rotary-position-embeddings": lambda _: True,
    "--group-query-attention": lambda _: True,
    "--add-bias-linear": lambda built: _linear_bias(built),
    "--disable-bias-linear": lambda built: not _linear_bias(built),
    "--add-qkv-bias": lambda built: bool(built.transformer.get("add_qkv_bias")),
    "--qk-layernorm": lambda built: bool(built.transformer.get("qk_layernorm")),
    "--untie-embeddings-and-output-weights": lambda built: not built.tied,
}
"""Flags without a value, and whether they are true of a model."""
DTYPES: Final[Mapping[str, str]] = {"--bf16": "bf16", "--fp16": "fp16"}


def require_agreement(flags: Mapping[str, str | None], directory: ModelDirectory, blueprint: Blueprint) -> None:
    """Raise ConfigError for the first flag that is not known, or says something else than the model."""
    for flag, value in flags.items():
        if flag in NUMBERS:
            _require_number(flag, value, directory, blueprint)
        elif flag in ONLY:
            _require_only(flag, value)
        elif flag in (TENSOR, PIPELINE):
            _number(flag, value)
        elif flag in SWITCHES or flag in DTYPES:
            _require_switch(flag, value, directory, blueprint)
        else:
            raise ConfigError(
                f"{flag} is no model flag that is compared with a checkpoint",
                remedy=f"Leave it out. Known: {', '.join(sorted([*NUMBERS, *ONLY, *SWITCHES, TENSOR, PIPELINE]))}.",
                code="VIME-CONFIG-093",
            )


def require_dtype(flags: Mapping[str, str | None], dtype: str) -> None:
    """Raise ConfigError where a flag names another dtype than the weights have."""
    for flag, named in DTYPES.items():
        if flag in flags and named != dtype:
            raise _contradiction(f"{flag} contradicts the weights, which are {dtype}")


def _require_number(flag: str, value: str | None, directory: ModelDirectory, blueprint: Blueprint) -> None:
    said = {key: _looked_up(directory.config, key) for key in NUMBERS[flag]}
    held = {key: number for key, number in said.items() if number is not None}
    if not held and flag in IMPLIED:
        held = {f"the implied {NUMBERS[flag][0]}": IMPLIED[flag](blueprint)}
    for key, number in held.items():
        if float(number) != _number(flag, value):
            raise _contradiction(f"{flag} {value} contradicts {key} = {number} of {_named(directory)}")


def _require_only(flag: str, value: str | None) -> None:
    only = ONLY[flag]
    same = _number(flag, value) == float(only) if only[0].isdigit() else value == only
    if not same:
        raise _contradiction(f"{flag} {value or ''}: only {only} is converted")


def _require_switch(flag: str, value: str | None, directory: ModelDirectory, blueprint: Blueprint) -> None:
    if value is not None:
        raise _contradiction(f"{flag} {value}: the flag takes no value")
    if flag in SWITCHES and not SWITCHES[flag](blueprint):
        raise _contradiction(f"{flag} contradicts {_named(directory)}: the model is not so")


def _linear_bias(built: Blueprint) -> bool:
    return built.output_bias or built.mlp_bias


def _named(directory: ModelDirectory) -> str:
    return repr(str(directory.path / "config.json"))


def _number(flag: str, value: str | None) -> float:
    try:
        return float(value or "")
    except ValueError as error:
        raise _contradiction(f"{flag} {value or ''} is no number") from error


def _looked_up(config: Mapping[str, Any], key: str) -> Any:
    found: Any = config
    for part in key.split("."):
        found = found.get(part) if isinstance(found, Mapping) else None
    return found


def _contradiction(message: str) -> ConfigError:
    return ConfigError(
        message,
        remedy="Leave the flag out, or name the checkpoint that it belongs to.",
        code="VIME-CONFIG-058",
    )
