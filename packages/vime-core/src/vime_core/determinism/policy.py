"""A determinism policy as one frozen object, by role, with the built-in policies `off` and `reproducible/v1`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from vime_core.types import Role


@dataclass(frozen=True)
class RolePolicy:
    """What a policy asks of the processes of one role.

    Args:
        environment: variables set before the process imports anything heavy.
        flags: switches that the backend must honour; a backend refuses a flag that it does not know.
        forbidden_packages: distributions whose presence breaks the promise.
        probes: ``"module:function"`` of checks ``(RunConfig) -> list[Finding]`` that run before compute is spent.
    """

    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    flags: Mapping[str, bool] = field(default_factory=dict[str, bool])
    forbidden_packages: tuple[str, ...] = ()
    probes: tuple[str, ...] = ()


@dataclass(frozen=True)
class DeterminismPolicy:
    """A named, versioned set of rules.

    ``inert`` says which of them do nothing without an optional package; ``repeats`` whether the same run twice (or
    stopped and resumed) must give the same bits.
    """

    name: str
    version: int
    summary: str
    driver: RolePolicy = RolePolicy()
    trainer: RolePolicy = RolePolicy()
    rollout: RolePolicy = RolePolicy()
    inert: Mapping[str, str] = field(default_factory=dict[str, str])
    repeats: bool = True

    @property
    def id(self) -> str:
        return f"{self.name}/v{self.version}"

    def role(self, role: Role) -> RolePolicy:
        return {"driver": self.driver, "trainer": self.trainer, "rollout": self.rollout}[role]


OFF: Final = DeterminismPolicy("off", 1, "Promises nothing; records everything.", repeats=False)

REPRODUCIBLE: Final = DeterminismPolicy(
    name="reproducible",
    version=1,
    summary="The same run twice gives the same bits: tokens, log-probs, gradients, weights.",
    driver=RolePolicy(environment={"TOKENIZERS_PARALLELISM": "false"}),
    trainer=RolePolicy(
        environment={
            "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
            "CUDA_DEVICE_MAX_CONNECTIONS": "1",
            "NCCL_ALGO": "Ring",
            "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
        },
        flags={"deterministic_algorithms": True},
        probes=(
            "vime_core.determinism.probes:transformer_engine_attention",
            "vime_core.determinism.probes:thread_count",
        ),
    ),
    rollout=RolePolicy(
        environment={"PYTHONHASHSEED": "0", "VLLM_USE_FLASHINFER_SAMPLER": "0"},
        flags={"paused_admission": True, "seed_per_request": True, "async_scheduling": False},
    ),
    inert={"NVTE_ALLOW_NONDETERMINISTIC_ALGO": "transformer_engine"},
)
