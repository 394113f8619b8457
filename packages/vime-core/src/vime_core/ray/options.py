"""The table ``[run.ray]``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field

from vime_core.config.schema import NonNegativeFloat
from vime_core.plugins.types import Options

Share = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class RayOptions(Options):
    """Where the actors go and what each of them reserves."""

    address: str = Field(
        "", description="Of a running cluster (host:port, or auto); empty: one of this run's own, on this machine."
    )
    env_vars: Mapping[str, str] = Field(
        default_factory=dict[str, str],
        description="More variables of every actor, as env_vars of Ray's runtime environment; the policy's stay.",
    )
    placement: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] = Field(
        "PACK", description="Ray's strategy: few nodes or many; the strict ones refuse anything else."
    )
    cpus_per_rank: Share = Field(1.0, description="CPUs that a trainer rank reserves; it decides no thread count.")
    cpus_per_engine: Share = Field(1.0, description="CPUs that an engine reserves.")
    gpus_per_rank: NonNegativeFloat | None = Field(
        None, description="GPUs that a trainer rank reserves; None: 1 in a cluster with GPUs, else 0."
    )
    gpus_per_engine: NonNegativeFloat | None = Field(
        None, description="GPUs that an engine reserves; None: its tensor parallel size in a cluster with GPUs, else 0."
    )
    wait_s: Share = Field(60.0, description="Longest wait for resources that other jobs of the cluster hold.")
