"""Probes of the built-in policies: checks of this machine that a table of variables cannot express."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

from vime_core.config.schema import RunConfig
from vime_core.determinism.preflight import installed_version
from vime_core.findings import Finding


def transformer_engine_attention(config: RunConfig) -> Iterator[Finding]:
    """Transformer Engine takes FlashAttention 3 wherever it finds it, and its backward is not deterministic."""
    del config
    found = installed_version("flash_attn_3")
    if found is not None and find_spec("transformer_engine") is not None:
        yield Finding(
            "VIME-ENV-005",
            "error",
            f"flash_attn_3 {found} is installed beside Transformer Engine",
            "Transformer Engine prefers it, and its backward pass adds with atomics",
            "Uninstall flash_attn_3, or choose another run.policy.",
        )


def thread_count(config: RunConfig) -> Iterator[Finding]:
    """A thread count that is not written down is the machine's: the bits hold for machines with as many cores."""
    for section, threads in (("trainer", config.trainer.threads), ("rollout", config.rollout.threads)):
        if threads is None:
            yield Finding(
                "VIME-ENV-006",
                "info",
                f"{section}.threads is not set",
                "on a CPU sums depend on the number of threads, which is then taken from the machine and recorded",
                f"Set {section}.threads to have the same bits on machines with other numbers of cores.",
            )
