"""``vime run``: one RL run, recorded."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vime_cli.arguments import Json, Set
from vime_cli.flags import overrides_of, refuse_another_policy
from vime_cli.output import print_json, show_progress
from vime_core.errors import ConfigError

Resume = Annotated[
    Path | None, typer.Option(help="Go on with a run that was stopped, from its last checkpoint.", metavar="RUN")
]

if TYPE_CHECKING:
    from vime_core.config.schema import RunConfig
    from vime_core.plugins.manager import PluginManager


def run(
    context: typer.Context,
    configs: Annotated[
        list[Path] | None, typer.Argument(help="TOML files, overlaid left to right.", show_default=False)
    ] = None,
    overrides: Set = None,
    resume: Resume = None,
    output: Annotated[Path | None, typer.Option(help="Directory of the run record (run.output).")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check and print the resolved configuration.")] = False,
    as_json: Json = False,
) -> int:
    """Train with RL as CONFIGS say, and write a run record.

    With --resume RUN, and without CONFIGS, the run of that record goes on. --deterministic-mode,
    --freeze-indexer, --runtime-env-json and any --vllm-NAME VALUE are keys of the configuration under the field's
    names.
    Exit code 0: the run is complete. 2: the configuration or the machine does not allow it. 3: a backend failed.
    """
    show_progress(logging.WARNING if as_json else logging.INFO)
    from vime_core.config.load import load_config
    from vime_core.loop.resume import open_resumption

    last: dict[str, dict[str, object]] = {"run": {}}
    if output:
        last["run"]["output"] = str(output)
    if as_json:
        last["run"]["sinks"] = ["jsonl"]
    resumption = None
    configs, switches = _apart(configs, context.args)
    overrides = overrides or []
    if resume is not None:
        _refuse_beside_resume(configs, output)
        config, plugins, resumption = open_resumption(resume, [*overrides, *switches], last)
    else:
        refuse_another_policy(switches, _given(configs), overrides)
        config, plugins = load_config(_given(configs), [*overrides, *switches], last)
    if dry_run:
        _require_ready(config, plugins, resuming=resumption is not None)
        return _print_resolved(config, as_json=as_json)
    from vime_core.loop.run import execute

    summary = execute(config, plugins, resumption)
    if as_json:
        print_json(summary.as_json())
    else:
        print(summary.sentence())
    return 0


def _require_ready(config: RunConfig, plugins: PluginManager, *, resuming: bool) -> None:
    from vime_core.loop.preparation import Preparation
    from vime_core.loop.readiness import RESUME, RUN, require_ready
    from vime_core.loop.sides import load_policy

    preparation = Preparation(config, load_policy(config, plugins), plugins)
    for finding in require_ready(preparation, RESUME if resuming else RUN):
        if finding.severity == "warning":
            print(finding, file=sys.stderr)


def _apart(configs: list[Path] | None, extra: Sequence[str]) -> tuple[list[Path], list[str]]:
    """Files before the first switch that is none of our own options, and what the switches ask for."""
    from vime_core.plugins.manager import PluginManager
    from vime_core.plugins.types import RolloutEngine

    files = [str(file) for file in configs or []]
    first = next((i for i, file in enumerate(files) if file.startswith("--")), len(files))
    arguments = [*files[first:], *extra]
    if not arguments:
        return [Path(file) for file in files], []
    engine = PluginManager.discover().find(RolloutEngine, "vllm", field_name="rollout.backend")
    return [Path(file) for file in files[:first]], overrides_of(arguments, engine.options_class().model_fields)


def _given(configs: list[Path] | None) -> list[Path]:
    if not configs:
        raise ConfigError(
            "no configuration is given",
            remedy="Name a TOML file, such as configs/smoke.toml, or --resume RUN.",
            code="VIME-CONFIG-018",
        )
    return configs


def _refuse_beside_resume(configs: list[Path] | None, output: Path | None) -> None:
    given = f"the configuration {str(configs[0])!r}" if configs else f"--output {str(output)!r}"
    if configs or output:
        raise ConfigError(
            f"--resume goes on with a recorded run, and {given} is given beside it",
            remedy="Leave it out: configuration and place are the record's.",
            code="VIME-CONFIG-018",
        )


def _print_resolved(config: RunConfig, *, as_json: bool) -> int:
    import tomlkit

    from vime_core.config.validate import resolved_table

    table = resolved_table(config)
    if as_json:
        print_json(table)
    else:
        print(tomlkit.dumps(table), end="")
    return 0
