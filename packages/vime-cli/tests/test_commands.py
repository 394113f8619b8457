"""What all commands have, and what a check of plugins answers without an engine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
from typer.core import TyperCommand, TyperGroup

from vime_cli.main import app


def commands(command: object, path: str = "vime") -> Iterator[tuple[str, TyperCommand]]:
    if isinstance(command, TyperGroup):
        for name, inner in command.commands.items():
            yield from commands(inner, f"{path} {name}")
    elif isinstance(command, TyperCommand):
        yield path, command


ALL = dict(commands(typer.main.get_command(app)))


def test_every_command_is_looked_at() -> None:
    assert {
        "vime run",
        "vime report",
        "vime verify resume",
        "vime convert torch-dist-to-hf",
        "vime plugins new",
    } <= set(ALL)


@pytest.mark.parametrize("name", ALL)
def test_a_command_has_json(name: str) -> None:
    assert any("--json" in parameter.opts for parameter in ALL[name].params)


def test_a_distribution_that_registers_nothing_is_not_checked(tmp_path: Path) -> None:
    info = tmp_path / "hollow-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: hollow\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[vime]\nhollow = hollow\n")
    (tmp_path / "hollow.py").touch()
    command = [sys.executable, "-m", "vime_cli", "plugins", "check", "hollow", "--json"]
    ran = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(tmp_path)}, capture_output=True, check=False)
    found = json.loads(ran.stdout)
    assert (ran.returncode, found[-1]["what"], found[-1]["holds"]) == (3, "registrations", None)
