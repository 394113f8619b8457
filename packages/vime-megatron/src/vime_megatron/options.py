"""The ``[trainer.megatron]`` section."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from vime_core.config.schema import PositiveInt
from vime_core.plugins.types import Options


class MegatronOptions(Options):
    """Options of the Megatron-core trainer."""

    spec: Literal["local"] = Field("local", description="Layer specification: Megatron's own modules.")
    tensor_parallel: PositiveInt = Field(1, description="Ranks that share each tensor.")
    data_parallel: PositiveInt = Field(1, description="Ranks that share a step's microbatches.")
