"""What the processes of an aligned engine are handed, and what each makes of it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Final

from vime_core.alignment import Offered, load_operations
from vime_core.errors import ContractViolation
from vime_core.numerics import Contract, Operations

if TYPE_CHECKING:
    from vime_core.alignment import Alignment

CONFIG_KEY: Final = "vime_alignment"
"""Key of vLLM's ``additional_config`` under which the contract travels."""


@dataclass(frozen=True)
class Installed:
    """A contract with the operations that compute it here; ``side`` is the model class, ``"module:Class"``."""

    contract: Contract
    operations: Operations
    side: str


def message(alignment: Alignment) -> dict[str, Any]:
    """What the engine is handed: plain data, once, explicitly."""
    return {
        "contract": alignment.contract.to_json(),
        "provider": alignment.provider,
        "operations": alignment.operations,
        "side": alignment.rollout_side,
        "offered": [asdict(each) for each in alignment.offered],
    }


def is_aligned(vllm_config: Any) -> bool:
    """Whether an engine was started to keep a contract."""
    config = vllm_config.additional_config
    return isinstance(config, dict) and CONFIG_KEY in config


def installed(vllm_config: Any) -> Installed:
    """The contract of this process's engine; one object a process.

    Raises:
        ContractViolation: the engine was not started to keep one, or what it was handed is none.
        PolicyError: the provider cannot run here.
    """
    if not is_aligned(vllm_config):
        raise ContractViolation(
            "an aligned model class was started without a contract",
            remedy="Set alignment.contract; an aligned class runs in vime's engines only.",
            code="VIME-ALIGN-029",
        )
    given: dict[str, Any] = vllm_config.additional_config[CONFIG_KEY]
    offered = tuple(Offered(**each) for each in given["offered"])
    return _install(given["contract"], given["provider"], given["operations"], given["side"], offered)


@cache
def _install(contract: str, provider: str, operations: str, side: str, offered: tuple[Offered, ...]) -> Installed:
    held = Contract.from_json(contract)
    return Installed(held, load_operations(held, provider, operations, offered), side)
