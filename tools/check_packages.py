"""Build each package's wheel, install it alone in an empty environment, and try it there.

What is tried: the import; that an absent backend gives one clear error with its remedy and no traceback; that nothing
of the other packages is needed.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOCK = ROOT / "constraints" / "cpu-py311.txt"

LOAD = """
from vime_core.errors import VimeError
from vime_core.plugins.manager import PluginManager
from vime_core.plugins import {kind}
manager = PluginManager.discover()
manager.require()
try:
    manager.find({kind}, "{name}", field_name="x").load()(None)
except VimeError as error:
    assert "{package}" in str(error), str(error)
    assert "pip install" in error.remedy, error.remedy
else:
    raise SystemExit("an absent backend raised nothing")
"""


@dataclass(frozen=True)
class Case:
    """A package, the packages of ours that it needs, and a program that must run beside it."""

    package: str
    needs: tuple[str, ...]
    program: str


CASES = (
    Case("vime-core", (), "import sys, vime_core, vime_core.plugins.manager; assert 'torch' not in sys.modules"),
    Case("vime-cli", ("vime-core",), "import vime_cli.main"),
    Case("vime-megatron", ("vime-core",), LOAD.format(kind="TrainerBackend", name="megatron", package="megatron")),
    Case("vime-vllm", ("vime-core",), LOAD.format(kind="RolloutEngine", name="vllm", package="vllm")),
    Case("vime-glm5", ("vime-core", "vime-megatron", "vime-vllm"), "import vime_glm5"),
)


def run(*command: str) -> None:
    """Run a command and end with its output when it fails."""
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")


def build(wheels: Path) -> None:
    """Build all wheels with the build backend of this environment."""
    sources = [str(path.parent) for path in sorted(ROOT.glob("packages/*/pyproject.toml"))]
    for source in sources:
        run(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(wheels), source)


def check(case: Case, wheels: Path, scratch: Path) -> float:
    """Install one package alone and run its program; returns the seconds that it took."""
    start = time.monotonic()
    environment = scratch / case.package
    run(sys.executable, "-m", "venv", str(environment))
    python = str(environment / "bin" / "python")
    run(python, "-m", "pip", "install", "-q", "--find-links", str(wheels), "-c", str(LOCK), case.package)
    installed = subprocess.run([python, "-m", "pip", "list", "--format=freeze"], capture_output=True, text=True)
    ours = {line.split("==")[0] for line in installed.stdout.splitlines() if line.startswith("vime")}
    if ours != {case.package, *case.needs}:
        raise SystemExit(f"{case.package} brought {sorted(ours)}")
    run(python, "-c", case.program)
    return time.monotonic() - start


def main() -> None:
    """Check every package."""
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        build(scratch / "wheels")
        for case in CASES:
            print(f"{case.package}: {check(case, scratch / 'wheels', scratch):.1f} s", flush=True)
    print(f"{len(CASES)} packages install and import alone")


if __name__ == "__main__":
    main()
