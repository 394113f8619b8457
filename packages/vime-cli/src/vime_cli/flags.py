"""The field's own switches on ``vime run``, as keys of the configuration.

``--deterministic-mode`` and ``--vllm-enable-deterministic-inference`` ask for ``run.policy = "reproducible"``; any
other ``--vllm-NAME VALUE`` is ``rollout.vllm.NAME``, or an engine argument where the plugin has no such key.
``--freeze-indexer`` is ``trainer.megatron.freeze_indexer = true``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Final

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


def overrides_of(arguments: Sequence[str], own_keys: Collection[str]) -> list[str]:
    """The values of ``--set`` that say the same as some switches.

    Args:
        arguments: what the command line held besides its own options.
        own_keys: keys of ``[rollout.vllm]``.

    Raises:
        ConfigError: an argument is none of these switches.
    """
    return [_override(name, value, own_keys) for name, value in pairs(arguments)]


def pairs(arguments: Sequence[str]) -> Iterator[tuple[str, str | None]]:
    """(switch, value) of command-line arguments; None where the next one is a switch again.

    Raises:
        ConfigError: a value stands without a switch.
    """
    rest = list(arguments)
    while rest:
        name, equals, value = rest.pop(0).partition("=")
        if not name.startswith("--"):
            raise _unknown(name)
        if equals:
            yield name, value
        else:
            yield name, rest.pop(0) if rest and not rest[0].startswith("--") else None


def _override(name: str, value: str | None, own_keys: Collection[str]) -> str:
    if name in SWITCHES and value is None:
        return SWITCHES[name]
    if not name.startswith(PREFIX) or name in SWITCHES:
        raise _unknown(name if value is None else f"{name} {value}")
    key = name.removeprefix(PREFIX).replace("-", "_")
    holder = "rollout.vllm" if key in own_keys else "rollout.vllm.engine_args"
    return f"{holder}.{key}={'true' if value is None else value}"


def _unknown(argument: str) -> ConfigError:
    return ConfigError(
        f"vime run has no option {argument}",
        remedy="Use --set SECTION.KEY=VALUE for the configuration, or --vllm-NAME VALUE for the engine.",
        code="VIME-CONFIG-065",
    )
