"""Builds and loads ``hash128.c`` with the system's C compiler: the reference's values, an order of magnitude faster."""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

import numpy as np
from blake3 import blake3

from vime_core.record.hash128 import BLOCK_BYTES, Bytes, reference_hash

SOURCE: Final = Path(__file__).with_name("hash128.c")
COMPILERS: Final = ("cc", "gcc", "clang")
FLAGS: Final = ("-O3", "-march=native", "-shared", "-fPIC")


@dataclass(frozen=True)
class Native:
    """The compiled hash, or None and the reason why there is none."""

    hash: Callable[[Bytes], bytes] | None
    reason: str = ""


class UnavailableError(Exception):
    """There is no compiled hash here; the message says why."""


@cache
def native() -> Native:
    """Build (once a machine), load and test the C implementation."""
    try:
        return Native(_tested(load(_build())))
    except (UnavailableError, OSError, subprocess.TimeoutExpired) as error:
        return Native(None, str(error))


def load(library: Path) -> Callable[[Bytes], bytes]:
    """The hash of uint8 [N] (contiguous) by a compiled ``hash128.c``; it releases the GIL."""
    code = ctypes.CDLL(str(library))
    code.vime_hash128_prepare()
    code.vime_hash128.argtypes = (ctypes.c_void_p, ctypes.c_uint64, ctypes.c_void_p)
    code.vime_hash128.restype = None

    def native_hash(data: Bytes) -> bytes:
        total = (ctypes.c_uint64 * 2)()
        code.vime_hash128(data.ctypes.data, data.size, total)
        return bytes(total)

    return native_hash


def _build() -> Path:
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        raise UnavailableError(f"no C compiler among {', '.join(COMPILERS)}")
    directory = _cache_directory()
    library = directory / f"hash128-{_build_key(compiler)}.so"
    if not library.exists():
        compile_to(library, compiler)
    return library


def compile_to(library: Path, compiler: str, flags: tuple[str, ...] = FLAGS) -> None:
    """Compile beside ``library`` and rename, so that concurrent builds only ever see whole files."""
    handle, unfinished = tempfile.mkstemp(dir=library.parent, suffix=".so")
    os.close(handle)
    try:
        command = [compiler, *flags, "-o", unfinished, str(SOURCE)]
        outcome = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        if outcome.returncode != 0:
            raise UnavailableError(f"{compiler} failed: {outcome.stderr.strip()[-500:]}")
        os.replace(unfinished, library)
    except subprocess.TimeoutExpired as error:
        raise UnavailableError(f"{compiler} did not finish in {error.timeout:.0f} s") from error
    finally:
        Path(unfinished).unlink(missing_ok=True)


def _cache_directory() -> Path:
    """The user's cache, or a directory of this process when that cannot be written."""
    try:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        directory = base / "vime" / "native"
        directory.mkdir(parents=True, exist_ok=True)
        if os.access(directory, os.W_OK):
            return directory
    except (OSError, RuntimeError):  # RuntimeError: the user has no home
        pass
    return Path(_process_directory().name)


@cache
def _process_directory() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="vime-native-")


def _build_key(compiler: str) -> str:
    """What decides the machine code: source, flags, compiler, and the processor that ``native`` stands for."""
    version = subprocess.run([compiler, "--version"], capture_output=True, check=False, timeout=60).stdout
    parts = (SOURCE.read_bytes(), " ".join(FLAGS).encode(), version, _processor())
    return blake3(b"\0".join(parts)).hexdigest()[:32]


def _processor() -> bytes:
    try:
        lines = Path("/proc/cpuinfo").read_bytes().splitlines()
    except OSError:
        lines = []
    kept = {line for line in lines if line.startswith((b"flags", b"model name", b"Features", b"CPU part"))}
    return platform.machine().encode() + b"\0" + b"\0".join(sorted(kept))


def _tested(candidate: Callable[[Bytes], bytes]) -> Callable[[Bytes], bytes]:
    """A compiler can be wrong: four blocks at once, one block, and a tail must agree with the reference."""
    data = np.arange(5 * BLOCK_BYTES + 4099, dtype=np.uint32).astype(np.uint8) * np.uint8(151)
    for part in (data, data[1:], data[:7], data[:0]):
        if candidate(part) != reference_hash(part):
            raise UnavailableError("the compiled hash disagrees with the reference")
    return candidate
