"""Exit codes that do not depend on whose code ended a command."""

from __future__ import annotations

import sys

import pytest

from vime_cli import main
from vime_core.errors import PluginError


def test_a_plugin_command_that_cannot_load_is_an_error_without_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object) -> None:
        raise PluginError("planted", remedy="Nothing.", code="VIME-PLUGIN-003")

    monkeypatch.setattr(main, "add_plugin_commands", refuse)
    assert main.main() == 2
    assert "VIME-PLUGIN-003: planted" in capsys.readouterr().err


def test_foreign_code_that_exits_with_zero_is_no_success(monkeypatch: pytest.MonkeyPatch) -> None:
    def leave(*_: object) -> None:
        sys.exit(0)

    monkeypatch.setattr(main, "add_plugin_commands", leave)
    assert main.main() == 3
