"""Which providers spread experts over ranks, and why the others are refused."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Final

from vime_core.errors import PolicyError

if TYPE_CHECKING:
    import torch.distributed as dist

    from vime_glm5.ranks.collective import Collective

COLLECTIVE: Final = "collective"


def refusal_of(name: str) -> str:
    """Why provider ``name`` cannot be used here; empty when it can."""
    if name == COLLECTIVE:
        return ""
    if name == "deep_ep":
        return _deep_ep()
    if name == "megatron":
        return "Megatron's all-to-all dispatcher adds the rows of a token before they are back with its owner"
    return f"there is no such provider; known are {COLLECTIVE}, deep_ep"


def _deep_ep() -> str:
    if find_spec("deep_ep") is None:
        return "the package deep_ep is not installed"
    import torch

    if not torch.cuda.is_available():
        return "deep_ep needs GPUs, and this machine has none"
    return "deep_ep is installed, but its dispatch by route is not implemented in this version"


def open_ranks(name: str, group: dist.ProcessGroup, experts: int) -> Collective:
    """The provider of that name over ``group``.

    Raises:
        PolicyError: it is not usable here, with the reason; or the experts cannot be spread evenly.
    """
    if why := refusal_of(name):
        raise PolicyError(
            f"experts over ranks by {name!r}: {why}",
            remedy=f"Use {COLLECTIVE!r}.",
            code="VIME-ALIGN-074",
        )
    from vime_glm5.ranks.collective import Collective

    return Collective(group, experts)
