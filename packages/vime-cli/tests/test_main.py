"""Exit codes that do not depend on whose code ended a command."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

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


def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["vime", *arguments])
    code = main.main()
    out, err = capsys.readouterr()
    return code, out, err


def test_usage_errors_are_json_on_request(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(monkeypatch, capsys, "doctor", "--colour", "--json")
    error = json.loads(out)["error"]
    assert (code, error["code"]) == (2, "VIME-CLI-001")
    assert "--colour" in error["message"]


PRINTS = """
from vime_core.plugins import Command, hookimpl
print("hello from an import")
@hookimpl
def vime_commands():
    print("hello from a hook")
    yield Command("fails", "Raises.", "printing_plugin:fails")
def fails(as_json: bool = False, used_up: bool = False, cancelled: bool = False):
    print("hello from a command")
    if cancelled:
        raise __import__("asyncio").CancelledError
    error = RuntimeError("no connection" if not used_up else "CUDA out of memory. Tried to allocate 1.84 GiB.")
    error.add_note("2 steps are kept")
    raise error
"""


@pytest.fixture
def printing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "printing_plugin.py").write_text(PRINTS)
    info = tmp_path / "printing_dist-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: printing-dist\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[vime]\nprinting = printing_plugin\n")
    (info / "top_level.txt").write_text("printing_plugin\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    sys.modules.pop("printing_plugin", None)


def test_prints_of_plugins_stay_out_of_the_document(
    printing: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run(monkeypatch, capsys, "plugins", "list", "--json")
    assert code == 0
    assert "printing" in [plugin["name"] for plugin in json.loads(out)["plugins"]]
    assert "hello from an import" in err
    assert "hello from a hook" in err


def test_a_command_that_raises_is_a_finding_that_names_its_distribution(
    printing: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run(monkeypatch, capsys, "fails")
    assert code == 3
    assert "Traceback" not in out + err
    assert "VIME-CLI-003: code of printing-dist failed: RuntimeError: no connection (in " in err
    assert "note: 2 steps are kept" in err
    code, _, err = run(monkeypatch, capsys, "fails", "--used-up")
    assert code == 3
    assert "VIME-BACKEND-026: the run ran out of GPU memory: CUDA out of memory. Tried to allocate 1.84 GiB." in err
    assert "note: 2 steps are kept" in err
    assert "note: raised in " in err
    code, _, err = run(monkeypatch, capsys, "fails", "--cancelled")
    assert code == 3
    assert "VIME-CLI-003: code of printing-dist failed: CancelledError (in " in err
    code, out, _ = run(monkeypatch, capsys, "fails", "--as-json", "--json")
    assert (code, json.loads(out)["error"]["code"]) == (2, "VIME-CLI-001")  # --json is no option of that command
    monkeypatch.setenv("VIME_TRACEBACK", "1")
    assert "Traceback" in run(monkeypatch, capsys, "fails")[2]


@pytest.fixture
def default_signals() -> Iterator[None]:
    """What a terminal gives; a job in the background inherits an ignored SIGINT."""
    handlers = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("default_signals")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_is_one_line_or_one_document(
    number: signal.Signals, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = signal.getsignal(number)
    monkeypatch.setattr(main, "add_plugin_commands", lambda *_: signal.raise_signal(number))
    assert run(monkeypatch, capsys, "doctor") == (code, "", f"interrupted by {number.name}: nothing was recorded\n")
    got, out, _ = run(monkeypatch, capsys, "doctor", "--json")
    assert (got, json.loads(out)["error"]["code"]) == (code, "VIME-CLI-002")
    assert signal.getsignal(number) is before


def test_the_version_is_json_on_request(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(monkeypatch, capsys, "--version", "--json")
    assert (code, list(json.loads(out))) == (0, ["vime"])
    code, out, _ = run(monkeypatch, capsys, "--json", "plugins", "list")
    assert (code, json.loads(out)["error"]["code"]) == (2, "VIME-CLI-001")
