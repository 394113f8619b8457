"""Builds the C++ kernels for an instruction set, once per source, torch and compiler flags, and loads them.

The library lies under ``TORCH_EXTENSIONS_DIR`` (default ``~/.cache/torch_extensions``). Processes that build at the
same time wait for one another on a file lock, which the kernel frees when its holder dies; the finished library
appears by one rename.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

import torch

from vime_core.errors import PolicyError

SOURCE: Final = Path(__file__).with_name("kernels.cpp")
# No contraction: a fused multiply-add happens only where the source says so. The rest changes no result.
FLAGS: Final = (
    *("-O3", "-std=c++20", "-shared", "-fPIC", "-fopenmp", "-w"),
    *("-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"),
)
_loading: Final = threading.Lock()
_loaded: Final[dict[str, Path]] = {}
_OTHER_PROVIDER: Final = "or choose the provider 'reference', which needs none (same results, slow)."


@dataclass(frozen=True)
class InstructionSet:
    """An instruction set that the source can be built for; all of them give the same bits."""

    name: str
    flags: tuple[str, ...]
    needs: frozenset[str]


def _instruction_set(name: str, features: str) -> InstructionSet:
    needs = features.split()
    flags = tuple(f"-m{feature.replace('_', '')}" for feature in needs)
    return InstructionSet(name, flags, frozenset(needs))


_AVX2: Final = "avx2 fma"
_AVX512: Final = f"{_AVX2} avx512f avx512bw avx512vl avx512dq"
INSTRUCTION_SETS: Final = (  # the best first
    _instruction_set("avx512bf16", f"{_AVX512} avx512_bf16"),
    _instruction_set("avx512", _AVX512),
    _instruction_set("avx2", _AVX2),
)


def machine_features() -> frozenset[str]:
    """What the kernel says about this machine's first processor; empty where it says nothing."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return frozenset(next((line.split(":")[1] for line in lines if line.startswith("flags")), "").split())


def supported() -> list[InstructionSet]:
    """The instruction sets of this machine, the best first."""
    features = machine_features()
    return [isa for isa in INSTRUCTION_SETS if isa.needs <= features]


def cache_directory() -> Path:
    """Where built libraries lie."""
    default = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")) / "torch_extensions"
    return Path(os.environ.get("TORCH_EXTENSIONS_DIR", default)).expanduser() / "vime_numerics"


def build_key(isa: InstructionSet) -> str:
    """Names a build: source, flags and the torch whose headers it uses."""
    parts = [SOURCE.read_text(), *FLAGS, *isa.flags, torch.__version__]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _compiler() -> str:
    for name in (os.environ.get("CXX"), "c++", "g++", "clang++"):
        if name and shutil.which(name):
            return name
    raise PolicyError(
        "numerics provider 'cpu' has to be built and no C++ compiler was found (CXX, c++, g++, clang++)",
        remedy=f"Install a C++ compiler, {_OTHER_PROVIDER}",
        code="VIME-ENV-041",
    )


def _command(compiler: str, isa: InstructionSet, namespace: str, target: Path) -> list[str]:
    root = Path(torch.__file__).parent
    headers = (root / "include", root / "include/torch/csrc/api/include")
    return [
        *(compiler, *FLAGS, *isa.flags, f"-DVIME_NAMESPACE={namespace}"),
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        *(f"-isystem{header}" for header in headers),
        *(str(SOURCE), f"-L{root / 'lib'}", "-ltorch", "-ltorch_cpu", "-lc10", "-o", str(target)),
    ]


def _compile(isa: InstructionSet, namespace: str, library: Path) -> None:
    with tempfile.TemporaryDirectory(dir=library.parent) as directory:
        target = Path(directory) / library.name
        command = _command(_compiler(), isa, namespace, target)
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise PolicyError(
                f"numerics provider 'cpu' could not be built for {isa.name}: {done.stderr.strip()[-800:]}",
                remedy=f"Use g++ 11 or newer (CXX names it), {_OTHER_PROVIDER}",
                code="VIME-ENV-042",
            )
        target.replace(library)


def _locked_build(isa: InstructionSet, namespace: str, library: Path) -> None:
    try:
        library.parent.mkdir(parents=True, exist_ok=True)
        with library.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not library.exists():
                _compile(isa, namespace, library)
    except OSError as error:
        raise PolicyError(
            f"numerics provider 'cpu' cannot be kept in {library.parent}: {error.strerror}",
            remedy="Set TORCH_EXTENSIONS_DIR to a directory that can be written.",
            code="VIME-ENV-043",
        ) from error


def namespace_of(isa: InstructionSet) -> str:
    """The namespace of ``torch.ops`` that a build registers itself under, and the name of its file."""
    return f"vime_{isa.name}_{build_key(isa)}"


def built_library(isa: InstructionSet) -> Path:
    """The library of ``isa``, built if it is not in the cache.

    Raises:
        PolicyError: no compiler, the compiler failed, or the cache cannot be written.
    """
    namespace = namespace_of(isa)
    library = cache_directory() / f"{namespace}.so"
    if not library.exists():
        _locked_build(isa, namespace, library)
    return library


def load_library(isa: InstructionSet) -> tuple[str, Path]:
    """Loads the kernels into ``torch.ops``, once in a process: their namespace, and the file they came from.

    Raises:
        PolicyError: as :func:`built_library`.
    """
    namespace = namespace_of(isa)
    with _loading:
        if namespace not in _loaded:
            library = built_library(isa)
            cast("Any", torch.ops).load_library(library)
            _loaded[namespace] = library
        return namespace, _loaded[namespace]
