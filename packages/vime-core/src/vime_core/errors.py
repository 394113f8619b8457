"""Errors that a user can act on: a stable code, what was wrong with which value, and what to do."""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar


class VimeError(Exception):
    """Base of every error that vime raises on purpose; printed without a traceback.

    Args:
        message: what is wrong, naming the field and the value.
        remedy: what the user can do about it, as an imperative sentence.
        code: stable identifier (``VIME-CONFIG-001``); the class's default when omitted.
    """

    default_code: ClassVar[str] = "VIME-000"
    exit_code: ClassVar[int] = 2

    def __init__(self, message: str, *, remedy: str, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.remedy = remedy
        self.code = code or self.default_code

    def __str__(self) -> str:
        return f"{self.code}: {self.message}\n  help: {self.remedy}"

    def __reduce__(self) -> tuple[Any, ...]:
        """Keyword arguments survive a way to another process too."""
        return partial(type(self), remedy=self.remedy, code=self.code), (self.message,)


class Interrupted(BaseException):
    """A signal asked this process to end. No Exception, so that nothing on the way takes it for a failure.

    Args:
        signal_name: ``SIGINT`` or ``SIGTERM``.
        exit_code: 128 + the signal's number, as shells have it.
    """

    def __init__(self, signal_name: str, exit_code: int) -> None:
        super().__init__(f"interrupted by {signal_name}")
        self.exit_code = exit_code


class ConfigError(VimeError):
    """The configuration is unusable: unknown key, wrong type, contradiction, missing file."""

    default_code = "VIME-CONFIG-000"


class PluginError(VimeError):
    """A plugin is missing, broken, or in conflict with another one."""

    default_code = "VIME-PLUGIN-000"


class PolicyError(VimeError):
    """A determinism policy or alignment contract cannot be kept here; raised before compute is spent."""

    default_code = "VIME-ENV-000"


class DataError(VimeError):
    """A dataset, prompt or reward is unusable."""

    default_code = "VIME-DATA-000"


class RecordError(VimeError):
    """A run record cannot be written or read."""

    default_code = "VIME-RECORD-000"


class BackendError(VimeError):
    """A trainer or a rollout engine failed, died or did not answer in time."""

    default_code = "VIME-BACKEND-000"
    exit_code = 3


class PluginFailed(BackendError):
    """Code of a plugin raised an exception of its own while it was used."""

    default_code = "VIME-PLUGIN-007"


class NotFinite(BackendError):
    """A side computed a NaN or an infinity where the other needs a number; verdicts take it as a difference."""


class ContractViolation(VimeError):
    """Two sides that must hold the same bits do not (weights after an update, contract digests)."""

    default_code = "VIME-ALIGN-000"
    exit_code = 1
