"""What a command does when nobody takes its output: a closed pipe ends it quietly, a full disk is one clear error."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest


@contextmanager
def closed_pipe() -> Iterator[int]:
    read, write = os.pipe()
    os.close(read)
    yield write
    os.close(write)


def vime(*arguments: str, stdout: int = subprocess.PIPE, stderr: int = subprocess.PIPE) -> tuple[int, str]:
    command = [sys.executable, "-m", "vime_cli", *arguments]
    ran = subprocess.run(command, stdout=stdout, stderr=stderr, text=True, check=False)
    return ran.returncode, ran.stderr or ""


COMMANDS = [("plugins", "list"), ("plugins", "list", "--json"), ("--help",), ("doctor", "--colour", "--json")]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_a_closed_pipe_ends_quietly(command: tuple[str, ...]) -> None:
    with closed_pipe() as pipe:
        assert vime(*command, stdout=pipe) == (141, "")


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_a_full_output_is_one_error(command: tuple[str, ...]) -> None:
    with open("/dev/full", "w") as full:
        code, said = vime(*command, stdout=full.fileno())
    assert code == 3
    first, *rest = said.splitlines()
    assert first == "error VIME-CLI-004: standard output cannot be written: No space left on device"
    assert [line.strip() for line in rest] == ["help: Make room, or send it elsewhere."]


def test_what_stands_in_no_buffer_any_more_ends_it_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONUNBUFFERED", "1")  # the first print fails, not the flush at the end
    with closed_pipe() as pipe:
        assert vime("plugins", "list", stdout=pipe) == (141, "")


def test_lost_errors_keep_exit_code_one_for_what_does_not_hold() -> None:
    with closed_pipe() as pipe:
        assert vime("diff", "/absent", "/absent", stderr=pipe)[0] == 141
    with open("/dev/full", "w") as full:
        assert vime("diff", "/absent", "/absent", stderr=full.fileno())[0] == 3


def test_typer_may_end_a_command_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION", "1")
    assert vime("--show-completion", "bash") == (0, "")
