"""What vime-glm5 can say about a run without building a model: the hook ``vime_check_run``."""

from __future__ import annotations

from pathlib import Path
from typing import cast

from vime_core.config.schema import RunConfig
from vime_core.errors import PolicyError
from vime_core.loop.model import read_model_config
from vime_glm5.numerics.latent_codec import row_bytes
from vime_glm5.structure import read_shape
from vime_megatron.options import MegatronOptions


def check_run(config: RunConfig, model_directory: Path) -> None:
    """Refuse what a side of ``glm5/v1`` would refuse once it is built.

    Raises:
        PolicyError: naming the key.
    """
    shape = read_shape(read_model_config(model_directory))
    contract = config.alignment.contract
    row_bytes("bf16" if contract.endswith("bf16kv") else "fp8", shape.kv_lora, shape.rotary)
    if config.trainer.dtype != "bf16":
        raise PolicyError(
            f"contract {contract} is kept in bf16, and trainer.dtype = {config.trainer.dtype!r}",
            remedy="Set trainer.dtype = 'bf16'.",
            code="VIME-ALIGN-072",
        )
    if config.trainer.backend == "megatron":
        _require_even(cast("MegatronOptions", config.options("trainer", "megatron")).expert_parallel, shape.experts)


def _require_even(ranks: int, experts: int) -> None:
    if experts % ranks:
        raise PolicyError(
            f"trainer.megatron.expert_parallel = {ranks} does not divide the model's {experts} experts"
            " (n_routed_experts)",
            remedy="Use a number of ranks that does.",
            code="VIME-ALIGN-075",
        )
