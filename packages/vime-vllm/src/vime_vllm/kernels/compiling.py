"""Compile DeepGEMM's kernels side by side before anything needs them.

DeepGEMM compiles inside the call that needs a kernel, and holds the interpreter meanwhile: so other processes make the
calls first, and share what they compile through DeepGEMM's cache directory.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Final

from vime_core.errors import BackendError
from vime_core.numerics.offers import LinearCall

Task = tuple[LinearCall, int]
MOST_PROCESSES: Final = 12
LONGEST_S: Final = 600
FEW: Final = 1024
_DRIVERS_OWN: Final = ("VIME_ENGINE_OWNER", "TORCHDYNAMO_DISABLE")


def compile_all(calls: Sequence[LinearCall]) -> None:
    """Compile what ``calls`` can ever use. What is in the cache of an earlier run costs nothing.

    Raises:
        BackendError: a compiling process failed; its output is quoted.
    """
    from vime_vllm.kernels.deep_gemm import CACHE_VARIABLE, run_all, tokens

    tasks = {call: [(call, count) for count in tokens(call)] for call in calls}
    new = missing(tasks, Path(os.environ[CACHE_VARIABLE]) / "vime")
    if new:
        parts = split([task for call in new.values() for task in tasks[call]], min(MOST_PROCESSES, os.cpu_count() or 1))
        run_side_by_side(parts)
    for done, call in new.items():
        done.parent.mkdir(parents=True, exist_ok=True)
        done.write_text(json.dumps(str(call)))
    run_all([task for some in tasks.values() for task in some])


def missing(tasks: Mapping[LinearCall, Sequence[Task]], folder: Path) -> dict[Path, LinearCall]:
    """The calls that no run has compiled here yet, by the file in ``folder`` that will say it was done.

    A file for each call, so that an engine, a trainer and another model share what they have in common.
    """
    files = {folder / f"{_key(some)}.json": call for call, some in tasks.items() if some}
    return {file: call for file, call in files.items() if not file.exists()}


def split(tasks: Sequence[Task], parts: int) -> list[list[Task]]:
    """Few tokens, of which each has a kernel of its own, in turn; many, where neighbours share one, in a row."""
    few = [task for task in tasks if task[1] <= FEW]
    many = [task for task in tasks if task[1] > FEW]
    size = -(-len(many) // parts)
    return [part for i in range(parts) if (part := few[i::parts] + many[i * size : (i + 1) * size])]


def run_side_by_side(parts: Sequence[Sequence[Task]]) -> None:
    """One process for each part. Raises BackendError when one fails or all take longer than 10 minutes."""
    environment = {name: value for name, value in os.environ.items() if name not in _DRIVERS_OWN}
    with tempfile.TemporaryDirectory() as folder:
        logs = [Path(folder) / f"{i}.log" for i in range(len(parts))]
        running = [_start(part, log, environment) for part, log in zip(parts, logs, strict=True)]
        try:
            codes = [process.wait(timeout=LONGEST_S) for process in running]
        except subprocess.TimeoutExpired as error:
            raise _failure(f"took longer than {LONGEST_S} s") from error
        finally:
            for process in running:
                process.kill()
        for code, log in zip(codes, logs, strict=True):
            if code:
                raise _failure(f"ended with {code}: {log.read_text(errors='replace')[-1500:]}")


def _start(part: Sequence[Task], log: Path, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    given = json.dumps([[asdict(call), count] for call, count in part])
    command = [sys.executable, "-m", "vime_vllm.kernels.compiling", given]
    with log.open("wb") as out:
        return subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=environment)


def _key(tasks: Sequence[Task]) -> str:
    """Of one call's tasks, DeepGEMM, compiler, PyTorch and GPU."""
    import torch

    from vime_vllm.kernels.deep_gemm import compiler, offer

    found = offer()
    version = found if isinstance(found, str) else found.version
    named = [f"{call} {count}" for call, count in tasks]
    parts = [version, compiler(), torch.__version__, torch.cuda.get_device_name(), *named]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _failure(what: str) -> BackendError:
    return BackendError(
        f"compiling DeepGEMM's kernels {what}",
        remedy='Set alignment.linear = "own", or repair nvcc.',
        code="VIME-ALIGN-014",
    )


def main() -> None:
    """Compile the tasks of one part."""
    from vime_vllm.kernels import deep_gemm

    found = deep_gemm.offer()
    if isinstance(found, str):
        raise SystemExit(found)
    deep_gemm.run_all([(LinearCall(**call), count) for call, count in json.loads(sys.argv[1])])


if __name__ == "__main__":
    main()
