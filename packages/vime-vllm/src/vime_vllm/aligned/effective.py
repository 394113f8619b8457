"""Whether a started engine keeps the contract: what its workers read back, by name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vime_core.alignment import Alignment
from vime_core.errors import PolicyError
from vime_core.types import ProcessReport
from vime_vllm.aligned.arguments import side_class


def require_aligned(reports: Sequence[ProcessReport], alignment: Alignment) -> None:
    """Compare what computing processes report with what the contract needs.

    Raises:
        PolicyError: a module ran that the contract does not know, vLLM took another model class, sampler, attention
            or dtype of the cache, or nothing was reported.
    """
    workers = [report for report in reports if "contract" in report.settings]
    if not workers:
        raise _unkept("process", "none", "reports a contract")
    cls = side_class(alignment)
    for report in workers:
        settings = report.settings
        _require(settings, "model_class", f"{cls.__module__}.{cls.__qualname__}")
        _require(settings, "quantization", "")
        _require(settings, "logits_processors", [])
        _require(settings, "tensor_parallel_size", 1)
        if set(settings["attention_backends"]) != {"CUSTOM"}:
            raise _unkept("attention backend", settings["attention_backends"], "is at work")
        if not settings["sampler"].startswith("vime_vllm.aligned."):
            raise _unkept("sampler", settings["sampler"], "is at work")
        _require_census(settings["census"])


def _require_census(census: dict[str, Any]) -> None:
    if not census["ran"]:
        raise _unkept("module", "none", "was seen to run")
    if census["foreign"]:
        raise _unkept("module", census["foreign"][0], "runs in the engine and is none of the contract's")


def _require(settings: Any, name: str, value: object) -> None:
    if settings[name] != value:
        raise _unkept(name, settings[name], f"is effective, not {value!r}")


def _unkept(what: str, found: object, why: str) -> PolicyError:
    return PolicyError(
        f"the engine does not keep its alignment contract: {what} {found!r} {why}",
        remedy="Leave out plugins and options that change the engine's model, or set alignment.contract to empty.",
        code="VIME-ALIGN-029",
    )
