"""The ``[trainer.megatron]`` section."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, ValidationInfo, field_validator

from vime_core.config.schema import ActorCount
from vime_core.plugins.types import Options


class MegatronOptions(Options):
    """Options of the Megatron-core trainer."""

    spec: Literal["auto", "local", "te", "aligned"] = Field(
        "auto",
        description="Modules: Megatron's own (local), Transformer Engine's (te), the contract's (aligned), or as"
        " alignment.contract says: the contract's or Megatron's own.",
    )
    recompute: Literal["none", "full", "selective"] = Field(
        "none", description="Run the forward again in the backward: of whole layers (full) or of core attention."
    )
    tensor_parallel: ActorCount = Field(1, description="Ranks that share each tensor.")
    data_parallel: ActorCount = Field(1, description="Ranks that share a step's microbatches.")
    expert_parallel: ActorCount = Field(
        1, description="Ranks, of those of data_parallel, that share a layer's experts."
    )
    expert_dispatcher: str = Field(
        "collective", description="What moves tokens between them: collective, or deep_ep where it is installed."
    )
    freeze_indexer: bool = Field(True, description="GLM-5: the indexer, which chooses keys, does not train.")

    @field_validator("expert_parallel")
    @classmethod
    def _is_shared_by_data_parallel_ranks(cls, value: int, info: ValidationInfo) -> int:
        ranks = info.data.get("data_parallel", value)
        if ranks % value:
            raise ValueError(f"{value} ranks share experts, but data_parallel = {ranks} is no multiple of that")
        return value

    @field_validator("freeze_indexer")
    @classmethod
    def _trains_no_indexer(cls, value: bool) -> bool:
        if not value:
            raise ValueError(
                "false is refused: a choice of keys has no gradient, and no loss of the indexer's own is defined, so it"
                " would get a gradient of zero and decay"
            )
        return value

    @property
    def ranks(self) -> int:
        """Ranks of the whole trainer."""
        return self.tensor_parallel * self.data_parallel
