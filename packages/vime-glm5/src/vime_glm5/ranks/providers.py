"""Which providers spread experts over ranks, and why the others are refused."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final

from vime_core.errors import PolicyError

if TYPE_CHECKING:
    import torch.distributed as dist

    from vime_glm5.ranks.types import Ranks

COLLECTIVE: Final = "collective"
DEEP_EP: Final = "deep_ep"
KNOWN: Final = (COLLECTIVE, DEEP_EP)
_EARLY_SUM: Final = "Megatron's {} adds the rows of a token before they are back with its owner"
MEGATRONS: Final = {
    name: _EARLY_SUM.format(f"dispatcher {name!r}") for name in ("megatron", "alltoall", "allgather", "flex")
}
"""Megatron's own dispatchers (``moe_token_dispatcher_type``), by name."""
NEEDED: Final = ("get_dispatch_layout", "dispatch", "combine", "get_dispatch_config", "get_combine_config")
OLDEST_CAPABILITY: Final = (9, 0)


def refusal_of(name: str, ranks: int = 1, hidden: int = 0) -> str:
    """Why provider ``name`` cannot be used here; empty when it can.

    Args:
        name: of the provider.
        ranks: how many there are.
        hidden: elements of a row; 0: not known yet.
    """
    if name == COLLECTIVE:
        return ""
    if name == DEEP_EP:
        return _deep_ep(ranks, hidden)
    return MEGATRONS.get(name, f"there is no such provider; known are {', '.join(KNOWN)}")


def _deep_ep(ranks: int, hidden: int) -> str:
    if find_spec("deep_ep") is None:
        return "the package deep_ep is not installed"
    import torch

    if not torch.cuda.is_available():
        return "deep_ep needs GPUs, and this machine has none"
    if (found := torch.cuda.get_device_capability()) < OLDEST_CAPABILITY:
        return f"deep_ep's normal kernels need capability 9.0, and this GPU has {found[0]}.{found[1]}"
    if 2 * hidden % 32:
        return f"deep_ep moves rows in units of 32 bytes, and hidden_size = {hidden} gives {2 * hidden}"
    return _lacks(ranks)


def _lacks(ranks: int) -> str:
    """What the installed deep_ep has not."""
    try:
        buffer: Any = getattr(import_module("deep_ep"), "Buffer", None)
    except (ImportError, OSError) as error:
        return f"deep_ep cannot be imported: {error}"
    if absent := [name for name in NEEDED if not hasattr(buffer, name)]:
        return f"this deep_ep has no Buffer.{absent[0]}; its 1.2 line has"
    try:
        buffer.get_dispatch_config(ranks)
    except AssertionError:
        return f"deep_ep has no configuration for {ranks} ranks"
    return ""


def require(name: str, ranks: int = 1, hidden: int = 0) -> None:
    """Raise PolicyError when a provider cannot be used here, with the reason."""
    if why := refusal_of(name, ranks, hidden):
        raise PolicyError(
            f"experts over ranks by {name!r}: {why}",
            remedy=f"Use {COLLECTIVE!r}.",
            code="VIME-ALIGN-074",
        )


def open_ranks(name: str, group: dist.ProcessGroup, experts: int, hidden: int) -> Ranks:
    """The provider of that name over ``group``.

    Args:
        name: of the provider.
        group: of the ranks.
        experts: E of a layer.
        hidden: elements of a row.

    Raises:
        PolicyError: it is not usable here, with the reason; or the experts cannot be spread evenly.
    """
    import torch.distributed as dist

    require(name, dist.get_world_size(group), hidden)
    from vime_glm5.ranks.collective import Collective
    from vime_glm5.ranks.deep_ep import DeepEp, open_buffer

    if name == COLLECTIVE:
        return Collective(group, experts)
    return DeepEp(group, experts, open_buffer(group, hidden))
