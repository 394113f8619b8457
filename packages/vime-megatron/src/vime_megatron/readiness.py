"""What vime-megatron can say about a run without building a model: the hook ``vime_check_run``."""

from __future__ import annotations

from pathlib import Path
from typing import cast

from vime_core.alignment import Alignment
from vime_core.backends import Ranks
from vime_core.config.schema import RunConfig
from vime_core.determinism.policy import DeterminismPolicy
from vime_megatron.aligned.holding import require_layout
from vime_megatron.aligned.side import ExpertLayout
from vime_megatron.determinism import deterministic
from vime_megatron.model_directory import read_model_directory
from vime_megatron.options import MegatronOptions
from vime_megatron.requirement import require_megatron
from vime_megatron.sharding import refuse_indivisible
from vime_megatron.structures.registry import find_structure
from vime_megatron.structures.spec import of_spec
from vime_megatron.trainer import refuse_ranks


def check_run(config: RunConfig, policy: DeterminismPolicy, model_directory: Path, alignment: Alignment | None) -> None:
    """Refuse what `vime_megatron.trainer.open_trainer` would refuse, before any process is started.

    Raises:
        VimeError: as `open_trainer` says.
    """
    require_megatron()
    options = cast("MegatronOptions", config.options("trainer", config.trainer.backend))
    if config.run.launcher == "inline":
        refuse_ranks(options, Ranks(), config.run.launcher)
    deterministic(policy.trainer.flags)
    directory = read_model_directory(model_directory)
    experts = ExpertLayout(options.expert_parallel, options.expert_dispatcher)
    require_layout(alignment, options.spec, options.tensor_parallel, experts)
    blueprint = find_structure(directory.model_type, config.plugins).blueprint(directory.config)
    refuse_indivisible(of_spec(blueprint, options.spec), options.tensor_parallel)
