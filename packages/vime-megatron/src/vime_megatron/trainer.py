"""The trainer backend's factory. Megatron and torch are imported when it is called, and not before."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vime_core.backends import Ranks, TrainerContext
from vime_core.errors import ConfigError
from vime_megatron.options import MegatronOptions
from vime_megatron.quiet import silence_megatron
from vime_megatron.requirement import require_megatron

if TYPE_CHECKING:
    from vime_megatron.rank import TrainerRank


def open_trainer(context: TrainerContext) -> TrainerRank:
    """A `vime_core.backends.Trainer`: this process's rank, alone or one of several.

    Raises:
        PluginError: megatron-core is absent, or nobody registered the model's structure.
        ConfigError: the options ask for more ranks than there are, or the model directory is unusable.
        PolicyError: the policy sets a flag that this trainer does not know.
        BackendError: another trainer is open in this process.
    """
    require_megatron()
    options = context.options
    assert isinstance(options, MegatronOptions)
    refuse_ranks(options, context.ranks, context.config.run.launcher)
    silence_megatron()
    from vime_megatron.rank import TrainerRank

    return TrainerRank(context, options, context.ranks)


def refuse_ranks(options: MegatronOptions, ranks: Ranks, launcher: str) -> None:
    """Raise ConfigError unless the launcher holds as many ranks as are asked for."""
    if options.ranks != ranks.world_size:
        key = "tensor_parallel" if options.tensor_parallel > 1 else "data_parallel"
        raise ConfigError(
            f"trainer.megatron.{key} = {getattr(options, key)} needs {options.ranks} ranks, but run.launcher ="
            f" {launcher!r} holds {ranks.world_size}",
            remedy=f"Set run.launcher = 'ray', or trainer.megatron.{key} = 1.",
            code="VIME-CONFIG-056",
        )
