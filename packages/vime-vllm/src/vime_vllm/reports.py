"""Reports of the engine's processes for the run record, and the check that the engine took what it was given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vime_core.errors import PolicyError
from vime_core.types import ProcessReport
from vime_vllm.client import EngineClient


def process_reports(engine: EngineClient, stop_token_ids: Sequence[int]) -> list[ProcessReport]:
    """One report a process, read back in it; a core that computes in its own process has one report for both."""
    core = engine.core_report()
    core["settings"] |= {"stop_token_ids": list(stop_token_ids)}
    by_pid: dict[int, dict[str, Any]] = {}
    for report in [core, *engine.on_workers("vime_report")]:
        earlier = by_pid.setdefault(report["pid"], report)
        if earlier is not report:
            earlier["settings"] |= report["settings"]
            earlier["kind"] = f"{earlier['kind']} and {report['kind']}"
    return [_report(report) for report in by_pid.values()]


def _report(report: Mapping[str, Any]) -> ProcessReport:
    return ProcessReport(
        role="rollout",
        rank=report["rank"],
        pid=report["pid"],
        environment=report["environment"],
        settings={"process": report["kind"], **report["settings"]},
        versions=report["versions"],
        hardware=report["hardware"],
    )


def require_effective(reports: Sequence[ProcessReport], arguments: Mapping[str, Any]) -> None:
    """Raise PolicyError when an engine silently took another setting than it was given."""
    packed: list[str] = []
    asked = {
        "async_scheduling": arguments.get("async_scheduling"),
        "chunked_prefill": arguments.get("enable_chunked_prefill"),
        "prefix_caching": arguments["enable_prefix_caching"],
        "max_model_len": arguments["max_model_len"],
        "max_num_batched_tokens": arguments.get("max_num_batched_tokens"),
        "dtype": arguments["dtype"],
        "packed_layers": packed,
    }
    for report in reports:
        for name, value in asked.items():
            if value is not None and name in report.settings and report.settings[name] != value:
                raise _other(name, value, report.settings[name])
        _require_attention_backend(report, arguments.get("attention_backend"))


def _require_attention_backend(report: ProcessReport, asked: str | None) -> None:
    used = report.settings.get("attention_backends")
    if asked is not None and used is not None and set(used) != {asked}:
        raise _other("attention_backends", asked, ", ".join(used) or "none")


def _other(name: str, asked: object, effective: object) -> PolicyError:
    return PolicyError(
        f"the engine was started with {name} = {asked!r}, but {effective!r} is effective",
        remedy="Ask for what the engine supports on this machine, or leave the option out.",
        code="VIME-ENV-067",
    )
