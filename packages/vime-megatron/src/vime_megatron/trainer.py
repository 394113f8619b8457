"""The trainer backend's factory. Megatron and torch are imported when it is called, and not before."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vime_core.backends import TrainerContext
from vime_core.errors import ConfigError
from vime_megatron.options import MegatronOptions
from vime_megatron.quiet import silence_megatron
from vime_megatron.requirement import require_megatron

if TYPE_CHECKING:
    from vime_megatron.rank import TrainerRank


def open_trainer(context: TrainerContext) -> TrainerRank:
    """A `vime_core.backends.Trainer` of one rank, in this process.

    Raises:
        PluginError: megatron-core is absent, or nobody registered the model's structure.
        ConfigError: the options ask for more ranks than one, or the model directory is unusable.
        PolicyError: the policy sets a flag that this trainer does not know.
        BackendError: another trainer is open in this process.
    """
    require_megatron()
    options = context.options
    assert isinstance(options, MegatronOptions)
    refuse_ranks(options, context.config.run.launcher)
    silence_megatron()
    from vime_megatron.parallel import Ranks
    from vime_megatron.rank import TrainerRank

    return TrainerRank(context, options, Ranks())


def refuse_ranks(options: MegatronOptions, launcher: str) -> None:
    """Raise ConfigError for more ranks than the launcher holds."""
    for key in ("tensor_parallel", "data_parallel"):
        size = getattr(options, key)
        if size > 1:
            raise ConfigError(
                f"trainer.megatron.{key} = {size} needs {size} ranks, but run.launcher = {launcher!r} holds one",
                remedy=f"Set trainer.megatron.{key} = 1.",
                code="VIME-CONFIG-056",
            )
