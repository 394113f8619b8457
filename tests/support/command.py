"""The command line as a user runs it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PLUGINS = ROOT / "tests" / "plugins"


@dataclass(frozen=True)
class Ran:
    """A finished ``vime`` command."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)

    @property
    def text(self) -> str:
        return self.out + self.err


def vime(*arguments: str | Path, env: dict[str, str] | None = None, timeout: float = 900) -> Ran:
    """Run ``vime`` in a fresh process, with the plugins of the tests importable."""
    places = os.pathsep.join([str(PLUGINS), *filter(None, [os.environ.get("PYTHONPATH")])])
    variables = {**os.environ, "PYTHONPATH": places, "OMP_NUM_THREADS": "1", **(env or {})}
    command = [sys.executable, "-m", "vime_cli", *map(str, arguments)]
    done = subprocess.run(
        command, capture_output=True, text=True, env=variables, cwd=ROOT, timeout=timeout, stdin=subprocess.DEVNULL
    )
    return Ran(done.returncode, done.stdout, done.stderr)


def no_traceback(ran: Ran) -> None:
    """A user's mistake is answered without a traceback."""
    assert "Traceback" not in ran.text, ran.text
