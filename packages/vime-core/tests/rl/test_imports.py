from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = ("torch", "transformers", "pyarrow", "reasoning_gym", "math_verify", "sympy")
LIGHT = [
    "vime_core.rl.seeds",
    "vime_core.rl.packing",
    "vime_core.rl.reduction",
    "vime_core.data.files",
    "vime_core.data.order",
    "vime_core.data.reasoning",
    "vime_core.data.template",
    "vime_core.rewards.exact",
    "vime_core.rewards.reasoning",
    "vime_core.rewards.symbolic",
    "vime_core.rewards.worker",
]


def heavy_imports(modules: list[str]) -> list[str]:
    code = f"import sys, {', '.join(modules)}; print(*[m for m in {HEAVY!r} if m in sys.modules])"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True).stdout.split()


def test_nothing_heavy_is_imported_before_use() -> None:
    assert heavy_imports(LIGHT) == []


@pytest.mark.parametrize(("module", "heavy"), [("vime_core.rl.losses", "torch"), ("pyarrow", "pyarrow")])
def test_a_heavy_import_would_be_seen(module: str, heavy: str) -> None:
    assert heavy in heavy_imports([module])
