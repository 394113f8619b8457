"""The field's own switches on ``vime run``, as keys of the configuration.

``--deterministic-mode`` and ``--vllm-enable-deterministic-inference`` ask for ``run.policy = "reproducible"``; any
other ``--vllm-NAME VALUE`` is ``rollout.vllm.NAME``, or an engine argument where the plugin has no such key.
``--freeze-indexer`` is ``trainer.megatron.freeze_indexer = true``.
``--runtime-env-json JSON``, as Ray has it, may hold ``env_vars``: they are ``run.ray.env_vars``.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, cast

from vime_core.errors import ConfigError

PREFIX: Final = "--vllm-"
REPRODUCIBLE: Final = "run.policy=reproducible"
SWITCHES: Final = {
    "--deterministic-mode": REPRODUCIBLE,
    "--vllm-enable-deterministic-inference": REPRODUCIBLE,
    "--freeze-indexer": "trainer.megatron.freeze_indexer=true",
    "--no-freeze-indexer": "trainer.megatron.freeze_indexer=false",
}
"""Those without a value."""
RUNTIME_ENV: Final = "--runtime-env-json"
ENV_VARS: Final = "run.ray.env_vars"


def overrides_of(arguments: Sequence[str], own_keys: Collection[str]) -> list[str]:
    """The values of ``--set`` that say the same as some switches.

    Args:
        arguments: what the command line held besides its own options.
        own_keys: keys of ``[rollout.vllm]``.

    Raises:
        ConfigError: an argument is none of these switches.
    """
    return [_override(name, value, own_keys) for name, value in pairs(arguments)]


def pairs(arguments: Sequence[str], command: str = "vime run") -> Iterator[tuple[str, str | None]]:
    """(switch, value) of command-line arguments; None where the next one is a switch again.

    Raises:
        ConfigError: a value stands without a switch.
    """
    rest = list(arguments)
    while rest:
        name, equals, value = rest.pop(0).partition("=")
        if not name.startswith("--"):
            raise _stray(name, command)
        if equals:
            yield name, value
        else:
            yield name, rest.pop(0) if rest and not rest[0].startswith("--") else None


def _override(name: str, value: str | None, own_keys: Collection[str]) -> str:
    if name in SWITCHES and value is None:
        return SWITCHES[name]
    if name == RUNTIME_ENV:
        return f"{ENV_VARS}={_env_vars(value or '')}"
    if not name.startswith(PREFIX) or name in SWITCHES:
        raise _unknown(name if value is None else f"{name} {value}")
    key = name.removeprefix(PREFIX).replace("-", "_")
    holder = "rollout.vllm" if key in own_keys else "rollout.vllm.engine_args"
    return f"{holder}.{key}={'true' if value is None else value}"


def refuse_another_policy(switches: Sequence[str], files: Sequence[Path], overrides: Sequence[str]) -> None:
    """Raise ConfigError when a switch asks for the policy ``reproducible`` and the configuration names another one.

    Args:
        switches: what :func:`overrides_of` gave.
        files: of the configuration.
        overrides: the values of ``--set``.
    """
    if REPRODUCIBLE not in switches:
        return
    from vime_core.config.layers import parse_override, read_toml

    for layer in (*map(read_toml, files), *map(parse_override, overrides)):
        table: Any = layer.get("run")
        policy: Any = cast("dict[str, Any]", table).get("policy") if isinstance(table, dict) else None
        if policy not in (None, "reproducible"):
            asked = " or ".join(name for name, key in SWITCHES.items() if key == REPRODUCIBLE)
            raise ConfigError(
                f"{asked} asks for run.policy = 'reproducible', and run.policy = {policy!r} is configured",
                remedy="Leave out one of the two.",
                code="VIME-CONFIG-079",
            )


def _env_vars(text: str) -> str:
    """The variables of a runtime environment, as a TOML table."""
    try:
        table: Any = json.loads(text)
    except ValueError as error:
        raise _unusable(text, f"it is no JSON: {error}") from error
    if not isinstance(table, dict) or set(cast("dict[str, Any]", table)) - {"env_vars"}:
        raise _unusable(text, "only an object with the key env_vars is taken; actors run what is installed here")
    if any("\ud800" <= letter <= "\udfff" for letter in json.dumps(table, ensure_ascii=False)):
        raise _unusable(text, "it holds half of a surrogate pair, which is no character")
    variables: Any = cast("dict[str, Any]", table).get("env_vars", {})
    if not isinstance(variables, dict) or any(type(v) is not str for v in cast("dict[str, Any]", variables).values()):
        raise _unusable(text, "env_vars must be an object of strings")
    pairs = cast("dict[str, str]", variables).items()
    return "{" + ", ".join(f"{_quoted(name)} = {_quoted(value)}" for name, value in pairs) + "}"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _unusable(text: str, why: str) -> ConfigError:
    return ConfigError(
        f"{RUNTIME_ENV} {text!r}: {why}",
        remedy=f"""Write it as {RUNTIME_ENV} '{{"env_vars": {{"NAME": "value"}}}}'.""",
        code="VIME-CONFIG-075",
    )


def _stray(word: str, command: str) -> ConfigError:
    return ConfigError(
        f"{command} takes no word {word!r} there",
        remedy=f"Leave it out, or write the option that it belongs to before it; {command} --help lists them.",
        code="VIME-CONFIG-077",
    )


def _unknown(argument: str) -> ConfigError:
    return ConfigError(
        f"vime run has no option {argument}",
        remedy="Use --set SECTION.KEY=VALUE for the configuration, or --vllm-NAME VALUE for the engine.",
        code="VIME-CONFIG-065",
    )
