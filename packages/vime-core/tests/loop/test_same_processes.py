"""What may be otherwise in the processes of a resumed run, and what may not."""

from __future__ import annotations

from typing import Any

import pytest

from vime_core.errors import ConfigError
from vime_core.loop.same_processes import require_same_processes
from vime_core.record.schema import ProcessEntry


def process(role: str = "trainer", **changes: Any) -> ProcessEntry:
    """A process on a CPU; ``part__key=value`` sets a value of a part, None takes it out."""
    parts: dict[str, dict[str, Any]] = {
        "environment": {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "0", "VLLM_LOGGING_LEVEL": "WARNING"},
        "settings": {"provider_digest": "ab", "threads": 1, "cpu_capability": "AVX512", "kv_cache_blocks": 100},
        "versions": {"torch": "2.13.0", "python": "3.11.7"},
        "hardware": {"cpu": "EPYC", "cores": 2, "device": "cpu"},
    }
    for path, value in changes.items():
        part, _, key = path.partition("__")
        parts[part].pop(key, None)
        if value is not None:
            parts[part][key] = value
    return ProcessEntry.model_validate({"role": role, "rank": 0, "pid": 1, **parts})


GPU = {"hardware__device": "NVIDIA H200"}


@pytest.mark.parametrize(
    ("began", "now", "named"),
    [
        ({}, {"versions__torch": "2.14.0"}, "torch '2.13.0' in trainer 0, and this is '2.14.0'"),
        ({}, {"versions__flash": "3"}, "flash absent in trainer 0, and this is '3'"),
        ({}, {"environment__ONEDNN_MAX_CPU_ISA": "SSE41"}, "variable ONEDNN_MAX_CPU_ISA absent .* this is 'SSE41'"),
        ({}, {"environment__OMP_NUM_THREADS": None}, "variable OMP_NUM_THREADS '1' .* this is absent"),
        ({}, {"settings__provider_digest": "cd"}, "provider_digest 'ab' .* this is 'cd'"),
        ({}, {"settings__cpu_capability": "AVX2"}, "cpu_capability 'AVX512'"),
        ({}, {"settings__threads": 2}, "threads 1 .* this is 2"),
        ({}, {"hardware__cpu": "Xeon"}, "cpu 'EPYC' .* this is 'Xeon'"),
        ({}, GPU, "device 'cpu' .* this is 'NVIDIA H200'"),
        (GPU, {"hardware__device": "NVIDIA H100"}, "device 'NVIDIA H200' .* this is 'NVIDIA H100'"),
        (GPU, {}, "device 'NVIDIA H200'"),
    ],
)
def test_what_decides_bits_is_refused_by_name(began: dict[str, Any], now: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=f"VIME-CONFIG-017: the run was recorded with .*{named}"):
        require_same_processes([process("rollout"), process(**began)], [process("rollout"), process(**now)])


@pytest.mark.parametrize(
    "change",
    [
        {"environment__CUDA_VISIBLE_DEVICES": "3"},
        {"environment__VLLM_LOGGING_LEVEL": "INFO"},
        {"settings__kv_cache_blocks": 99},
        {"hardware__cores": 64},
        {**GPU, "hardware__cpu": "Xeon", "settings__cpu_capability": "AVX2", "settings__threads": 8},
    ],
)
def test_what_decides_no_bit_may_change(change: dict[str, Any]) -> None:
    began = process(**GPU) if "hardware__device" in change else process()
    require_same_processes([began], [process(**change)])


def test_processes_that_are_more_fewer_or_of_another_role_are_refused() -> None:
    two = [process(), process("rollout")]
    for other in ([process()], [*two, process("rollout")], two[::-1]):
        with pytest.raises(ConfigError, match="VIME-CONFIG-017"):
            require_same_processes(two, other)


def test_a_record_without_processes_never_began() -> None:
    require_same_processes([], [process()])
