"""No C++ or C function reads or writes past either end of what it is given, and none needs memory that nobody wrote."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def guard(tmp_path_factory: pytest.TempPathFactory) -> Path:
    library, compiler = tmp_path_factory.mktemp("guard") / "guard.so", shutil.which("cc")
    assert compiler is not None
    subprocess.run([compiler, "-O1", "-shared", "-fPIC", "-o", str(library), str(HERE / "guard.c")], check=True)
    return library


def run(guard: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(HERE / "guarded_cases.py"), *arguments]
    environment = {**os.environ, "LD_PRELOAD": str(guard), "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=900, check=False)


def test_operands_results_and_scratch_end_at_protected_pages(guard: Path) -> None:
    done = run(guard)
    lines = done.stdout.splitlines()
    assert done.returncode == 0, f"{lines[-1:]} ended with {done.returncode}: {done.stderr[-800:]}"
    assert [before for before, line in pairwise(lines) if line.startswith("UNEQUAL")] == []
    assert int(lines[-1].removeprefix("compared ")) > 1000


@pytest.mark.parametrize("end", ["end", "begin"])
def test_control_one_byte_past_an_end_kills(guard: Path, end: str) -> None:
    assert run(guard, end).returncode == -signal.SIGSEGV
