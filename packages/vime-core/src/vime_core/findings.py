"""Findings: what a check noticed, with a stable code, a cause and a remedy. Each code has a page in the docs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal

Severity = Literal["error", "warning", "info"]


@dataclass(frozen=True)
class Finding:
    """One observation. An ``error`` means that the contract cannot be kept here."""

    code: str
    severity: Severity
    message: str
    cause: str
    remedy: str

    def as_json(self) -> dict[str, str]:
        return asdict(self)

    def __str__(self) -> str:
        return f"{self.severity} {self.code}: {self.message}\n  cause: {self.cause}\n  help: {self.remedy}"


def errors(findings: Sequence[Finding]) -> list[Finding]:
    """The findings that forbid a run."""
    return [finding for finding in findings if finding.severity == "error"]
