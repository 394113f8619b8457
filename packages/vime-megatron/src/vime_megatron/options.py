"""The ``[trainer.megatron]`` section."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from vime_core.config.schema import PositiveInt
from vime_core.plugins.types import Options


class MegatronOptions(Options):
    """Options of the Megatron-core trainer."""

    spec: Literal["auto", "local", "aligned"] = Field(
        "auto", description="Modules: Megatron's own (local), the contract's (aligned), or as alignment.contract says."
    )
    recompute: Literal["none", "full", "selective"] = Field(
        "none", description="Run the forward again in the backward: of whole layers (full) or of core attention."
    )
    tensor_parallel: PositiveInt = Field(1, description="Ranks that share each tensor.")
    data_parallel: PositiveInt = Field(1, description="Ranks that share a step's microbatches.")
