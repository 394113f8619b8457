"""Development sessions. ``python3 -m pip install nox && python3 -m nox -s tests`` does all the set-up by itself.

The sessions share one environment, ``.nox/env``, which the session ``env`` builds and keeps while its inputs
(constraints, package metadata, this file) are unchanged.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import nox

ROOT = Path(__file__).parent
ENV = ROOT / ".nox" / "env"
LOCK = ROOT / "constraints" / "cpu-py311.txt"
MEGATRON = "megatron-core==0.19.2"
PACKAGES = ("vime-core", "vime-megatron", "vime-vllm", "vime-glm5", "vime-cli")
LINTED = ("packages", "tests", "benchmarks", "examples", "tools", "noxfile.py")

nox.options.default_venv_backend = "none"
nox.options.sessions = ["tests", "lint", "types", "layers", "packages"]


@nox.session
def env(session: nox.Session) -> None:
    """Build the shared environment: locked CPU dependencies and the five packages, editable."""
    stamp = ENV / "vime-stamp"
    inputs = _inputs_hash()
    if stamp.is_file() and stamp.read_text() == inputs:
        session.log("environment is up to date")
        return
    shutil.rmtree(ENV, ignore_errors=True)
    session.run(_python311(session), "-m", "venv", str(ENV), external=True)
    _pip(session, "--no-deps", "-r", str(LOCK))
    _pip(session, "--no-deps", "--ignore-requires-python", MEGATRON)
    _pip(session, "--no-deps", "--no-build-isolation", *(a for p in PACKAGES for a in ("-e", f"packages/{p}")))
    stamp.write_text(inputs)


@nox.session(requires=["env"])
def quickstart(session: nox.Session) -> None:
    """Train a small instruct model with RL, twice, and compare every bit."""
    _run(session, "vime", "verify", "repeat", "configs/quickstart.toml", *session.posargs)


@nox.session(requires=["env"])
def tests(session: nox.Session) -> None:
    """Run every test, a file at a time on each of two cores. ``-- -m 'not slow'`` deselects; a path selects."""
    _run(session, "python", "-m", "pytest", "-n", "2", "--dist", "loadfile", *session.posargs)


@nox.session(requires=["env"])
def long(session: nox.Session) -> None:
    """Run the tests that take minutes each: a run killed at fifty random moments, 300 random structures."""
    _run(session, "python", "-m", "pytest", "-m", "long", *session.posargs)


@nox.session(requires=["env"])
def lint(session: nox.Session) -> None:
    """Check style and formatting."""
    paths = [path for path in LINTED if (ROOT / path).exists()]
    _run(session, "ruff", "check", *paths)
    _run(session, "ruff", "format", "--check", *paths)


@nox.session(requires=["env"])
def types(session: nox.Session) -> None:
    """Check the packages' types, strictly."""
    _run(session, "basedpyright")


@nox.session(requires=["env"])
def layers(session: nox.Session) -> None:
    """Check which package may import which."""
    _run(session, "lint-imports")


@nox.session(requires=["env"])
def packages(session: nox.Session) -> None:
    """Build each wheel, install it alone in an empty environment, and try it there."""
    _run(session, "python", "tools/check_packages.py", *session.posargs)


def _run(session: nox.Session, program: str, *args: str) -> None:
    variables = {"PATH": f"{ENV / 'bin'}{os.pathsep}{os.environ['PATH']}", "VIRTUAL_ENV": str(ENV)}
    with _timed(session):
        session.run(str(ENV / "bin" / program), *args, env=variables, external=True)


@contextmanager
def _timed(session: nox.Session) -> Generator[None]:
    start = time.monotonic()
    try:
        yield
    finally:
        session.log(f"{session.name}: {time.monotonic() - start:.0f} s")


def _pip(session: nox.Session, *args: str) -> None:
    command = (str(ENV / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *args)
    with _timed(session):
        session.run(*command, external=True)


def _inputs_hash() -> str:
    files = [LOCK, Path(__file__), *sorted(ROOT.glob("packages/*/pyproject.toml"))]
    return hashlib.sha256(b"\0".join(file.read_bytes() for file in files)).hexdigest()


def _python311(session: nox.Session) -> str:
    if sys.version_info[:2] == (3, 11):
        return sys.executable
    found = shutil.which("python3.11")
    if found is None:
        session.error(f"Python 3.11 is needed for the locked CPU environment, and this is {sys.version.split()[0]}")
    return found
