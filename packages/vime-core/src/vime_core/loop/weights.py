"""Both sides must hold the same weights: one digest a tensor, compared before generation goes on."""

from __future__ import annotations

from collections.abc import Mapping

from vime_core.errors import ContractViolation


def require_equal_weights(trainer: Mapping[str, str], rollout: Mapping[str, str], version: int) -> None:
    """Compare what the trainer sent with what the engine's kernels read, by HF name.

    Raises:
        ContractViolation: a tensor is missing on a side or its digests differ; nothing at all was compared.
    """
    if not trainer:
        raise _violation("the trainer named no tensor", version, "nothing could be compared")
    missing = sorted(set(trainer) ^ set(rollout))
    if missing:
        side = "the rollout engine" if missing[0] in trainer else "the trainer"
        raise _violation(f"{missing[0]!r} is missing on the side of {side}", version, f"{len(missing)} such tensors")
    unequal = [name for name in trainer if trainer[name] != rollout[name]]
    if unequal:
        raise _violation(
            f"{unequal[0]!r} differs between trainer and rollout engine",
            version,
            f"{len(unequal)} of {len(trainer)} tensors differ",
        )


def _violation(what: str, version: int, extent: str) -> ContractViolation:
    return ContractViolation(
        f"after the update to weight version {version}, {what} ({extent})",
        remedy="The engine kept old weights, or changed them on the way; the run stops before generating with them.",
        code="VIME-ALIGN-001",
    )
