"""The table ``[run.ray]``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from vime_core.config.schema import NonNegativeFloat
from vime_core.plugins.types import Options


def _is_name(name: str) -> str:
    if not name or "=" in name or "\0" in name:
        raise ValueError(f"{name!r} is no name of an environment variable; leave out what is empty, = and NUL")
    return name


def _is_value(value: str) -> str:
    if "\0" in value:
        raise ValueError(f"{value!r} holds a NUL byte, which no environment variable can; leave it out")
    return value


Name = Annotated[str, AfterValidator(_is_name)]
Value = Annotated[str, AfterValidator(_is_value)]
Share = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class RayOptions(Options):
    """Where the actors go and what each of them reserves."""

    address: str = Field(
        "", description="Of a running cluster (host:port, or auto); empty: one of this run's own, on this machine."
    )
    env_vars: Mapping[Name, Value] = Field(
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
