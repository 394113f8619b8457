from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from vime_core.record import digest, hash128_native
from vime_core.record.hash128 import reference_hash
from vime_core.record.hash128_native import compile_to, load, native

DATA = np.arange(100_003, dtype=np.uint32).astype(np.uint8)


@pytest.fixture(autouse=True)
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A cache of the test's own, and no memory of earlier loads."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    native.cache_clear()
    yield
    native.cache_clear()


def libraries(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "cache" / "vime" / "native").iterdir())


def test_builds_once_and_is_reused(tmp_path: Path) -> None:
    assert native().reason == ""
    (built,) = libraries(tmp_path)
    before = built.stat().st_mtime_ns
    native.cache_clear()
    assert native().hash is not None
    assert libraries(tmp_path) == [built]
    assert built.stat().st_mtime_ns == before


def test_no_compiler_means_numpy_with_the_same_value(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    expected = digest.bytes_hash(DATA)
    native.cache_clear()
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
    assert digest.bytes_hash(DATA) == expected
    assert digest.implementation() == "numpy (no C compiler among cc, gcc, clang)"


def test_a_compiler_that_fails_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    compiler = tmp_path / "cc"
    compiler.write_text("#!/bin/sh\necho out of order >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert digest.implementation() == f"numpy ({compiler} failed: out of order)"
    assert libraries(tmp_path) == []


def test_a_miscompiled_hash_is_not_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    spoiled = tmp_path / "hash128.c"
    spoiled.write_text(
        hash128_native.SOURCE.read_text()
        .replace("block + TOGETHER <= whole", "block + TOGETHER < whole")
        .replace("first + n)", "first + 2 * n)")
    )
    monkeypatch.setattr(hash128_native, "SOURCE", spoiled)
    assert digest.implementation() == "numpy (the compiled hash disagrees with the reference)"
    assert digest.bytes_hash(DATA) == reference_hash(DATA)


def test_a_damaged_library_is_not_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert native().hash is not None
    (built,) = libraries(tmp_path)
    native.cache_clear()
    damaged = tmp_path / "damaged" / "vime" / "native" / built.name
    damaged.parent.mkdir(parents=True)
    damaged.write_bytes(b"no library")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "damaged"))
    assert "numpy (" in digest.implementation()
    assert digest.bytes_hash(DATA) == reference_hash(DATA)


def test_a_cache_that_cannot_be_written_is_replaced(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert native().hash is not None


@pytest.mark.parametrize("march", ["x86-64", "x86-64-v3", "native"])
def test_the_value_does_not_depend_on_the_processor(march: str, tmp_path: Path) -> None:
    """Builds for older processors run on newer ones; SSE2, AVX2 and the local best must agree."""
    if march != "native" and hash128_native.platform.machine() != "x86_64":
        pytest.skip("x86 levels")
    compiler = shutil.which("cc")
    assert compiler is not None
    library = tmp_path / f"{march}.so"
    compile_to(library, compiler, ("-O3", f"-march={march}", "-shared", "-fPIC"))
    for start, stop in ((0, 100_003), (3, 90_000), (1, 8193), (0, 0)):
        assert load(library)(DATA[start:stop]) == reference_hash(DATA[start:stop])


def test_concurrent_first_builds(tmp_path: Path) -> None:
    code = (
        "import numpy as np; from vime_core.record import digest;"
        "print(digest.implementation(), digest.bytes_hash(np.arange(100_003, dtype=np.uint32).astype(np.uint8)).hex())"
    )
    running = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(3)]
    values = {process.communicate(timeout=900)[0].strip() for process in running}
    assert values == {f"c {reference_hash(DATA).hex()}"}
    assert [path.suffix for path in libraries(tmp_path)] == [".so"]
