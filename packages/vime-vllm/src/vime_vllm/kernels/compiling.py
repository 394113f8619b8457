"""Compile DeepGEMM's kernels side by side before anything needs them.

DeepGEMM compiles inside the call that needs a kernel, and holds the interpreter meanwhile: so other processes make the
calls first, and share what they compile through DeepGEMM's cache directory. They share the GPU's memory too, with each
other and with engine and trainer: as many run as have room, and those that found none run again one after another.
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
CONTEXT_BYTES: Final = 1 << 30  # of a process beside its operands: 0.6 to 0.75 GiB were seen on an H200
OUT_OF_MEMORY: Final = 75  # exit code of a compiling process
_DRIVERS_OWN: Final = ("VIME_ENGINE_OWNER", "TORCHDYNAMO_DISABLE")


def compile_all(calls: Sequence[LinearCall]) -> None:
    """Compile what ``calls`` can ever use. What is in the cache of an earlier run costs nothing.

    Raises:
        BackendError: a compiling process failed, and is quoted; or it found no memory even alone.
    """
    import torch

    from vime_vllm.kernels.deep_gemm import CACHE_VARIABLE, run_all, tokens, workspace_bytes

    tasks = {call: [(call, count) for count in tokens(call)] for call in calls}
    new = missing(tasks, Path(os.environ[CACHE_VARIABLE]) / "vime")
    if new:
        torch.cuda.empty_cache()  # memory that this process keeps for later is lost to the others
        todo = [task for call in new.values() for task in tasks[call]]
        compile_in(split(todo, processes(torch.cuda.mem_get_info()[0], workspace_bytes(todo))))
    for done, call in new.items():
        done.parent.mkdir(parents=True, exist_ok=True)
        done.write_text(json.dumps(str(call)))
    if every := [task for some in tasks.values() for task in some]:
        try:
            run_all(every)
        except torch.OutOfMemoryError as error:
            raise _no_memory(workspace_bytes(every)) from error


def processes(free: int, workspace: int) -> int:
    """How many may compile at once where ``free`` bytes of GPU memory are left and each takes ``workspace`` for calls.

    One always may: whether it finds room it says itself.
    """
    return max(1, min(MOST_PROCESSES, os.cpu_count() or 1, free // (CONTEXT_BYTES + workspace)))


def compile_in(parts: Sequence[Sequence[Task]]) -> None:
    """Compile side by side, then one after another what found no memory. Raises BackendError, see `compile_all`."""
    from vime_vllm.kernels.deep_gemm import workspace_bytes

    for part in run_side_by_side(parts):
        if run_side_by_side([part]):
            raise _no_memory(CONTEXT_BYTES + workspace_bytes(part))


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


def run_side_by_side(parts: Sequence[Sequence[Task]]) -> list[Sequence[Task]]:
    """One process for each part; the parts that ran out of GPU memory.

    Raises:
        BackendError: one failed otherwise, or all took longer than 10 minutes.
    """
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
            if code not in (0, OUT_OF_MEMORY):
                raise _failure(f"ended with {code}: {log.read_text(errors='replace')[-1500:]}")
    return [part for part, code in zip(parts, codes, strict=True) if code == OUT_OF_MEMORY]


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


def _no_memory(needed: int) -> BackendError:
    return BackendError(
        f"compiling DeepGEMM's kernels ran out of GPU memory in a process that needs {needed / 2**30:.1f} GiB",
        remedy="Lower rollout.vllm.gpu_memory_utilization or set rollout.vllm.kv_cache_gib, free the GPU of other"
        ' processes, or set alignment.linear = "own".',
        code="VIME-ALIGN-015",
    )


def ran_out_of_memory(message: str) -> bool:
    """Whether PyTorch, CUDA or DeepGEMM says so; each has its own words and class."""
    return "out of memory" in message.lower().replace("_", " ")


def main() -> None:
    """Compile the tasks of one part."""
    from vime_vllm.kernels import deep_gemm

    try:
        found = deep_gemm.offer()
        if not isinstance(found, str):
            deep_gemm.run_all([(LinearCall(**call), count) for call, count in json.loads(sys.argv[1])])
            return
    except RuntimeError as error:
        if not ran_out_of_memory(str(error)):
            raise
        found = str(error)
    print(found, file=sys.stderr)
    raise SystemExit(OUT_OF_MEMORY if ran_out_of_memory(found) else 1)


if __name__ == "__main__":
    main()
